"""Accelerator.save_state and load_state of a parallelized model: a complete or absent folder, for any layout."""

import functools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...checkpoint import rng_state
from ...checkpoint.discovery import LATEST, committed, is_committed, list_saves, pointed_at
from ...checkpoint.gather_full import full_state_dict
from ...checkpoint.loop_state import LOOP, advance_scheduler, open_verified, restore_random_state
from ...checkpoint.packed_state import read_packed, write_packed
from ...checkpoint.save import choose_target
from ...checkpoint.training_state import load_optimizers, write_config
from ...checkpoint.transaction import prune
from ...compat.patch_registry import PATCH_REGISTRY
from ...core.communication.rank_errors import propagate_errors, rank_and_size
from ...errors import CheckpointError, UnsupportedError
from ...parallel_state import parallel_state, unwrap_parallel_model
from ..peft.checkpoints import adapted_module, load_weights, save_training_state
from ..transformers.model_cards import write_model_card
from .batch_shards import find_sampler
from .shuffled_order import SharedOrder, skips_batches

# Accelerate's automatic name, and that of a second save.
_AUTOMATIC_NAME = re.compile(r"checkpoint_(\d+)(?:\.\d+)?")
# The file that Accelerate in a single process writes last.
_WRITTEN_LAST = "random_states_0.pkl"


def _only_model(accelerator: Any) -> Any | None:
    """Returns the Accelerator's parallelized model; `None` if it has none."""
    models = accelerator._models
    if all(parallel_state(model) is None for model in models):
        return None
    if len(models) > 1:
        names = ", ".join(type(model).__name__ for model in models)
        raise UnsupportedError(
            f"save_state and load_state support one model with megatron_config, got several ({names}). Prepare each "
            "with its own Accelerator, or do not prepare models that are not trained."
        )
    return models[0]


def _optimizers(accelerator: Any) -> list[Any]:
    return [getattr(optimizer, "optimizer", optimizer) for optimizer in accelerator._optimizers]


def _data_file(rank: int) -> str:
    return f"data-{rank:05d}.safetensors"


