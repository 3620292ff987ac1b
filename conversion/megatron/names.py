"""What Megatron-Core's names of tensors mean: how tensor-parallel ranks share one, and what other names it has.

Names are those of torch_dist with TransformerEngine's layers, with the global number of the layer in them. File names
here are relative to `megatron/core` of megatron-core 0.16.1.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor

from ...errors import CheckpointError


@dataclass(frozen=True)
class RankSplit:
    """How tensor-parallel ranks share a tensor: equal parts in the order of the ranks.

    Args:
        dim: of the global tensor; tensors of experts have the experts as dimension 0.
        halves: with a gated activation, gate and up are split by themselves (`mlp.py`, `apply_swiglu_sharded_factory`).
        whole_in_te: TransformerEngine's layers hold it whole on every rank, the local ones split it
            (`transformer/multi_latent_attention.py`: `parallel_mode` "duplicated" of TELinear).
    """

    dim: int
    halves: bool = False
    whole_in_te: bool = False

    def of_expert(self) -> "RankSplit":
        """Returns the same for the tensor of a single expert."""
        return replace(self, dim=self.dim - 1)


# What models of images and text put before GPTModel's names (models/multimodal/llava_model.py, and Megatron-Bridge's).
LANGUAGE = "language_model."
# BertModel calls its layers `encoder` (models/bert/bert_model.py).
LAYER = re.compile(r"((?:language_model\.)?(?:decoder|encoder|mtp)\.layers\.)(\d{1,9})\.")
# Modules that torch_dist stores as one tensor with an axis for their numbers: layers, and those that Megatron-Bridge's
# Qwen3VLVisionTransformerBlock stores likewise.
STACK = re.compile(
    r"((?:(?:language_model|vision_model)\.)?(?:decoder|encoder)\.layers"
    r"|vision_model\.decoder\.deepstack_merger_list)\.(\d{1,9})\.(.+)"
)
_TOWER = re.compile(r"(?:vision_model|vision_projection|visual|vision_tower|multi_modal_projector)\.")
# Parts of towers that are modules of torch or transformers, and have no states beside their weights.
_STATELESS = re.compile(
    r"(?:visual|vision_tower)\.|vision_model\.(?:class_token|conv1|position_embeddings|ln_post|patch_embed|pos_embed)\b"
)
EXPERTS = ".mlp.experts.experts."
FLAT_TOWER, DEEP_TOWER = "vision_tower.", "vision_tower.vision_model."

# The part of a name after its layer, and how it is split. `tensor_parallel/layers.py`: ColumnParallelLinear splits
# rows and its bias, RowParallelLinear splits columns and keeps its bias whole, VocabParallelEmbedding splits rows.
_IN_LAYER: tuple[tuple[str, RankSplit | None], ...] = (
    # transformer/attention.py: the rows of linear_qkv lie in groups, and are cut evenly even inside a group.
    (r"self_attention\.linear_qkv\.(weight|bias)", RankSplit(0)),
    (r"self_attention\.linear_(q_proj|q_up_proj|kv_up_proj)\.(weight|bias)", RankSplit(0)),
    (r"self_attention\.linear_(q|kv)_down_proj\.weight", RankSplit(0, whole_in_te=True)),
    (r"self_attention\.linear_proj\.weight", RankSplit(1)),
    (r"self_attention\.linear_proj\.bias", None),
    # transformer/dot_product_attention.py, `softmax_offset`: one value per head.
    (r"self_attention\.core_attention\.softmax_offset", RankSplit(0)),
    # transformer/mlp.py; moe/shared_experts.py is an MLP over the ranks of dense layers.
    (r"mlp\.(shared_experts\.)?linear_fc1\.(weight|bias)", RankSplit(0, halves=True)),
    (r"mlp\.(shared_experts\.)?linear_fc2\.weight", RankSplit(1)),
    (r"mlp\.(shared_experts\.)?linear_fc2\.bias", None),
    # transformer/moe/experts.py: SequentialMLP and TEGroupedMLP store the same keys.
    (r"mlp\.experts\.experts\.linear_fc1\.(weight|bias)", RankSplit(1, halves=True)),
    (r"mlp\.experts\.experts\.linear_fc2\.weight", RankSplit(2)),
    (r"mlp\.experts\.experts\.linear_fc2\.bias", None),
    # transformer/moe/router.py, moe/shared_experts.py
    (r"mlp\.router\.(weight|bias|expert_bias)", None),
    (r"mlp\.shared_experts\.gate_weight", None),
    # TransformerEngine's linears with a norm before them, and norms of their own.
    (r"(self_attention|mlp)\.linear_\w+\.layer_norm_(weight|bias)", None),
    (r"(\w+\.)*\w*norm\.(weight|bias)", None),
)
_OUTSIDE: tuple[tuple[str, RankSplit | None], ...] = (
    # models/common/embeddings/language_model_embedding.py
    (r"embedding\.word_embeddings\.weight", RankSplit(0)),
    (r"embedding\.(position|tokentype)_embeddings\.weight", None),
    (r"(decoder|encoder)\.final_layernorm\.(weight|bias)", None),
    # models/gpt/gpt_model.py
    (r"output_layer\.(weight|bias)", RankSplit(0)),
    # models/bert/bert_model.py, bert_lm_head.py, pooler.py
    (r"(pooler\.dense|lm_head\.(dense|layer_norm)|binary_head)\.(weight|bias)", None),
    # transformer/multi_token_prediction.py
    (r"mtp\.layers\.\d+\.(enorm|hnorm|final_layernorm)\.(weight|bias)", None),
    (r"mtp\.layers\.\d+\.eh_proj\.weight", RankSplit(0)),
)
# What stands before the language model, on the first stage of a pipeline.
_TOWERS: tuple[tuple[str, RankSplit | None], ...] = (
    # models/vision/clip_vit_model.py
    (r"vision_model\.(class_token|(conv1|position_embeddings)\.weight|conv1\.bias|ln_(pre|post)\.(weight|bias))", None),
    # models/vision/multimodal_projector.py, an MLP whose activation has no gate.
    (r"vision_projection\.encoder\.linear_fc1\.(weight|bias)", RankSplit(0)),
    (r"vision_projection\.encoder\.linear_fc2\.weight", RankSplit(1)),
    (r"vision_projection\.encoder\.linear_fc2\.bias", None),
    # Megatron-Bridge's modelling_qwen3_vl/vision_model.py and utils.py, Qwen3VLVisionPatchMerger.
    (r"vision_model\.(pos_embed\.weight|patch_embed\.proj\.(weight|bias))", None),
    (r"vision_model\.(merger|decoder\.deepstack_merger_list\.\d+)\.patch_norm\.(weight|bias)", None),
    (r"vision_model\.(merger|decoder\.deepstack_merger_list\.\d+)\.linear_fc1\.(weight|bias)", RankSplit(0)),
    (r"vision_model\.(merger|decoder\.deepstack_merger_list\.\d+)\.linear_fc2\.weight", RankSplit(1)),
    (r"vision_model\.(merger|decoder\.deepstack_merger_list\.\d+)\.linear_fc2\.bias", None),
    # Towers of transformers, which every rank has whole: Megatron-Bridge's qwen_vl/modeling_qwen25_vl.py and
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
        # No tower of Megatron's own has a gated activation.
        (
            r"vision_model\.decoder\.layers\.\d+\.",
            tuple((name, split and replace(split, halves=False)) for name, split in _IN_LAYER),
        ),
        (_LANGUAGE + r"(decoder|encoder)\.layers\.\d+\.", _IN_LAYER),
        (_LANGUAGE + r"mtp\.layers\.\d+\.transformer_layer\.", _IN_LAYER),
    )
    for pattern, split in rules
)

# A norm inside TransformerEngine's linear, and the norm of its own that the local layers have in its place
# (models/gpt/gpt_layer_specs.py, `sharded_state_dict_keys_map`). With latent attention `input_layernorm` is a norm of
# its own in both, and its two inner norms move into the up projections.
_FUSED = tuple(
    (linear, norm, re.compile(rf"(.*\.){re.escape(norm)}\.(weight|bias)"))
    for linear, norm in (
        ("self_attention.linear_qkv", "input_layernorm"),
        ("mlp.linear_fc1", "pre_mlp_layernorm"),
        ("self_attention.linear_q_up_proj", "self_attention.q_layernorm"),
        ("self_attention.linear_kv_up_proj", "self_attention.kv_layernorm"),
    )
)
_INSIDE = re.compile(r"(.*\.)(self_attention\.linear_\w+|mlp\.linear_fc1)\.layer_norm_(weight|bias)")


def of_mtp(name: str) -> bool:
    """Checks whether a tensor, or the layers that `LAYER` finds, predict further tokens (MTP)."""
    return name.removeprefix(LANGUAGE).startswith("mtp.")


def of_tower(name: str) -> bool:
    """Checks whether a tensor belongs to what stands before a language model: towers and projectors."""
    return _TOWER.match(name) is not None


def has_state(name: str) -> bool:
    """Checks whether the module of a tensor may have a state beside its weights."""
    return _STATELESS.match(name) is None


def tensor_parallel_split(name: str) -> RankSplit | None:
    """Returns how tensor-parallel ranks share the tensor of a name, `None` where each of them has all of it.

    Raises:
        CheckpointError: no module of Megatron-Core or Megatron-Bridge that is known has a tensor of this name.
    """
    for pattern, split in _RULES:
        if pattern.fullmatch(name):
            return split
    raise CheckpointError(f"{name} is not a tensor of a model of Megatron-Core that can be converted.")


def spellings(name: str) -> tuple[str, ...]:
    """Returns the other names that a tensor has: of the norm before a linear, inside of it or on its own.

    A tower of transformers lies one module deeper in version 4 than in version 5.
    """
    if name.startswith(DEEP_TOWER):
        return (FLAT_TOWER + name.removeprefix(DEEP_TOWER),)
    return tuple(other for _, other in _spellings(name))


def _spellings(name: str) -> Iterator[tuple[str, str]]:
    """Yields the weight of the linear that the norm stands before, and the norm's other name."""
    if inside := _INSIDE.fullmatch(name):
        for linear, norm, _ in _FUSED:
            if linear == inside[2]:
                yield f"{inside[1]}{linear}.weight", f"{inside[1]}{norm}.{inside[3]}"
        return
    for linear, _, alone in _FUSED:
        if outside := alone.fullmatch(name):
            yield f"{outside[1]}{linear}.weight", f"{outside[1]}{linear}.layer_norm_{outside[2]}"


