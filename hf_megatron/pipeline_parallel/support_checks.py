"""Which models, and which of them by which schedules, cannot be cut."""

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
    """Raises `UnsupportedError` for a model that is no single stack of layers, or of a type that says so."""
    if spec is not None and spec.pp.no_pipeline is not None:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size}: model type {spec.model_type!r} cannot be cut: "
            f"{spec.pp.no_pipeline}"
        )
    if spec is not None and spec.pp.recorded_layers and config.sequence_parallel:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size} with sequence_parallel=True: the loop of model type "
            f"{spec.model_type!r} keeps whole hidden states for later layers. Set sequence_parallel=False."
        )
    if model.main_input_name != _TOKENS and not (reads_modalities(model) or model.config.is_encoder_decoder):
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size}: {type(model).__name__} takes {model.main_input_name}, and a "
            f"pipeline cuts models that take {_TOKENS}. Load it with pp_size=1."
        )


def row_to_cut(model: Any, spec: ModelSpec, config: MegatronConfig, axes: Axes) -> LayerSequence:
    """Returns the layers that a pipeline cuts; raises `UnsupportedError` for a model or schedule that cannot be."""
    require_cuttable(model, spec, config)
    row = LayerSequence.of(model, spec, "pp_size")
    require_schedule(
        spec, config, axes, [model.get_submodule(name) for name in row.names[row.decoder :]] if row.decoder else []
    )
    return row


def require_schedule(spec: ModelSpec, config: MegatronConfig, axes: Axes, decoder: list[nn.Module]) -> None:
    """Raises `UnsupportedError` for a split of backward that something does not allow.

    Args:
        decoder: layers behind those of an encoder.
    """
    if not schedule(config.pipeline_schedule).splits_backward:
        return
    if config.zero_stage == 3 and axes.size("dp_cp") > 1:
        raise UnsupportedError(
            f"MegatronConfig.pipeline_schedule = {config.pipeline_schedule!r} with zero_stage = 3: FSDP2 reduces "
            "gradients before those of the weights are computed. Use '1f1b', 'interleaved_1f1b', or zero_stage 1 or 2."
        )
    if axes.size("tp") > 1 and not splits_python_functions():
        raise UnsupportedError(
            f"MegatronConfig.pipeline_schedule = {config.pipeline_schedule!r} with tp_size = {config.tp_size} needs "
            f"torch 2.13, this is {torch.__version__}. Use '1f1b' or 'interleaved_1f1b'."
        )
    if spec.pp.no_zero_bubble is not None:
        raise UnsupportedError(
            f"MegatronConfig.pipeline_schedule = {config.pipeline_schedule!r}: model type {spec.model_type!r} has no "
            f"backward in two steps: {spec.pp.no_zero_bubble} Use '1f1b' or 'interleaved_1f1b'."
        )
    names = [{name for name, _ in layer.named_parameters()} for layer in decoder[:2]]
    if len(names) > 1 and (own := sorted(names[0] - names[1])):
        raise UnsupportedError(
            f"MegatronConfig.pipeline_schedule = {config.pipeline_schedule!r}: {own[0]} of the decoder's first layer "
            "makes what other layers read, of no hidden states. Use '1f1b' or 'interleaved_1f1b'."
        )
