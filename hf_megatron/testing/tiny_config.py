"""Tiny configs: every numeric feature of a config class scaled down, with the feature still on."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..models.fingerprint import is_rate
from ..models.type_facts import IMAGE_CODES, facts_of

VOCAB_SIZE = 131


FIRST_SPECIAL_TOKEN = 120


_SPECIAL_TOKENS = ("_token_id", "_token_index", "image_patch_id")


MOE_SIZE = 48


# Of embeddings that are not as wide as the layers.
_EMBEDDED = 40


def _by_name(*rows: tuple[float, str]) -> dict[str, Any]:
    """Spells out a table of values and of the names of the attributes that take them."""
    return {name: value for value, names in rows for name in names.split()}


EXPERT_COUNTS = "num_experts num_local_experts n_routed_experts moe_num_experts"


# Upper bounds: a value is only ever lowered, so that a feature which is off (0 shared experts) or degenerate (1 KV
# head, top-1 routing) stays as it is. The numbers are unalike on purpose: swapped dimensions then fail on shapes.
SIZES: Mapping[str, int] = _by_name(
    (VOCAB_SIZE, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    # A padded head stays padded.
    (VOCAB_SIZE - 2, "unpadded_vocab_size"),
    (8, "additional_vocab_size"),
    (64, "hidden_size n_embd d_model embed_dim dim emb_dim out_hidden_size text_hidden_size projection_dim"),
    (64, "encoder_hidden_size downsample_channels adapter_in_dim adapter_input_size adapter_out_dim"),
    (64, "projection_hidden_size vision_hidden_size pooler_hidden_size audio_hidden_size"),
    # Even, and not divisible by 4: four ranks get uneven slices.
    (90, "intermediate_size ffn_hidden_size ffn_dim d_ff n_inner mlp_dim hidden_dim dff dim_ff d_inner"),
    (94, "intermediate_size_mlp dense_intermediate_size"),
    (38, "shared_expert_intermediate_size shared_experts_intermediate_size shared_intermediate_size share_expert_dim"),
    (38, "moe_shared_expert_intermediate_size"),
    # A quarter of it still is a multiple of 16 bytes, which the grouped matrix product of the experts asks for.
    (MOE_SIZE, "moe_intermediate_size expert_ffn_hidden_size"),
    (4, "num_attention_heads n_head n_heads num_heads attention_heads"),
    (4, "swa_num_attention_heads index_n_heads indexer_n_heads"),
    (16, "head_dim swa_head_dim global_head_dim indexer_head_dim dim_head d_head"),
    # T5 does not scale its attention scores: wide heads would saturate the softmax.
    (4, "d_kv"),
    # Multi-head latent attention.
    (24, "q_lora_rank kv_lora_rank o_lora_rank"),
    (8, "qk_nope_head_dim v_head_dim swa_v_head_dim rotary_dim index_head_dim"),
    (4, "qk_rope_head_dim o_groups"),
    # Experts.
    (4, EXPERT_COUNTS),
    (2, "num_experts_per_tok num_experts_per_token top_k_experts moe_topk moe_k moe_top_k"),
    (2, "n_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts zero_expert_num"),
    (1, "topk_group"),
    # Linear attention and state space models.
    (4, "linear_num_heads linear_num_key_heads n_groups mamba_n_groups"),
    (8, "linear_head_dim linear_key_head_dim mamba_num_heads mamba_n_heads"),
    (12, "linear_value_head_dim"),
    (16, "mamba_head_dim mamba_d_head ssm_state_size mamba_d_state"),
    (6, "mamba_dt_rank"),
    # Several chunks, blocks and windows per sequence, else their boundaries are never crossed.
    (4, "sliding_window sliding_window_size attention_chunk_size keep_window_size chunk_size mamba_chunk_size"),
    (4, "sliding_windows block_size index_block_size index_topk floor_scale log_scaling_n_floor rel_extent"),
    (4, "heavily_compressed_attention"),
    (2, "index_topk_blocks index_kpool compressed_sparse_attention"),
    # Periods of a layer pattern, to show in a few layers. Jamba's first three layers then are Mamba with an MLP, Mamba
    # with experts, and attention with an MLP.
    (2, "decoder_sparse_step encoder_sparse_step moe_layer_interval expert_layer_period attn_layer_offset"),
    (4, "attn_layer_period"),
    (2, "num_layers_per_stack num_global_layers"),
    (0, "insert_layer_id"),
    (64, "max_position_embeddings n_positions model_max_length"),
    (8, "original_max_position_embeddings"),
    # Projections of images: wide ones would leave each weight a gradient next to nothing.
    (92, "alignment_intermediate_size projector_hidden_size projector_intermediate_size merger_intermediate_size"),
    # What the experts read, between projections.
    (72, "moe_hidden_size"),
    # Each of the three is the input of the next.
    (68, "projector_input_dim projector_output_dim vision_output_dim"),
    (44, "output_channels"),
    # Other narrow paths.
    (12, "hidden_size_per_layer_input laurel_rank gated_norm_rank hc_lowrank"),
    (6, "d_rel num_query_tokens latent_query_num"),
    (24, "dim_model_base"),
    (48, "word_embed_proj_dim embedding_rank"),
    (32, "ple_embed_dim"),
    (50, "ngram_vocab_size_base"),
    (8, "make_ngram_vocab_size_divisible_by"),
    (4, "split_ngram_parts"),
    (2, "heads_per_ngram"),
    # The image and audio towers of a model whose text part is tested.
    (28, "image_size crop_size max_image_size"),
    (4, "mm_tokens_per_image resampler_n_latents"),
    (7, "patch_size"),
    # Of tokenizers of images: a norm has 32 groups of channels, and some tokens of the vocabulary are images'.
    (32, "base_channels"),
    (16, "latent_channels"),
    (IMAGE_CODES, "codebook_size num_embeddings"),
    (16, "input_size num_mel_bins nemo_conv_channels depthwise_separable_out_channel"),
    (64, "ext_pw_out_channel"),
    # ModalityEncoders of sounds.
    (64, "output_dim"),
    # Encoders and decoders.
    (4, "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
    (4, "speech_encoder_attention_heads"),
    (90, "speech_encoder_intermediate_size"),
    (90, "encoder_ffn_dim decoder_ffn_dim encoder_intermediate_size decoder_intermediate_size"),
    (64, "max_target_positions"),
    (1, "pretraining_tp"),
)


# Multipliers and caps. Tuned for large models, they would be invisible here (a cap of 50) or would drown the rest of
# the model (an embedding scale of 50), and a neutral one would hide a parallel layer that applies it once per rank.
SCALES: Mapping[str, float] = _by_name(
    (1, "attn_logit_softcapping swiglu_limit mlp_gate_softcap mlp_up_softcap clip_qkv"),
    (1, "swiglu_limits swiglu_limits_shared"),
    (2, "final_logit_softcapping moe_router_logit_softcapping qk_l2_clip_threshold rel_l2_clip_threshold"),
    (0.5, "qk_scale_factor attention_multiplier logit_scale residual_multiplier attn_scale log_scaling_alpha"),
    (2, "embedding_multiplier embedding_scale scale_emb logits_scaling logits_mup_width_multiplier"),
    (2, "routed_scaling_factor moe_routed_scaling_factor router_scaling_factor route_scale"),
    (2, "full_attn_alpha_factor linear_attn_alpha_factor mlp_alpha_factor"),
    (9, "query_pre_attn_scalar"),
    # Seen, and enough to keep the norm of a state that is nearly zero from turning round-off into direction.
    (
        1e-2,
        "rms_norm_eps post_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon ln_eps",
    ),
)


# Query heads and their key/value heads: grouped stays grouped, with fewer key/value heads than four ranks.
HEAD_PAIRS: Mapping[str, str] = {
    "num_key_value_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "num_global_key_value_heads": "num_attention_heads",
}


LAYER_COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers", "num_blocks"),
    *("depth", "layers", "encoder_layers", "decoder_layers"),
    *("encoder_num_hidden_layers", "decoder_num_hidden_layers", "num_encoder_layers"),
    "speech_encoder_layers",
)


# The number of the first layer in each of these lists of layers.
LAYER_INDICES: Mapping[str, int] = {
    **{"mlp_only_layers": 0, "attn_layer_indices": 0, "moe_layers": 0, "local_layer_ids": 0, "ple_layer_ids": 1},
    **{"cross_attention_layers": 0, "intermediate_layers_indices": 0},
    **{"fullatt_block_indexes": 0, "deepstack_visual_indexes": 0, "global_attn_indexes": 0},
    "rope_scaling_layers": 0,
}


LEADING_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")


TRAILING_LAYERS = ("num_kv_shared_layers",)


# The number of the layer whose keys and values each layer reads: its own, or that of an earlier one.
SOURCES = ("kv_source_layers",)


# Layers of a block, whose first layers are of a kind, and the model's first of another.
BLOCKS_OF_LAYERS = ("n_layers_per_attn_res_block",)


def full_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config with what the default ones of its class and of its parts lack, where it is that one."""
    values, default = config.to_dict(), type(config)().to_dict()
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    new = {name: full_config(part).to_dict() for name, part in parts.items()}
    new = {name: part for name, part in new.items() if part != parts[name].to_dict()}
    # A config may write into what it is made of, and several types share these values.
    overrides = copy.deepcopy(facts_of(config.model_type).defaults)
    if all(values.get(name) == default.get(name) for name in overrides):
        new |= overrides
    return type(config).from_dict({**values, **new}) if new else config


