"""Checkpoints of a model with adapters: PEFT's files, and a hash of the base model instead of its weights."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...checkpoint.base_model_hash import base_identity, identity_in_one_process
from ...checkpoint.discovery import LATEST
from ...checkpoint.reader import Checkpoint
from ...checkpoint.save import save_sharded
from ...checkpoint.tensor_chunks import LocalChunk
from ...checkpoint.training_state import load_model, optimizer_pieces, pieces, training_metadata
from ...compat.ecosystem import adapter_prefix
from ...data_parallel.combined_optimizers import list_stepping
from ...errors import CheckpointError
from ...parallel_state import parallel_state, unwrap_parallel_model

_BASE = "base"


def adapted_module(model: Any) -> Any:
    """Returns the module whose parameter names match the saved optimizer state of adapters."""
    if parallel_state(model) is not None or adapter_prefix(model) is None:
        return unwrap_parallel_model(model)
    # In a model that is not parallelized, prompt encoders are outside the base model.
    return model if model.active_peft_config.is_prompt_learning else model.get_base_model()


def is_adapter_checkpoint(checkpoint: Checkpoint) -> bool:
    """Returns whether a checkpoint was saved from a model with adapters."""
    return _BASE in checkpoint.metadata


def checkpoint_metadata(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, Any]:
    """Returns the manifest's metadata; a collective call with the same result on every rank."""
    inner = unwrap_parallel_model(model)
    metadata = training_metadata(inner, optimizers)
    return metadata if inner is model else metadata | {_BASE: base_identity(inner)}


def saved_pieces(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[LocalChunk]:
    """Yields the chunks that this rank writes: for a model with adapters, only their optimizer moments."""
    inner = unwrap_parallel_model(model)
    if inner is model:
        yield from pieces(model, optimizers)
        return
    for number, optimizer in enumerate(list_stepping(optimizers)):
        yield from optimizer_pieces(inner, optimizer, number)


def save_adapters(model: Any, directory: Path) -> None:
    """Writes the files of a model's adapters, if it has any; a collective call."""
    if unwrap_parallel_model(model) is not model:
        model.save_pretrained(directory)


def save_training_state(
    target: Path,
    model: Any,
    optimizers: Sequence[torch.optim.Optimizer],
    write_files: Callable[[Path], None],
    *,
    step: int,
    pointer: str | None = LATEST,
) -> None:
    """Saves a model, its adapters and optimizers as a sharded checkpoint; see `checkpoint.save.save_sharded`.

    Args:
        write_files (`Callable`): folder -> `None`; writes the caller's own files.
        step (`int`): training step, for the manifest.
    """

    def write(directory: Path) -> None:
        write_files(directory)
        save_adapters(model, directory)

    metadata = {"step": step, **checkpoint_metadata(model, optimizers)}
    save_sharded(target, metadata, write, lambda: saved_pieces(model, optimizers), pointer=pointer)


def write_markers(directory: Path) -> None:
    """Writes invalid optimizer files, so that a Trainer without hf_megatron raises.

    Otherwise it would find PEFT's files and silently start with a new optimizer.
    """
    text = (
        "The optimizer state is in the shard files of this folder. Run `import hf_megatron` before you create the "
        "Trainer.\n"
    )
    for name in ("optimizer.pt", "scheduler.pt"):
        (directory / name).write_text(text, encoding="utf-8")


def load_weights(model: Any, checkpoint: Checkpoint) -> None:
    """Loads a model's weights, or the weights of its adapters, from a checkpoint of any layout.

    Raises:
        CheckpointError: one of checkpoint and model has adapters and the other has none, or the adapters belong to
            another base.
    """
    inner, saved, prefix = adapted_module(model), checkpoint.metadata.get(_BASE), adapter_prefix(model)
    if (saved is None) != (prefix is None):
        holds, is_one = ("a model", "adapters") if saved is None else ("adapters", "a model without any")
        raise CheckpointError(f"{checkpoint.path} holds {holds}, but this run trains {is_one}.")
    if saved is None or prefix is None:
        load_model(model, checkpoint)
        return
    state = parallel_state(inner)
    identity = identity_in_one_process(model.get_base_model(), prefix) if state is None else base_identity(inner)
    if differing := [name for name, value in identity.items() if name != "name" and saved.get(name) != value]:
        raise CheckpointError(
            f"{checkpoint.path} holds adapters of another base model: {', '.join(differing)} of {saved['name']} and "
            f"{identity['name']} differ. Load the base model that the adapters were trained on."
        )
    for adapter in model.peft_config:
        folder = checkpoint.path if adapter == "default" else Path(checkpoint.path, adapter)
        model.load_adapter(folder, adapter, is_trainable=adapter in model.active_adapters)
    if state is not None and state.data_parallel is not None:
        state.data_parallel.refresh_main_weights()
        state.data_parallel.step_status.skipped_steps = int(checkpoint.metadata.get("skipped_steps", 0))
