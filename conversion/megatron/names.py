"""Meaning of Megatron-Core's tensor names, and alternative names of a tensor.

Canonical names are the ones of torch_dist with TransformerEngine's layers, with the global layer index. File names
here are relative to `megatron/core` of megatron-core 0.16.1.
"""

import re
from collections.abc import Collection, Iterable, Iterator

# Prefix of GPTModel's names in vision-language models (models/multimodal/llava_model.py, and Megatron-Bridge's).
LANGUAGE = "language_model."
# BertModel names its layers `encoder` (models/bert/bert_model.py).
LAYER = re.compile(r"((?:language_model\.)?(?:decoder|encoder|mtp)\.layers\.)(\d{1,9})\.")
# Modules that torch_dist stores as one tensor with a leading axis for their indices: layers, and the mergers of
# Megatron-Bridge's Qwen3VLVisionTransformerBlock.
STACK = re.compile(
    r"((?:(?:language_model|vision_model)\.)?(?:decoder|encoder)\.layers"
    r"|vision_model\.decoder\.deepstack_merger_list)\.(\d{1,9})\.(.+)"
)
_TOWER = re.compile(r"(?:vision_model|vision_projection|visual|vision_tower|multi_modal_projector)\.")
# Parts of vision encoders that are modules of torch or transformers, and have no extra state.
_STATELESS = re.compile(
    r"(?:visual|vision_tower)\.|vision_model\.(?:class_token|conv1|position_embeddings|ln_post|patch_embed|pos_embed)\b"
)
EXPERTS = ".mlp.experts.experts."
# Parallel linears of MTP layers, of state space mixers, and of MoE blocks with a latent dimension.
_LINEARS = ("eh_proj", "in_proj", "out_proj", "fc1_latent_proj", "fc2_latent_proj")
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
# T5Model registers its output layer twice (models/T5/t5_model.py).
_SECOND_OUTPUT = "lm_head.output_layer"
# Names in rank files after 0.16; torch_dist keeps the older ones (ssm/mamba_mixer.py, `conv_checkpoint_key_map`).
_LATER_CONVOLUTION = re.compile(r"(.+\.mixer\.)conv1d_(weight|bias)")
# The final norm of MambaStack, and its name in the class that replaces it after 0.16.
_LAST_NORM, _LATER_LAST_NORM = "decoder.final_norm.weight", "decoder.final_layernorm.weight"
FLAT_TOWER, DEEP_TOWER = "vision_tower.", "vision_tower.vision_model."

# A norm fused into TransformerEngine's linear, and the separate norm of the local layers
# (models/gpt/gpt_layer_specs.py, `sharded_state_dict_keys_map`). With latent attention, `input_layernorm` is separate
# in both, and its two inner norms are fused into the up projections.
_FUSED = tuple(
    (linear, norm, re.compile(rf"(.*\.){re.escape(norm)}\.(weight|bias)"))
    for linear, norm in (
        ("self_attention.linear_qkv", "input_layernorm"),
        ("mlp.linear_fc1", "pre_mlp_layernorm"),
        ("self_attention.linear_q_up_proj", "self_attention.q_layernorm"),
        ("self_attention.linear_kv_up_proj", "self_attention.kv_layernorm"),
        ("mixer.in_proj", "norm"),
    )
)
_INSIDE = re.compile(r"(.*\.)(self_attention\.linear_\w+|mlp\.linear_fc1|mixer\.in_proj)\.layer_norm_(weight|bias)")


def is_mtp_name(name: str) -> bool:
    """Returns whether a tensor, or a module matched by `LAYER`, belongs to multi-token prediction (MTP)."""
    return name.removeprefix(LANGUAGE).startswith("mtp.")


def is_encoder_weight(name: str) -> bool:
    """Returns whether a tensor belongs to a modality encoder or a projector."""
    return _TOWER.match(name) is not None


def has_state(name: str) -> bool:
    """Returns whether the module of a tensor may have extra state."""
    return _STATELESS.match(name) is None


def spellings(name: str) -> tuple[str, ...]:
    """Returns the other names of a tensor: a norm before a linear may be fused into it or separate.

    A transformers vision encoder is nested one module deeper in version 4 than in version 5.
    """
    if name.startswith(DEEP_TOWER):
        return (FLAT_TOWER + name.removeprefix(DEEP_TOWER),)
    if name == _LAST_NORM:
        return (_LATER_LAST_NORM,)
    return tuple(other for _, other in _spellings(name))


