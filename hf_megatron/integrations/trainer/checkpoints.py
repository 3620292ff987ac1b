"""Checkpoints of transformers' Trainer: saved as a folder that is complete or absent, resumed on any layout.

Everything that stock Trainer writes into `checkpoint-N` goes into a temporary folder, whose name does not match
Trainer's own pattern, and is renamed last. Weights and optimizer state are sharded (see `checkpoint/`); scheduler,
scaler and random states are JSON and safetensors.
"""

import functools
import tempfile
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoint import rng_state
from ...checkpoint.async_save import AsyncSaver
from ...checkpoint.collected_state import collect_after_training
from ...checkpoint.discovery import is_committed
from ...checkpoint.loop_state import LOOP, advance_scheduler, open_verified, restore_random_state
from ...checkpoint.packed_state import read_packed, write_packed
from ...checkpoint.reader import Checkpoint
from ...checkpoint.save import choose_target, save_sharded
from ...checkpoint.training_state import load_optimizers, write_config
from ...checkpoint.transaction import prune
from ...compat.patch_registry import PATCH_REGISTRY
from ...core.communication.rank_errors import propagate_errors, rank_and_size
from ...parallel_state import model_inside, parallel_state, unwrap_parallel_model
from ..peft.checkpoints import (
    adapted_module,
    checkpoint_metadata,
    is_adapter_checkpoint,
    load_weights,
    save_adapters,
    save_training_state,
    saved_pieces,
    write_markers,
)
from ..transformers.model_cards import write_trainer_card
from .resume import STATE, checkpoint_to_resume


def _optimizers(trainer: Any) -> list[Any]:
    return [getattr(trainer.optimizer, "optimizer", trainer.optimizer)]


def _holds_shards(path: Any) -> bool:
    return is_committed(path) and (bool((checkpoint := Checkpoint(path)).names()) or is_adapter_checkpoint(checkpoint))


