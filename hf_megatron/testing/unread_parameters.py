"""Trainable parameters that get no gradient in a check, from `TypeFacts` and from the config, with reasons."""

from collections.abc import Collection, Mapping

from transformers import PreTrainedConfig

from ..models.type_facts import get_type_facts

# Cross-attention of a decoder whose class has no encoder.
_CROSS_ATTENTION = {r"\.(encoder_attn|crossattention|cross_attn)\w*\.": "reads an encoder: compared without one"}


def without_gradient(config: PreTrainedConfig, modalities: Collection[str] = ()) -> Mapping[str, str]:
    """Maps regular expressions of trainable parameters that get no gradient to the reasons.

    Args:
        config (`PreTrainedConfig`): config of the model; its sub-configs' types are included.
        modalities (`Collection[str]`): modalities of the batches besides text: `"images"`, `"videos"`, `"audio"`.
    """
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    known = {
        name: why for part in (config, *parts) for name, why in get_type_facts(part.model_type).no_gradient.items()
    }
    of_media = get_type_facts(config.model_type).no_gradient_without
    unread = {name: why for medium, of in of_media.items() if medium not in modalities for name, why in of.items()}
    has_encoder = getattr(config, "is_decoder", False) or type(config)().is_encoder_decoder
    alone = _CROSS_ATTENTION if has_encoder and not config.is_encoder_decoder else {}
    return {
        **known,
        **unread,
        **alone,
        **_unread_layers(config),
        **({} if "images" in modalities else _left_out(config)),
    }


def _left_out(config: PreTrainedConfig) -> dict[str, str]:
    """Returns an expression for the layers that cross-attend to images."""
    layers = "|".join(map(str, getattr(config, "cross_attention_layers", None) or ()))
    return {rf"\blayers\.({layers})\.": "left out where there are no images"} if layers else {}


def _unread_layers(config: PreTrainedConfig) -> dict[str, str]:
    """Returns an expression for the layers of an image encoder after the last one whose output is read."""
    read = getattr(config, "vision_feature_layer", None)
    layers = getattr(getattr(config, "vision_config", None), "num_hidden_layers", None)
    if read is None or layers is None:
        return {}
    first = max(layer % (layers + 1) for layer in ([read] if isinstance(read, int) else read))
    trailing = "|".join(map(str, range(first, layers)))
    return {rf"_tower\..*\blayers\.({trailing})\.": "behind the layer whose output is read"} if trailing else {}
