"""Tensor-parallel sharding of Megatron-Core's tensors, by name.

Names are as in `names`; file names here are relative to `megatron/core` of megatron-core 0.16.1.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from ...errors import CheckpointError
from ..interfaces import MegatronModel
from .names import LANGUAGE


@dataclass(frozen=True)
class RankSplit:
    """Tensor-parallel sharding of a tensor: equal shards in rank order.

    Args:
        dim: of the global tensor; expert tensors have the experts as dimension 0.
        halves: with a gated activation, gate and up are split separately (`mlp.py`, `apply_swiglu_sharded_factory`).
        replicated_in_te: replicated in TransformerEngine's layers, split in the local ones
            (`transformer/multi_latent_attention.py`: `parallel_mode` "duplicated" of TELinear).
    """

    dim: int
    halves: bool = False
    replicated_in_te: bool = False

    def without_expert_dim(self) -> "RankSplit":
        """Returns the sharding of a single expert's tensor."""
        return replace(self, dim=self.dim - 1)


# Name suffix after the layer index -> sharding. `tensor_parallel/layers.py`: ColumnParallelLinear splits its rows and
# bias, RowParallelLinear splits its columns and replicates its bias, VocabParallelEmbedding splits its rows.
_IN_LAYER: tuple[tuple[str, RankSplit | None], ...] = (
    # transformer/attention.py: the rows of linear_qkv are grouped, but split evenly, even inside a group.
    (r"self_attention\.linear_qkv\.(weight|bias)", RankSplit(0)),
    (r"self_attention\.linear_(q_proj|q_up_proj|kv_up_proj)\.(weight|bias)", RankSplit(0)),
    (r"self_attention\.linear_(q|kv)_down_proj\.weight", RankSplit(0, replicated_in_te=True)),
    (r"self_attention\.linear_proj\.weight", RankSplit(1)),
    (r"self_attention\.linear_proj\.bias", None),
    # transformer/dot_product_attention.py, `softmax_offset`: one value per head.
    (r"self_attention\.core_attention\.softmax_offset", RankSplit(0)),
    # models/T5/t5_spec.py: queries are separate, keys and values are packed per head.
    (r"cross_attention\.linear_(q|kv)\.(weight|bias)", RankSplit(0)),
    (r"cross_attention\.linear_proj\.weight", RankSplit(1)),
    (r"cross_attention\.linear_proj\.bias", None),
    # transformer/mlp.py; moe/shared_experts.py is an MLP that is split over the same ranks as dense layers.
    (r"mlp\.(shared_experts\.)?linear_fc1\.(weight|bias)", RankSplit(0, halves=True)),
    (r"mlp\.(shared_experts\.)?linear_fc2\.weight", RankSplit(1)),
    (r"mlp\.(shared_experts\.)?linear_fc2\.bias", None),
    # transformer/moe/experts.py: SequentialMLP and TEGroupedMLP store the same keys.
    (r"mlp\.experts\.experts\.linear_fc1\.(weight|bias)", RankSplit(1, halves=True)),
    (r"mlp\.experts\.experts\.linear_fc2\.weight", RankSplit(2)),
    (r"mlp\.experts\.experts\.linear_fc2\.bias", None),
    # transformer/moe/router.py, moe/shared_experts.py, moe/moe_layer.py
    (r"mlp\.router\.(weight|bias|expert_bias)", None),
    (r"mlp\.shared_experts\.gate_weight", None),
    (r"mlp\.fc[12]_latent_proj\.weight", None),
    # ssm/mamba_mixer.py: heads and groups are split, each row block of in_proj and conv1d separately.
    (r"mixer\.(in_proj\.weight|conv1d\.(weight|bias)|A_log|D|dt_bias|norm\.weight)", RankSplit(0)),
    (r"mixer\.in_proj\.layer_norm_(weight|bias)", None),
    (r"mixer\.out_proj\.weight", RankSplit(1)),
    # Norms fused into TransformerEngine's linears, and separate norms.
    (r"(self_attention|mlp)\.linear_\w+\.layer_norm_(weight|bias)", None),
    (r"(\w+\.)*\w*norm\.(weight|bias)", None),
)
_OUTSIDE: tuple[tuple[str, RankSplit | None], ...] = (
    # models/common/embeddings/language_model_embedding.py
    (r"embedding\.word_embeddings\.weight", RankSplit(0)),
    (r"embedding\.(position|tokentype)_embeddings\.weight", None),
    (r"(decoder|encoder)\.(final_layernorm|final_norm)\.(weight|bias)", None),
    # models/gpt/gpt_model.py
    (r"output_layer\.(weight|bias)", RankSplit(0)),
    # models/bert/bert_model.py, bert_lm_head.py, pooler.py
    (r"(pooler\.dense|lm_head\.(dense|layer_norm)|binary_head)\.(weight|bias)", None),
    # models/T5/t5_model.py, which registers its output layer under a second name.
    (r"(encoder|decoder)_relative_pos_emb\.relative_attention_bias\.weight", None),
    (r"lm_head\.output_layer\.weight", RankSplit(0)),
    # transformer/multi_token_prediction.py
    (r"mtp\.layers\.\d+\.(enorm|hnorm|final_layernorm)\.(weight|bias)", None),
    (r"mtp\.layers\.\d+\.eh_proj\.weight", RankSplit(0)),
)
# Modality encoders and projectors, which run before the language model on the first pipeline stage.
_TOWERS: tuple[tuple[str, RankSplit | None], ...] = (
    # models/vision/clip_vit_model.py
    (r"vision_model\.(class_token|(conv1|position_embeddings)\.weight|conv1\.bias|ln_(pre|post)\.(weight|bias))", None),
    # models/vision/multimodal_projector.py, an MLP without a gated activation.
    (r"vision_projection\.encoder\.linear_fc1\.(weight|bias)", RankSplit(0)),
    (r"vision_projection\.encoder\.linear_fc2\.weight", RankSplit(1)),
    (r"vision_projection\.encoder\.linear_fc2\.bias", None),
    # Megatron-Bridge's modelling_qwen3_vl/vision_model.py and utils.py, Qwen3VLVisionPatchMerger.
    (r"vision_model\.(pos_embed\.weight|patch_embed\.proj\.(weight|bias))", None),
    (r"vision_model\.(merger|decoder\.deepstack_merger_list\.\d+)\.patch_norm\.(weight|bias)", None),
    (r"vision_model\.(merger|decoder\.deepstack_merger_list\.\d+)\.linear_fc1\.(weight|bias)", RankSplit(0)),
    (r"vision_model\.(merger|decoder\.deepstack_merger_list\.\d+)\.linear_fc2\.weight", RankSplit(1)),
    (r"vision_model\.(merger|decoder\.deepstack_merger_list\.\d+)\.linear_fc2\.bias", None),
    # transformers' modality encoders, replicated on every rank: Megatron-Bridge's qwen_vl/modeling_qwen25_vl.py and
    # gemma_vl/modeling_gemma3_vl.py.
    (r"(visual|vision_tower)\..+", None),
    (r"multi_modal_projector\.mm_soft_embed_norm\.weight", None),
    (r"multi_modal_projector\.proj\.weight", RankSplit(0)),
)
_LANGUAGE = rf"({re.escape(LANGUAGE)})?"
_RULES = tuple(
    (re.compile(prefix + pattern), split)
    for prefix, rules in (
        (_LANGUAGE, _OUTSIDE),
        ("", _TOWERS),
        # Megatron's own vision encoders have no gated activation.
        (
            r"vision_model\.decoder\.layers\.\d+\.",
            tuple((name, split and replace(split, halves=False)) for name, split in _IN_LAYER),
        ),
        (_LANGUAGE + r"(decoder|encoder)\.layers\.\d+\.", _IN_LAYER),
        (_LANGUAGE + r"mtp\.layers\.\d+\.transformer_layer\.", _IN_LAYER),
    )
    for pattern, split in rules
)


