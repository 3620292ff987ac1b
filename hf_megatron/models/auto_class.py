"""Choice of the transformers auto class of a config: the one with a loss on tokens."""

from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMaskedLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from ..errors import ConfigError

_CAUSAL = AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING
_ENCODER_DECODER = AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
_OTHERS = (
    (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
)


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns the auto class that builds a model with a loss on tokens from a config.

    If there are several, `config.architectures` decides. If that does not name exactly one of them, the first match is
    returned: encoder-decoder or causal, then masked language model, image-text and multimodal.

    Raises:
        ConfigError: transformers has no such class for the config's type.
    """
    named, usual = config.architectures or [], (_ENCODER_DECODER if config.is_encoder_decoder else _CAUSAL, *_OTHERS)
    for auto, mapping in (_CAUSAL, _ENCODER_DECODER, *_OTHERS):
        kind: Any = mapping.get(type(config), None)
        if kind is not None and named == [kind.__name__]:
            return auto
    # A causal class of an encoder-decoder type is its decoder alone, which is another model.
    auto_cls = next((auto for auto, mapping in usual if mapping.get(type(config), None) is not None), None)
    if auto_cls is None:
        raise ConfigError(
            f"MODEL of type {config.model_type!r}: transformers has no class that takes tokens and computes a loss on "
            "them."
        )
    return auto_cls
