"""Description of a model family, and the rules of blocks that most families share."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..interfaces import MegatronModel
from ..megatron.rules import Chain, Copied, GroupedQKV, Joined, Operation, PaddedVocabulary, Rule, Same
from .positions import rotary_arguments, unstored_positions, window_arguments

Arguments = dict[str, Any]

# Names of the tanh approximation of GELU.
_TANH_GELU = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast", "gelu_accurate", "gelu_python_tanh")
BIASES_TOGETHER = "Megatron-Core's add_bias_linear enables the biases of attention and MLP together"
NORMS_BEHIND = "Megatron-Core 0.16.1 has no norms after attention and MLP; the names are Megatron-Bridge's"


@dataclass(frozen=True)
class Family:
    """The tensors of some model types in Megatron.

    Args:
        model_types: values of `config.model_type`.
        layer: config, layer index, and names of a layer in the model and in Megatron -> a rule for each of its tensors.
        arguments: config -> Megatron-LM's arguments that describe the content of the checkpoint.
        gated: whether `linear_fc1` holds gate and up.
        unchecked: config -> why megatron-core 0.16.1 cannot build the model, so that its format was checked by round
            trips alone; `None` if megatron-core loads it with equal logits.
        unsupported_reason: config -> why a config cannot be expressed at all, `None` if it can.
        embedding, positions, layers, norm: the model's names of modules outside the layers, and of the layers without
            their index; `positions` only if positions are learned.
        norm_bias: whether the final norm has a bias.
        block: Megatron's name of the module that holds the layers.
        heads: config, padded vocabulary size -> rules of tensors outside the layers that are specific to the family.
        copied_head: the head's name in the model, if Megatron has a separate head weight even when it equals the
            embedding to which every config of the model ties it.
        outputs: Megatron's names of the head.
        final_norm: Megatron's name of the final norm.
        sizes: config -> dimensions split over tensor-parallel ranks besides heads and MLP widths, by name.
        blocks: config -> row blocks of a tensor that ranks split separately (`MegatronModel.blocks`).
        stacked: whether `torch_dist` stores one tensor for all layers if they are identical.
        extra_blocks: config -> additional modules with layers, and their numbers of layers; `heads` has their rules.
        own_unstored: config -> other differences from transformers that Megatron's arguments cannot express.
    """

    model_types: tuple[str, ...]
    layer: Callable[[Any, int, str, str], Iterable[Rule]]
    arguments: Callable[[Any], Arguments]
    gated: bool = True
    unchecked: Callable[[Any], str | None] = lambda config: None
    unsupported_reason: Callable[[Any], str | None] = lambda config: None
    embedding: str = "model.embed_tokens"
    positions: str = ""
    layers: str = "model.layers"
    norm: str = "model.norm"
    norm_bias: bool = False
    block: str = "decoder"
    heads: Callable[[Any, int], Iterable[Rule]] = lambda config, padded: ()
    copied_head: str = ""
    outputs: tuple[str, ...] = ("output_layer",)
    final_norm: str = "final_layernorm"
    sizes: Callable[[Any], Mapping[str, int]] = lambda config: {}
    blocks: Callable[[Any], Mapping[str, Mapping[str, int]]] = lambda config: {}
    stacked: bool = True
    extra_blocks: Callable[[Any], Mapping[str, int]] = lambda config: {}
    own_unstored: Callable[[Any], Iterable[str]] = lambda config: ()

    def model(self, config: Any, num_mtp_layers: int = 0) -> MegatronModel:
        """Returns the properties that Megatron's formats need of a config with multi-token prediction layers."""
        further = {"mtp_num_layers": num_mtp_layers} if num_mtp_layers else {}
        arguments, facts = {**self.arguments(config), **further}, (self.sizes(config), self.blocks(config))
        return MegatronModel(arguments, self.gated, self.block, "", *facts, self.stacked, self.extra_blocks(config))

    def meaning(self, config: Any) -> Arguments:
        """Returns a config's meaning in Megatron's arguments: the stored ones, and equivalent switches."""
        return {"openai_gelu": activation(config) in _TANH_GELU, **self.arguments(config)}

    def unstored(self, config: Any) -> tuple[str, ...]:
        """Returns what Megatron-LM's arguments cannot express of a config's positions, MLP activation and the like."""
        candidates = unstored_positions(config), self._unstored_activation(config), *self.own_unstored(config)
        return tuple(what for what in candidates if what)

    def _unstored_activation(self, config: Any) -> str | None:
        name, arguments = activation(config), self.arguments(config)
        if "ffn_hidden_size" not in arguments or arguments.get("squared_relu"):
            return None
        if self.gated and not (arguments.get("swiglu") or arguments.get("quick_geglu")):
            return f"a gated {name}; set gated_linear_unit and activation_func of TransformerConfig"
        if not self.gated and name not in ("gelu", "gelu_python", *_TANH_GELU):
            return f"the activation {name}; set activation_func of TransformerConfig"
        return None

    def rules(self, config: Any, padded: int, num_mtp_layers: int = 0, names: Collection[str] = ()) -> Iterator[Rule]:
        """Yields a rule for every tensor.

        Args:
            padded: vocabulary size in Megatron, including padding.
            num_mtp_layers: number of multi-token prediction layers.
            names: the model's tensor names, for modules that are copied unchanged.
        """
        vocabulary = PaddedVocabulary(config.vocab_size, padded)
        own_head = not config.tie_word_embeddings or (self.copied_head and self.copied_head in names)
        copies = () if own_head or not self.copied_head else self.outputs
        yield _copied(self.embedding, ("embedding.word_embeddings", *copies), vocabulary)
        if own_head:
            yield _copied("lm_head", self.outputs, vocabulary)
        if self.positions:
            yield from renamed(self.positions, "embedding.position_embeddings")
        for number in range(config.num_hidden_layers):
            yield from self.layer(config, number, f"{self.layers}.{number}", f"{self.block}.layers.{number}")
        yield from renamed(self.norm, f"{self.block}.{self.final_norm}", bias=self.norm_bias)
        for index in range(num_mtp_layers):
            number, target = config.num_hidden_layers + index, f"mtp.layers.{index}"
            yield from self.layer(config, number, f"{self.layers}.{number}", f"{target}.transformer_layer")
            for name in ("enorm", "hnorm", "eh_proj"):
                yield from renamed(f"{self.layers}.{number}.{name}", f"{target}.{name}")
            yield from renamed(f"{self.layers}.{number}.shared_head.norm", f"{target}.final_layernorm")
        yield from self.heads(config, padded)


