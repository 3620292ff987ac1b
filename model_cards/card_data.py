"""Data of a model card. Unknown fields are `None` or empty, and the card omits them."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from ..checkpoint.reader import Checkpoint
from ..compat.versions import __version__, installed_version
from ..config import MegatronConfig
from ..models.verified import layout_kinds, records
from ..parallel_state import ParallelState, parallel_state
from .provenance import find_base_model, hub_id

LIBRARY_TAG = "hf_megatron"
_VERSIONS = ("torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "huggingface_hub")


@dataclass(frozen=True)
class Parity:
    """Recorded results in `verified.json` for a model class and the kinds that make up a layout.

    Attributes:
        kinds: such as `tp+sp` and `pp`; empty for pure data parallelism, which changes no module.
        rows: the records of these kinds, for any sizes, passed or failed.
        missing: kinds without a record that passed.
    """

    kinds: tuple[str, ...] = ()
    rows: tuple[Mapping[str, Any], ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class CardData:
    """All data that a card can contain.

    Attributes:
        model_name, model_id, base_model: the title; this repository and the model it derives from, as ids on the Hub.
        architecture, model_type, parameters, dtype: class name, transformers' type, number of parameters of the full
            model.
        license, language, datasets, tags, pipeline_tag, library_name: of the metadata block, in the Hub's names.
        dataset_names: datasets without an id on the Hub.
        layout, world_size: parallel layout of the model, and its number of ranks.
        trainer, optimizer, mixed_precision: class names, `bf16` or `fp16`.
        steps, epochs, batch_size, accumulation, tokens, learning_rates, seed: of the training; the batch size is the
            number of samples per optimizer step on all ranks, the learning rates are the parameter groups'.
        log_history: as in `TrainerState`.
        metrics, metrics_step: of the last evaluation, without `eval_`.
        evaluation_dataset, evaluation_config, evaluation_split: data of the evaluation, as ids on the Hub.
        versions: of the libraries that wrote the model.
        source_format, target_format, notes: of a conversion.
        parity: recorded parity results for the layout.
        files: `"merged"` (plain Hugging Face files) or `"sharded"` (a checkpoint folder); `None` detects it in the
            folder, and if that holds neither, the card does not mention loading.
        tokenizer: whether the folder has a tokenizer; `None` detects it in the folder.
    """

    model_name: str | None = None
    model_id: str | None = None
    base_model: str | None = None
    architecture: str | None = None
    model_type: str | None = None
    parameters: int | None = None
    dtype: str | None = None
    license: str | None = None
    language: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    dataset_names: tuple[str, ...] = ()
    tags: tuple[str, ...] = (LIBRARY_TAG,)
    pipeline_tag: str | None = None
    library_name: str | None = "transformers"
    layout: MegatronConfig | None = None
    world_size: int | None = None
    trainer: str | None = None
    steps: int | None = None
    epochs: float | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    tokens: int | None = None
    optimizer: str | None = None
    learning_rates: tuple[float, ...] = ()
    mixed_precision: str | None = None
    seed: int | None = None
    log_history: tuple[Mapping[str, Any], ...] = ()
    metrics: Mapping[str, float] | None = None
    metrics_step: int | None = None
    evaluation_dataset: str | None = None
    evaluation_config: str | None = None
    evaluation_split: str | None = None
    versions: Mapping[str, str] | None = None
    source_format: str | None = None
    target_format: str | None = None
    notes: tuple[str, ...] = ()
    parity: Parity | None = None
    files: str | None = None
    tokenizer: bool | None = None


def recorded_parity(class_name: str, model_type: str, layout: MegatronConfig) -> Parity:
    """Returns the recorded results of a class's default config for the kinds that make up `layout`."""
    kinds = tuple(layout_kinds(layout))
    of_class = (row for row in records() if (row["class"], row["model_type"]) == (class_name, model_type))
    rows = tuple(row for row in of_class if row["layout"] in kinds and not row["changes"])
    passed = {row["layout"] for row in rows if row["passed"]}
    return Parity(kinds, rows, tuple(kind for kind in kinds if kind not in passed))


