"""Tiny configs: numeric values are scaled down so that every feature of the original stays enabled."""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

from ..models.fingerprint import is_rate
from ..models.type_facts import IMAGE_CODES, get_type_facts

VOCAB_SIZE = 131


FIRST_SPECIAL_TOKEN = 120


_SPECIAL_TOKENS = ("_token_id", "_token_index", "image_patch_id")


MOE_SIZE = 48


# Width of embeddings that differs from the width of the layers.
_EMBEDDED = 40


def _by_name(*rows: tuple[float, str]) -> dict[str, Any]:
    """Expands a table of values and space-separated attribute names into a mapping by name."""
    return {name: value for value, names in rows for name in names.split()}


EXPERT_COUNTS = "num_experts num_local_experts n_routed_experts moe_num_experts"


# Upper bounds: a value is only ever lowered, so that a feature which is off (0 shared experts) or degenerate (1 KV
# head, top-1 routing) stays as it is. The sizes differ on purpose, so that swapped dimensions fail on shapes.
SIZES: Mapping[str, int] = _by_name(
    (VOCAB_SIZE, "vocab_size decoder_vocab_size vocab_size_per_layer_input"),
    # A padded vocabulary stays padded.
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
    # A quarter of it is still a multiple of 16 bytes, which the grouped GEMM of the experts requires.
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
    # Several chunks, blocks and windows per sequence, so that their boundaries are crossed.
    (4, "sliding_window sliding_window_size attention_chunk_size keep_window_size chunk_size mamba_chunk_size"),
    (4, "sliding_windows block_size index_block_size index_topk floor_scale log_scaling_n_floor rel_extent"),
    (4, "heavily_compressed_attention"),
    (2, "index_topk_blocks index_kpool compressed_sparse_attention"),
    # Periods of layer patterns, short enough for few layers. Jamba's first three layers then are Mamba with an MLP,
    # Mamba with experts, and attention with an MLP.
    (2, "decoder_sparse_step encoder_sparse_step moe_layer_interval expert_layer_period attn_layer_offset"),
    (4, "attn_layer_period"),
    (2, "num_layers_per_stack num_global_layers"),
    (0, "insert_layer_id"),
    (64, "max_position_embeddings n_positions model_max_length"),
    (8, "original_max_position_embeddings"),
    # Image projections: with wide ones the gradient of each weight would be close to zero.
    (92, "alignment_intermediate_size projector_hidden_size projector_intermediate_size merger_intermediate_size"),
    # Input width of the experts, between projections.
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
    # Image and audio encoders of a model whose language model is tested.
    (28, "image_size crop_size max_image_size"),
    (4, "mm_tokens_per_image resampler_n_latents"),
    (7, "patch_size"),
    # Image tokenizers: a norm has 32 groups of channels, and some tokens of the vocabulary are image codes.
    (32, "base_channels"),
    (16, "latent_channels"),
    (IMAGE_CODES, "codebook_size num_embeddings"),
    (16, "input_size num_mel_bins nemo_conv_channels depthwise_separable_out_channel"),
    (64, "ext_pw_out_channel"),
    # Audio encoders.
    (64, "output_dim"),
    # Encoders and decoders.
    (4, "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads"),
    (4, "speech_encoder_attention_heads"),
    (90, "speech_encoder_intermediate_size"),
    (90, "encoder_ffn_dim decoder_ffn_dim encoder_intermediate_size decoder_intermediate_size"),
    (64, "max_target_positions"),
    (1, "pretraining_tp"),
)


# Multipliers and caps. Values tuned for large models would have no effect here (a cap of 50) or dominate the model (an
# embedding scale of 50), and a neutral value would hide a parallel layer that applies it once per rank.
SCALES: Mapping[str, float] = _by_name(
    (1, "attn_logit_softcapping swiglu_limit mlp_gate_softcap mlp_up_softcap clip_qkv"),
    (1, "swiglu_limits swiglu_limits_shared"),
    (2, "final_logit_softcapping moe_router_logit_softcapping qk_l2_clip_threshold rel_l2_clip_threshold"),
    (0.5, "qk_scale_factor attention_multiplier logit_scale residual_multiplier attn_scale log_scaling_alpha"),
    (2, "embedding_multiplier embedding_scale scale_emb logits_scaling logits_mup_width_multiplier"),
    (2, "routed_scaling_factor moe_routed_scaling_factor router_scaling_factor route_scale"),
    (2, "full_attn_alpha_factor linear_attn_alpha_factor mlp_alpha_factor"),
    (9, "query_pre_attn_scalar"),
    # Large enough to matter, and to keep a norm from amplifying the round-off of a nearly zero state.
    (
        1e-2,
        "rms_norm_eps post_norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_eps norm_epsilon ln_eps",
    ),
)


# Key/value heads and their query heads: grouped attention stays grouped, with fewer key/value heads than four ranks.
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


