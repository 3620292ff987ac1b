"""transformers.Trainer and checkpoints: a folder that is complete or absent, and resuming from it on any layout.

Everything stock writes into `checkpoint-N` goes into a temporary folder, whose name Trainer's own pattern does not
match, and is renamed last. Weights and optimizer state are sharded (see `checkpoint/`); scheduler, scaler and random
states are JSON and safetensors.
"""

import functools
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ...checkpoint import rng_state
from ...checkpoint.async_save import AsyncSaver
from ...checkpoint.discovery import fresh_name, is_committed
from ...checkpoint.packed_state import read_packed, write_packed
from ...checkpoint.reader import Checkpoint, open_checkpoint
from ...checkpoint.training_state import load_optimizers, write_config
from ...checkpoint.transaction import Transaction, prune
from ...compat.patch_registry import PATCH_REGISTRY
from ...core.communication.rank_errors import gather, propagate_errors, rank_and_size
from ...parallel_state import model_inside, parallel_state, unwrap_parallel_model
from ..peft.checkpoints import (
    adapted_module,
    checkpoint_metadata,
    is_of_adapters,
    load_weights,
    save_adapters,
    saved_pieces,
    write_markers,
)
from ..transformers.model_cards import write_trainer_card
from .resume import STATE, checkpoint_to_resume

LOOP = "loop.safetensors"


def _optimizers(trainer: Any) -> list[Any]:
    return [getattr(trainer.optimizer, "optimizer", trainer.optimizer)]


def _holds_shards(path: Any) -> bool:
    return is_committed(path) and (bool((checkpoint := Checkpoint(path)).names()) or is_of_adapters(checkpoint))


