"""Adapter that reads and writes checkpoints with Megatron's names under the model's names, by its family's rules."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...core.io.buffer_pool import FRESH, Memory, Pool
from ...core.io.safetensors import TensorMeta
from ...errors import CheckpointError
from ..architecture import Architecture, OwnWeights
from ..families import get_family, list_rules
from ..format import Format
from ..interfaces import (
    WEIGHT,
    Key,
    MegatronModel,
    MegatronReader,
    OptimizerState,
    Reader,
    TargetOptions,
    Writer,
    largest,
    same_bytes,
)
from ..output_folder import Output
from .arguments import check_arguments, get_argument_notes
from .folder import iteration_folder
from .names import EMBEDDING, LANGUAGE, OUTPUT, is_encoder_weight, is_mtp_name, spellings
from .rules import Rule


class TransformersView(Reader):
    """A Megatron checkpoint as tensors of the model.

    Raises:
        CheckpointError: naming tensors that match no rule, that are missing, or whose shapes do not fit the model.
    """

    def __init__(self, reader: Reader, rules: Sequence[Rule], architecture: Architecture, where: str):
        self._reader = reader
        self.optimizer, self.optimizer_unsupported_reason = reader.optimizer, reader.optimizer_unsupported_reason
        self.iteration, self.tokenizer = reader.iteration, reader.tokenizer
        self._source_of: dict[Key, tuple[Rule, tuple[Key, ...]]] = {}
        self._ready: dict[Key, Tensor] = {}
        try:
            self.entries = self._arranged(rules, architecture, where)
        except CheckpointError:
            reader.close()
            raise

    def _arranged(self, rules: Sequence[Rule], architecture: Architecture, where: str) -> dict[Key, TensorMeta]:
        reader = self._reader
        entries: dict[Key, TensorMeta] = {}
        used: set[Key] = set()
        self._filled: dict[Key, float] = {}
        kinds = sorted({key.kind for key in reader.entries}, key=lambda kind: (kind != WEIGHT, kind))
        for rule in rules:
            for kind in kinds:
                sources = self._present(kind, rule)
                if sources is None:
                    if rule.fill_value is not None and kind == WEIGHT:
                        self._filled |= {Key(kind, name): rule.fill_value for name in rule.transformers}
                    continue
                used.update(sources)
                try:
                    tensors = rule.operation.to_transformers([reader.entries[key].meta() for key in sources])
                except (RuntimeError, CheckpointError) as error:
                    raise CheckpointError(
                        f"{where}: {sources[0]} {reader.entries[sources[0]].shape}: {error}"
                    ) from error
                for name, tensor in zip(rule.transformers, tensors, strict=True):
                    entries[Key(kind, name)] = TensorMeta.of(tensor)
                    self._source_of[Key(kind, name)] = rule, sources
        further = [key for key in reader.entries if key not in used and is_mtp_name(key.name)]
        self.left_out = tuple(key.name for key in further if key.kind == WEIGHT)
        unknown = [str(key) for key in reader.entries if key not in used and not is_mtp_name(key.name)]
        if unknown:
            listing = ", ".join(unknown[:50]) + (", ..." if len(unknown) > 50 else "")
            raise CheckpointError(
                f"{where}: {len(unknown)} tensors have no counterpart in {type(architecture.model).__name__}: "
                f"{listing}. Check that the config belongs to this checkpoint."
            )
        dtypes = [entry.dtype for key, entry in entries.items() if key.kind == WEIGHT]
        usual = max(dict.fromkeys(dtypes), key=dtypes.count, default=torch.float32)
        entries |= {key: TensorMeta(architecture.shapes[key.name], usual) for key in self._filled}
        architecture.check((key.name for key in entries if key.kind == WEIGHT), where)
        return entries

    def _present(self, kind: str, rule: Rule) -> tuple[Key, ...] | None:
        """Returns a rule's Megatron tensors as keys of the checkpoint; `None` if some are missing.

        If Megatron has a weight under several names, its moments are stored under one of them.
        """
        keys = []
        for name in rule.megatron:
            names = [name, *spellings(name)]
            key = next((Key(kind, other) for other in names if Key(kind, other) in self._reader.entries), None)
            if key is not None:
                keys.append(key)
            elif kind == WEIGHT or not rule.copied:
                return None
        return tuple(keys) or None

    def read(self, key: Key) -> Tensor:
        if key in self._filled:
            entry = self.entries[key]
            return torch.full(entry.shape, self._filled[key], dtype=entry.dtype)
        if key not in self._ready:
            rule, sources = self._source_of[key]
            self._reader.memory = self.memory
            stored = [self._reader.read(source) for source in sources]
            try:
                tensors = rule.operation.to_transformers(stored, self.memory)
            except CheckpointError as error:
                raise CheckpointError(f"{', '.join(map(str, sources))}: {error}") from error
            self._ready |= {
                Key(key.kind, name): tensor for name, tensor in zip(rule.transformers, tensors, strict=True)
            }
        return self._ready.pop(key)

    def close(self) -> None:
        self._reader.close()

    @property
    def filled_weight_notes(self) -> tuple[str, ...]:
        """Note for users on weights that are neither in the checkpoint nor read by the model."""
        if not self._filled:
            return ()
        names = ", ".join(f"{key.name} with {value:g}" for key, value in self._filled.items())
        return (f"unused weights that are missing from the checkpoint are filled: {names}",)


def _check_parts(rules: Sequence[Rule], keys: Iterable[Key], where: str) -> None:
    """Checks for exactly the expected submodels (text, vision): shapes and arguments would not reveal a mismatch."""
    expected_parts = {_part(name) for rule in rules for name in rule.megatron} - {""}
    there = {_part(key.name) for key in keys} - {""}
    if missing := sorted(expected_parts - there):
        raise CheckpointError(
            f"{where} has no {_listed(missing)}, but the config is for a vision-language model. Check that this is not "
            "the checkpoint of a text model or another submodel."
        )
    if surplus := sorted(there - expected_parts):
        raise CheckpointError(
            f"{where} has {_listed(surplus)}, which the config does not describe. Check that this is not the config of "
            "a text model or another vision-language model."
        )


def _check_head(reader: Reader, architecture: Architecture, where: str) -> None:
    """Checks that a head tied by the class equals the embedding, if Megatron stores it separately.

    Raises:
        OwnWeights: they differ.
    """
    head = get_family(architecture.config).copied_head
    embedding, output = Key(WEIGHT, EMBEDDING), Key(WEIGHT, OUTPUT)
    if not head or not architecture.ties_always or not {embedding, output} <= reader.entries.keys():
        return
    if not same_bytes(reader.read(embedding), reader.read(output)):
        raise OwnWeights(where, [head])


def _listed(parts: Iterable[str]) -> str:
    return ", ".join(f"{part}.*" for part in parts)


def _part(name: str) -> str:
    return name.partition(".")[0] if is_encoder_weight(name) or name.startswith(LANGUAGE) else ""


class Regrouping:
    """Collects tensors of the model until all inputs of a rule are present, then returns its Megatron tensors."""

    def __init__(self, rules: Sequence[Rule], memory: Memory = FRESH):
        self._memory = memory
        self._rule_of = {name: rule for rule in rules for name in rule.transformers}
        self._waiting: dict[Key, Tensor] = {}

    def take(self, key: Key, tensor: Tensor) -> dict[Key, Tensor]:
        """Adds a tensor of any shape; returns the Megatron tensors that are now complete."""
        rule = self._rule_of[key.name]
        self._waiting[key] = tensor
        keys = [Key(key.kind, name) for name in rule.transformers]
        if any(other not in self._waiting for other in keys):
            return {}
        _check_types({other: self._waiting[other] for other in keys})
        converted = rule.operation.to_megatron([self._waiting.pop(other) for other in keys], self._memory)
        return {Key(key.kind, name): out for name, out in zip(rule.megatron, converted, strict=True)}

    def check(self, where: str) -> None:
        """Raises if tensors are still waiting for others of their rule."""
        if self._waiting:
            listing = ", ".join(map(str, list(self._waiting)[:20]))
            raise CheckpointError(
                f"{where}: {listing} must be merged into one Megatron tensor with tensors that are missing (frozen "
                "weights have no moments)."
            )


def _check_types(tensors: Mapping[Key, Tensor]) -> None:
    """Checks that tensors of any shapes that are merged share one dtype; reports the ones that deviate."""
    types = [tensor.dtype for tensor in tensors.values()]
    usual = max(dict.fromkeys(types), key=types.count)
    odd = [f"{key} has dtype {tensor.dtype}" for key, tensor in tensors.items() if tensor.dtype != usual]
    if odd:
        others = ", ".join(str(key) for key, tensor in tensors.items() if tensor.dtype == usual)
        raise CheckpointError(
            f"{', '.join(odd)}, expected {usual} as for {others}: they are merged into one Megatron tensor."
        )


def megatron_plan(plan: Mapping[Key, TensorMeta], rules: Sequence[Rule], where: str) -> dict[Key, TensorMeta]:
    """Translates a plan from the model's names to Megatron's, in the order in which tensors become complete.

    Raises:
        CheckpointError: naming tensors that match no rule.
    """
    known = {name for rule in rules for name in rule.transformers}
    unknown = sorted({key.name for key in plan} - known)
    if unknown:
        raise CheckpointError(f"{where}: no rule maps {', '.join(unknown[:5])} to Megatron.")
    regrouping = Regrouping(rules)
    converted: dict[Key, TensorMeta] = {}
    for key, entry in plan.items():
        try:
            converted |= {other: TensorMeta.of(tensor) for other, tensor in regrouping.take(key, entry.meta()).items()}
        except (RuntimeError, CheckpointError) as error:
            raise CheckpointError(f"{where}: {key}: {error}") from error
    regrouping.check(where)
    return converted


class TransformersNames(Writer):
    """Writer that takes tensors of the model and passes Megatron's tensors to an inner writer."""

    def __init__(self, writer: Writer, plan: Mapping[Key, TensorMeta], rules: Sequence[Rule]):
        super().__init__(plan)
        self._writer = writer
        self._regrouping = Regrouping(rules, Pool(largest(plan)))

    def arrange(self, key: Key, tensor: Tensor) -> Iterable[tuple[Key, Tensor]]:
        self.check(key, tensor)
        return self._regrouping.take(key, tensor).items()

    def write(self, key: Key, tensor: Tensor) -> None:
        self._writer.write(key, tensor)

    def finish(self) -> None:
        self._regrouping.check("Tensors")
        self._writer.finish()


