"""Export of a model in memory, with any layout, to another library's format; all ranks call, rank 0 writes."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..checkpoint.gather_full import stream_weights
from ..core.communication.rank_errors import propagate_errors, raise_on_all_ranks, rank_and_size
from ..core.io.safetensors import TensorMeta
from ..errors import CheckpointError, UnsupportedError
from .architecture import Architecture
from .card import write_conversion_card
from .families import list_rules
from .formats import check_options, format_named
from .interfaces import WEIGHT, Key, TargetOptions
from .write import get_format_notes, order_by_rules, write_checkpoint


def export(
    model: Any, target: Path, format: str, options: TargetOptions | None, write_config: Callable[[Path], Any]
) -> list[str]:
    """Writes a model's weights as `convert` would; no rank ever holds the full model.

    Args:
        model: a stock model, or one that is sharded over ranks.
        target: a folder that does not exist.
        format: as `to` of `convert`.
        options: how the target is split, if its format supports that.
        write_config: writes config and the like into a rank-local folder; collective, as in stock transformers.

    Returns:
        `list[str]`: notes for users of the result.

    Raises:
        CheckpointError: on every rank, naming the rank that failed; nothing is left on disk then.
    """
    to, options, first = format_named(format), options or TargetOptions(), rank_and_size(None)[0] == 0
    check_options(to, options)
    stored, fetch = stream_weights(model)
    with propagate_errors(f"Saving {target}"):
        if first and os.path.lexists(target):
            raise CheckpointError(f"{target} already exists. Choose a folder that does not exist.")
        architecture = Architecture.from_class(stock_class(model), model.config)
        # Tied weights are stored once, so a second name in `stored` means a separate weight.
        taken = {architecture.first_name(name) for name in stored if architecture.first_name(name) == name}
        if own_name := [name for name in stored if name != architecture.first_name(name) in taken]:
            architecture = architecture.with_own_weights(own_name)
        names = {architecture.first_name(name): name for name in stored}
        plan = {
            Key(WEIGHT, own_name): TensorMeta(stored[name].shape, stored[name].dtype)
            for own_name, name in names.items()
        }
        if to.megatron:
            plan = order_by_rules(plan, list_rules(architecture, options))
        notes = get_format_notes(model.config) if to.megatron else []
        small_files = Path(tempfile.mkdtemp(prefix="hf_megatron_"))
    try:
        with propagate_errors(f"Saving {target}"):
            write_config(small_files)
        tensors = _Stream(plan, lambda key: fetch(names[key.name]))
        error: Exception | None = None
        try:
            if first:
                write_checkpoint(
                    target,
                    to,
                    architecture,
                    plan,
                    tensors,
                    options,
                    small_files,
                    metadata={"source_format": "model", "notes": notes},
                    write_card=lambda folder: write_conversion_card(
                        folder, target.name, architecture.config, "a model in training", to, notes, None, plan
                    ),
                )
        except Exception as caught:  # noqa: BLE001 - propagated to the other ranks below
            error = caught
        try:
            # The other ranks, and rank 0 after a failure, iterate over the full plan to match every collective send.
            for _ in tensors:
                pass
        except Exception as caught:  # noqa: BLE001 - propagated to the other ranks below
            error = error or caught
        raise_on_all_ranks(error, None, f"Saving {target}")
    finally:
        shutil.rmtree(small_files, ignore_errors=True)
    return notes


class _Stream:
    """Tensors in planned order, each fetched exactly once over all iterations; only rank 0 gets actual tensors."""

    def __init__(self, plan: Mapping[Key, TensorMeta], fetch: Callable[[Key], Any]):
        self._remaining = iter(plan)
        self._fetch = fetch

    def __iter__(self) -> Iterator[tuple[Key, Any]]:
        for key in self._remaining:
            yield key, self._fetch(key)


def stock_class(model: Any) -> Any:
    """Returns a model's transformers class, skipping FSDP2's wrapper class and user subclasses.

    Raises:
        UnsupportedError: naming a class that is not derived from one of transformers.
    """
    for base in type(model).__mro__:
        if base.__module__.startswith("transformers.models."):
            return base
    raise UnsupportedError(
        f"{type(model).__name__} is not a transformers model and has no other formats. Call `save_pretrained` without "
        "`format`."
    )