def head_dim(config: Any) -> int:
    """Returns the dimension of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_heads(config: Any) -> int:
    """Returns the number of key and value heads."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def activation(config: Any) -> str | None:
    """Returns the name of the MLP's activation."""
    names = ("hidden_act", "hidden_activation", "activation_function", "dense_act_fn")
    return next((value for name in names if (value := getattr(config, name, None))), None)


def qkv(config: Any) -> GroupedQKV:
    """Returns the operation that packs queries, keys and values."""
    return GroupedQKV(config.num_attention_heads, kv_heads(config), head_dim(config))


def renamed(source: str, target: str, *, bias: bool = False, operation: Operation | None = None) -> Iterator[Rule]:
    """Yields the rules of a module's weight, and of its bias with `bias`."""
    for suffix in ("weight", "bias") if bias else ("weight",):
        yield Rule((f"{source}.{suffix}",), (f"{target}.{suffix}",), operation or Same())


def _copied(source: str, targets: tuple[str, ...], operation: Operation) -> Rule:
    """Returns the rule of a module's weight that Megatron stores under each of several names."""
    if len(targets) > 1:
        operation = Chain((operation, Copied(len(targets))))
    return Rule((f"{source}.weight",), tuple(f"{target}.weight" for target in targets), operation)


def fused_norm(source: str, target: str, *, bias: bool = False) -> Iterator[Rule]:
    """Yields the rules of a norm that Megatron fuses into the linear after it (`layer_norm_weight`)."""
    for suffix in ("weight", "bias") if bias else ("weight",):
        yield Rule((f"{source}.{suffix}",), (f"{target}.layer_norm_{suffix}",))


