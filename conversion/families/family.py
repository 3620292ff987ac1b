"""What a family states, and the blocks that most of them are made of."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..megatron.rules import Chain, GroupedQKV, Joined, Operation, PaddedVocabulary, Rule, Same
from ..tensors import MegatronModel

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """The tensors of some model types in Megatron.

    Args:
        model_types: of `config.model_type`.
        rules: config, padded vocabulary -> a rule for every tensor.
        arguments: config -> Megatron-LM's arguments, as far as they say what the checkpoint holds.
        gated: whether `linear_fc1` holds gate and up.
        unchecked: config -> why megatron-core 0.16.1 cannot build it, so that its format was checked by round trips
            alone; `None` where megatron-core loads it and gives equal logits.
        refuse: config -> why a config cannot be expressed at all, `None` if it can.
    """

    model_types: tuple[str, ...]
    rules: Callable[[Any, int], Iterable[Rule]]
    arguments: Callable[[Any], Arguments]
    gated: bool = True
    unchecked: Callable[[Any], str | None] = lambda config: None
    refuse: Callable[[Any], str | None] = lambda config: None

    def model(self, config: Any) -> MegatronModel:
        return MegatronModel(self.arguments(config), self.gated)


def head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def qkv(config: Any) -> GroupedQKV:
    return GroupedQKV(config.num_attention_heads, kv_heads(config), head_dim(config))


def renamed(source: str, target: str, *, bias: bool = False, operation: Operation | None = None) -> Iterator[Rule]:
    """A module's weight, and its bias where it has one."""
    for suffix in ("weight", "bias") if bias else ("weight",):
        yield Rule((f"{source}.{suffix}",), (f"{target}.{suffix}",), operation or Same())


def fused_norm(source: str, target: str, *, bias: bool = False) -> Iterator[Rule]:
    """A norm that Megatron keeps inside the linear behind it (`layer_norm_weight`)."""
    for suffix in ("weight", "bias") if bias else ("weight",):
        yield Rule((f"{source}.{suffix}",), (f"{target}.layer_norm_{suffix}",))


def vocabulary(config: Any, padded: int, embedding: str, head: str = "lm_head") -> Iterator[Rule]:
    """Input embedding and, unless it is tied, the head."""
    operation = PaddedVocabulary(config.vocab_size, padded)
    yield Rule((f"{embedding}.weight",), ("embedding.word_embeddings.weight",), operation)
    if not config.tie_word_embeddings:
        yield Rule((f"{head}.weight",), ("output_layer.weight",), operation)


def attention(
    config: Any, source: str, target: str, *, qkv_bias: bool = False, output_bias: bool = False, output: str = "o_proj"
) -> Iterator[Rule]:
    """Separate q, k and v projections and the output projection."""
    for suffix in ("weight", "bias") if qkv_bias else ("weight",):
        names = tuple(f"{source}.{part}_proj.{suffix}" for part in "qkv")
        yield Rule(names, (f"{target}.linear_qkv.{suffix}",), qkv(config))
    yield from renamed(f"{source}.{output}", f"{target}.linear_proj", bias=output_bias)


def qk_norms(source: str, target: str) -> Iterator[Rule]:
    """Norms of queries and keys."""
    for part in "qk":
        yield from renamed(f"{source}.{part}_norm", f"{target}.{part}_layernorm")


def gated_mlp(width: int, source: str, target: str) -> Iterator[Rule]:
    """gate, up and down projections without biases."""
    names = (f"{source}.gate_proj.weight", f"{source}.up_proj.weight")
    yield Rule(names, (f"{target}.linear_fc1.weight",), Joined((width, width)))
    yield from renamed(f"{source}.down_proj", f"{target}.linear_fc2")


def experts(source: str, target: str) -> Iterator[Rule]:
    """Packed experts: gate_up_proj [experts, 2 * width, hidden] and down_proj [experts, hidden, width]."""
    inside = f"{target}.experts.experts"
    yield Rule((f"{source}.gate_up_proj",), (f"{inside}.linear_fc1.weight",))
    yield Rule((f"{source}.down_proj",), (f"{inside}.linear_fc2.weight",))


def chain(*operations: Operation) -> Chain:
    return Chain(operations)


def layers(config: Any) -> range:
    return range(config.num_hidden_layers)


def rotary_arguments(config: Any) -> Arguments:
    """Rotary positions, as far as one number says it; scaled ones have further settings of their own."""
    rope = config.rope_parameters
    # Gemma 3 has one set per kind of layer.
    rope = rope.get("full_attention", rope)
    return {
        "position_embedding_type": "rope",
        "rotary_base": rope["rope_theta"],
        "rotary_percent": rope.get("partial_rotary_factor", 1.0),
    }


def common_arguments(config: Any, **further: Any) -> Arguments:
    """The arguments of a decoder that every family states, and those that this one adds or replaces."""
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": kv_heads(config) != config.num_attention_heads,
        "num_query_groups": kv_heads(config),
        "kv_channels": head_dim(config),
        "max_position_embeddings": config.max_position_embeddings,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "normalization": "RMSNorm",
        "swiglu": True,
        **further,
    }