def installed_versions(*further: str) -> dict[str, str]:
    """Returns the versions of this library, the libraries it works with, and installed ones among `further`."""
    versions = {"hf_megatron": __version__}
    for name in (*_VERSIONS, *further):
        with suppress(metadata.PackageNotFoundError):
            versions[name] = installed_version(name)
    return versions


def get_hub_task(architecture: str | None) -> str | None:
    """Returns the Hub's task name for a model class, such as `text-generation`."""
    from transformers.modelcard import TASK_MAPPING

    tasks: dict[str, Any] = TASK_MAPPING
    return next((task for task, classes in tasks.items() if architecture in classes.values()), None)


def card_data_from_config(config: Any, **known: Any) -> CardData:
    """Collects card data of a model from its config alone, as in a conversion.

    `known` are additional fields of `CardData`; they override values from the config.
    """
    architecture = config.architectures[0] if len(config.architectures or ()) == 1 else None
    fields = {
        "architecture": architecture,
        "model_type": config.model_type,
        "dtype": None if config.dtype is None else str(config.dtype).removeprefix("torch."),
        "base_model": hub_id(config.name_or_path),
        "pipeline_tag": get_hub_task(architecture),
        "versions": installed_versions(),
    }
    return CardData(**(fields | known))


def card_data_from_model(model: Any, **known: Any) -> CardData:
    """Collects card data of a loaded model, parallelized or not; not collective, so a single rank may call it.

    `known` are additional fields of `CardData`; they override values from the model.
    """
    state = parallel_state(model)
    # FSDP2 prefixes the class name.
    architecture = type(model).__name__.removeprefix("FSDP")
    fields: dict[str, Any] = {
        "architecture": architecture,
        "dtype": str(model.dtype).removeprefix("torch."),
        "base_model": find_base_model(model.config.name_or_path),
        "parameters": _parameters(model, state),
        "pipeline_tag": get_hub_task(architecture),
        "tags": (LIBRARY_TAG, *(model.model_tags or ())),
    }
    if state is not None:
        fields |= {
            "layout": state.config,
            "world_size": state.mesh.root.size(),
            "parity": recorded_parity(architecture, model.config.model_type, state.config),
        }
    return card_data_from_config(model.config, **(fields | known))


def _parameters(model: Any, state: ParallelState | None) -> int:
    if state is None or state.cut is None:
        return model.num_parameters()
    tied = set(model.all_tied_weights_keys)
    if state.cut.tied:
        # A stage without the head does not record that the head is tied to the embedding; its class does.
        patterns = type(model)._tied_weights_keys
        tied |= {name for name in state.shardings if any(re.search(pattern, name) for pattern in patterns)}
    return sum(math.prod(sharding.shape) for name, sharding in state.shardings.items() if name not in tied)


def card_data_from_checkpoint(path: str | Path) -> CardData:
    """Collects card data of a sharded checkpoint from its config, its manifest and, if Trainer wrote it, its log.

    Raises:
        CheckpointError: the folder has no valid manifest.
        ConfigError: its layout has fields unknown to this version.
    """
    checkpoint = Checkpoint(path)
    saved, config = checkpoint.metadata, _json(checkpoint.path / "config.json")
    state = _json(checkpoint.path / "trainer_state.json")
    described = saved.get("model") or {}
    architecture, model_type = described.get("class"), described.get("model_type")
    layout = None if saved.get("layout") is None else MegatronConfig.from_saved(saved["layout"])
    parity = None
    if layout is not None and architecture is not None and model_type is not None:
        parity = recorded_parity(architecture, model_type, layout)
    return CardData(
        architecture=architecture,
        model_type=model_type,
        dtype=config.get("dtype"),
        pipeline_tag=get_hub_task(architecture),
        layout=layout,
        world_size=saved.get("world_size"),
        parity=parity,
        steps=state.get("global_step"),
        epochs=state.get("epoch"),
        log_history=tuple(state.get("log_history", ())),
        versions=dict(checkpoint.manifest.versions),
        files="sharded",
    )


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
