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

from .errors import ConfigError

_CAUSAL = AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING
_ENCODER_DECODER = AutoModelForSeq2SeqLM, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
_OTHERS = (
    (AutoModelForMaskedLM, MODEL_FOR_MASKED_LM_MAPPING),
    (AutoModelForImageTextToText, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING),
    (AutoModelForMultimodalLM, MODEL_FOR_MULTIMODAL_LM_MAPPING),
)


def auto_class(config: PreTrainedConfig) -> Any:
    """Returns the auto class whose model of a config is planned: it has a loss on tokens.

    Of several it is that of the one class which the config names; without one an encoder-decoder's, a causal one, the
    others.

    Raises:
        ConfigError: the config's type has none.
    """
    common = (_ENCODER_DECODER, _CAUSAL) if config.is_encoder_decoder else (_CAUSAL, _ENCODER_DECODER)
    found = {auto: kind for auto, mapping in (*common, *_OTHERS) if (kind := mapping.get(type(config), None))}
    if not found:
        raise ConfigError(
            f"MODEL of type {config.model_type!r}: transformers has no class of it with a loss on tokens."
        )
    names = config.architectures or []
    return next((auto for auto, kind in found.items() if names == [kind.__name__]), next(iter(found)))
