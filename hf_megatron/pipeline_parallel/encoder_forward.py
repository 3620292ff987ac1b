"""Calls of the encoder alone, as `generate()` makes them: its layers run from stage to stage.

Every rank gets the output, and the decoder is called with it afterwards, once per token.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ..errors import UnsupportedError
from .microbatches import DECODER_INPUTS, batch_size
from .pipeline import Pipeline
from .stage_payload import Message

_KIND = ("encoder",)
_TAG = 0


@dataclass
class _EncoderOutput(BaseModelOutput):
    """Output of an encoder that was called alone. Decoders of MoE models copy its router logits, for the loss only."""

    router_logits: Any = None


def pipelined_encoder(pipeline: Pipeline, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an encoder's forward that runs its stages if it is called alone; `forward` is the encoder's own."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def encode(*args: Any, **kwargs: Any) -> Any:
        # Called by the model's own forward inside a stage.
        if pipeline.cut.boundary.is_running:
            return forward(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        bound |= bound.pop("kwargs", {})
        return _encode(pipeline, forward, bound)

    return encode


def _encode(pipeline: Pipeline, forward: Callable[..., Any], arguments: dict[str, Any]) -> BaseModelOutput:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "The encoder of a pipelined model was called alone with gradients enabled, which would not reach it. Call "
            "the model, or the encoder under torch.no_grad()."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if arguments.get(name):
            raise UnsupportedError(
                f"{name}=True: pipeline stages return none, because each has only its own layers. Use pp_size=1."
            )
    pipeline.checks.require_tokens(arguments)
    # The trial forward runs the full model, so it needs decoder inputs as well.
    pipeline.trial_forward.of_call(_full_call(pipeline, arguments), is_read=False)
    boundary, transport, rank = pipeline.cut.boundary, pipeline.runner.transport, pipeline.runner.rank
    rank_of = boundary.stages.rank_of
    last = boundary.stages.get_layer_stage(pipeline.cut.layers.decoder - 1)
    output: Any = None
    message: Message | None = None
    # One microbatch through the encoder's stages; later stages have no encoder layers and take no part.
    for stage in range(last + 1):
        if rank_of[stage] != rank:
            continue
        if stage and rank_of[stage - 1] != rank:
            arriving = transport.receive(rank_of[stage - 1], _TAG, (stage, _KIND))
            message = Message(arriving.wait(), arriving.layout)
        output = boundary.run(stage, message, lambda: forward(**arguments), encodes_alone=True)
        if stage < last:
            message = output
            if rank_of[stage + 1] != rank:
                transport.send(output, rank_of[stage + 1], _TAG, (stage + 1, _KIND))
    transport.flush()
    transport.forget([_KIND])
    # [batch, sequence, hidden], from the rank of the encoder's last layer to all ranks of the pipeline.
    local: tuple[Tensor, ...] = (output.last_hidden_state,) if rank == rank_of[last] else ()
    return _EncoderOutput(last_hidden_state=transport.broadcast(local, rank_of[last]).tensors[0])


def _full_call(pipeline: Pipeline, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of the model that encodes the same inputs and decodes one token per sample."""
    known = pipeline.signature.parameters
    tensors = {name: value for name, value in arguments.items() if name in known and isinstance(value, Tensor)}
    tokens = torch.zeros(batch_size(tensors), 1, dtype=torch.long, device=pipeline.state.mesh.device)
    return tensors | {DECODER_INPUTS[0]: tokens}
