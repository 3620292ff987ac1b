"""Checkpoints of a model with adapters: PEFT's files, and what tells the base from others in place of its weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.base_identity import base_identity
from ..checkpoint.boxes import Piece
from ..checkpoint.reader import Checkpoint
from ..checkpoint.training_state import facts, load_model, optimizer_pieces, pieces
from ..errors import CheckpointError
from ..parallel_state import laid_out_model, parallel_state

_BASE = "base"


def is_of_adapters(checkpoint: Checkpoint) -> bool:
    """Tells whether a checkpoint was saved of a model with adapters."""
    return _BASE in checkpoint.facts


def saved_facts(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Returns what the manifest says beside the tensors; every rank calls it and gets the same."""
    inner = laid_out_model(model)
    found = facts(inner, optimizers)
    return found if inner is model else found | {_BASE: base_identity(inner)}


def saved_pieces(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Piece]:
    """Yields all that this rank writes: of a model with adapters their moments."""
    inner = laid_out_model(model)
    if inner is model:
        yield from pieces(model, optimizers)
        return
    for number, optimizer in enumerate(optimizers):
        yield from optimizer_pieces(inner, optimizer, number)


def save_adapters(model: Any, directory: Path) -> None:
    """Writes the files of a model's adapters, if it has any; every rank calls it."""
    if laid_out_model(model) is not model:
        model.save_pretrained(directory)


def load_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Fills a model's weights, or those of its adapters, from a checkpoint of any layout.

    Raises:
        CheckpointError: the checkpoint holds a model and this one has adapters, or the other way round; or it is of
            adapters of another base.
    """
    inner, saved = laid_out_model(model), checkpoint.facts.get(_BASE)
    if (saved is None) != (inner is model):
        holds, is_one = ("a model", "adapters") if saved is None else ("adapters", "a model without any")
        raise CheckpointError(f"{checkpoint.path} holds {holds}, and this run trains {is_one}.")
    if saved is None:
        load_model(model, checkpoint)
        return
    own = base_identity(inner)
    if differing := [name for name, value in own.items() if name != "name" and saved.get(name) != value]:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters of another base: {', '.join(differing)} of {saved['name']} differ from "
            f"{own['name']}'s."
        )
    for adapter in model.peft_config:
        folder = checkpoint.path if adapter == "default" else Path(checkpoint.path, adapter)
        model.load_adapter(folder, adapter, is_trainable=adapter in model.active_adapters)
    state: Any = parallel_state(inner)
    state.data_parallel.refresh_main_weights()
    state.data_parallel.skipped_steps = int(checkpoint.facts.get("skipped_steps", 0))