def _spellings(name: str) -> Iterator[tuple[str, str]]:
    """Yields the weight name of the linear after a norm, and the norm's other name."""
    if inside := _INSIDE.fullmatch(name):
        for linear, norm, _ in _FUSED:
            if linear == inside[2]:
                yield f"{inside[1]}{linear}.weight", f"{inside[1]}{norm}.{inside[3]}"
        return
    for linear, _, alone in _FUSED:
        if outside := alone.fullmatch(name):
            yield f"{outside[1]}{linear}.weight", f"{outside[1]}{linear}.layer_norm_{outside[2]}"


def canonical(name: str, names: Collection[str]) -> str:
    """Returns a tensor's name with TransformerEngine's layers.

    A separate norm is fused into the linear after it if that linear is among `names`, the names of the model:
    `pre_mlp_layernorm` of a layer with experts keeps its name.
    """
    if later := _LATER_CONVOLUTION.fullmatch(name):
        return f"{later[1]}conv1d.{later[2]}"
    for weight, other in _spellings(name):
        if weight in names and ".layer_norm_" not in name:
            return other
    return name


def local(name: str) -> str:
    """Returns a tensor's name with Megatron-Core's local layers."""
    return next(iter(spellings(name)), name) if ".layer_norm_" in name else name


# moe/experts.py: SequentialMLP, TEGroupedMLP, and GroupedMLP, which holds all experts of a rank in one tensor.
_ONE_EXPERT = (
    re.compile(
        r"(.*\.mlp\.experts\.)local_experts\.(?P<expert>\d{1,9})\.(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)"
    ),
    re.compile(r"(.*\.mlp\.experts\.)(?P<linear>linear_fc[12])\.(?P<kind>weight|bias)(?P<expert>\d{1,9})"),
)
_ALL_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)weight([12])")


def split_expert_name(name: str) -> tuple[str, int | None] | None:
    """Splits a rank's name of an expert tensor into the name of all experts' tensor and the local expert index.

    The index is `None` if the tensor holds all of the rank's experts; returns `None` for other names.
    """
    for pattern in _ONE_EXPERT:
        if match := pattern.fullmatch(name):
            return f"{match[1]}experts.{match['linear']}.{match['kind']}", int(match["expert"])
    if match := _ALL_EXPERTS.fullmatch(name):
        return f"{match[1]}experts.linear_fc{match[2]}.weight", None
    return None


def build_local_expert_name(name: str, expert: int, grouped: bool) -> str:
    """Returns a rank's name for one of its local experts, in TEGroupedMLP or SequentialMLP."""
    module, _, tensor = name.partition(EXPERTS)
    linear, kind = tensor.split(".")
    if grouped:
        return f"{module}.mlp.experts.{linear}.{kind}{expert}"
    return f"{module}.mlp.experts.local_experts.{expert}.{linear}.{kind}"


def extra_states(names: Iterable[str], local_names: bool, last: bool, prefix: str = "") -> Iterator[str]:
    """Yields the keys of empty extra states that a strict `load_state_dict` expects on a rank.

    `tensor_parallel/layers.py`: column- and row-parallel linears have one, the output layer even if it has no weight.
    TransformerEngine's linears, norms and attention have one too.

    Args:
        last: whether the rank has the output layer.
        prefix: prefix of the output layer's name.
    """
    for name in names:
        module, _, kind = name.rpartition(".")
        if not has_state(name):
            continue
        if module == _SECOND_OUTPUT:
            yield f"{module}._extra_state"
        # The norm in BERT's head is Apex's, which has no extra state (models/bert/bert_lm_head.py).
        elif kind.startswith("weight") and not module.startswith("lm_head."):
            linear = module.rpartition(".")[2]
            parallel = linear.startswith("linear_") or linear in _LINEARS or module == "multi_modal_projector.proj"
            # The norm inside a state space mixer is not TransformerEngine's.
            norm = linear.endswith(("norm", "ln_pre")) and not module.endswith(".mixer.norm")
            if parallel or (not local_names and norm):
                yield f"{module}._extra_state"
            if not local_names and linear == "linear_proj":
                yield f"{module.removesuffix(linear)}core_attention._extra_state"
    if last:
        yield f"{prefix}output_layer._extra_state"
