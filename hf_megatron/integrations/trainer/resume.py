"""Checkpoint selection for resuming a Trainer, in folders that may mix single-process and sharded checkpoints."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...checkpoint.discovery import committed, is_committed, latest, list_saves
from ...core.communication.rank_errors import gather
from ...errors import CheckpointError

STATE = "trainer_state.json"

# Optimizer states of a plain Trainer: native, FSDP and DeepSpeed.
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_*", "global_step*")


def checkpoint_to_resume(resume_from: Any, output_dir: str, *, is_parallelized: bool) -> Any:
    """Returns the newest save of the given step, or for `True` the newest checkpoint of the output folder.

    Raises:
        CheckpointError: a parallelized run would resume from a single-process optimizer state.
    """
    if is_parallelized:
        # Use the first rank's view of the file system on all ranks.
        checkpoint = gather(_found(resume_from, output_dir), None, "Looking for a checkpoint to resume")[0]
    else:
        checkpoint = _found(resume_from, output_dir)
    if (
        is_parallelized
        and isinstance(checkpoint, str)
        and _is_stock(Path(checkpoint))
        and _has_optimizer(Path(checkpoint))
    ):
        raise CheckpointError(_missing_state_message(Path(checkpoint)))
    return checkpoint


def get_last_checkpoint(original: Callable, folder: str) -> str | None:
    """Returns the newest complete checkpoint of a folder, or upstream's choice if there is none.

    Only called for models that are not parallelized; for others, `train` has replaced `True` by a path.
    """
    return _newest(Path(folder)) or original(folder)


def _found(resume_from: Any, output_dir: str) -> Any:
    if resume_from is True:
        return _newest(Path(output_dir)) or True
    if isinstance(resume_from, str) and (saved := list_saves(Path(resume_from))):
        return str(saved[0])
    return resume_from


def _newest(folder: Path) -> str | None:
    """Returns the checkpoint with the highest step: the sharded one that `latest` names, or one of plain Trainer."""
    sharded = latest(folder) if committed(folder) else None
    others = [path for path in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    stock = max((path for path in others if _is_stock(path)), key=_step, default=None)
    candidates = [path for path in (stock, sharded) if path is not None]
    # If both have the same step, prefer the sharded checkpoint.
    newest = max(reversed(candidates), key=_step, default=None)
    passed_over = [path for path in others if newest is not None and _step(path) > _step(newest)]
    if incomplete := [path for path in passed_over if not is_committed(path)]:
        highest = max(incomplete, key=_step)
        warnings.warn(
            f"{highest} is passed over for {newest}: it has neither manifest.json nor the last file that plain Trainer "
            f"writes ({STATE}), so its save was interrupted. Delete it.",
            stacklevel=2,
        )
    return None if newest is None else str(newest)


def _step(path: Path) -> int:
    match = re.search(r"-(\d+)", path.name)
    return int(match[1]) if match else -1


def _is_stock(path: Path) -> bool:
    """Returns whether a folder is a complete checkpoint of plain Trainer."""
    return (path / STATE).is_file() and not is_committed(path) and not any(path.glob("shard-*"))


def _has_optimizer(path: Path) -> bool:
    return any(any(path.glob(pattern)) for pattern in _OPTIMIZERS)


def _missing_state_message(path: Path) -> str:
    older = next(iter(committed(path.parent)), None)
    reason = f"{path} was written by plain Trainer, whose optimizer state a parallelized model cannot load. "
    reason += "Resume it in a single process"
    if older is None:
        weights = f"from_pretrained({str(path)!r}, megatron_config=...)"
        if (path / "adapter_config.json").is_file():
            weights = f"PeftModel.from_pretrained(model, {str(path)!r}, is_trainable=True)"
        return f"{reason}, or start from its weights: {weights}."
    return (
        f"{reason}, or pass resume_from_checkpoint={str(older)!r}, the newest checkpoint that this run can resume; "
        "training after it is lost."
    )
