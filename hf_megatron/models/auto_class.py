"""Which auto class of transformers a config is for: the one with a loss on tokens."""

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
    """Returns the auto class whose model of a config is planned: it has a loss on tokens.

    Of several it is that of the one class which the config names; else an encoder-decoder's or a causal one, then one
    of masked tokens, of images, of all media.

    Raises:
        ConfigError: the config's type has none.
    """
    named, usual = config.architectures or [], (_ENCODER_DECODER if config.is_encoder_decoder else _CAUSAL, *_OTHERS)
    for auto, mapping in (_CAUSAL, _ENCODER_DECODER, *_OTHERS):
        kind: Any = mapping.get(type(config), None)
        if kind is not None and named == [kind.__name__]:
            return auto
    # The decoder of an encoder-decoder alone is another model.
    found = next((auto for auto, mapping in usual if mapping.get(type(config), None) is not None), None)
    if found is None:
        raise ConfigError(
            f"MODEL of type {config.model_type!r}: transformers has no class of it that reads tokens and has a loss on "
            "them."
        )
    return found