def tensor_parallel_split(name: str) -> RankSplit | None:
    """Returns the tensor-parallel sharding of a tensor by name, `None` if it is replicated.

    Raises:
        CheckpointError: the name matches no supported tensor of Megatron-Core or Megatron-Bridge.
    """
    for pattern, split in _RULES:
        if pattern.fullmatch(name):
            return split
    raise CheckpointError(f"{name} is not a supported Megatron-Core tensor.")


def blocks_of(name: str, split: RankSplit | None, length: int, model: MegatronModel) -> tuple[int, ...]:
    """Returns the lengths, along a tensor's split dim, of the blocks that are split separately."""
    if split is not None and split.halves and model.gated:
        return length // 2, length - length // 2
    return tuple(model.blocks_of(name).values()) or (length,)


def rank_views(
    tensor: Tensor, split: RankSplit, rank: int, size: int, blocks: Sequence[int] = ()
) -> tuple[Tensor, ...]:
    """Returns the views of a global tensor `[rows, ...]` that form a rank's shard, in order along `split.dim`.

    Args:
        blocks: lengths along this dim of the blocks that are split separately; a single block by default.

    Raises:
        CheckpointError: the tensor cannot be divided evenly, or its blocks do not sum to its length.
    """
    length = tensor.shape[split.dim]
    blocks = blocks or (length,)
    if sum(blocks) != length:
        raise CheckpointError(f"length {length} in dimension {split.dim}, expected {' + '.join(map(str, blocks))}.")
    if any(block % size for block in blocks):
        each = f" in separate blocks of {', '.join(map(str, blocks))}" if len(blocks) > 1 else ""
        raise CheckpointError(
            f"length {length} in dimension {split.dim} cannot be split evenly over {size} ranks{each}."
        )
    views, start = [], 0
    for block in blocks:
        views.append(tensor.narrow(split.dim, start + rank * (block // size), block // size))
        start += block
    return tuple(views)
