"""What the check knows of single model types: what their default configs lack, and which parameters get no gradient."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from transformers import PreTrainedConfig

# Images of a twin become tokens of so many kinds.
IMAGE_CODES = 8

# What the default config of a class lacks to build a model, or to build an interesting one. An entry is applied before
# the rules above, as a whole, and only to a config that has the default value of each of its attributes.
OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    # The number of patches of a tiny image, of which the default names none.
    "aria": {"projector_patch_to_query_dict": {16: 5}},
    # No names of tokens by default, of which some are images'.
    "chameleon": {
        "image_token_id": 100,
        "vocabulary_map": {"<image>": 100, **{f"IMGIMG{chr(65 + code)}Z": 101 + code for code in range(IMAGE_CODES)}},
    },
    "emu3": {
        "image_token_id": 100,
        "vocabulary_map": {
            **{"<image>": 100, "<|extra_200|>": 101},
            **{f"<|visual token {code:06d}|>": 102 + code for code in range(IMAGE_CODES)},
        },
    },
    # A number of heads by default that does not divide the width of the tower.
    "aya_vision": {
        "vision_config": {
            **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14},
            **{"image_size": 364, "num_hidden_layers": 26, "num_attention_heads": 16, "vision_use_head": False},
        }
    },
    # No placeholder by default.
    "blip-2": {"image_token_index": 50265},
    "instructblip": {"image_token_index": 50265},
    "instructblipvideo": {"video_token_index": 50265},
    # A head by default that nobody reads.
    "cohere2_vision": {
        "vision_config": {
            **{"model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 3072},
            **{"image_size": 512, "num_hidden_layers": 27, "num_attention_heads": 12, "vision_use_head": False},
        }
    },
    # No rotary parameters by default, which the model reads for every layer type.
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": None,
        },
    },
    # No base of its rotary embedding by default, which the attention reads.
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 90, "hidden_size": 6144, "moe_num_experts": 16, "moe_top_k": 4},
    },
    # No number of experts per token by default.
    "deepseek_v2": {"num_experts_per_tok": 2},
    # No kinds of MLPs by default, and no number of experts per token.
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 31, "num_experts_per_tok": 6},
    # Multipliers of one by default, which checkpoints have otherwise.
    "falcon_h1": {
        **{"ssm_multipliers": [0.5, 1.5, 0.75, 1.25, 0.9], "mlp_multipliers": [0.75, 1.5], "key_multiplier": 0.75},
        **{"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.75, "attention_in_multiplier": 0.9},
        **{"attention_out_multiplier": 1.1, "embedding_multiplier": 5.5, "lm_head_multiplier": 0.5},
    },
    # Neither adapters nor positions by default, which some checkpoints have.
    "zamba2": {"use_shared_attention_adapter": True, "use_mem_rope": True},
    # No experts by default, but layers of them.
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    # No sections by default, where the model takes those of a wide head.
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [22, 22, 20]},
    },
    # Not the sizes of its experts by default, which every layer builds.
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704},
    # No attention layer by default.
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    # Images by default that are smaller than what is made of them, and a head that nobody reads.
    "gemma3": {
        "vision_config": {
            **{"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
            "vision_use_head": False,
        }
    },
    "shieldgemma2": {
        "vision_config": {
            **{"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
            "vision_use_head": False,
        }
    },
    # No tower by default.
    "gemma4": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_unified": {"vision_config": {"model_type": "gemma4_unified_vision"}},
    # A single expert by default, and no size of a head.
    "hunyuan_v1_moe": {"num_experts": 8, "moe_topk": 2, "head_dim": 128},
    # No size of a head by default, which the attention reads, and no sections.
    "hunyuan_vl_text": {
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 16, 16, 16]},
    },
    # No sliding layer by default, hence one kind of rotary embedding only.
    "laguna": {
        "layer_types": ["full_attention", "sliding_attention"] * 20,
        "num_attention_heads_per_layer": [48, 64] * 20,
    },
    "mellum": {"layer_types": ["full_attention", "sliding_attention"] * 14},
    # No sparse attention by default, and no dense MLP.
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 30,
        "mlp_layer_types": ["dense"] + ["sparse"] * 59,
    },
    # Sizes by default that do not follow from each other as those of checkpoints do.
    "llama4_vision_model": {"hidden_size": 1408, "vision_output_dim": 4096, "image_size": 336},
    "muse_spark_audio": {"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
    # A head by default that nobody reads.
    "t5gemma2_encoder": {
        "vision_config": {
            **{"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
            "vision_use_head": False,
        },
    },
    "modernvbert": {"vision_config": {"model_type": "siglip_vision_model", "vision_use_head": False}},
    "lfm2_vl": {"vision_config": {"model_type": "siglip2_vision_model", "vision_use_head": False}},
    # No layer types by default.
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8},
    # No indexer by default, which every indexed attention layer builds.
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    # No token by default that begins an image, which the positions ask for; and tokens 8 apart, which are one in a
    # tiny vocabulary.
    **{
        name: {"vision_start_token_id": 151652, "audio_start_token_id": 151649}
        for name in ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    },
    # Counted from the end, as a tower of any number of layers has them.
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    # No size of a head by default, which the attention reads.
    "hunyuan_v1_dense": {"head_dim": 128},
    # No placeholder by default.
    **{name: {"image_token_id": 100, "video_token_id": 101} for name in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")},
    "nemotron_h_omni": {"image_token_id": 100, "video_token_id": 101, "audio_token_id": 102},
    "voxtral": {"audio_token_id": 24},
    "ministral": {"head_dim": 128},
    # No vocabulary by default.
    "esm": {"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
    # No language by default, whose adapters the layers take.
    "xmod": {"default_language": "en_XX"},
    # No number of key/value heads by default, which the attention reads.
    "nemotron": {"num_key_value_heads": 48},
    # No sections by default, where the model takes those of a wide head.
    **{
        name: {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [16, 24, 24]}}
        for name in ("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text")
    },
    **{
        name: {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}}
        for name in ("glm4v_text", "glm4v_moe_text", "glm_ocr_text", "glm46v_text", "glmga_text")
    },
    # No sections by default, where the model takes those of a wide head.
    "paddleocr_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [16, 24, 24]}
    },
    # No window by default, which the model asks for; and what checkpoints have beside it: more heads in layers with
    # one, that rotate whole, and limits in the last layers.
    "step3p5": {
        "sliding_window": 512,
        "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 11 + ["full_attention"],
        "num_sliding_attention_heads": 96,
        "per_layer_config": {layer: {"num_attention_heads": 96} for layer in range(45) if layer % 4},
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000000.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
        },
        "swiglu_limits": [0.0] * 43 + [7.0, 7.0],
        "swiglu_limits_shared": [0.0] * 43 + [16.0, 16.0],
    },
    # Set by every checkpoint, and needed to shift the labels.
    **{
        name: {"decoder_start_token_id": 0}
        for name in ("t5", "longt5", "switch_transformers", "cohere_asr", "pop2piano")
    },
    # No number of key/value heads by default, which the attention reads.
    "moonshine_streaming": {"decoder_start_token_id": 0, "num_key_value_heads": 8},
    "moonshine": {"pad_token_id": 2},
    "encoder-decoder": {"decoder_start_token_id": 0, "pad_token_id": 0},
}


# What a type has that takes sounds, and not by default.
WITH_SOUNDS: Mapping[str, Mapping[str, Any]] = {
    "gemma4": {"audio_config": {"model_type": "gemma4_audio"}},
    "gemma4_unified": {"audio_config": {"model_type": "gemma4_unified_audio"}},
    "nemotron_h_omni": {
        "audio_config": {"model_type": "parakeet_encoder", "projection_hidden_size": 4096, "projection_bias": False}
    },
}

# Tokens of rows at least: fewer have another kind of attention, for which the model exchanges its modules.
LONG_ROWS: Mapping[str, int] = {"big_bird": 50, "bigbird_pegasus": 50, "perceiver": 64}

# Which make none of their labels.
NEEDS_DECODER_INPUTS = ("fsmt",)
# Whose decoder alone reads tokens of several codebooks, a table for each.
IN_CODEBOOKS = ("musicgen_decoder", "musicgen_melody_decoder")
# Whose shift of labels looks for the last one of each row.
NEEDS_A_LABEL = ("mbart", "plbart")

# Sizes of a twin where those of all types would make it large.
TINY: Mapping[str, Mapping[str, Any]] = {
    # Tables with a row for each of all entities, or of rows and columns of spreadsheets.
    "luke": {"entity_vocab_size": 37, "entity_emb_size": 40},
    # A text of 13 tokens has several windows, and none of 512 to pad it to.
    "led": {"attention_window": 8},
    "perceiver": {
        **{"d_latents": 64, "num_latents": 12, "num_self_attends_per_block": 3, "qk_channels": 32, "v_channels": 64},
        **{"num_self_attention_heads": 4, "num_cross_attention_heads": 4},
    },
    # Divided into groups.
    "squeezebert": {"intermediate_size": 96},
    "mobilebert": {"intra_bottleneck_size": 48, "true_hidden_size": 48, "num_feedforward_networks": 2},
    "tapas": {"type_vocab_sizes": [3, 12, 12, 2, 12, 12, 10]},
    # The width of a layer of the tower grows with the square of it.
    "inkling_vision": {"patch_size": 2},
    # Heads as wide as the layer expands.
    "mamba2": {"num_heads": 8},
    # Two layers with one shared block.
    "zamba": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
        **{"attention_hidden_size": 128, "attention_head_dim": 32},
    },
    "zamba2": {
        **{"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4, "hybrid_layer_ids": [1, 3]},
        **{"attention_hidden_size": 128, "attention_head_dim": 32, "mamba_headdim": 16, "adapter_rank": 12},
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_d_head": 16},
    **{name: {"intermediate_size": 128} for name in ("mamba", "falcon_mamba")},
    "xlnet": {"d_inner": 256},
    "blt": {"encoder_hash_byte_group_vocab": 53},
    # As wide as the bytes that a patch is made of are together.
    **{name: {"hidden_size_global": 128} for name in ("blt_local_encoder", "blt_local_decoder")},
    "blt_global_transformer": {"hidden_size": 128, "head_dim": 32},
    # Layers that read images at no end of a stage, where text alone would leave them out.
    "mllama_text_model": {"num_hidden_layers": 6, "cross_attention_layers": [1, 4]},
    # Kernels in full precision.
    "xlstm": {"embedding_dim": 64, "autocast_kernel_dtype": "float32"},
    # Other channels than hidden states have.
    "rwkv": {"attention_hidden_size": 48},
    # Heads of two ranks in four parts.
    "codegen": {"n_head": 8},
    # Four books of 17 tokens beside the text's, and a last one for padding.
    "kyutai_speech_to_text": {
        **{"num_codebooks": 4, "codebook_vocab_size": 17, "audio_bos_token_id": 16, "audio_pad_token_id": 199},
    },
    # Frames that NumPy draws anew for every microbatch are hidden from it while it trains.
    "speecht5": {"apply_spec_augment": False, "conv_dim": [32] * 7},
    # Few samples of a token, and no noise on what is made of them: it is drawn for every microbatch.
    **{
        name: {"downsampling_ratios": [2, 2], "depths": [1, 1, 1], "num_filters": 8, "vae_std": 0.0}
        for name in ("vibevoice_acoustic_tokenizer_encoder", "vibevoice_acoustic_tokenizer")
    },
    # A group of channels for each of the narrow states.
    "mimi": {"upsample_groups": 64},
    # As many features as four neighbours have. Towers of Whisper's kind take twice as many frames as positions.
    "glmasr_encoder": {"intermediate_size": 256},
    "voxtral_encoder": {"intermediate_size": 256, "max_source_positions": 16},
    **{
        name: {"max_source_positions": 16}
        for name in (
            *("qwen2_audio_encoder", "moss_transcribe_diarize_audio", "audioflamingo3_encoder"),
            *("seamless_m4t", "seamless_m4t_v2", "speech_to_text", "whisper"),
        )
    },
    # Its times end at the base of its angles.
    "musicflamingo": {
        "rope_parameters": {"rope_theta": 64.0, "partial_rotary_factor": 0.25, "rope_type": "default"},
        "max_position_embeddings": 64.0,
    },
    # What is left of 16 behind three convolutions.
    "phi4_multimodal_audio": {"nemo_final_size": 2, "depthwise_separable_out_channel": 64},
    **{
        name: {"hidden_dim": 64, "input_dim": 16, "dim_head": 16, "context_size": 8, "max_pos_emb": 16}
        for name in ("granite_speech_encoder", "granite_speech_plus_encoder")
    },
    "fun_asr_nano": {
        "adaptor_config": {
            **{"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 16, "num_hidden_layers": 2},
            "projector_hidden_size": 92,
        }
    },
}


_BEFORE_NORM = {r"_tower\.post_layernorm\.": "the states of layers are read, which it does not see"}
_TOKENIZER = {r"\.vqmodel\.": "chooses tokens of images: no gradient comes through a choice"}
_POOLED = {r"\.vision_model\.head\.": "pools the states of the tower, which are read as they are"}
_INDEXER = {r"\.indexer\.": "chooses which tokens are read: no gradient comes through a choice"}
# Trainable parameters that get no gradient, by model type and regular expression, and why.
NO_GRADIENT: Mapping[str, Mapping[str, str]] = {
    "afmoe": {r"\.expert_bias$": "chooses experts: no gradient comes through a choice"},
    "ernie4_5_moe": {r"\.e_score_correction_bias$": "chooses experts: no gradient comes through a choice"},
    "ernie4_5_vl_moe_text": {r"\.e_score_correction_bias$": "chooses experts: no gradient comes through a choice"},
    "qwen2_5_omni_audio_encoder": {r"\.audio_bos_eos_token\.": "read by no forward"},
    **{name: {r"\.pooler\.": "read by heads of classes alone"} for name in ("big_bird", "fnet", "layoutlm")},
    **{
        name: {r"_global\.": "reads tokens that see all others: compared without such"}
        for name in ("led", "longformer")
    },
    "mra": {r"\.attention\.self\.": "read by a kernel, without which attention is zeros: compared without it"},
    "luke": {
        r"entity_predictions\.": "predicts entities: compared without labels of them",
        r"\.pooler\.": "read by heads of classes alone",
    },
    "esm": {r"\.contact_head\.": "predicts contacts of residues: read by no loss"},
    "hunyuan_vl_vision": {r"\.image_sep$": "read by no forward"},
    "laguna": {r"\.e_score_correction_bias$": "chooses experts: no gradient comes through a choice"},
    "axk2": _INDEXER,
    "deepseek_v32": _INDEXER,
    "deepseek_v4": _INDEXER,
    "dots3_note_text": _INDEXER,
    "glm5_next_text": _INDEXER,
    "glm_moe_dsa": _INDEXER,
    "hy_v4": _INDEXER,
    "minimax_m3_vl_text": _INDEXER,
    "mistral_large4_text": _INDEXER,
    **{
        name: {r"\.embed_positions\.": "positions are looked up without gradients"}
        for name in ("fsmt", "marian", "pegasus", "roformer", "speech_to_text")
    },
    "vibevoice_asr": {r"_tokenizer_encoder\.": "makes latents of sounds without gradients"},
    "speecht5": {r"\.masked_spec_embed$": "stands for frames hidden at random: compared without such"},
    "kyutai_speech_to_text": {r"^codec_model\.": "makes tokens of clips in generate() alone"},
    "encoder-decoder": {r"^encoder\.pooler\.": "makes one state of an encoder's, whose states are all read"},
    "nllb-moe": {r"\.expert_(?![01]\.)\d+\.": "chosen by no token: masks are read as the numbers of two experts"},
    "pop2piano": {r"^mel_conditioner\.": "read by generate() alone"},
    "phi4_multimodal": {r"\.embed_tokens_extend\.": "reads images and audio: compared on text alone"},
    "blt": {r"\.patcher\.": "cuts bytes into patches: no gradient comes through a choice"},
    "qwen4_exp_text": _INDEXER,
    "xlnet": {
        r"\.mask_emb$": "stands for tokens that are predicted in an order: compared without one",
        r"\.(seg_embed|r_s_bias)$": "reads segments: compared on one",
    },
    "deepseek_ocr2_vision": {r"\.query_1024_resolution\.": "makes features of larger images: compared on small ones"},
    "emu3": _TOKENIZER,
    "granite_docling": {r"\.connector\.fine\.": "reads tiles of which the batch says that they are fine"},
    "chameleon": _TOKENIZER,
    "deepseek_vl": _POOLED,
    "deepseek_vl_hybrid": _POOLED,
    "janus": {r"\.(vqmodel|generation_\w+)\.": "makes images: compared on those that are read"},
    "minicpm_ocr": {r"\.vit_merger\.": "merges patches in the other one of two modes"},
    "aya_vision": _BEFORE_NORM,
    "aria": _BEFORE_NORM,
    "llava": _BEFORE_NORM,
    "llava_next": _BEFORE_NORM,
    "llava_next_video": _BEFORE_NORM,
    "llava_onevision": _BEFORE_NORM,
    "video_llava": _BEFORE_NORM,
    "vipllava": _BEFORE_NORM,
}

# The same of batches without a medium.
NO_GRADIENT_WITHOUT: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "videos": {
        "nemotron_h_omni": {r"\.video_patch_projection\.": "reads videos: compared on images alone"},
        "video_llava": {r"\.video_tower\.": "reads videos: compared on images alone"},
    },
    "audio": {
        name: {r"\.?audio_tower\.": "reads sounds: compared on images alone"}
        for name in ("dots3_note", "inkling_mm_model", "muse_spark", "qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")
    },
}

# Parts that their constructors put into evaluation mode, where norms by the statistics of a batch would be others' for
# each part of it. Twins keep them there.
FROZEN: Mapping[str, tuple[str, ...]] = {"emu3": ("model.vqmodel",)}


# Layers of a decoder that read an encoder's states, where its class has no encoder.
_CROSS_ATTENTION = {r"\.(encoder_attn|crossattention|cross_attn)\w*\.": "reads an encoder: compared without one"}


def without_gradient(config: PreTrainedConfig, modalities: Collection[str] = ()) -> Mapping[str, str]:
    """Maps expressions of the trainable parameters that get no gradient, of a type and its parts, to the reasons.

    Args:
        media (`Collection[str]`): what the batches have beside text: `"images"`, `"videos"`, `"audio"`.
    """
    parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
    known = {name: why for part in (config, *parts) for name, why in NO_GRADIENT.get(part.model_type, {}).items()}
    lacking = [of_types for medium, of_types in NO_GRADIENT_WITHOUT.items() if medium not in modalities]
    unread = {name: why for of_types in lacking for name, why in of_types.get(config.model_type, {}).items()}
    has_encoder = getattr(config, "is_decoder", False) or type(config)().is_encoder_decoder
    alone = _CROSS_ATTENTION if has_encoder and not config.is_encoder_decoder else {}
    return {
        **known,
        **unread,
        **alone,
        **_unread_layers(config),
        **({} if "images" in modalities else _left_out(config)),
    }


def _left_out(config: PreTrainedConfig) -> dict[str, str]:
    """Finds the layers that read images in place of tokens."""
    layers = "|".join(map(str, getattr(config, "cross_attention_layers", None) or ()))
    return {rf"\blayers\.({layers})\.": "left out where there are no images"} if layers else {}


def tiny_reads(read: int | Sequence[int], num_layers: int, num_tiny: int) -> int | list[int]:
    """Returns the states of a tiny tower that are read, in the order of the full one; the last, if that one is."""
    layers = [read] if isinstance(read, int) else read
    states = [layer % (num_layers + 1) for layer in layers]
    last = num_tiny - min(num_layers - max(states), 1)
    new = [last - sum(other > state for other in set(states)) for state in states]
    found = [state - (num_tiny + 1 if layer < 0 else 0) for layer, state in zip(layers, new, strict=True)]
    return found[0] if isinstance(read, int) else found


def _unread_layers(config: PreTrainedConfig) -> dict[str, str]:
    """Finds the layers of an image tower behind the last one whose output the model reads."""
    read = getattr(config, "vision_feature_layer", None)
    layers = getattr(getattr(config, "vision_config", None), "num_hidden_layers", None)
    if read is None or layers is None:
        return {}
    first = max(layer % (layers + 1) for layer in ([read] if isinstance(read, int) else read))
    trailing = "|".join(map(str, range(first, layers)))
    return {rf"_tower\..*\blayers\.({trailing})\.": "behind the layer whose output is read"} if trailing else {}