def canonical(name: str, names: Collection[str]) -> str:
    """Returns the name that TransformerEngine's layers have for a tensor.

    A norm on its own belongs to the linear after it where there is one among `names`, all names of the model:
    `pre_mlp_layernorm` of a layer with experts stays what it is.
    """
    for weight, other in _spellings(name):
        if weight in names and ".layer_norm_" not in name:
            return other
    return name


def local(name: str) -> str:
    """Returns the name that Megatron-Core's own layers have for a tensor."""
    return next(iter(spellings(name)), name) if ".layer_norm_" in name else name


# moe/experts.py: SequentialMLP, TEGroupedMLP, and GroupedMLP, which holds all experts of a rank in one tensor.
_ONE_EXPERT = (
    re.compile(
        r"(.*\.mlp\.experts\.)local_experts\.(?P<expert>\d{1,9})\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)"
    ),
    re.compile(r"(.*\.mlp\.experts\.)(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d{1,9})"),
)
_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)weight([12])")


def expert_of(name: str) -> tuple[str, int | None] | None:
    """Splits a rank's own name of experts into the name of all experts' tensor and which of the rank's it is.

    The number is `None` where the tensor holds all of the rank's experts, `None` is returned for other names.
    """
    for pattern in _ONE_EXPERT:
        if match := pattern.fullmatch(name):
            return f"{match[1]}experts.{match['linear']}.{match['kind']}", int(match["expert"])
    if match := _ALL_EXPERTS.fullmatch(name):
        return f"{match[1]}experts.linear_fc{match[2]}.weight", None
    return None


