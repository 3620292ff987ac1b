"""Models of images and text: the text part is another family's under a prefix, the rest a few rules of their own.

A new one is a file that says which family its text part is of, and what its towers become.
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
    """The tensors of some model types with a language model in them.

    Args:
        model_types: of `config.model_type`.
        text: the family of the text part.
        encoder_rules: config, names of the model's tensors -> a rule for each tensor outside of the text part.
        encoder_sizes: config -> what tensor-parallel ranks share of the towers, and how many of it there are.
        text_type: the type of `text` that the text part computes as, if its own is another.
        mrope_section: what transformers takes where a config has none; `None` for positions of one dimension.
        own_unchecked, own_unsupported_reason: as `unchecked` and `unsupported_reason` of `Family`; the text part has
            its own.
        own_unstored: config -> what no argument of Megatron-LM says of the towers.
        source: what stands before the names of the text part's tensors in transformers.
        copied_head: as of `Family`; no text part has one.
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
        """Returns the config of a causal language model with the weights of the text part."""
        found = copy.deepcopy(config.text_config)
        if self.text_type is not None:
            found.model_type = self.text_type
        # It is the outer one by which transformers ties the head.
        found.tie_word_embeddings = config.tie_word_embeddings
        return found

    def unsupported_reason(self, config: Any) -> str | None:
        """Returns why a config cannot be expressed at all, `None` if it can."""
        if self.text_type is None and config.text_config.model_type not in self.text.model_types:
            known = ", ".join(self.text.model_types)
            return f"a text part of type {config.text_config.model_type!r} is not known; known are {known}"
        return self.own_unsupported_reason(config) or self.text.unsupported_reason(self.text_config(config))

    def unchecked(self, config: Any) -> str | None:
        """Returns why the format was checked by round trips alone, `None` where megatron-core loads it."""
        return self.own_unchecked(config) or self.text.unchecked(self.text_config(config))

    def unstored(self, config: Any) -> tuple[str, ...]:
        """Returns what Megatron-LM's arguments cannot say of a config."""
        return (*self.text.unstored(self.text_config(config)), *self.own_unstored(config))

    def model(self, config: Any, num_mtp_layers: int = 0) -> MegatronModel:
        """Returns what Megatron's formats need to know of a config; its arguments are those of the text part."""
        text = self.text_config(config)
        made = self.text.model(text, num_mtp_layers)
        arguments = {**made.arguments, **self._positions(text)}
        return replace(made, arguments=arguments, prefix=LANGUAGE, sizes={**made.sizes, **self.encoder_sizes(config)})

    def meaning(self, config: Any) -> Arguments:
        """Returns what the text part means in Megatron's arguments."""
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
        """Returns the name that a causal language model's tensor has as a part of the whole."""
        first, _, rest = name.partition(".")
        return f"{self.source}.{rest}" if first == "model" else name


def carried(names: Iterable[str], source: str, target: str) -> Iterator[Rule]:
    """Yields the rules of a module that Megatron takes from transformers as it is."""
    for name in names:
        if name.startswith(f"{source}."):
            yield Rule((name,), (f"{target}{name.removeprefix(source)}",))


def packed_qkv(width: int, heads: int) -> Chain:
    """Returns the operation that sorts all queries, all keys and all values of a tower by heads."""
    return Chain((Divided((width,) * 3), GroupedQKV(heads, heads, width // heads)))


def encoder_mlp(source: str, target: str, first: str, second: str, norm: str) -> Iterator[Rule]:
    """Yields the rules of a tower's MLP, all of whose parts have biases, and of the norm before it."""
    yield from fused_norm(norm, f"{target}.linear_fc1", bias=True)
    yield from renamed(f"{source}.{first}", f"{target}.linear_fc1", bias=True)
    yield from renamed(f"{source}.{second}", f"{target}.linear_fc2", bias=True)