def save_state(original: Callable, self: Any, output_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Saves model, optimizers and loop as a sharded checkpoint; saves to `folder.1` if the folder exists."""
    model = _only_model(self)
    naming = self.project_configuration
    if naming.automatic_checkpoint_naming and self.is_main_process:
        _drop_pointer(_automatic_folder(self))
    if model is None:
        return original(self, output_dir, *args, **kwargs)
    # Accelerate, and scripts that list the folder, expect a number in every name there: no pointer file.
    pointer = None if naming.automatic_checkpoint_naming else LATEST
    if naming.automatic_checkpoint_naming:
        path = _automatic_folder(self) / f"checkpoint_{self.save_iteration}"
        if path.exists():
            raise ValueError(
                f"Checkpoint directory {path} ({self.save_iteration}) already exists. Please manually override "
                "`self.save_iteration` with what iteration to start with."
            )
    elif output_dir is None:
        raise ValueError("save_state needs output_dir, because automatic checkpoint naming is off.")
    else:
        path = Path(output_dir).expanduser()
    target = choose_target(path, f"Saving {path}")

    def write_files(directory: Path) -> None:
        hooks = self._save_model_state_pre_hook.values()
        # Hooks get all weights, as rank 0 of a plain run does; they are gathered only if there is a hook.
        gathered = [full_state_dict(model)] if hooks else []
        for hook in hooks:
            hook(self._models, gathered, str(directory))
        _write_files(self, directory)
        write_model_card(model, directory, files="sharded")

    save_training_state(target, model, _optimizers(self), write_files, step=self.step, pointer=pointer)
    if naming.automatic_checkpoint_naming and naming.total_limit:
        # All ranks wait: one that continued to load would list folders that rank 0 is removing.
        with propagate_errors(f"Removing old checkpoints next to {target}"):
            if self.is_main_process:
                prune(target.parent, naming.total_limit, pattern="checkpoint_*")
    naming.iteration += 1
    return target


def _automatic_folder(accelerator: Any) -> Path:
    return Path(accelerator.project_dir) / "checkpoints"


def _drop_pointer(folder: Path) -> None:
    """Removes the pointer file that earlier versions wrote next to automatically named checkpoints."""
    named = pointed_at(folder)
    if named is not None and _AUTOMATIC_NAME.fullmatch(named.name):
        (folder / LATEST).unlink(missing_ok=True)


def _write_files(accelerator: Any, directory: Path) -> None:
    rank = rank_and_size(None)[0]
    rng_state.save(directory, rank)
    write_packed(directory / _data_file(rank), [_data_state(loader) for loader in accelerator._dataloaders])
    if rank == 0:
        if unwrap_parallel_model(accelerator._models[0]) is accelerator._models[0]:
            write_config(accelerator._models[0], directory)
        scaler = accelerator.scaler
        loop = {
            "schedulers": [scheduler.state_dict() for scheduler in accelerator._schedulers],
            "scaler": None if scaler is None else scaler.state_dict(),
            "scheduler_steps": [scheduler.steps for scheduler in accelerator._schedulers],
            "custom": [custom.state_dict() for custom in accelerator._custom_objects],
            "step": accelerator.step,
        }
        write_packed(directory / LOOP, loop)


def _sampler(loader: Any) -> Any | None:
    from accelerate.data_loader import SeedableRandomSampler

    sampler = loader.get_sampler()
    return sampler if isinstance(sampler, SeedableRandomSampler) else None


def _data_state(loader: Any) -> dict[str, Any]:
    sampler = _sampler(loader)
    state: dict[str, Any] = {"iteration": loader.iteration}
    order = find_sampler(loader)
    if isinstance(order, SharedOrder):
        state["order_start"] = order.order_start
    if sampler is not None:
        state |= {"epoch": sampler.epoch, "initial_seed": sampler.initial_seed}
    if getattr(loader, "use_stateful_dataloader", False):
        state["loader"] = loader.state_dict()
    return state


def _load_data_state(loader: Any, state: dict[str, Any]) -> None:
    loader.iteration = state["iteration"]
    order = find_sampler(loader)
    if isinstance(order, SharedOrder):
        order.saved_start = state.get("order_start")
    sampler = _sampler(loader)
    if sampler is not None and "epoch" in state:
        sampler.epoch, sampler.initial_seed = state["epoch"], state["initial_seed"]
    if "loader" in state and getattr(loader, "use_stateful_dataloader", False):
        loader.load_state_dict(state["loader"])


def load_state(original: Callable, self: Any, input_dir: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Loads model, optimizers and loop from the newest sharded checkpoint of that name, saved on any layout."""
    path = _resolve(self, input_dir)
    if path is None or not is_committed(path):
        if _only_model(self) is not None:
            raise CheckpointError(_missing_state_message(self, input_dir, path))
        return original(self, input_dir if path is None else str(path), *args, **kwargs)
    models = self._models
    if len(models) != 1:
        raise UnsupportedError(f"{path} holds one model, but this Accelerator has prepared {len(models)}.")
    for hook in self._load_model_state_pre_hook.values():
        hook(models, str(path))
    PATCH_REGISTRY.activate()
    checkpoint = open_verified(path, models[0])
    loop: Any = None if checkpoint.metadata.get("converted") else read_packed(path / LOOP)
    holders = {"schedulers": self._schedulers, "custom": self._custom_objects}
    for name, objects in {} if loop is None else holders.items():
        if len(loop[name]) != len(objects):
            raise CheckpointError(
                f"{path} holds {len(loop[name])} states of {name}, but this Accelerator has {len(objects)}. Prepare or "
                "register as many as when the checkpoint was saved."
            )
    load_weights(models[0], checkpoint)
    load_optimizers(adapted_module(models[0]), _optimizers(self), checkpoint)
    if loop is None:
        for scheduler in self._schedulers:
            advance_scheduler(scheduler.scheduler, checkpoint.metadata["step"] * scheduler.steps)
        return
    for number, (scheduler, state) in enumerate(zip(self._schedulers, loop["schedulers"], strict=True)):
        steps = loop["scheduler_steps"][number] if "scheduler_steps" in loop else 1
        if steps == scheduler.steps:
            scheduler.load_state_dict(state)
        else:
            # Accelerate steps a scheduler once per replica: another number of replicas counts differently.
            advance_scheduler(scheduler.scheduler, state["last_epoch"] // steps * scheduler.steps)
    for custom, state in zip(self._custom_objects, loop["custom"], strict=True):
        custom.load_state_dict(state)
    if self.scaler is not None and loop["scaler"]:
        self.scaler.load_state_dict(loop["scaler"])
    self.step = loop["step"]
    file = path / _data_file(rank_and_size(None)[0])
    # After a change of the number of ranks: the position in the data is the same on all of them.
    data = read_packed(file if file.exists() else path / _data_file(0))
    for loader, state in zip(self._dataloaders, data, strict=False):
        _load_data_state(loader, state)
    restore = functools.partial(restore_random_state, models[0], path, self.step)
    restore()

    def restore_in_epoch() -> None:
        # The saved epoch had drawn its order before the state was saved. A new epoch draws it from the saved state.
        if skips_batches(self.gradient_state.active_dataloader):
            restore()

    _once_before_forward(models[0], restore_in_epoch)


def _once_before_forward(model: Any, action: Callable[[], None]) -> None:
    """Runs `action` before the next forward, after data loaders have drawn the random numbers that they need."""

    def run(*_: Any) -> None:
        handle.remove()
        action()

    handle = model.register_forward_pre_hook(run, prepend=True)


def _resolve(accelerator: Any, input_dir: str | None) -> Path | None:
    """Returns the newest checkpoint of that name.

    With automatic naming it may be one of plain Accelerate; `None` if Accelerate itself has to find it.
    """
    if input_dir is not None:
        path = Path(input_dir).expanduser()
        saved = list_saves(path)
        return saved[0] if saved else path if is_committed(path) else None
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        return None
    folder = _automatic_folder(accelerator)
    sharded = next(iter(committed(folder)), None)
    if sharded is None:
        return None
    later = [path for path in folder.iterdir() if _number(path) > _number(sharded) and not is_committed(path)]
    stock = [path for path in later if (path / _WRITTEN_LAST).is_file()]
    newest = max(stock, key=_number, default=sharded)
    if passed_over := [path for path in later if _number(path) > _number(newest)]:
        warnings.warn(
            f"{max(passed_over, key=_number)} is passed over for {newest}: it has neither a valid manifest.json nor "
            f"the last file that plain Accelerate writes ({_WRITTEN_LAST}). Delete it.",
            stacklevel=2,
        )
    return newest


def _number(path: Path) -> int:
    """Returns the number in the name of an automatically named checkpoint, -1 for any other name."""
    match = _AUTOMATIC_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _missing_state_message(accelerator: Any, input_dir: str | None, stock: Path | None) -> str:
    """Returns the reason why a parallelized model cannot be loaded."""
    if stock is None:
        if input_dir is None and accelerator.project_configuration.automatic_checkpoint_naming:
            return f"{_automatic_folder(accelerator)} holds no complete checkpoint (no valid manifest.json)."
        return (
            f"{input_dir} is not a complete checkpoint (no valid manifest.json). Pass a folder that save_state wrote, "
            "or load weights with from_pretrained."
        )
    older = committed(stock.parent)[0]
    return (
        f"{stock} was written by plain Accelerate, whose optimizer state a parallelized model cannot load. Resume it "
        f"in a single process, or pass load_state({str(older)!r}), the newest checkpoint that this run can resume; "
        "training after it is lost."
    )