def attention(
    config: Any,
    source: str,
    target: str,
    *,
    norm: bool = True,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norms: bool = False,
) -> Iterator[Rule]:
    """Yields the rules of a layer's attention with separate q, k and v projections, and of the norm before it."""
    source_norm, source, target = f"{source}.input_layernorm", f"{source}.self_attn", f"{target}.self_attention"
    if norm:
        yield from fused_norm(source_norm, f"{target}.linear_qkv")
    for suffix in ("weight", "bias") if qkv_bias else ("weight",):
        names = tuple(f"{source}.{part}_proj.{suffix}" for part in "qkv")
        yield Rule(names, (f"{target}.linear_qkv.{suffix}",), qkv(config))
    yield from renamed(f"{source}.o_proj", f"{target}.linear_proj", bias=output_bias)
    for part in "qk" if qk_norms else "":
        yield from renamed(f"{source}.{part}_norm", f"{target}.{part}_layernorm")


def gated_mlp(
    width: int,
    source: str,
    target: str,
    *,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Rule]:
    """Yields the rules of gate, up and down projections."""
    *firsts, second = names
    for suffix in ("weight", "bias") if bias else ("weight",):
        sources = tuple(f"{source}.{name}.{suffix}" for name in firsts)
        yield Rule(sources, (f"{target}.linear_fc1.{suffix}",), Joined((width, width)))
    yield from renamed(f"{source}.{second}", f"{target}.linear_fc2", bias=bias)


def dense_mlp(
    config: Any, source: str, target: str, *, bias: bool = False, norm: str = "post_attention_layernorm"
) -> Iterator[Rule]:
    """Yields the rules of a layer's MLP and of the norm before it."""
    yield from fused_norm(f"{source}.{norm}", f"{target}.mlp.linear_fc1")
    yield from gated_mlp(config.intermediate_size, f"{source}.mlp", f"{target}.mlp", bias=bias)


def sparse_mlp(source: str, target: str, *, correction: bool = False) -> Iterator[Rule]:
    """Yields the rules of a layer's router, of the norm before it, and of its packed experts.

    Args:
        correction: whether the router has a load-balancing bias.
    """
    yield from renamed(f"{source}.post_attention_layernorm", f"{target}.pre_mlp_layernorm")
    yield from renamed(f"{source}.mlp.gate", f"{target}.mlp.router")
    if correction:
        yield Rule((f"{source}.mlp.gate.e_score_correction_bias",), (f"{target}.mlp.router.expert_bias",))
    yield Rule((f"{source}.mlp.experts.gate_up_proj",), (f"{target}.mlp.experts.experts.linear_fc1.weight",))
    yield Rule((f"{source}.mlp.experts.down_proj",), (f"{target}.mlp.experts.experts.linear_fc2.weight",))


def common_arguments(config: Any, **further: Any) -> Arguments:
    """Returns the arguments that every family has, overridden and extended by the given ones."""
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "group_query_attention": kv_heads(config) != config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "num_query_groups": kv_heads(config),
        "kv_channels": head_dim(config),
        "max_position_embeddings": config.max_position_embeddings,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
        "normalization": "RMSNorm",
        "swiglu": activation(config) in ("silu", "swish"),
        **window_arguments(config),
        **further,
    }


def rotary_decoder_arguments(config: Any, **further: Any) -> Arguments:
    """Returns the arguments of a decoder with rotary positions, RMSNorm and no biases, extended by the given ones."""
    return {
        **common_arguments(config, **rotary_arguments(config)),
        "ffn_hidden_size": config.intermediate_size,
        "norm_epsilon": config.rms_norm_eps,
        "add_bias_linear": False,
        **further,
    }