def megatron_format(
    reader: Callable[[Path, Architecture], MegatronReader],
    writer: Callable[
        [Output, Mapping[Key, TensorMeta], MegatronModel, TargetOptions, int | None, OptimizerState | None], Writer
    ],
    **facts: Any,
) -> Format:
    """Returns a format from a reader and a writer with Megatron's names, converted to the model's names.

    Args:
        facts: the other fields of `Format`.
    """

    def open(path: Path, architecture: Architecture, verify: bool) -> Reader:
        rules = list_rules(architecture, TargetOptions())
        inner_reader, where = reader(path, architecture), str(iteration_folder(path))
        try:
            _check_parts(rules, inner_reader.entries, where)
            _check_head(inner_reader, architecture, where)
            check_arguments(inner_reader.arguments, get_family(architecture.config).meaning(architecture.config), where)
        except CheckpointError:
            inner_reader.close()
            raise
        view = TransformersView(inner_reader, rules, architecture, where)
        view.notes = (*get_argument_notes(inner_reader.arguments), *view.filled_weight_notes)
        return view

    def create(
        output: Output,
        plan: Mapping[Key, TensorMeta],
        architecture: Architecture,
        options: TargetOptions,
        iteration: int | None,
        optimizer: OptimizerState | None,
    ) -> Writer:
        rules = list_rules(architecture, options)
        model = get_family(architecture.config).model(architecture.config, architecture.num_mtp_layers)
        inner = megatron_plan(plan, rules, str(output.target))
        return TransformersNames(writer(output, inner, model, options, iteration, optimizer), plan, rules)

    return Format(open=open, create=create, megatron=True, holds_mtp=True, **facts)