def train(original: Callable, self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Trains from the newest checkpoint of the given step, or of all, and waits for an asynchronous save at the end."""
    state = parallel_state(self.model)
    resume_from_checkpoint = checkpoint_to_resume(
        resume_from_checkpoint, self.args.output_dir, is_parallelized=state is not None
    )
    if state is None:
        return original(self, resume_from_checkpoint, *args, **kwargs)
    if state.config.async_save:
        with closing(AsyncSaver(dist.new_group(backend="gloo"))) as self._hf_megatron_saver:
            result = original(self, resume_from_checkpoint, *args, **kwargs)
    else:
        result = original(self, resume_from_checkpoint, *args, **kwargs)
    collect_after_training(model_inside(self.model))
    return result


def probe(directory: Path) -> None:
    """Writes to a directory on rank 0; raises `CheckpointError` with its name on every rank if that fails."""
    with propagate_errors(f"Writing to output_dir {directory} (TrainingArguments)"):
        if rank_and_size(None)[0] == 0:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(b"probe")


def save_checkpoint(original: Callable, self: Any, model: Any, trial: Any) -> None:
    """Saves a sharded checkpoint, complete or absent; in the background with `async_save`."""
    if parallel_state(self.model) is None:
        return original(self, model, trial)
    if self.hp_search_backend is None and trial is None:
        self.store_flos()
    run_directory = Path(self._get_output_dir(trial=trial))
    step = self.state.global_step
    target = choose_target(run_directory / f"checkpoint-{step}", f"Saving step {step}")
    before = self.state.best_model_checkpoint
    if self.state.best_global_step == step:
        self.state.best_model_checkpoint = str(target)
    saver = vars(self).get("_hf_megatron_saver")
    try:
        if saver is None or self.args.save_only_model:
            _save(self, target)
        else:
            _save_in_background(self, saver, target)
    except BaseException:
        self.state.best_model_checkpoint = before
        raise


def _save(trainer: Any, target: Path) -> None:
    model, step, weights_only = model_inside(trainer.model), trainer.state.global_step, trainer.args.save_only_model

    def write_files(directory: Path) -> None:
        _write_files(trainer, directory)
        if weights_only and model is trainer.model:
            model.save_pretrained(directory, is_main_process=trainer.args.should_save)
        elif weights_only:
            trainer.model.save_pretrained(str(directory))
        write_trainer_card(trainer, directory, files="merged" if weights_only else "sharded")

    if weights_only:
        save_sharded(target, {"step": step}, write_files, None)
    else:
        save_training_state(target, model, _optimizers(trainer), write_files, step=step)
    _after_commit(trainer, target)


def _save_in_background(trainer: Any, saver: AsyncSaver, target: Path) -> None:
    model, optimizers = model_inside(trainer.model), _optimizers(trainer)
    with tempfile.TemporaryDirectory() as staging:
        _write_files(trainer, Path(staging))
        save_adapters(model, Path(staging))
        write_trainer_card(trainer, staging, files="sharded")
        written = (path for path in Path(staging).rglob("*") if path.is_file())
        files = {str(path.relative_to(staging)): path.read_bytes() for path in written}
    described = {"step": trainer.state.global_step, **checkpoint_metadata(model, optimizers)}
    after = functools.partial(_after_commit, trainer, target)
    saver.save(saved_pieces(model, optimizers), target, described, files, after=after)


def _write_files(trainer: Any, directory: Path) -> None:
    """Writes the files of a checkpoint other than weights and optimizer state."""
    args, model = trainer.args, model_inside(trainer.model)
    if not args.save_only_model:
        rng_state.save(directory, rank_and_size(None)[0])
    if not args.should_save:
        return
    if not args.save_only_model:
        if unwrap_parallel_model(model) is model:
            write_config(model, directory)
        else:
            write_markers(directory)
        scaler = getattr(trainer.accelerator, "scaler", None)
        scaled = None if scaler is None else scaler.state_dict()
        write_packed(directory / LOOP, {"scheduler": trainer.lr_scheduler.state_dict(), "scaler": scaled})
    tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    (directory / "training_args.json").write_text(args.to_json_string(), encoding="utf-8")
    _export_callbacks(trainer)
    trainer.state.save_to_json(str(directory / STATE))


def _export_callbacks(trainer: Any) -> None:
    """Copies the states of callbacks and of the control into the trainer's state, as stock does on every save."""
    from transformers.trainer_callback import ExportableState

    kept = trainer.state.stateful_callbacks
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            # A run resumed from a converted checkpoint may have no list for this callback.
            if isinstance(kept.get(name), list):
                kept[name].append(callback.state())
            else:
                kept[name] = callback.state()


def _after_commit(trainer: Any, target: Path) -> None:
    args = trainer.args
    if args.push_to_hub:
        trainer._push_from_checkpoint(str(target))
    if args.should_save and args.save_total_limit:
        best = trainer.state.best_model_checkpoint
        prune(target.parent, args.save_total_limit, protected=[] if best is None else [Path(best)])


def compare_arguments(original: Callable, training_args: Any, trainer_state: Any) -> None:
    """Compares the arguments with the saving run's; a converted checkpoint takes this run's."""
    if trainer_state.train_batch_size is None:
        trainer_state.train_batch_size = training_args.train_batch_size
        trainer_state.compute_steps(training_args, training_args.max_steps)
    original(training_args, trainer_state)


def load_from_checkpoint(original: Callable, self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
    """Loads the weights of a sharded checkpoint of any layout."""
    checkpoint = open_verified(resume_from_checkpoint, self.model) if is_committed(resume_from_checkpoint) else None
    if checkpoint is not None:
        # A model that is not parallelized may resume too: its optimizer, scheduler and random states are read next.
        PATCH_REGISTRY.activate()
    if checkpoint is not None and (checkpoint.names() or is_adapter_checkpoint(checkpoint)):
        load_weights(model_inside(self.model), checkpoint)
    else:
        original(self, resume_from_checkpoint, model)


def _from_shards(load: Callable[[Any, Path], None]) -> Callable:
    """Returns the replacement of a Trainer method that reads part of a checkpoint; `load` reads sharded ones."""

    @functools.wraps(load)
    def replacement(original: Callable, self: Any, checkpoint: str | None) -> None:
        """Reads a sharded checkpoint with `load`, and any other with the original."""
        if checkpoint is None or not _holds_shards(checkpoint):
            original(self, checkpoint)
        else:
            load(self, Path(checkpoint))

    return replacement


@_from_shards
def load_optimizer_and_scheduler(trainer: Any, checkpoint: Path) -> None:
    """Loads the states of the optimizer, the scheduler and the loss scaler, saved on any layout.

    Trainer reads the scaler's from a file of its own, which sharded checkpoints do not have.
    """
    opened = Checkpoint(checkpoint)
    load_optimizers(adapted_module(model_inside(trainer.model)), _optimizers(trainer), opened)
    if opened.metadata.get("converted"):
        # A converted checkpoint has only the step.
        advance_scheduler(trainer.lr_scheduler, trainer.state.global_step)
        return
    states = read_packed(checkpoint / LOOP)
    trainer.lr_scheduler.load_state_dict(states["scheduler"])
    scaler = getattr(trainer.accelerator, "scaler", None)
    if states["scaler"] and scaler is not None:
        scaler.load_state_dict(states["scaler"])


@_from_shards
def load_rng_state(trainer: Any, checkpoint: Path) -> None:
    """Loads the states of the random generators."""
    restore_random_state(trainer.model, checkpoint, trainer.state.global_step)


def load_best_model(original: Callable, self: Any) -> None:
    """Loads the weights of the best checkpoint, which may still be saving."""
    if parallel_state(self.model) is None:
        return original(self)
    saver = vars(self).get("_hf_megatron_saver")
    if saver is not None:
        saver.wait()
    path = self.state.best_model_checkpoint
    if not is_committed(path):
        warnings.warn(f"{path} is not a complete checkpoint: the model keeps its current weights.", stacklevel=2)
    elif _holds_shards(path):
        load_weights(model_inside(self.model), open_verified(path, self.model))
    else:
        original(self)