def name_of_expert(name: str, expert: int, grouped: bool) -> str:
    """Returns a rank's own name for one of its experts: of TEGroupedMLP, or of SequentialMLP."""
    module, _, tensor = name.partition(EXPERTS)
    linear, kind = tensor.split(".")
    if grouped:
        return f"{module}.mlp.experts.{linear}.{kind}{expert}"
    return f"{module}.mlp.experts.local_experts.{expert}.{linear}.{kind}"


def extra_states(names: Iterable[str], local_names: bool, last: bool, prefix: str = "") -> Iterator[str]:
    """Yields the keys of states without content that a strict `load_state_dict` expects of a rank.

    `tensor_parallel/layers.py`: linears split by columns or rows have one, the output layer even where it has no
    weight. TransformerEngine's linears, norms and attention have one too.

    Args:
        last: whether the rank has the output layer.
        prefix: what stands before its name.
    """
    for name in names:
        module, _, kind = name.rpartition(".")
        if not has_state(name):
            continue
        # The norm of BERT's head is Apex's, which has no state (models/bert/bert_lm_head.py).
        if kind.startswith("weight") and not module.startswith("lm_head."):
            linear = module.rpartition(".")[2]
            parallel = linear.startswith("linear_") or linear == "eh_proj" or module == "multi_modal_projector.proj"
            if parallel or (not local_names and linear.endswith(("norm", "ln_pre"))):
                yield f"{module}._extra_state"
            if not local_names and linear == "linear_proj":
                yield f"{module.removesuffix(linear)}core_attention._extra_state"
    if last:
        yield f"{prefix}output_layer._extra_state"


def rank_views(tensor: Tensor, split: RankSplit, rank: int, size: int, gated: bool) -> tuple[Tensor, ...]:
    """Returns the views of a global tensor `[rows, ...]` that a rank's is made of, in order along `split.dim`.

    Raises:
        CheckpointError: the tensor cannot be divided evenly.
    """
    pieces = 2 if split.halves and gated else 1
    length = tensor.shape[split.dim]
    if length % (pieces * size):
        halves = " in each of gate and up" if pieces == 2 else ""
        raise CheckpointError(f"{length} in dimension {split.dim} do not divide evenly over {size} ranks{halves}.")
    part = length // (pieces * size)
    return tuple(tensor.narrow(split.dim, piece * (length // pieces) + rank * part, part) for piece in range(pieces))
