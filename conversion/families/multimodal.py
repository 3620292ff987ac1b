"""Vision-language models: a text backbone from another family under a prefix, and rules for the vision encoder.

To add one, add a module that names the family of its text backbone and the rules of its modality encoders.
"""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..interfaces import MegatronModel
from ..megatron.names import LANGUAGE
from ..megatron.rules import Chain, Divided, GroupedQKV, Rule
from .family import Arguments, Family, fused_norm, renamed

BRIDGE_ONLY = "megatron-core 0.16.1 has no such model; names and shapes are Megatron-Bridge's"


@dataclass(frozen=True)
class MultimodalFamily:
    """The tensors of some model types that contain a language model.

    Args:
        model_types: values of `config.model_type`.
        text: the family of the text backbone.
        encoder_rules: config, names of the model's tensors -> a rule for each tensor outside the text backbone.
        encoder_sizes: config -> dimensions of the modality encoders split over tensor-parallel ranks, by name.
        text_type: the model type of `text` whose computation the text backbone shares, if its own type differs.
        mrope_section: transformers' default if a config has none; `None` for one-dimensional positions.
        own_unchecked, own_unsupported_reason: as `unchecked` and `unsupported_reason` of `Family`, in addition to the
            text backbone's.
        own_unstored: config -> properties of the modality encoders that Megatron-LM's arguments cannot express.
        source: prefix of the text backbone's tensor names in transformers.
        copied_head: as in `Family`; no text backbone has one.
    """

    model_types: tuple[str, ...]
    text: Family
    encoder_rules: Callable[[Any, Collection[str]], Iterable[Rule]]
    encoder_sizes: Callable[[Any], Mapping[str, int]] = lambda config: {}
    text_type: str | None = None
    mrope_section: tuple[int, ...] | None = None
    own_unchecked: Callable[[Any], str | None] = lambda config: None
    own_unsupported_reason: Callable[[Any], str | None] = lambda config: None
    own_unstored: Callable[[Any], Iterable[str]] = lambda config: ()
    source: str = "model.language_model"
    copied_head: str = ""

    def text_config(self, config: Any) -> Any:
        """Returns the config of a causal language model with the text backbone's weights."""
        found = copy.deepcopy(config.text_config)
        if self.text_type is not None:
            found.model_type = self.text_type
        # transformers ties the head according to the outer config.
        found.tie_word_embeddings = config.tie_word_embeddings
        return found

    def unsupported_reason(self, config: Any) -> str | None:
        """Returns why a config cannot be expressed at all, `None` if it can."""
        if self.text_type is None and config.text_config.model_type not in self.text.model_types:
            known = ", ".join(self.text.model_types)
            return f"text model type {config.text_config.model_type!r} is not supported; supported are {known}"
        return self.own_unsupported_reason(config) or self.text.unsupported_reason(self.text_config(config))

    def unchecked(self, config: Any) -> str | None:
        """Returns why the format was checked by round trips alone, `None` if megatron-core loads the model."""
        return self.own_unchecked(config) or self.text.unchecked(self.text_config(config))

    def unstored(self, config: Any) -> tuple[str, ...]:
        """Returns what Megatron-LM's arguments cannot express of a config."""
        return (*self.text.unstored(self.text_config(config)), *self.own_unstored(config))

    def model(self, config: Any, num_mtp_layers: int = 0) -> MegatronModel:
        """Returns the properties that Megatron's formats need of a config; its arguments are the text backbone's."""
        text = self.text_config(config)
        made = self.text.model(text, num_mtp_layers)
        arguments = {**made.arguments, **self._positions(text)}
        return replace(made, arguments=arguments, prefix=LANGUAGE, sizes={**made.sizes, **self.encoder_sizes(config)})

    def meaning(self, config: Any) -> Arguments:
        """Returns the text backbone's meaning in Megatron's arguments."""
        text = self.text_config(config)
        return {**self.text.meaning(text), **self._positions(text)}

    def _positions(self, text: Any) -> Arguments:
        if self.mrope_section is None:
            return {}
        section = text.rope_parameters.get("mrope_section") or self.mrope_section
        return {"position_embedding_type": "mrope", "mrope_section": list(section)}

    def rules(self, config: Any, padded: int, num_mtp_layers: int = 0, names: Collection[str] = ()) -> Iterator[Rule]:
        """Yields a rule for every tensor, as `Family.rules`."""
        yield from self.encoder_rules(config, names)
        for rule in self.text.rules(self.text_config(config), padded, num_mtp_layers):
            sources = tuple(self._in_model(name) for name in rule.transformers)
            yield replace(rule, transformers=sources, megatron=tuple(f"{LANGUAGE}{name}" for name in rule.megatron))

    def _in_model(self, name: str) -> str:
        """Returns a causal language model's tensor name as it is inside the composite model."""
        first, _, rest = name.partition(".")
        return f"{self.source}.{rest}" if first == "model" else name


def carried(names: Iterable[str], source: str, target: str) -> Iterator[Rule]:
    """Yields the rules of a module that Megatron takes from transformers unchanged."""
    for name in names:
        if name.startswith(f"{source}."):
            yield Rule((name,), (f"{target}{name.removeprefix(source)}",))


def packed_qkv(width: int, heads: int) -> Chain:
    """Returns the operation that groups an encoder's packed query, key and value rows by head."""
    return Chain((Divided((width,) * 3), GroupedQKV(heads, heads, width // heads)))


def encoder_mlp(source: str, target: str, first: str, second: str, norm: str) -> Iterator[Rule]:
    """Yields the rules of an encoder's MLP, whose linears all have biases, and of the norm before it."""
    yield from fused_norm(norm, f"{target}.linear_fc1", bias=True)
    yield from renamed(f"{source}.{first}", f"{target}.linear_fc1", bias=True)
    yield from renamed(f"{source}.{second}", f"{target}.linear_fc2", bias=True)
