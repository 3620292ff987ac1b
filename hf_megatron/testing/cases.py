"""Selection of the model types to check, and of the class and task of each."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from ..models.modalities.images import SOUNDS, VIDEO_PIXELS, image_token, is_image_argument
from ..models.type_facts import get_type_facts
from .tiny_config import full_config

BASE_CLASSES = frozenset(
    name for names in MODEL_MAPPING_NAMES.values() for name in ((names,) if isinstance(names, str) else names)
)
# Types with a registered spec that are not causal, and the tasks to check them on.
OTHER_TASKS = {"bert": ("masked", "classification"), "t5": ("seq2seq",)}
_CLASS_TASKS = {
    "SequenceClassification": "classification",
    "TokenClassification": "token_classification",
    "QuestionAnswering": "question_answering",
    "MultipleChoice": "multiple_choice",
    "MaskedLM": "masked",
}
# Classes of types without a class that predicts tokens.
_CLASSIFIERS = {
    "token_classification": MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "classification": MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
# Tasks of types without a causal class, in order of preference.
_OTHER_CLASSES = {
    "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "audio": MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    "speech": MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    **_CLASSIFIERS,
}


def causal_types() -> list[str]:
    """Returns the causal model types."""
    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name in CONFIG_MAPPING]


def image_types() -> list[str]:
    """Returns the model types that read images and text."""
    return [name for name in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES if name in CONFIG_MAPPING]


def takes_videos(model_type: str) -> bool:
    """Returns whether the image-text class of a type has separate arguments for videos."""
    forward = getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type]).forward
    return VIDEO_PIXELS in inspect.signature(forward).parameters


def audio_types() -> list[str]:
    """Returns the model types that generate text from audio, or from audio and images."""
    listed = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES | MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES
    return [name for name in listed if name in CONFIG_MAPPING and _audio_class(name) is not None]


def _audio_class(model_type: str) -> str | None:
    """Returns the audio-text class of a type: its multimodal class, or else its sequence-to-sequence class."""
    name: str | None = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(model_type)
    model_class = getattr(transformers, name or MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(model_type, ""), None)
    if model_class is None or not _takes_audio(model_class.forward):
        return None
    is_other = name is None and (model_class.main_input_name in SOUNDS or model_class.config_class().is_encoder_decoder)
    return None if is_other else model_class.__name__


def _takes_audio(forward: Callable[..., Any]) -> bool:
    return not {*inspect.signature(forward).parameters}.isdisjoint(SOUNDS)


def get_class_task(class_name: str, config: PreTrainedConfig) -> str:
    """Returns the task whose batches fit a class, such as `"image"` for many `...ForConditionalGeneration` classes."""
    if class_name in BASE_CLASSES and class_name != _get_image_class(config):
        return "hidden_states"
    is_image = _is_image_type(config) or (class_name == _get_image_class(config) and _takes_images(config))
    is_masked = class_name == MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(config.model_type)
    if is_masked and class_name != MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type):
        return "seq2seq" if config.is_encoder_decoder else "masked"
    has_encoder = config.is_encoder_decoder and not class_name.endswith("ForCausalLM")
    is_speech = class_name == MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES.get(config.model_type)
    if is_speech and _audio_class(config.model_type) is None:
        return "speech"
    default = "seq2seq" if has_encoder else "image" if is_image else "causal"
    return next((task for part, task in _CLASS_TASKS.items() if part in class_name), default)


def _get_image_class(config: PreTrainedConfig) -> str | None:
    class_name: str | None = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    return class_name


def _takes_images(config: PreTrainedConfig) -> bool:
    # The default configs of some types have no placeholder, which `full_config` adds.
    return "vision_config" in config.to_dict() or image_token(full_config(config)) is not None


def _is_image_type(config: PreTrainedConfig) -> bool:
    """Returns whether a type reads images and has no separate class for text."""
    image, text = _get_image_class(config), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return image is not None and text in (None, image) and _takes_images(config)


def default_task(config: PreTrainedConfig) -> str:
    """Returns the task of the class that users of a type load: causal, if it has a text-only class."""
    if _is_image_type(config):
        return "image"
    class_name: str | None = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(config.model_type)
    if class_name == MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type) and config.model_type in audio_types():
        # By default, types that also have a text-only head are compared on that head.
        return "causal" if class_name is None or class_name.endswith("ForCausalLM") else "audio"
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        for task, names in _OTHER_CLASSES.items():
            if config.model_type in names:
                return task
    return "causal"


def classifier_class(config: PreTrainedConfig) -> str | None:
    """Returns the class of a type whose only losses are those of classifiers, or `None` for other types."""
    names = _CLASSIFIERS.get(default_task(config))
    return None if names is None else names.get(config.model_type)


def _get_text_class(config: PreTrainedConfig) -> str | None:
    """Returns the causal class of a type if transformers lists it for images only although it takes no images."""
    name = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type)
    if name is None or not name.endswith("ForCausalLM") or config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    arguments = inspect.signature(getattr(transformers, name).forward).parameters
    return None if any(map(is_image_argument, arguments)) else name


def _part_with_causal_class(config: PreTrainedConfig) -> PreTrainedConfig | None:
    """Returns the sub-config that a type's causal class is built from, if Auto classes do not select it themselves."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return None if name is None or "text_config" in config.sub_configs else _get_class_config(config, name)


