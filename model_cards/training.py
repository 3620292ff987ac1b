"""Card data from a Trainer: datasets, steps, losses, evaluation."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from ..parallel_state import parallel_state
from .card_data import CardData, card_data_from_model, installed_versions

_HUB = "hf://datasets/"
# Suffixes that an evaluation logs in addition to its metrics.
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "tokens_per_second", "model_preparation_time")
# Builders for generic files, whose names identify no dataset; transformers' own cards skip the same ones.
_FILE_BUILDERS = (None, "csv", "json", "pandas", "parquet", "text", "generator")


def card_data_from_trainer(trainer: Any, **known: Any) -> CardData:
    """Collects card data of a Trainer and its model; a single rank may call it, before, during or after training.

    `known` are additional fields of `CardData`; they override values from the trainer.
    """
    args, state = trainer.args, trainer.state
    model = card_data_from_model(trainer.model)
    name = args.hub_model_id.split("/")[-1] if args.hub_model_id else os.path.basename(os.path.abspath(args.output_dir))
    metrics, step = _last_evaluation(trainer)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    precision = trainer.accelerator.mixed_precision
    of_trl = type(trainer).__module__.partition(".")[0] == "trl"
    # A scheduler stores each group's `initial_lr`; without one, take the current rate.
    groups = () if optimizer is None else optimizer.param_groups
    fields = {
        "model_name": name,
        "model_id": trainer.hub_model_id if "/" in (trainer.hub_model_id or "") else None,
        "tags": (*model.tags, "generated_from_trainer"),
        "trainer": type(trainer).__name__,
        "steps": state.global_step,
        "epochs": state.epoch,
        "batch_size": _samples_per_step(trainer),
        "accumulation": args.gradient_accumulation_steps,
        "tokens": state.num_input_tokens_seen or None,
        "optimizer": None if optimizer is None else type(optimizer).__name__,
        "learning_rates": tuple(sorted({float(group.get("initial_lr", group["lr"])) for group in groups})),
        "mixed_precision": None if precision == "no" else precision,
        "seed": args.seed,
        "datasets": tuple(dataset_ids(trainer.train_dataset)),
        "log_history": tuple(state.log_history),
        "metrics": metrics,
        "metrics_step": step,
        "versions": installed_versions(*(("trl",) if of_trl else ())),
    }
    evaluated = dataset_ids(trainer.eval_dataset)
    # With several datasets, the metrics cannot be attributed to one of them.
    if len(evaluated) == 1:
        split = trainer.eval_dataset.split
        fields["evaluation_dataset"] = evaluated[0]
        fields["evaluation_config"] = trainer.eval_dataset.info.config_name
        fields["evaluation_split"] = None if split is None else str(split)
    return dataclasses.replace(model, **(fields | known))


def _samples_per_step(trainer: Any) -> int:
    """Returns the samples per optimizer step over all ranks; ranks of a model-parallel group count once."""
    layout = parallel_state(trainer.model)
    ranks = trainer.args.world_size if layout is None else layout.mesh.dp_size
    if trainer.accelerator.split_batches:
        ranks = 1
    # `auto_find_batch_size` may have lowered the batch size.
    rows = trainer.state.train_batch_size or trainer.args.train_batch_size
    return rows * ranks * trainer.args.gradient_accumulation_steps


def dataset_ids(dataset: Any) -> list[str]:
    """Returns the Hub ids that a dataset of the `datasets` library was read from; empty for any other dataset."""
    from transformers.modelcard import is_hf_dataset

    if not is_hf_dataset(dataset):
        return []
    info = dataset.info
    files = map(str, info.download_checksums or ())
    ids = {file.removeprefix(_HUB).partition("@")[0] for file in files if file.startswith(_HUB)}
    if not ids and info.builder_name not in _FILE_BUILDERS:
        ids = {info.builder_name}
    return sorted(ids)


def _last_evaluation(trainer: Any) -> tuple[dict[str, float] | None, int | None]:
    """Returns the evaluated metrics of the weights that the trainer holds, and their step."""
    log, state = trainer.state.log_history, trainer.state
    evaluations = [(place, entry) for place, entry in enumerate(log) if _get_metrics(entry)]
    if not evaluations:
        return None, None
    ends = [place for place, entry in enumerate(log) if "train_runtime" in entry]
    last, step = evaluations[-1][0], evaluations[-1][1].get("step")
    best = trainer.args.load_best_model_at_end and not trainer.is_in_train and state.best_global_step is not None
    if best and ends and last < ends[-1]:
        # After training, the trainer holds the weights of the best step, not the last.
        step = state.best_global_step
    metrics: dict[str, float] = {}
    for _, entry in evaluations:
        if entry.get("step") == step:
            metrics |= _get_metrics(entry)
    return metrics, step


def _get_metrics(entry: Mapping[str, Any]) -> dict[str, float]:
    return {
        name.removeprefix("eval_"): float(value)
        for name, value in entry.items()
        if name.startswith("eval_") and not name.endswith(_TIMES) and isinstance(value, int | float)
    }


def curves(log: tuple[Mapping[str, Any], ...]) -> dict[str, list[tuple[float, float]]]:
    """Returns the losses by step, one list for training and one for each evaluation set."""
    losses: dict[str, list[tuple[float, float]]] = {}
    for entry in log:
        for name, value in entry.items():
            of_evaluation = name.startswith("eval_") and name.endswith("_loss")
            if "step" not in entry or not isinstance(value, int | float) or not (name == "loss" or of_evaluation):
                continue
            which = name.removeprefix("eval_").removesuffix("loss").strip("_")
            label = "training loss" if name == "loss" else "evaluation loss" + (f" ({which})" if which else "")
            losses.setdefault(label, []).append((entry["step"], float(value)))
    return losses
