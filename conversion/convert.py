"""Conversion of a checkpoint from one format to another, tensor by tensor."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from ..core.io.buffer_pool import Pool
from ..core.io.safetensors import TensorMeta
from ..errors import CheckpointError, ConfigError
from .architecture import Architecture
from .auxiliary_files import check_small_files, get_adapter_notes, get_tokenizer_notes
from .card import write_conversion_card
from .compare import Comparison
from .families import check_config, get_family, list_rules
from .formats import Format, check_options, format_named
from .interfaces import MAIN_WEIGHT, MOMENTS, WEIGHT, Key, Reader, TargetOptions, largest
from .megatron.name_view import megatron_plan
from .megatron.rules import Rule
from .megatron.sizes import check_sizes
from .open_pair import Folder, compare_sources
from .source import Source, find_source
from .write import get_format_notes, get_left_out_notes, order_by_rules, planned_entries, write_checkpoint


@dataclass
class Report:
    """Plan or result of a conversion.

    Attributes:
        rows: (name in the model, names in Megatron if different, shape and dtype) of each tensor.
        notes: notes for users of the result.
        comparison: comparison of source and target, if requested.
    """

    source: Source
    target: Path
    format: Format
    rows: list[tuple[str, str, TensorMeta]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    comparison: Comparison | None = None

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for _, _, entry in self.rows)

    def table(self) -> str:
        """Lists every mapping and size, one line each."""
        lines = [
            f"{name}{' -> ' + other if other else ''}  {list(entry.shape)} "
            f"{str(entry.dtype).removeprefix('torch.')}  {entry.nbytes:,} bytes"
            for name, other, entry in self.rows
        ]
        total = f"{len(self.rows)} tensors, {self.nbytes:,} bytes: {self.source.format.title} -> {self.format.title}"
        return "\n".join([*lines, total, *self.notes])


def _tensors(
    reader: Reader, plan: Mapping[Key, TensorMeta], on_tensor: Callable[[int], object]
) -> Iterator[tuple[Key, Tensor]]:
    for key, entry in plan.items():
        # An fp32 main weight that the source does not have is a cast of the weight.
        yield key, reader.read(key) if key in reader.entries else reader.read(Key(WEIGHT, key.name)).float()
        on_tensor(entry.nbytes)


def plan_conversion(
    source: Folder,
    target: Folder,
    to: str,
    *,
    from_format: str | None = None,
    config: str | None = None,
    options: TargetOptions | None = None,
    optimizer: bool = True,
    without_mtp: bool = False,
) -> Report:
    """Plans what `convert` would do with the same arguments: every mapping and size, without reading a tensor.

    Raises:
        CheckpointError, ConfigError, UnsupportedError: as `convert`.
    """
    options = options or TargetOptions()
    report = _report(source, target, to, from_format, config, options, without_mtp)
    with report.source.open(False, report.format.holds_mtp) as reader:
        _plan(report, reader, options, optimizer)
    return report


def convert(
    source: Folder,
    target: Folder,
    to: str,
    *,
    from_format: str | None = None,
    config: str | None = None,
    options: TargetOptions | None = None,
    optimizer: bool = True,
    without_mtp: bool = False,
    verify: bool = False,
    logits: bool = False,
    checksums: bool = True,
    on_plan: Callable[[Report], None] = lambda report: None,
    on_tensor: Callable[[int], object] = lambda size: None,
    on_check: Callable[[str, int, int], object] = lambda what, size, total: None,
) -> Report:
    """Writes a checkpoint in another format; the target appears once everything is written and read back.

    Args:
        source: a folder, or the id of a model on the Hub.
        target: a folder that does not exist.
        to: `"hf"`, `"sharded"` (this library's checkpoints), `"megatron_core"` (`"torch_dist"`), `"megatron_legacy"`
            (`"torch"`), `"dcp"` or `"shards"` (transformers' `shard-*.safetensors`).
        from_format: the source's format, recognized by default.
        config: a folder or model id with the config.json, for a source that has none.
        options: how the target is split, if its format supports that.
        optimizer: convert moments too if both formats support them.
        without_mtp: leave out multi-token prediction layers; the other formats hold none.
        verify: compare source and target tensor by tensor at the end.
        logits: compare their logits too.
        checksums: compare the source's files with its recorded checksums.
        on_plan: called once with the plan.
        on_tensor: called with the size in bytes of each tensor read.
        on_check: called at the end, while files are read back and while both sides are compared, with the kind of
            check, a number of bytes processed, and the total.

    Raises:
        CheckpointError: the source is damaged, unsafe or does not fit its config, a name has no counterpart, the target
            exists or lies inside the source, an option does not divide the size it splits, or disk space is too
            small; or source and target differ. Nothing is left on disk then.
        ConfigError: an unknown format or an invalid option.
        UnsupportedError: Megatron's formats cannot express the model.
    """
    options = options or TargetOptions()
    report = _report(source, target, to, from_format, config, options, without_mtp)
    source_checkpoint = report.source
    with source_checkpoint.open(checksums, report.format.holds_mtp) as reader:
        reader.memory = Pool(largest(reader.entries))
        plan = _plan(report, reader, options, optimizer)
        on_plan(report)
        state = reader.optimizer if any(key.kind in MOMENTS for key in plan) else None
        write_checkpoint(
            report.target,
            report.format,
            reader.architecture,
            plan,
            _tensors(reader, plan, on_tensor),
            options,
            source_checkpoint.config_folder,
            iteration=reader.iteration,
            optimizer=state,
            on_read_back=lambda size, total: on_check("reading back", size, total),
            metadata={"source_format": source_checkpoint.format.name, "notes": report.notes},
            write_card=lambda folder: write_conversion_card(
                folder,
                report.target.name,
                source_checkpoint.architecture.config,
                source_checkpoint.format.title,
                report.format,
                report.notes,
                source_checkpoint.config_folder,
                plan,
            ),
        )
    if verify or logits:
        try:
            _verify(report, logits, on_check)
        except BaseException:
            # This call created the target, so it may delete it.
            shutil.rmtree(report.target, ignore_errors=True)
            raise
    return report


def _verify(report: Report, logits: bool, on_check: Callable[[str, int, int], object]) -> None:
    """Compares the target with its source; raises `CheckpointError` unless they are equal."""
    report.comparison = comparison = compare_sources(
        report.source,
        find_source(report.target, report.format.name),
        moments=report.format.moments,
        logits=logits,
        on_tensor=lambda size: on_check("comparing", size, report.nbytes),
    )
    if not comparison.equal:
        raise CheckpointError(
            f"{report.target} could not be verified against its source and is removed: {comparison.summary()}"
        )


def _report(
    source: Folder,
    target: Folder,
    to: str,
    from_format: str | None,
    config: str | None,
    options: TargetOptions,
    without_mtp: bool,
) -> Report:
    for name, value in (("source", source), ("target", target)):
        if not os.fspath(value):
            raise ConfigError(f"{name}='': expected a folder.")
    to_format = format_named(to)
    check_options(to_format, options)
    source_checkpoint = find_source(source, from_format, config, without_mtp)
    if source_checkpoint.format.megatron or to_format.megatron:
        check_config(source_checkpoint.architecture.config)
    if to_format.megatron:
        _check_sizes(source_checkpoint.architecture, options)
    check_small_files(source_checkpoint.config_folder)
    if os.path.lexists(target):
        raise CheckpointError(f"{target} already exists. Choose a folder that does not exist.")
    report = Report(source_checkpoint, Path(os.path.abspath(target)), to_format)
    if report.target.resolve().is_relative_to(source_checkpoint.path.resolve()):
        raise CheckpointError(f"{target} is inside the source {source}. Choose a folder outside it.")
    if source_checkpoint.format.megatron or to_format.megatron:
        report.notes.extend(get_format_notes(source_checkpoint.architecture.config))
    return report


def _check_sizes(architecture: Architecture, options: TargetOptions) -> None:
    names = [Key(WEIGHT, name) for rule in list_rules(architecture, options) for name in rule.megatron]
    check_sizes(get_family(architecture.config).model(architecture.config), options, names)


def _plan(report: Report, reader: Reader, options: TargetOptions, optimizer: bool) -> dict[Key, TensorMeta]:
    plan, to = planned_entries(reader, report.format, optimizer), report.format
    rules: list[Rule] = []
    if report.source.format.megatron or to.megatron:
        rules = list_rules(reader.architecture, options)
        plan = order_by_rules(plan, rules)
    report.notes += [*get_left_out_notes(reader, type(report.source.architecture.model).__name__), *reader.notes]
    source = report.source
    named = reader.tokenizer or getattr(source.architecture.config, "tokenizer_class", None)
    report.notes += get_tokenizer_notes(source.path, source.config_folder, named)
    report.notes += get_adapter_notes(source.path, source.config_folder)
    has_optimizer = reader.optimizer is not None or reader.optimizer_unsupported_reason is not None
    if has_optimizer and not (optimizer and to.moments):
        why = "--no-optimizer" if to.moments else f"{to.title} cannot store it"
        report.notes.append(f"the optimizer's state is left out: {why}")
    if any(key.kind == MAIN_WEIGHT for key in reader.entries) and to.main_weights == "never":
        report.notes.append(f"fp32 copies of the weights are left out: {to.title} cannot store them")
    if to.megatron:
        _check_sizes(reader.architecture, options)
        megatron_plan(plan, rules, str(report.source.path))
    names = {name: ", ".join(rule.megatron) for rule in rules for name in rule.transformers}
    report.rows = [(str(key), names.get(key.name, ""), entry) for key, entry in plan.items()]
    return plan