def train(original: Callable, self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Trains from the newest save of the step that is named or of all, and waits at the end for a save under way."""
    state = parallel_state(self.model)
    resume_from_checkpoint = checkpoint_to_resume(
        resume_from_checkpoint, self.args.output_dir, is_parallelized=state is not None
    )
    if state is None or not state.config.async_save:
        return original(self, resume_from_checkpoint, *args, **kwargs)
    with closing(AsyncSaver(dist.new_group(backend="gloo"))) as self._hf_megatron_saver:
        return original(self, resume_from_checkpoint, *args, **kwargs)


def probe(directory: Path) -> None:
    """Writes to a directory on rank 0; an error is a `CheckpointError` on every rank, which names the directory."""
    with propagate_errors(f"Writing to output_dir {directory} (TrainingArguments)"):
        if rank_and_size(None)[0] == 0:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory) as file:
                file.write(b"probe")


def save_checkpoint(original: Callable, self: Any, model: Any, trial: Any) -> None:
    """Saves a sharded checkpoint, complete or absent, and in the background where the layout says so."""
    if parallel_state(self.model) is None:
        return original(self, model, trial)
    if self.hp_search_backend is None and trial is None:
        self.store_flos()
    run_directory = Path(self._get_output_dir(trial=trial))
    step = self.state.global_step
    # The first rank's view of the file system counts.
    target = gather(fresh_name(run_directory / f"checkpoint-{step}"), None, f"Saving step {step}")[0]
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


@contextmanager
def progress(what: str) -> Iterator[Callable[[str], None]]:
    """Shows a bar on the first rank that counts the tensors it has written, none for a save of under a second."""
    from tqdm.auto import tqdm

    with tqdm(desc=what, unit=" tensors", delay=1.0, disable=rank_and_size(None)[0] > 0) as bar:
        yield lambda step: bar.update() if step.startswith("tensor ") else None


def _save(trainer: Any, target: Path) -> None:
    model, optimizers = model_inside(trainer.model), _optimizers(trainer)
    weights_only = trainer.args.save_only_model
    described = {"step": trainer.state.global_step, **({} if weights_only else checkpoint_metadata(model, optimizers))}
    with progress(f"Saving {target.name}") as advance, Transaction(target, described, on_step=advance) as transaction:
        _write_files(trainer, transaction.directory)
        if weights_only and model is trainer.model:
            model.save_pretrained(transaction.directory, is_main_process=trainer.args.should_save)
        elif weights_only:
            trainer.model.save_pretrained(str(transaction.directory))
        else:
            save_adapters(model, transaction.directory)
            transaction.write(saved_pieces(model, optimizers))
        write_trainer_card(trainer, transaction.directory, files="merged" if weights_only else "sharded")
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
    """Writes what a checkpoint holds beside weights and moments."""
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
    """Puts the state of callbacks and of the control into the trainer's, as stock does on every save."""
    from transformers.trainer_callback import ExportableState

    kept = trainer.state.stateful_callbacks
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            # A converted checkpoint knows of none.
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
    """Compares arguments with those of the run that saved; for a converted checkpoint, this run's are taken."""
    if trainer_state.train_batch_size is None:
        trainer_state.train_batch_size = training_args.train_batch_size
        trainer_state.compute_steps(training_args, training_args.max_steps)
    original(training_args, trainer_state)


def open_verified(path: Any, model: Any) -> Checkpoint:
    """Opens a checkpoint on all ranks, with its checksums compared unless the model's layout says otherwise."""
    state = parallel_state(model)
    return open_checkpoint(path, verify=state is None or state.config.verify_checksums)


def load_from_checkpoint(original: Callable, self: Any, resume_from_checkpoint: str, model: Any = None) -> None:
    """Loads the weights of a sharded checkpoint, whatever layout saved it."""
    checkpoint = open_verified(resume_from_checkpoint, self.model) if is_committed(resume_from_checkpoint) else None
    if checkpoint is not None:
        # A model that is not parallelized resumes, too: optimizer, scheduler and random states are read next.
        PATCH_REGISTRY.activate()
    if checkpoint is not None and (checkpoint.names() or is_of_adapters(checkpoint)):
        load_weights(model_inside(self.model), checkpoint)
    else:
        original(self, resume_from_checkpoint, model)


def _from_shards(load: Callable[[Any, Path], None]) -> Callable:
    """Returns the replacement of a Trainer method that reads a part of a checkpoint: `load` reads ours."""

    @functools.wraps(load)
    def replacement(original: Callable, self: Any, checkpoint: str | None) -> None:
        """Reads ours by `load`, and others by the original."""
        if checkpoint is None or not _holds_shards(checkpoint):
            original(self, checkpoint)
        else:
            load(self, Path(checkpoint))

    return replacement


@_from_shards
def load_optimizer_and_scheduler(trainer: Any, checkpoint: Path) -> None:
    """Loads the optimizer's state of any layout, and the scheduler's."""
    opened = Checkpoint(checkpoint)
    load_optimizers(adapted_module(model_inside(trainer.model)), _optimizers(trainer), opened)
    if opened.metadata.get("converted"):
        advance(trainer.lr_scheduler, trainer.state.global_step)
    else:
        trainer.lr_scheduler.load_state_dict(read_packed(checkpoint / LOOP)["scheduler"])


def advance(scheduler: Any, steps: int) -> None:
    """Puts the scheduler of this run to where it is after so many steps: another library's has no counterpart here."""
    with warnings.catch_warnings():
        # torch expects an optimizer step before each.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        for _ in range(steps):
            scheduler.step()


@_from_shards
def load_scaler(trainer: Any, checkpoint: Path) -> None:
    """Loads the loss scaler's state; a converted checkpoint has none."""
    if Checkpoint(checkpoint).metadata.get("converted"):
        return
    saved, scaler = read_packed(checkpoint / LOOP)["scaler"], getattr(trainer.accelerator, "scaler", None)
    if saved and scaler is not None:
        scaler.load_state_dict(saved)


@_from_shards
def load_rng_state(trainer: Any, checkpoint: Path) -> None:
    """Loads the states of the random generators."""
    restore_random_state(trainer.model, checkpoint, trainer.state.global_step)


def restore_random_state(model: Any, directory: Path, step: int) -> None:
    """Continues every generator, or starts it anew where batches are dealt out otherwise; converted ones have none."""
    state, saved = parallel_state(model), Checkpoint(directory).metadata
    if saved.get("converted"):
        return
    layout = None if state is None else state.config
    sizes = ("tp_size", "dp_size", "cp_size", "pp_size", "ep_size")
    before = saved.get("layout") or {}
    same = saved.get("world_size") == rank_and_size(None)[1] and all(
        getattr(layout, name, 1) == before.get(name, 1) for name in sizes
    )
    stream = 0 if state is None else state.mesh.dp_rank
    counterpart = rank_and_size(None)[0] if same else None
    if not same and before.get("dp_size", 1) == (1 if layout is None else layout.dp_size):
        # Neighbours share a batch, and draw alike what they draw together: samples go on as in one process.
        counterpart = stream * (saved.get("world_size", 1) // before.get("dp_size", 1))
    rng_state.load(directory, counterpart, stream=stream, step=step)


def load_best_model(original: Callable, self: Any) -> None:
    """Loads the weights of the best checkpoint, which may still be on its way."""
    if parallel_state(self.model) is None:
        return original(self)
    saver = vars(self).get("_hf_megatron_saver")
    if saver is not None:
        saver.wait()
    path = self.state.best_model_checkpoint
    if not is_committed(path):
        warnings.warn(f"{path} is not a complete checkpoint: the model keeps its present weights.", stacklevel=2)
    elif _holds_shards(path):
        load_weights(model_inside(self.model), open_verified(path, self.model))
    else:
        original(self)