# Attributes that list layers -> the index that they use for the first layer.
LAYER_INDICES: Mapping[str, int] = {
    **{"mlp_only_layers": 0, "attn_layer_indices": 0, "moe_layers": 0, "local_layer_ids": 0, "ple_layer_ids": 1},
    **{"cross_attention_layers": 0, "intermediate_layers_indices": 0},
    **{"fullatt_block_indexes": 0, "deepstack_visual_indexes": 0, "global_attn_indexes": 0},
    "rope_scaling_layers": 0,
}


LEADING_LAYERS = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")


TRAILING_LAYERS = ("num_kv_shared_layers",)


# Per-layer index of the layer whose keys and values are read: the layer itself or an earlier one.
SOURCES = ("kv_source_layers",)


# Layers per block. The first layer of a block is a kind of its own, and the model's first layer another.
BLOCKS_OF_LAYERS = ("n_layers_per_attn_res_block",)


def full_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns the config with the `defaults` of its type, and of its sub-configs' types, in place of default values."""
    values, default = config.to_dict(), type(config)().to_dict()
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    new = {name: full_config(part).to_dict() for name, part in parts.items()}
    new = {name: part for name, part in new.items() if part != parts[name].to_dict()}
    # Copied because a config may modify its values in place, and several types share them.
    overrides = copy.deepcopy(get_type_facts(config.model_type).defaults)
    if all(values.get(name) == default.get(name) for name in overrides):
        new |= overrides
    return type(config).from_dict({**values, **new}) if new else config


