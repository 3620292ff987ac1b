"""Checks whether a model, and its schedule, support pipeline parallelism."""

from typing import Any

import torch
from torch import nn

from ..compat.torch_autograd import splits_python_functions
from ..config import MegatronConfig
from ..core.axes import Axes
from ..errors import UnsupportedError
from ..models.layers import LayerSequence
from ..models.modalities.sample_index import reads_modalities
from ..models.spec import ModelSpec
from .schedules import schedule

_TOKENS = "input_ids"


def require_cuttable(model: Any, spec: ModelSpec | None, config: MegatronConfig) -> None:
    """Raises `UnsupportedError` for a model whose type or main input does not support pipeline parallelism."""
    if spec is not None and spec.pp.no_pipeline is not None:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size}: model type {spec.model_type!r} does not support pipeline "
            f"parallelism: {spec.pp.no_pipeline}"
        )
    if spec is not None and spec.pp.recorded_layers and config.sequence_parallel:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size} with sequence_parallel=True: model type {spec.model_type!r} "
            "keeps full-sequence hidden states for later layers. Set sequence_parallel=False."
        )
    if model.main_input_name != _TOKENS and not (reads_modalities(model) or model.config.is_encoder_decoder):
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size}: {type(model).__name__} takes {model.main_input_name}, but a "
            f"pipeline supports models that take {_TOKENS}. Load it with pp_size=1."
        )


def row_to_cut(model: Any, spec: ModelSpec, config: MegatronConfig, axes: Axes) -> LayerSequence:
    """Returns the layers to split into stages; raises `UnsupportedError` if model or schedule do not support it."""
    require_cuttable(model, spec, config)
    row = LayerSequence.of(model, spec, "pp_size")
    require_schedule(
        spec, config, axes, [model.get_submodule(name) for name in row.names[row.decoder :]] if row.decoder else []
    )
    return row


def require_schedule(spec: ModelSpec, config: MegatronConfig, axes: Axes, decoder: list[nn.Module]) -> None:
    """Raises `UnsupportedError` if the schedule splits the backward and the model or configuration does not allow it.

    Args:
        decoder: layers of the decoder in an encoder-decoder.
    """
    if not schedule(config.pipeline_schedule).splits_backward:
        return
    if config.zero_stage == 3 and axes.size("dp_cp") > 1:
        raise UnsupportedError(
            f"MegatronConfig.pipeline_schedule = {config.pipeline_schedule!r} with zero_stage = 3: FSDP2 reduces "
            "gradients before the split backward has computed them. Use '1f1b', 'interleaved_1f1b', or zero_stage 1 "
            "or 2."
        )
    if axes.size("tp") > 1 and not splits_python_functions():
        raise UnsupportedError(
            f"MegatronConfig.pipeline_schedule = {config.pipeline_schedule!r} with tp_size = {config.tp_size} needs "
            f"torch 2.13, this is {torch.__version__}. Use '1f1b' or 'interleaved_1f1b'."
        )
    if spec.pp.no_zero_bubble is not None:
        raise UnsupportedError(
            f"MegatronConfig.pipeline_schedule = {config.pipeline_schedule!r}: model type {spec.model_type!r} does not "
            f"support a split backward: {spec.pp.no_zero_bubble} Use '1f1b' or 'interleaved_1f1b'."
        )
    # A weight that only the decoder's first layer has, such as a relative position bias, gets no hidden states.
    names = [{name for name, _ in layer.named_parameters()} for layer in decoder[:2]]
    if len(names) > 1 and (extra := sorted(names[0] - names[1])):
        raise UnsupportedError(
            f"MegatronConfig.pipeline_schedule = {config.pipeline_schedule!r}: {extra[0]} of the decoder's first layer "
            "is used for other layers without hidden states, so a split backward would not reach it. Use '1f1b' or "
            "'interleaved_1f1b'."
        )
