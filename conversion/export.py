"""A model in memory, on any layout, written as a checkpoint of another library: every rank calls, rank 0 writes."""

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
from .families import rules_of
from .formats import check_options, format_named
from .interfaces import WEIGHT, Key, TargetOptions
from .write import notes_of, order_by_rules, write_checkpoint


def export(
    model: Any, target: Path, format: str, options: TargetOptions | None, write_config: Callable[[Path], Any]
) -> list[str]:
    """Writes a model's weights as `convert` would write them; no rank ever holds the model.

    Args:
        model: a stock model, or one that is split over ranks.
        target: a folder that does not exist.
        format: as `to` of `convert`.
        options: how the target is split, where its format knows of that.
        write_config: writes config and the like into a folder of this rank's own; stock does so on all ranks together.

    Returns:
        `list[str]`: what a reader of the result has to know.

    Raises:
        CheckpointError: on every rank, naming the rank that failed; nothing is left behind then.
    """
    to, options, first = format_named(format), options or TargetOptions(), rank_and_size(None)[0] == 0
    check_options(to, options)
    stored, fetch = stream_weights(model)
    with propagate_errors(f"Saving {target}"):
        if first and os.path.lexists(target):
            raise CheckpointError(f"{target} exists; give a folder that does not.")
        architecture = Architecture.from_class(stock_class(model), model.config)
        # A tied weight is stored once: what comes a second time is a weight of its own.
        taken = {architecture.first_name(name) for name in stored if architecture.first_name(name) == name}
        if own := [name for name in stored if name != architecture.first_name(name) in taken]:
            architecture = architecture.with_own_weights(own)
        names = {architecture.first_name(name): name for name in stored}
        plan = {Key(WEIGHT, own): TensorMeta(stored[name].shape, stored[name].dtype) for own, name in names.items()}
        if to.megatron:
            plan = order_by_rules(plan, rules_of(architecture, options))
        notes = notes_of(model.config) if to.megatron else []
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
        except Exception as caught:  # noqa: BLE001 - the other ranks have to hear of it
            error = caught
        try:
            # The other ranks, and a first one that failed, go through what was planned: what is sent is received.
            for _ in tensors:
                pass
        except Exception as caught:  # noqa: BLE001 - the other ranks have to hear of it
            error = error or caught
        raise_on_all_ranks(error, None, f"Saving {target}")
    finally:
        shutil.rmtree(small_files, ignore_errors=True)
    return notes


class _Stream:
    """Tensors in a planned order, each fetched once, however many iterate; there are none but on the first rank."""

    def __init__(self, plan: Mapping[Key, TensorMeta], fetch: Callable[[Key], Any]):
        self._remaining = iter(plan)
        self._fetch = fetch

    def __iter__(self) -> Iterator[tuple[Key, Any]]:
        for key in self._remaining:
            yield key, self._fetch(key)


def stock_class(model: Any) -> Any:
    """Finds the class of transformers that a model is of: not FSDP2's before it, nor a subclass of the user's.

    Raises:
        UnsupportedError: naming a class that is none of transformers'.
    """
    for found in type(model).__mro__:
        if found.__module__.startswith("transformers.models."):
            return found
    raise UnsupportedError(f"{type(model).__name__} is no model of transformers: call save_pretrained without format=.")