def tiny_config(config: PreTrainedConfig, min_layers: int = 2, keep: frozenset[int] = frozenset()) -> PreTrainedConfig:
    """Shrinks a config to one whose model trains in milliseconds and still runs every kind of layer of the original.

    Args:
        config (`PreTrainedConfig`): with sub-configs if it has any; not changed.
        min_layers (`int`, defaults to 2): layers at the end that are kept beside the first one of each kind.
        keep (`frozenset[int]`): further layers that are kept.
    """
    config = full_config(config)
    values = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    read = values.get("vision_feature_layer")
    # As many layers of a tower as are read, and one that is not.
    encoder_layers = {"vision_config": len(read) + 1} if isinstance(read, (list, tuple)) else {}
    at_least = {name: max(min_layers, encoder_layers.get(name, 0)) for name in parts}
    values |= {name: tiny_config(part, at_least[name], keep).to_dict() for name, part in parts.items()}
    # The rules read the original values, so they do not depend on each other's order.
    tiny = {name: _tiny_value(name, value) for name, value in values.items()}
    tiny |= _tiny_heads(values, tiny) | _tiny_experts(values)
    tiny |= _tiny_layers(values, tiny, min_layers, keep)
    tiny |= _tiny_rope(tiny)
    if read is not None and (layers := getattr(parts.get("vision_config"), "num_hidden_layers", None)):
        tiny["vision_feature_layer"] = tiny_reads(read, layers, values["vision_config"]["num_hidden_layers"])
    if values.get("out_hidden_size") and values["out_hidden_size"] == _merged_width(config.to_dict()):
        tiny["out_hidden_size"] = _merged_width(values)
    for name in ("embedding_size", "input_embedding_size", "output_embedding_size"):
        if isinstance(values.get(name), int):
            # Wider or narrower ones are projected.
            is_projected = values[name] != values.get("hidden_size")
            tiny[name] = min(values[name], _EMBEDDED) if is_projected else tiny["hidden_size"]
    if halved := values.get("downsample_channels"):
        # As many patches behind the convolutions as other towers have.
        tiny["image_size"] = min(values["image_size"], tiny["image_size"] * 2 ** len(halved))
    if values.get("num_position_embeddings") and values["num_position_embeddings"] == _patches_of_image(values):
        tiny["num_position_embeddings"] = _patches_of_image(tiny)
    if values.get("intermediate_layers_indices") and "vision_output_dim" in values:
        # The outputs of these layers and of the last one, side by side.
        tiny["vision_output_dim"] = tiny["hidden_size"] * (len(tiny["intermediate_layers_indices"]) + 1)
    if sizes := values.get("image_grid_pinpoints"):
        # Of images in tiles, each as large as an image of the tower.
        full, tile = config.vision_config.image_size, values["vision_config"]["image_size"]
        tiny["image_grid_pinpoints"] = [[side * tile // full for side in size] for size in sizes]
    return type(config).from_dict({**tiny, **copy.deepcopy(facts_of(config.model_type).tiny), "dtype": "float32"})


def tiny_reads(read: int | Sequence[int], num_layers: int, num_tiny: int) -> int | list[int]:
    """Returns the states of a tiny tower that are read, in the order of the full one; the last, if that one is."""
    layers = [read] if isinstance(read, int) else read
    states = [layer % (num_layers + 1) for layer in layers]
    last = num_tiny - min(num_layers - max(states), 1)
    new = [last - sum(other > state for other in set(states)) for state in states]
    found = [state - (num_tiny + 1 if layer < 0 else 0) for layer, state in zip(layers, new, strict=True)]
    return found[0] if isinstance(read, int) else found


def _merged_width(values: Mapping[str, Any]) -> int | None:
    """Returns the width of the patches of a tower that are merged side by side, of a config's values."""
    vision = values.get("vision_config") or {}
    return vision["hidden_size"] * vision["merge_size"] ** 2 if {"hidden_size", "merge_size"} <= vision.keys() else None


def _patches_of_image(values: Mapping[str, Any]) -> int | None:
    """Counts the patches of an image of two sides, of a config's values."""
    size, patch = values.get("image_size"), values.get("patch_size")
    return math.prod(side // patch for side in size) if isinstance(size, list | tuple) and patch else None


def _tiny_value(name: str, value: Any) -> Any:
    """Returns the tiny value of one attribute, as far as its name alone decides it."""
    if isinstance(value, bool) or value is None:
        return False if name == "use_cache" else value
    if isinstance(value, (list, tuple)):
        return [_tiny_value(name, item) for item in value]
    if isinstance(value, Mapping) and name == "compress_rates":
        return {key: _tiny_value(key, item) for key, item in value.items()}
    if not isinstance(value, (int, float)):
        return value
    if name.endswith(_SPECIAL_TOKENS):
        # Distinct tokens stay distinct as long as their ids are close.
        return value if value < FIRST_SPECIAL_TOKEN else FIRST_SPECIAL_TOKEN + value % 8
    if is_rate(name, value):
        return type(value)(0)
    if name.endswith("rope_theta") or name == "rope_local_base_freq":
        # The slow frequencies of a large base would not turn within a short sequence.
        return value**0.25
    if name in SCALES and value != 0:
        return type(value)(SCALES[name]) if SCALES[name] >= 1 else SCALES[name]
    return min(value, SIZES.get(name, value))


def _tiny_override(tiny: Any, base: Any, value: Any) -> Any:
    """Returns the tiny value of one layer, given those of the model, tiny and original: still larger, if it was."""
    if not isinstance(base, int) or value is None:
        return value
    return 2 * tiny if value > base else min(value, tiny)


def _tiny_heads(values: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes that follow from the number and the size of the query heads."""
    new: dict[str, Any] = {}
    for kv_heads, heads in HEAD_PAIRS.items():
        heads = heads if heads in values else "num_heads"
        if kv_heads in values and values.get(heads) is not None:
            grouped = values[kv_heads] is not None and values[kv_heads] != values[heads]
            new[kv_heads] = min(values[kv_heads], 2) if grouped else tiny[heads]
    if values.get("linear_num_value_heads") is not None:
        grouped = values["linear_num_value_heads"] != values["linear_num_key_heads"]
        new["linear_num_value_heads"] = tiny["linear_num_key_heads"] * (2 if grouped else 1)
    if isinstance(values.get("num_attention_heads_per_layer"), list):
        of_model = (tiny["num_attention_heads"], values["num_attention_heads"])
        per_layer = values["num_attention_heads_per_layer"]
        new["num_attention_heads_per_layer"] = [_tiny_override(*of_model, heads) for heads in per_layer]
    if "word_embed_proj_dim" in values and values["word_embed_proj_dim"] == values["hidden_size"]:
        new["word_embed_proj_dim"] = tiny["hidden_size"]
    if "head_dim" in values:
        if values["head_dim"] is None:
            new["head_dim"] = tiny["hidden_size"] // tiny["num_attention_heads"]
        elif values["head_dim"] == values.get("qk_rope_head_dim"):
            # Multi-head latent attention: the rotary embedding reads the size of the rotary part there.
            new["head_dim"] = tiny["qk_rope_head_dim"]
        elif values["head_dim"] == (values.get("qk_nope_head_dim") or 0) + (values.get("qk_rope_head_dim") or 0):
            # Or that of the whole head, of which it is a share.
            new["head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
        elif values.get("qk_nope_head_dim") is not None:
            # Or the size of the whole head, of the layers with the largest one.
            new["head_dim"] = 2 * tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    channels = values.get("base_channels"), *(values.get("channel_multiplier") or ())
    if "hidden_size" in values and channels[0] and values["hidden_size"] == channels[0] * channels[-1]:
        # Convolutions around attention.
        new["hidden_size"] = tiny["base_channels"] * channels[-1]
    if values.get("pixel_shuffle_ratio") is not None and "projector_input_dim" in values:
        # The projector reads shuffled states, which it takes to be as wide as an MLP.
        new["intermediate_size"] = int(tiny["hidden_size"] / values["pixel_shuffle_ratio"] ** 2)
    if values.get("qk_head_dim") is not None:
        new["qk_head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    return new


def _tiny_experts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of the experts that depend on each other."""
    new: dict[str, Any] = {}
    counts = {name: values[name] for name in EXPERT_COUNTS.split() if values.get(name) is not None}
    own_size = values.get("moe_intermediate_size") or values.get("expert_ffn_hidden_size")
    if counts and not own_size and isinstance(values.get("intermediate_size"), int):
        # The experts are as wide as the MLP of the model.
        new["intermediate_size"] = min(values["intermediate_size"], MOE_SIZE)
    if any((values.get(name) or 1) > 1 for name in ("n_group", "num_expert_group")):
        # Two experts out of a group of two would be no choice.
        new |= {name: min(count, 2 * SIZES[name]) for name, count in counts.items()}
    return new


def _tiny_layers(
    values: Mapping[str, Any], tiny: Mapping[str, Any], min_layers: int, keep: frozenset[int]
) -> dict[str, Any]:
    """Cuts the attributes that describe layers one by one down to the first layer of each kind and the last ones."""
    counts = [values[name] for name in LAYER_COUNTS if values.get(name) is not None]
    num_layers = counts[0] if counts else len(values.get("layers_block_type") or ())
    per_layer = {
        name: value
        for name, value in values.items()
        if name not in LAYER_INDICES and isinstance(value, Sequence) and not isinstance(value, str)
        if len(value) == num_layers
    }
    sources = {name: per_layer.pop(name) for name in SOURCES if name in per_layer}
    overrides = {int(layer): override for layer, override in (values.get("per_layer_config") or {}).items()}
    # Attributes that name a set of layers, by a list of them or by the number of leading or trailing ones.
    indices = {name: first for name, first in LAYER_INDICES.items() if values.get(name) is not None}
    leading = [name for name in LEADING_LAYERS if values.get(name) is not None]
    trailing = [name for name in TRAILING_LAYERS if values.get(name) is not None]
    blocks = [name for name in BLOCKS_OF_LAYERS if values.get(name) is not None]
    kinds: dict[tuple[Any, ...], int] = {}
    for layer in range(num_layers):
        kind: list[Any] = [str(value[layer]) for value in per_layer.values()] + [str(overrides.get(layer))]
        kind += [layer + first in values[name] for name, first in indices.items()]
        kind += [layer < values[name] for name in leading]
        kind += [layer >= num_layers - values[name] for name in trailing]
        kind += [layer == 0 or layer % values[name] == 0 and "later" for name in blocks]
        kind += [of[layer] == layer for of in sources.values()]
        kinds.setdefault(tuple(kind), layer)
    last = range(max(num_layers - min_layers, 0), num_layers)
    chosen = {*kinds.values(), *last, *(layer for layer in keep if layer < num_layers)}
    kept = sorted(chosen | {of[layer] for of in sources.values() for layer in chosen})

    new: dict[str, Any] = {name: len(kept) for name in LAYER_COUNTS if values.get(name) is not None}
    new |= {name: [tiny[name][layer] for layer in kept] for name in per_layer}
    new |= {name: [kept.index(of[layer]) for layer in kept] for name, of in sources.items()}
    if overrides:
        new["per_layer_config"] = {
            position: {name: _tiny_override(tiny.get(name), values.get(name), value) for name, value in layer.items()}
            for position, layer in enumerate(overrides.get(layer) for layer in kept)
            if layer is not None
        }
    for name, first in indices.items():
        new[name] = [position + first for position, layer in enumerate(kept) if layer + first in values[name]]
    for name in blocks:
        # The second block begins where it did, among the layers that are left.
        new[name] = next((place for place, layer in enumerate(kept) if place and layer % values[name] == 0), len(kept))
    new |= {name: sum(layer < values[name] for layer in kept) for name in leading}
    new |= {name: sum(layer >= num_layers - values[name] for layer in kept) for name in trailing}
    return new


def _tiny_rope(tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the rotary attributes of a config whose head sizes are tiny already."""
    head_dim: Any = tiny.get("head_dim") or tiny.get("qk_rope_head_dim")
    names = ("num_attention_heads", "n_heads", "num_heads", "decoder_num_attention_heads")
    heads = next((tiny[name] for name in names if tiny.get(name)), None)
    if head_dim is None and heads is not None and isinstance(tiny.get("rope_parameters"), Mapping):
        head_dim = (tiny.get("embed_dim") or tiny.get("hidden_size") or tiny["d_model"]) // heads

    def shrink(parameters: Mapping[str, Any]) -> dict[str, Any]:
        new: dict[str, Any] = {
            name: shrink(v) if isinstance(v, Mapping) else _tiny_value(name, v) for name, v in parameters.items()
        }
        factor = new.get("partial_rotary_factor") or tiny.get("partial_rotary_factor") or 1.0
        # At least two pairs of rotated dimensions: the first one turns at the same speed whatever the base is.
        rotary_dim = max(min(4, head_dim), int(head_dim * factor) // 2 * 2)
        if factor < 1:
            # A share that says how large the rotary part of a head with latent attention is.
            rotary_dim = tiny.get("qk_rope_head_dim") or rotary_dim
        if new.get("partial_rotary_factor") is not None:
            new["partial_rotary_factor"] = rotary_dim / head_dim
        beyond = new.get("rope_type") == "longrope" or "llama_4_scaling_beta" in new
        if "original_max_position_embeddings" in new and not beyond:
            # The fastest pair is left alone and the slow ones are rescaled. The others need a longer sequence instead.
            new["original_max_position_embeddings"] = 32
        for name in ("short_factor", "long_factor"):
            if name in new:
                step = max(1, len(new[name]) // (rotary_dim // 2))
                new[name] = new[name][::step][: rotary_dim // 2]
        if "mrope_section" in new:
            first, second, *_ = sections = parameters["mrope_section"]
            identical = [rotary_dim // 2 // len(sections)] * (len(sections) - 1)
            other = [rotary_dim // 2 - sum(identical)]
            new["mrope_section"] = identical + other if first == second else other + identical
        return new

    if head_dim is None or not isinstance(tiny.get("rope_parameters"), Mapping):
        return {}
    return {"rope_parameters": shrink(tiny["rope_parameters"])}