def tiny_config(config: PreTrainedConfig, min_layers: int = 2, keep: frozenset[int] = frozenset()) -> PreTrainedConfig:
    """Returns a config of a model that trains in milliseconds and has every kind of layer of the original.

    Args:
        config (`PreTrainedConfig`): original config, not modified; its sub-configs are shrunk too.
        min_layers (`int`, defaults to 2): last layers that are kept in addition to the first one of each kind.
        keep (`frozenset[int]`): indices of further layers to keep.
    """
    config = full_config(config)
    values = {name: value for name, value in config.to_dict().items() if name != "quantization_config"}
    parts = {name: part for name, part in vars(config).items() if isinstance(part, PreTrainedConfig)}
    read = values.get("vision_feature_layer")
    # The vision encoder keeps all layers that are read, and one that is not.
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
            # Embeddings of another width are projected to the hidden size.
            is_projected = values[name] != values.get("hidden_size")
            tiny[name] = min(values[name], _EMBEDDED) if is_projected else tiny["hidden_size"]
    if halved := values.get("downsample_channels"):
        # After the strided convolutions, the number of patches is the same as in other encoders.
        tiny["image_size"] = min(values["image_size"], tiny["image_size"] * 2 ** len(halved))
    if values.get("num_position_embeddings") and values["num_position_embeddings"] == _count_image_patches(values):
        tiny["num_position_embeddings"] = _count_image_patches(tiny)
    if values.get("intermediate_layers_indices") and "vision_output_dim" in values:
        # Concatenated outputs of these layers and of the last one.
        tiny["vision_output_dim"] = tiny["hidden_size"] * (len(tiny["intermediate_layers_indices"]) + 1)
    if sizes := values.get("image_grid_pinpoints"):
        # Sizes of tiled images; a tile has the image size of the encoder.
        full, tile = config.vision_config.image_size, values["vision_config"]["image_size"]
        tiny["image_grid_pinpoints"] = [[side * tile // full for side in size] for size in sizes]
    return type(config).from_dict({**tiny, **copy.deepcopy(get_type_facts(config.model_type).tiny), "dtype": "float32"})


def tiny_reads(read: int | Sequence[int], num_layers: int, num_tiny: int) -> int | list[int]:
    """Maps the indices of the encoder states that are read to a tiny encoder; keeps their order and a last state."""
    layers = [read] if isinstance(read, int) else read
    states = [layer % (num_layers + 1) for layer in layers]
    last = num_tiny - min(num_layers - max(states), 1)
    new = [last - sum(other > state for other in set(states)) for state in states]
    indices = [state - (num_tiny + 1 if layer < 0 else 0) for layer, state in zip(layers, new, strict=True)]
    return indices[0] if isinstance(read, int) else indices


def _merged_width(values: Mapping[str, Any]) -> int | None:
    """Returns the width of concatenated (merged) patches from a config's values, or `None`."""
    vision = values.get("vision_config") or {}
    return vision["hidden_size"] * vision["merge_size"] ** 2 if {"hidden_size", "merge_size"} <= vision.keys() else None


def _count_image_patches(values: Mapping[str, Any]) -> int | None:
    """Returns the number of patches of a `[height, width]` image size in a config's values, or `None`."""
    size, patch = values.get("image_size"), values.get("patch_size")
    return math.prod(side // patch for side in size) if isinstance(size, list | tuple) and patch else None


def _tiny_value(name: str, value: Any) -> Any:
    """Returns the tiny value of one attribute, from its name and value alone."""
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
        # The low frequencies of a large base would hardly rotate within a short sequence.
        return value**0.25
    if name in SCALES and value != 0:
        return type(value)(SCALES[name]) if SCALES[name] >= 1 else SCALES[name]
    return min(value, SIZES.get(name, value))


def _tiny_override(tiny: Any, base: Any, value: Any) -> Any:
    """Returns the tiny value of a per-layer override, given the model's tiny and base value; larger stays larger."""
    if not isinstance(base, int) or value is None:
        return value
    return 2 * tiny if value > base else min(value, tiny)


def _tiny_heads(values: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes that depend on the number and size of the query heads, and other dependent widths."""
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
            # Multi-head latent attention: the rotary embedding reads the rotary head size from `head_dim`.
            new["head_dim"] = tiny["qk_rope_head_dim"]
        elif values["head_dim"] == (values.get("qk_nope_head_dim") or 0) + (values.get("qk_rope_head_dim") or 0):
            # Or the full head size, a fraction of it being rotary.
            new["head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
        elif values.get("qk_nope_head_dim") is not None:
            # Or the full head size of the layers with the largest heads.
            new["head_dim"] = 2 * tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    channels = values.get("base_channels"), *(values.get("channel_multiplier") or ())
    if "hidden_size" in values and channels[0] and values["hidden_size"] == channels[0] * channels[-1]:
        # Attention inside a convolutional network runs on its last number of channels.
        new["hidden_size"] = tiny["base_channels"] * channels[-1]
    if values.get("pixel_shuffle_ratio") is not None and "projector_input_dim" in values:
        # The projector takes the width of pixel-shuffled states from the MLP's width.
        new["intermediate_size"] = int(tiny["hidden_size"] / values["pixel_shuffle_ratio"] ** 2)
    if values.get("qk_head_dim") is not None:
        new["qk_head_dim"] = tiny["qk_nope_head_dim"] + tiny["qk_rope_head_dim"]
    return new


def _tiny_experts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of experts that depend on each other."""
    new: dict[str, Any] = {}
    counts = {name: values[name] for name in EXPERT_COUNTS.split() if values.get(name) is not None}
    own_size = values.get("moe_intermediate_size") or values.get("expert_ffn_hidden_size")
    if counts and not own_size and isinstance(values.get("intermediate_size"), int):
        # The experts take their width from `intermediate_size`.
        new["intermediate_size"] = min(values["intermediate_size"], MOE_SIZE)
    if any((values.get(name) or 1) > 1 for name in ("n_group", "num_expert_group")):
        # Choosing two experts in a group of two would not be a choice.
        new |= {name: min(count, 2 * SIZES[name]) for name, count in counts.items()}
    return new


def _tiny_layers(
    values: Mapping[str, Any], tiny: Mapping[str, Any], min_layers: int, keep: frozenset[int]
) -> dict[str, Any]:
    """Returns the layer counts and per-layer attributes for the first layer of each kind and the last layers."""
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
    # Attributes that define a set of layers by a list of indices or by the number of leading or trailing layers.
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
        # The second block begins at the same kept layer as before.
        new[name] = next((place for place, layer in enumerate(kept) if place and layer % values[name] == 0), len(kept))
    new |= {name: sum(layer < values[name] for layer in kept) for name in leading}
    new |= {name: sum(layer >= num_layers - values[name] for layer in kept) for name in trailing}
    return new


def _tiny_rope(tiny: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the RoPE parameters for a config whose head sizes are already tiny."""
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
        # At least two pairs of rotated dims, because the frequency of the first pair does not depend on the base.
        rotary_dim = max(min(4, head_dim), int(head_dim * factor) // 2 * 2)
        if factor < 1:
            # In latent attention, the factor defines the rotary size of a head.
            rotary_dim = tiny.get("qk_rope_head_dim") or rotary_dim
        if new.get("partial_rotary_factor") is not None:
            new["partial_rotary_factor"] = rotary_dim / head_dim
        beyond = new.get("rope_type") == "longrope" or "llama_4_scaling_beta" in new
        if "original_max_position_embeddings" in new and not beyond:
            # Rescales the low frequencies but not the highest one. The other types only rescale longer sequences, so
            # their value stays below the sequence length.
            new["original_max_position_embeddings"] = 32
        for name in ("short_factor", "long_factor"):
            if name in new:
                step = max(1, len(new[name]) // (rotary_dim // 2))
                new[name] = new[name][::step][: rotary_dim // 2]
        if "mrope_section" in new:
            first, second, *_ = sections = parameters["mrope_section"]
            equal_sections = [rotary_dim // 2 // len(sections)] * (len(sections) - 1)
            other = [rotary_dim // 2 - sum(equal_sections)]
            new["mrope_section"] = equal_sections + other if first == second else other + equal_sections
        return new

    if head_dim is None or not isinstance(tiny.get("rope_parameters"), Mapping):
        return {}
    return {"rope_parameters": shrink(tiny["rope_parameters"])}
