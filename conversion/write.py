"""Writing a checkpoint: which tensors it will hold, in which order, and the loop that writes them."""

import json
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.manifest import library_versions
from ..core.io.safetensors import TensorMeta
from ..errors import CheckpointError
from .architecture import Architecture
from .auxiliary_files import copy_small_files, list_small
from .families import get_family, list_rules
from .format import Format
from .interfaces import MAIN_WEIGHT, MOMENTS, WEIGHT, Key, OptimizerState, Reader, TargetOptions, Writer, largest
from .megatron.name_view import megatron_plan
from .megatron.rules import Rule
from .output_folder import Output
from .source import RECORD


def get_format_notes(config: Any) -> list[str]:
    """Returns notes for users of a model's checkpoint in one of Megatron's formats."""
    family = get_family(config)
    reason = family.unchecked(config)
    notes = [f"format checked by round trip only: {reason}"] if reason else []
    return [*notes, *(f"not expressed by Megatron's arguments: {what}" for what in family.unstored(config))]


def get_left_out_notes(reader: Reader, model_class: str) -> list[str]:
    """Returns a note for users on tensors that the checkpoint has but its model has no place for."""
    if not reader.left_out:
        return []
    return [
        f"{len(reader.left_out)} tensors of the source (multi-token prediction) are left out, as {model_class} does "
        "not have them"
    ]


def planned_entries(reader: Reader, to: Format, optimizer: bool) -> dict[Key, TensorMeta]:
    """Returns the tensors that a checkpoint of another format will hold, in the order of the reader.

    Raises:
        CheckpointError: optimizer state is present and requested, but cannot be converted.
    """
    if not (optimizer and to.moments):
        return {key: entry for key, entry in reader.entries.items() if key.kind == WEIGHT}
    if reader.optimizer_unsupported_reason:
        raise CheckpointError(
            f"The optimizer's state cannot be converted: {reader.optimizer_unsupported_reason}. Use --no-optimizer "
            "(optimizer=False) to convert the weights alone."
        )
    plan: dict[Key, TensorMeta] = {}
    for key, entry in reader.entries.items():
        weight = reader.entries[Key(WEIGHT, key.name)]
        redundant = to.main_weights == "narrower" and weight.dtype == entry.dtype
        if key.kind == MAIN_WEIGHT and (redundant or to.main_weights == "never"):
            continue
        plan[key] = entry
        main = Key(MAIN_WEIGHT, key.name)
        if key.kind == MOMENTS[0] and to.main_weights == "always" and main not in reader.entries:
            plan[main] = TensorMeta(weight.shape, torch.float32)
    return plan


def order_by_rules(plan: dict[Key, TensorMeta], rules: Sequence[Rule]) -> dict[Key, TensorMeta]:
    """Sorts tensors by rule, for each weight first the weight itself."""
    position = {name: index for index, rule in enumerate(rules) for name in rule.transformers}
    last = len(rules)
    keys = sorted(plan, key=lambda key: (position.get(key.name, last), key.kind != WEIGHT, key.kind))
    return {key: plan[key] for key in keys}


def write_checkpoint(
    target: Path,
    to: Format,
    architecture: Architecture,
    plan: Mapping[Key, TensorMeta],
    tensors: Iterable[tuple[Key, Tensor]],
    options: TargetOptions,
    small_files: Path,
    *,
    iteration: int | None = None,
    optimizer: OptimizerState | None = None,
    on_read_back: Callable[[int, int], object] = lambda size, total: None,
    metadata: Mapping[str, Any],
    write_card: Callable[[Path], None],
) -> None:
    """Writes tensors of any shape that arrive in planned order; reads the next one while the last is being written.

    Args:
        small_files: a folder whose config, tokenizer and the like are copied.
        on_read_back: called at the end with a number of bytes read back and with the total.
        metadata: stored in the record together with the checksums of all files.
        write_card: writes a model card into the folder; it has no checksum because people edit it.

    Raises:
        CheckpointError: nothing is left on disk then.
    """
    # Includes the padding of Megatron's vocabulary. Headers and indexes are not known yet, but small by comparison.
    rules = list_rules(architecture, options) if to.megatron else None
    written = plan if rules is None else megatron_plan(plan, rules, str(target))
    expected = sum(entry.nbytes for entry in written.values())
    expected += sum(path.stat().st_size for path in list_small(small_files))
    with Output(target, expected, on_read_back) as output:
        writer = to.create(output, plan, architecture, options, iteration, optimizer)
        # A queue of half the largest tensor evens out large and small ones.
        with _in_background(writer, largest(plan) // 2) as submit:
            for key, tensor in tensors:
                for arranged, converted in writer.arrange(key, tensor):
                    submit(arranged, converted)
        writer.finish()
        # Copied files are text that people edit, so they get no checksum.
        copied = copy_small_files(small_files, output, plan)
        write_card(output.directory)
        output.before_commit(lambda: _record({"format": to.name, **metadata}, output, copied))


@contextmanager
def _in_background(writer: Writer, limit: int) -> Iterator[Callable[[Key, Tensor], None]]:
    """Writes tensors sequentially in a background thread; at most `limit` bytes are queued, or a single tensor."""
    with ThreadPoolExecutor(1) as thread:
        pending: deque[tuple[int, Future[None]]] = deque()

        def submit(key: Key, tensor: Tensor) -> None:
            while pending and (pending[0][1].done() or sum(size for size, _ in pending) > limit):
                pending.popleft()[1].result()
            pending.append((tensor.nbytes, thread.submit(writer.write, key, tensor)))

        yield submit
        for _, future in pending:
            future.result()


def _record(metadata: Mapping[str, Any], output: Output, without: Collection[str]) -> None:
    digests = output.digests()
    files = {
        name: {"size": digests[name].size, "blake3": digests[name].blake3} for name in digests if name not in without
    }
    content = {**metadata, "versions": library_versions(), "files": files}
    output.add(RECORD, json.dumps(content, indent=1) + "\n")
