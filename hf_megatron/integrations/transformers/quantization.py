"""Support for `quantization_config=` together with `megatron_config=`: which linears are quantized, and how."""

import types
from typing import Any

import torch
from torch import nn

from ...errors import ConfigError, UnsupportedError
from ...parallel_state import ParallelState, parallel_state
from ...tensor_parallel.quantization.eight_bit import EightBit, Int8Rows
from ...tensor_parallel.quantization.four_bit import FourBit
from ...tensor_parallel.quantization.scheme import NAME, Quantization, Scheme, dequantize_linears


def requested(settings: Any) -> Any:
    """Returns the transformers quantizer for a `quantization_config`, before any weight is read; `None` without one.

    Raises:
        ConfigError: the value is not a quantization config of transformers.
        ImportError: the quantization library is missing (message from transformers).
        UnsupportedError: a quantization method without a recorded parity result.
    """
    if settings is None:
        return None
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AutoHfQuantizer, AutoQuantizationConfig
    from transformers.utils.quantization_config import QuantizationConfigMixin

    if isinstance(settings, dict):
        try:
            settings = AutoQuantizationConfig.from_dict(settings)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"quantization_config = {settings!r}: {error}") from error
    if not isinstance(settings, QuantizationConfigMixin):
        raise ConfigError(
            f"quantization_config = {settings!r} is not valid: expected a dict or a transformers config such as "
            f"BitsAndBytesConfig. Valid methods: {', '.join(AUTO_QUANTIZATION_CONFIG_MAPPING)}."
        )
    _scheme(settings)
    quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=False)
    quantizer.validate_environment(device_map=None)
    return quantizer


def _scheme(settings: Any) -> Scheme:
    kind = type(settings).__name__
    if kind == "BitsAndBytesConfig" and settings.load_in_4bit:
        return FourBit(
            settings.bnb_4bit_quant_type,
            settings.bnb_4bit_compute_dtype,
            settings.bnb_4bit_use_double_quant,
            settings.bnb_4bit_quant_storage,
        )
    if kind == "BitsAndBytesConfig":
        if settings.llm_int8_has_fp16_weight or settings.llm_int8_enable_fp32_cpu_offload:
            raise UnsupportedError(
                "BitsAndBytesConfig.llm_int8_has_fp16_weight and llm_int8_enable_fp32_cpu_offload are not supported "
                "with megatron_config: weights are stored in 8 bits on the rank's device. Leave both False."
            )
        return EightBit(settings.llm_int8_threshold)
    if kind == "TorchAoConfig":
        how = settings.quant_type
        if type(how).__name__ == "Int8WeightOnlyConfig" and _scales_rows(how):
            if settings.include_input_output_embeddings:
                raise UnsupportedError(
                    "TorchAoConfig.include_input_output_embeddings is not supported with megatron_config: the sharded "
                    "embedding and the loss read these weights. Set it to False."
                )
            return Int8Rows(how)
        raise UnsupportedError(
            f"TorchAoConfig({how!r}) is not supported with megatron_config. Use Int8WeightOnlyConfig() with one scale "
            "per row."
        )
    raise UnsupportedError(
        f"quantization_config = {kind} is not supported with megatron_config. Use BitsAndBytesConfig (4 or 8 bits) or "
        "TorchAoConfig(Int8WeightOnlyConfig())."
    )


def _scales_rows(how: Any) -> bool:
    from torchao.quantization import PerRow

    return isinstance(how.granularity, PerRow)


def plan_quantization(model: Any, quantizer: Any, state: ParallelState) -> None:
    """Finds the linears that transformers would quantize and checks that their local shards can be quantized."""
    from transformers.quantizers.quantizers_utils import should_convert_module

    settings = quantizer.quantization_config
    is_torchao = type(settings).__name__ == "TorchAoConfig"
    named = settings.modules_to_not_convert if is_torchao else settings.llm_int8_skip_modules
    left_out = quantizer.get_modules_to_not_convert(model, named, model._keep_in_fp32_modules)
    quantizer.modules_to_not_convert = left_out
    scheme, linears = _scheme(settings), []
    for name, module in model.named_modules():
        # transformers matches names of weights for torchao and names of modules for bitsandbytes.
        if not should_convert_module(f"{name}.weight" if is_torchao else name, left_out):
            continue
        if type(module).__name__ == "Conv1D":
            raise UnsupportedError(
                f"quantization_config is not supported for {name} with megatron_config: it is a Conv1D, whose weight "
                "is transposed. Load the model without quantization_config."
            )
        if isinstance(module, nn.Linear):
            linears.append(name)
            if isinstance(scheme, FourBit):
                # PEFT creates adapters in the compute dtype of the linear.
                module.compute_dtype = scheme.compute_dtype  # type: ignore[assignment]
    quantization = Quantization(scheme, f"quantization_config = {type(settings).__name__}", linears)
    quantization.require_fit(model, state)
    state.placed[NAME] = quantization


def quantize_arrived(model: Any, name: str) -> None:
    """Quantizes a weight that was just loaded, if it belongs to a quantized linear."""
    state = parallel_state(model)
    if state is not None and NAME in state.placed:
        state.placed[NAME].take(model, name, state)


def finish_quantization(model: Any, quantizer: Any, state: ParallelState) -> None:
    """Quantizes weights that need communication, and sets the attributes that training loops read from the model."""
    if quantizer is None:
        return
    state.placed[NAME].finish(model, state)
    settings = quantizer.quantization_config
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, settings.quant_method
    four, eight = (bool(vars(settings).get(f"_load_in_{bits}bit")) for bits in (4, 8))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = four, eight
    state.patches.replace(model, "dequantize", types.MethodType(dequantize, model))


def dequantize(model: Any, dtype: torch.dtype | None = None) -> Any:
    """Replaces quantized weights by dense ones, in the model's dtype or the given one; returns the model."""
    state = parallel_state(model)
    assert state is not None
    dequantize_linears(model, state, dtype or model.dtype)
    for attribute in ("hf_quantizer", "is_quantized", "quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit"):
        vars(model).pop(attribute, None)
    return model


def require_dense(model: Any) -> None:
    """Raises `UnsupportedError` when a quantized model is about to be saved."""
    state = parallel_state(model)
    if state is not None and NAME in state.placed:
        raise UnsupportedError(
            f"save_pretrained does not support a {type(model).__name__} with quantized weights, because each rank "
            "holds only its quantized shard. Save the adapter (PeftModel.save_pretrained), or save the weights after "
            "model.dequantize() or merge_and_unload()."
        )
