"""Checkpoints of a model with adapters: PEFT's files, and what tells the base from others in place of its weights."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.base_model_hash import base_identity, identity_in_one_process
from ...checkpoint.reader import Checkpoint
from ...checkpoint.tensor_chunks import LocalChunk
from ...checkpoint.training_state import load_model, optimizer_pieces, pieces, training_metadata
from ...compat.ecosystem import adapter_prefix
from ...errors import CheckpointError
from ...parallel_state import parallel_state, unwrap_parallel_model

_BASE = "base"


def adapted_module(model: Any) -> Any:
    """Returns the module that lists what is trained of an adapter as the saved state names it."""
    if parallel_state(model) is not None or adapter_prefix(model) is None:
        return unwrap_parallel_model(model)
    # Prompts stand beside a model that nobody has laid out.
    return model if model.active_peft_config.is_prompt_learning else model.get_base_model()


def is_of_adapters(checkpoint: Checkpoint) -> bool:
    """Tells whether a checkpoint was saved of a model with adapters."""
    return _BASE in checkpoint.metadata


def checkpoint_metadata(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Returns what the manifest says beside the tensors; every rank calls it and gets the same."""
    inner = unwrap_parallel_model(model)
    found = training_metadata(inner, optimizers)
    return found if inner is model else found | {_BASE: base_identity(inner)}


def saved_pieces(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[LocalChunk]:
    """Yields all that this rank writes: of a model with adapters their moments."""
    inner = unwrap_parallel_model(model)
    if inner is model:
        yield from pieces(model, optimizers)
        return
    for number, optimizer in enumerate(optimizers):
        yield from optimizer_pieces(inner, optimizer, number)


def save_adapters(model: Any, directory: Path) -> None:
    """Writes the files of a model's adapters, if it has any; every rank calls it."""
    if unwrap_parallel_model(model) is not model:
        model.save_pretrained(directory)


def write_markers(directory: Path) -> None:
    """Has a Trainer that knows nothing of shards raise: it would find PEFT's files, and start the rest anew."""
    text = "The optimizer's state lies in shards beside this file: `import hf_megatron` before the Trainer is made.\n"
    for name in ("optimizer.pt", "scheduler.pt"):
        (directory / name).write_text(text, encoding="utf-8")


def load_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Fills a model's weights, or those of its adapters, from a checkpoint of any layout.

    Raises:
        CheckpointError: the checkpoint holds a model and this one has adapters, or the other way round; or it is of
            adapters of another base.
    """
    inner, saved, prefix = adapted_module(model), checkpoint.metadata.get(_BASE), adapter_prefix(model)
    if (saved is None) != (prefix is None):
        holds, is_one = ("a model", "adapters") if saved is None else ("adapters", "a model without any")
        raise CheckpointError(f"{checkpoint.path} holds {holds}, and this run trains {is_one}.")
    if saved is None or prefix is None:
        load_model(model, checkpoint)
        return
    state = parallel_state(inner)
    own = identity_in_one_process(model.get_base_model(), prefix) if state is None else base_identity(inner)
    if differing := [name for name, value in own.items() if name != "name" and saved.get(name) != value]:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters of another base: {', '.join(differing)} of {saved['name']} differ from "
            f"{own['name']}'s."
        )
    for adapter in model.peft_config:
        folder = checkpoint.path if adapter == "default" else Path(checkpoint.path, adapter)
        model.load_adapter(folder, adapter, is_trainable=adapter in model.active_adapters)
    if state is not None and state.data_parallel is not None:
        state.data_parallel.refresh_main_weights()
        state.data_parallel.step_status.skipped_steps = int(checkpoint.metadata.get("skipped_steps", 0))
