"""`hf-megatron check` and `plan`: any architecture, by model type, folder or hub name."""

import contextlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from ..axes import Axes
from ..config import MegatronConfig
from ..errors import ConfigError, MegatronError, RankError, UnsupportedError
from ..expert_modules import find_experts
from ..media import SOUNDS, VIDEO_PIXELS, image_token, is_of_images
from ..parallelize import plan
from ..pipeline_parallel.stage_counts import layers_with_features
from ..registry import own_spec
from ..registry.features import Features, describe_model
from ..registry.recorded import layout_kind, tested_versions, write_results
from ..spec import ModelSpec
from .adapters import adapted
from .draws import check_draws
from .known_types import WITH_SOUNDS, without_gradient
from .metric import Judgement
from .named_models import resolve_config
from .parity import UNBUILDABLE, Twin, check_twin, make_twin
from .ranks import first_reason
from .token_mixing import unknown_mixing, whole_share
from .twin import TASKS, full_config
from .variants import variants_of

BASE_CLASSES = frozenset(
    name for names in MODEL_MAPPING_NAMES.values() for name in ((names,) if isinstance(names, str) else names)
)
# Own specs that are not causal, and the tasks they are checked on.
OTHER_TASKS = {"bert": ("masked", "classification"), "t5": ("seq2seq",)}
_CLASS_TASKS = {
    "SequenceClassification": "classification",
    "TokenClassification": "token_classification",
    "QuestionAnswering": "question_answering",
    "MaskedLM": "masked",
}
# Of types without a causal class, the first that they have.
_OTHER_CLASSES = {
    "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "sound": MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "speech": MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
_LAYOUT_WORDS = {
    "tp": "tp_size",
    "pp": "pp_size",
    "mb": "num_microbatches",
    "dp": "dp_size",
    "zero": "zero_stage",
    "replicas": "dp_replicate_size",
    "cp": "cp_size",
    "ep": "ep_size",
    "etp": "etp_size",
}
_SCHEMES = {"a2a": "a2a", "gather": "all_gather"}


def parse_layouts(text: str) -> list[MegatronConfig]:
    """Parses `tp2,tp2+sp,tp2+dp2+zero3` into configs; a word that is no layout raises `ConfigError`."""
    configs = []
    for layout in text.split(","):
        fields: dict[str, Any] = {}
        for word in layout.strip().split("+"):
            name = word.rstrip("0123456789")
            if word == "sp":
                fields["sequence_parallel"] = True
            elif word in _SCHEMES:
                fields["cp_comm_type"] = _SCHEMES[word]
            elif name in _LAYOUT_WORDS and name != word:
                fields[_LAYOUT_WORDS[name]] = int(word[len(name) :])
            else:
                raise ConfigError(
                    f"layout {layout!r}: expected tpN, sp, cpN, a2a, gather, ppN, mbN (microbatches), dpN, zeroN, "
                    "replicasN, epN, etpN joined by +, such as tp2,tp2+sp,tp4,cp2,cp2+a2a,dp2+ep2."
                )
        if "cp_size" in fields:
            fields.setdefault("cp_comm_type", "p2p")
        configs.append(MegatronConfig(**fields))
    return configs


def causal_types() -> list[str]:
    """Lists the causal model types."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]


def image_types() -> list[str]:
    """Lists the model types that read images and text."""
    return [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name in CONFIG_MAPPING]


def takes_videos(model_type: str) -> bool:
    """Tells whether the class for images of a type takes videos in arguments of their own."""
    forward = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]).forward
    return VIDEO_PIXELS in inspect.signature(forward).parameters


def sound_types() -> list[str]:
    """Lists the model types that write text about sounds, or about sounds and images."""
    listed = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return [name for name in listed if name in CONFIG_MAPPING and _class_of_sounds(name) is not None]


def _class_of_sounds(model_type: str) -> str | None:
    """Returns the class that writes about sounds, which a type without one for all media has among encoder-decoders."""
    name: str | None = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type)
    found = getattr(transformers, name or MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(model_type, ""), None)
    if found is None or not _takes_sounds(found.forward):
        return None
    is_other = name is None and (found.main_input_name in SOUNDS or found.config_class().is_encoder_decoder)
    return None if is_other else found.__name__


def _takes_sounds(forward: Callable[..., Any]) -> bool:
    return not {*inspect.signature(forward).parameters}.isdisjoint(SOUNDS)


# Less of the layers' parameters that is split is said.
_LARGE_SHARE = 0.5
# See `tiny_config`.
_TWIN_HEADS = 4
# Of a twin's batch.
_ROWS = 3
# Of a twin that adds features of images behind its first layers, at most two of them.
_LAYERS_WITH_FEATURES = 4


def task_of_class(class_name: str, config: PreTrainedConfig) -> str:
    """Returns the task whose batches fit a class; `...ForConditionalGeneration` are models of images too."""
    if class_name in BASE_CLASSES and class_name != _class_of_images(config):
        return "hidden_states"
    is_of_images = _is_of_images(config) or (class_name == _class_of_images(config) and _takes_images(config))
    is_masked = class_name == MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(config.model_type)
    if is_masked and class_name != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        return "seq2seq" if config.is_encoder_decoder else "masked"
    has_encoder = config.is_encoder_decoder and not class_name.endswith("ForCausalLM")
    is_of_speech = class_name == MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.get(config.model_type)
    if is_of_speech and _class_of_sounds(config.model_type) is None:
        return "speech"
    default = "seq2seq" if has_encoder else "image" if is_of_images else "causal"
    return next((task for part, task in _CLASS_TASKS.items() if part in class_name), default)


def _class_of_images(config: PreTrainedConfig) -> str | None:
    found: str | None = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return found


def _takes_images(config: PreTrainedConfig) -> bool:
    # Some name no placeholder by default.
    return "vision_config" in config.to_dict() or image_token(full_config(config)) is not None


def _is_of_images(config: PreTrainedConfig) -> bool:
    """Tells whether a type has no class for text alone."""
    image, text = _class_of_images(config), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return image is not None and text in (None, image) and _takes_images(config)


def default_task(config: PreTrainedConfig) -> str:
    """Returns the task of the class that users of a type load: causal, if it has one for text alone."""
    if _is_of_images(config):
        return "image"
    sounds: str | None = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    if sounds == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) and config.model_type in sound_types():
        # Those with a head for text alone are compared on that by default.
        return "causal" if sounds is None or sounds.endswith("ForCausalLM") else "sound"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for task, names in _OTHER_CLASSES.items():
            if config.model_type in names:
                return task
    return "causal"


def _class_of_text(config: PreTrainedConfig) -> str | None:
    """Returns the class of a type that transformers lists as one of images alone although it takes none."""
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if name is None or not name.endswith("ForCausalLM") or config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    arguments = inspect.signature(getattr(transformers, name).forward).parameters
    return None if any(map(is_of_images, arguments)) else name


def _part_with_causal_class(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Returns the part of a config that its type's causal class is made of, where Auto classes do not find it."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    kind = getattr(transformers, name or "", None)
    if kind is None or "text_config" in config.sub_configs or isinstance(config, kind.config_class):
        return None
    return next((part for part in vars(config).values() if isinstance(part, kind.config_class)), None)


def cases_of(models: list[str], task: str = "causal", *, given_class: bool = False) -> Iterator[tuple[str, str]]:
    """Yields model types, or names, with the task that each is checked on.

    Args:
        models (`list[str]`): `"all"` stands for all causal types, all types of images, sounds, masked language models
            and encoder-decoders; with another task than the default, for the types of that one.
        given_class (`bool`): a class is named, whose task it is.
    """
    for model in models:
        if model == "all":
            every = [(name, "causal") for name in causal_types()]
            every += [(name, "image") for name in image_types() if task == "image" or not _has_one_class(name)]
            every += [(name, "video") for name in image_types() if task == "video" and takes_videos(name)]
            every += [(name, "sound") for name in sound_types()]
            every += [(name, "masked") for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if name in CONFIG_MAPPING]
            sounds = {*sound_types()}
            every += [
                (name, "seq2seq")
                for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
                if name in CONFIG_MAPPING and name not in sounds
            ]
            of_speech = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
            every += [(name, "speech") for name in of_speech if name in CONFIG_MAPPING and name not in sounds]
            every += [(name, other) for name, tasks in OTHER_TASKS.items() for other in tasks]
            every = list(dict.fromkeys(every))
            yield from (case for case in every if task in ("causal", case[1]))
        else:
            tasks = OTHER_TASKS.get(model, ()) if task == "causal" and not given_class else ()
            yield from ((model, other) for other in tasks or (task,))


def _has_one_class(model_type: str) -> bool:
    """Tells whether the class for images is the causal one, which is given images then."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return names[0].get(model_type) == names[1][model_type]


def check_models(
    models: list[str],
    layouts: list[MegatronConfig],
    *,
    class_name: str | None = None,
    task: str = "causal",
    changes: Mapping[str, Any] | None = None,
    variants: bool = False,
    adapter: str | None = None,
    timeout: float = 120.0,
    device: str = "cpu",
    record: Path | None = None,
    echo: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """Checks the tiny twin of each model on each layout; returns the rows that `--record` writes.

    Args:
        models (`list[str]`): types, folders, hub names; `"all"` as in `cases_of`, each type's rows written as soon as
            they are there.
        changes (`Mapping`, *optional*): what to change in the models' configs.
        variants (`bool`): check what is listed in `variants.py`, too.
        adapter (`str`, *optional*): a key of `adapters.METHODS`, trained in the place of the model's own weights.
        device (`str`): of the ranks: `"cpu"` or `"cuda"`; the numbers they are compared with are a CPU's.
        record (`Path`, *optional*): a results file that takes up the rows of each model as soon as it is checked.

    Raises:
        ConfigError: an unknown task or model, or changes that a config does not take.
    """
    if task not in TASKS:
        raise ConfigError(f"task {task!r}: valid are {', '.join(TASKS)}.")
    largest = max(layout.tp_size for layout in layouts)
    if largest > _TWIN_HEADS:
        raise ConfigError(
            f"tp_size = {largest}: tiny twins have {_TWIN_HEADS} attention heads, and a result of tp{_TWIN_HEADS} "
            "stands for every larger size; `hf-megatron plan MODEL` says which sizes divide a model."
        )
    rows = []
    # Every pipeline stage needs a layer.
    layers = max(layout.pp_size * (layout.virtual_stages or 1) for layout in layouts)
    for model, case_task in cases_of(models, task, given_class=class_name is not None):
        pending = [dict(changes or {})]
        while pending:
            changed = pending.pop(0)
            try:
                found = _check_changed(
                    model,
                    changed,
                    layouts,
                    layers,
                    class_name,
                    case_task,
                    "all" in models or variants,
                    adapter,
                    timeout,
                    device,
                    echo,
                )
            except ConfigError as error:
                if "all" not in models:
                    raise
                # One type without a valid default config ends no check of the others.
                echo(f"{model:24} {error}")
                continue
            rows += found
            if record is not None:
                write_results(record, found)
            if (
                variants
                and changed == dict(changes or {})
                and model in CONFIG_MAPPING
                and found
                and found[0]["class"] != "-"
            ):
                pending = [changed | dict(variant) for variant in variants_of(model, found[0]["class"])]
    return rows


def _check_changed(
    model: str,
    changes: dict[str, Any],
    layouts: list[MegatronConfig],
    layers: int,
    class_name: str | None,
    task: str,
    everything: bool,
    adapter: str | None,
    timeout: float,
    device: str,
    echo: Callable[[str], Any],
) -> list[dict[str, Any]]:
    """Returns the rows of one model with changes in its config."""
    if task == "sound":
        changes = {**WITH_SOUNDS.get(model, {}), **changes}
    config = resolve_config(model, changes)
    if class_name is not None:
        task = task_of_class(class_name, config)
    elif task == "sound":
        class_name = _class_of_sounds(config.model_type)
    elif task in ("causal", "image") and (class_name := _class_of_text(config)):
        task = "causal"
    elif task == "causal":
        task = default_task(config)
        if task == "causal" and (part := _part_with_causal_class(config)) is not None:
            class_name, config = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type], part
    if layers_with_features(config):
        # Those behind which features of images are added lie on the first stage, with one more.
        layers = max(layers, _LAYERS_WITH_FEATURES)
    twin: Twin | None = None
    # Every dp rank needs one, and some have more.
    rows = max(_ROWS, max(layout.dp_size or 1 for layout in layouts) + 1)
    reason, results = "", []
    try:
        twin = make_twin(config, task=task, class_name=class_name, microbatches=2, min_layers=layers, batch_size=rows)
        twin = twin if adapter is None else adapted(twin, adapter)
    except UNBUILDABLE as error:
        reason = f"its tiny twin cannot be built: {type(error).__name__}: {error}"
        if not everything:
            raise ConfigError(f"{model}: {reason}") from error
    for layout in layouts:
        if layout.ep_size > 1 and twin is not None and not _has_experts(twin):
            if everything:
                continue
            with contextlib.suppress(UnsupportedError):
                # Wrong usage, unless it has some that are refused by name, which makes a row.
                plan(twin.model_on_meta(), layout, Axes.of(layout, 0))
        row = _check_layout(config, twin, layout, timeout, device, reason, adapter) | {"changes": changes}
        results.append(row)
        refused = row.pop("refused", False) or row["worst"].startswith(("UnsupportedError", "ConfigError"))
        verdict = "equal" if row["passed"] else "refused" if refused else "DIFFERS"
        name = f"{row['class']} {json.dumps(changes)}" if changes else row["class"]
        share = f", {row['split']:.0%} of its layers' parameters split" if row.get("split", 1.0) < _LARGE_SHARE else ""
        share += f", {row['whole']:.0%} of its layers' parameters computed whole by each rank" if "whole" in row else ""
        echo(f"{row['model_type']:24} {name:36} {layout.layout():8} {verdict:8} {row['worst']}{share}")
        if details := row.pop("details", None):
            echo(details)
    if twin is not None:
        twin.delete()
    return results


def _check_layout(
    config: PreTrainedConfig,
    twin: Twin | None,
    layout: MegatronConfig,
    timeout: float,
    device: str,
    reason: str,
    adapter: str | None,
) -> dict[str, Any]:
    """Returns the row of one twin on one layout; with an adapter all axes of the layout are named."""
    row: dict[str, Any] = {
        "model_type": config.model_type,
        "class": "-" if twin is None else twin.class_name,
        "layout": layout_kind(layout) if adapter is None else f"{layout.layout()} {adapter}",
        "tp_size": layout.tp_size,
        "pp_size": layout.pp_size,
        **({"cp_size": layout.cp_size} if layout.cp_size > 1 else {}),
        **({"ep_size": layout.ep_size} if layout.ep_size > 1 else {}),
        "parts": [],
        "draws": [],
        "versions": tested_versions(),
        **_media(twin),
    }
    if twin is None:
        return row | {"passed": False, "worst": reason}
    try:
        if adapter is not None:
            return row | _verdict(check_twin(twin, layout, timeout=timeout, device=device), twin)
        features = features_on_layout(twin.model_on_meta(), layout)
        row |= {"parts": list(features.parts)} | ({"split": _split_share(twin, layout)} if layout.tp_size > 1 else {})
        if unlike := describe_model(twin.model_on_meta()).features({}).parts ^ twin.full.features({}).parts:
            found = "; ".join(sorted(str(line) for part in unlike for line in part.lines))
            return row | {"passed": False, "worst": f"its twin is another model: {found}"[:300]}
        if layout.cp_size > 1:
            row |= _whole_blocks(twin, layout)
            if reason := row.pop("mixing", None):
                return row | {"passed": False, "worst": reason}
        comparison = check_twin(twin, layout, timeout=timeout, device=device)
        if comparison.passed and layout.tp_size > 1 and layout.pp_size == 1:
            sites, problem = check_draws(twin, layout, timeout=timeout, device=device)
            row |= {"draws": sorted(sites)} | ({"draws_differ": problem} if problem else {})
            if twin.full.draws - sites:
                return row | {"passed": False, "worst": f"while {sorted(twin.full.draws - sites)} drew: {problem}"}
    except MegatronError as error:
        refused = not isinstance(error, RankError)
        return row | {"passed": False, "worst": first_reason(str(error)), "refused": refused}
    return row | _verdict(comparison, twin)


def _media(twin: Twin | None) -> dict[str, Any]:
    """Says what a twin's batches have beside text."""
    if twin is None:
        return {}
    return {"media": list(twin.media)} if twin.media else {}


def _verdict(comparison: Judgement, twin: Twin) -> dict[str, Any]:
    found: dict[str, Any] = {"passed": comparison.passed, "worst": str(comparison.worst)}
    if reasons := without_gradient(twin.config, twin.media):
        found["no_gradient"] = sorted(reasons.values())
    return found if comparison.passed else found | {"details": comparison.report()}


def _has_experts(twin: Twin) -> bool:
    model = twin.model_on_meta()
    return bool(find_experts(model, own_spec(model) or ModelSpec(model.config.model_type)))


def _whole_blocks(twin: Twin, layout: MegatronConfig) -> dict[str, Any]:
    """Says which share of the layers cp computes on whole rows, and what mixes tokens that it does not know."""
    state = plan(twin.model_on_meta(), layout, Axes.of(layout, 0))
    assert twin.build_full is not None
    with torch.device("meta"):
        share = whole_share(twin.build_full(), state)
    model = twin.load()
    arguments = inspect.signature(type(model).forward).parameters
    needed = {name for name, argument in arguments.items() if argument.default is argument.empty}
    batch = {name: value for name, value in twin.batches[0].items() if name in {"input_ids", *needed}}
    reason = unknown_mixing(model, state.spec, batch)
    return ({"whole": round(share, 3)} if share else {}) | ({} if reason is None else {"mixing": reason})


def _split_share(twin: Twin, layout: MegatronConfig) -> float:
    """Returns which share of the layers' parameters is split, of the full model: a twin's tower is a larger part."""
    assert twin.build_full is not None
    with torch.device("meta"):
        full = twin.build_full()
    try:
        features = features_on_layout(full, layout)
    except MegatronError:
        # Sizes of a default config that tp_size does not divide.
        features = features_on_layout(twin.model_on_meta(), layout)
    return round(features.split, 3)


def features_on_layout(model: Any, layout: MegatronConfig) -> Features:
    """Returns what a model on the meta device is made of on a layout."""
    description = describe_model(model)
    return description.features(plan(model, layout, Axes.of(layout, 0)).claims if layout.tp_size > 1 else {})
