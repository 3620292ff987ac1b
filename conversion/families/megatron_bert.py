"""Megatron's BERT: pre-norm layers, learned positions, token types, a tied head with a bias, pooler."""

from collections.abc import Iterator
from typing import Any

from ..megatron.rules import PaddedVocabulary, Rule
from .family import Arguments, Family, common_arguments, fused_norm, qkv, renamed

_HEAD = "cls.predictions"


def _layer(config: Any, number: int, source: str, target: str) -> Iterator[Rule]:
    attention, mlp = f"{target}.self_attention", f"{target}.mlp"
    yield from fused_norm(f"{source}.attention.ln", f"{attention}.linear_qkv", bias=True)
    for suffix in ("weight", "bias"):
        names = tuple(f"{source}.attention.self.{part}.{suffix}" for part in ("query", "key", "value"))
        yield Rule(names, (f"{attention}.linear_qkv.{suffix}",), qkv(config))
    yield from renamed(f"{source}.attention.output.dense", f"{attention}.linear_proj", bias=True)
    yield from fused_norm(f"{source}.ln", f"{mlp}.linear_fc1", bias=True)
    yield from renamed(f"{source}.intermediate.dense", f"{mlp}.linear_fc1", bias=True)
    yield from renamed(f"{source}.output.dense", f"{mlp}.linear_fc2", bias=True)


def _heads(config: Any, padded: int) -> Iterator[Rule]:
    """Yields the rules of tensors outside the layers; a class without a pooler has no binary head either."""
    yield from renamed("bert.embeddings.token_type_embeddings", "embedding.tokentype_embeddings")
    yield from renamed("bert.pooler.dense", "pooler.dense", bias=True)
    yield from renamed(f"{_HEAD}.transform.dense", "lm_head.dense", bias=True)
    yield from renamed(f"{_HEAD}.transform.LayerNorm", "lm_head.layer_norm", bias=True)
    yield Rule((f"{_HEAD}.bias",), ("output_layer.bias",), PaddedVocabulary(config.vocab_size, padded))
    yield from renamed("cls.seq_relationship", "binary_head", bias=True)


def _arguments(config: Any) -> Arguments:
    return common_arguments(
        config,
        ffn_hidden_size=config.intermediate_size,
        normalization="LayerNorm",
        norm_epsilon=config.layer_norm_eps,
        position_embedding_type="learned_absolute",
        swiglu=False,
    )


def _unsupported_reason(config: Any) -> str | None:
    if config.add_cross_attention:
        return "add_cross_attention has no counterpart in Megatron's BertModel"
    if config.is_decoder:
        return "is_decoder: Megatron's BertModel has bidirectional attention"
    return None if config.tie_word_embeddings else "tie_word_embeddings=False: Megatron's BertModel ties them"


FAMILY = Family(
    model_types=("megatron-bert",),
    layer=_layer,
    arguments=_arguments,
    gated=False,
    unsupported_reason=_unsupported_reason,
    embedding="bert.embeddings.word_embeddings",
    positions="bert.embeddings.position_embeddings",
    layers="bert.encoder.layer",
    norm="bert.encoder.ln",
    norm_bias=True,
    block="encoder",
    heads=_heads,
)