def _get_class_config(config: PreTrainedConfig, class_name: str) -> PreTrainedConfig | None:
    """Returns the sub-config that a class is built from, or `None` if it takes the full config."""
    kind = getattr(getattr(transformers, class_name, None), "config_class", None)
    if kind is None or isinstance(config, kind):
        return None
    return next((part for part in vars(config).values() if isinstance(part, kind)), None)


def resolve_case(
    config: PreTrainedConfig, task: str, class_name: str | None
) -> tuple[PreTrainedConfig, str, str | None]:
    """Returns the config or sub-config to check, the task, and the class if no Auto class finds it.

    Args:
        config (`PreTrainedConfig`): config of the type.
        task (`str`): a key of `TASKS`; `"causal"` selects the default task of the type.
        class_name (`str`, *optional*): a transformers class, which determines the task.
    """
    if class_name is not None:
        config = _get_class_config(config, class_name) or config
        return config, get_class_task(class_name, config), class_name
    if task == "audio":
        return config, task, _audio_class(config.model_type)
    if task in ("causal", "image") and (of_text := _get_text_class(config)):
        return config, "causal", of_text
    if task != "causal":
        return config, task, None
    task = default_task(config)
    if task == "causal" and (part := _part_with_causal_class(config)) is not None:
        return part, task, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    return config, task, None


def iter_cases(models: list[str], task: str = "causal", *, given_class: bool = False) -> Iterator[tuple[str, str]]:
    """Yields pairs of a model (type, folder or hub name) and the task that it is checked on.

    Args:
        models (`list[str]`): model types, folders or hub names. `"all"` expands to all causal, image, audio, speech,
            masked language model and encoder-decoder types, or only to the types of `task` if that is not the default.
        task (`str`, defaults to `"causal"`): a key of `TASKS`.
        given_class (`bool`): a class is given, which determines the task.
    """
    for model in models:
        if model == "all":
            every = [(name, "causal") for name in causal_types()]
            every += [(name, "image") for name in image_types() if task == "image" or not _has_one_class(name)]
            every += [(name, "video") for name in image_types() if task == "video" and takes_videos(name)]
            every += [(name, "audio") for name in audio_types()]
            every += [(name, "masked") for name in MODEL_FOR_MASKED_LM_MAPPING_NAMES if name in CONFIG_MAPPING]
            with_audio = {*audio_types()}
            every += [
                (name, "seq2seq")
                for name in MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
                if name in CONFIG_MAPPING and name not in with_audio
            ]
            of_speech = MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES
            every += [(name, "speech") for name in of_speech if name in CONFIG_MAPPING and name not in with_audio]
            every += [(name, other) for name, tasks in OTHER_TASKS.items() for other in tasks]
            every = list(dict.fromkeys(every))
            yield from (case for case in every if task in ("causal", case[1]))
        else:
            tasks = OTHER_TASKS.get(model, ()) if task == "causal" and not given_class else ()
            yield from ((model, other) for other in tasks or (task,))


def _has_one_class(model_type: str) -> bool:
    """Returns whether the image-text class of a type is its causal class, which is then checked with images."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return names[0].get(model_type) == names[1][model_type]


Changes = Mapping[str, Any]


def list_variants(model_type: str, class_name: str) -> list[Changes]:
    """Returns the config changes to check in addition to a type's default, starting with the other weight tying."""
    return [*_tying(model_type, class_name), *get_type_facts(model_type).variants]


def _tying(model_type: str, class_name: str) -> list[Changes]:
    default = full_config(CONFIG_MAPPING[model_type]())
    flag = "tie_word_embeddings"
    try:
        changed = type(default).from_dict(default.to_dict() | {flag: not getattr(default, flag, False)})
    except StrictDataclassError:
        return []
    cls = getattr(transformers, class_name)
    if not isinstance(default, cls.config_class):
        return []
    with torch.device("meta"):
        tied = [cls(config).all_tied_weights_keys for config in (default, changed)]
    return [] if tied[0] == tied[1] else [{flag: getattr(changed, flag)}]
