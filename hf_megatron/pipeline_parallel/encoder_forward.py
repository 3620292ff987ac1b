"""A call of the encoder alone, as `generate()` makes it: its layers run from stage to stage, for all ranks.

Its decoder is called with that output afterwards, as often as there are tokens.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from ..errors import UnsupportedError
from .microbatches import DECODER_INPUTS, batch_size
from .stage_payload import Message
from .stage_runner import StageRunner

_KIND = ("encoder",)
_TAG = 0


def pipelined_encoder(runner: StageRunner, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an encoder's forward that runs its stages where it is called by itself; `forward` is its own."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def encode(*args: Any, **kwargs: Any) -> Any:
        if runner.boundary.is_running:
            return forward(*args, **kwargs)
        bound = signature.bind(*args, **kwargs).arguments
        bound |= bound.pop("kwargs", {})
        return _encode(runner, forward, bound)

    return encode


def _encode(runner: StageRunner, forward: Callable[..., Any], arguments: dict[str, Any]) -> BaseModelOutput:
    if torch.is_grad_enabled():
        raise UnsupportedError(
            "The encoder of a pipelined model was called by itself with gradients, which would not reach it. Call the "
            "whole model, or the encoder under torch.no_grad()."
        )
    for name in ("output_attentions", "output_hidden_states"):
        if arguments.get(name):
            raise UnsupportedError(f"{name}=True: no rank of a pipeline has those of all layers.")
    runner.checks.require_tokens(arguments)
    runner.trial_forward.of_call(_full_call(runner, arguments), is_read=False)
    boundary, transport, rank = runner.boundary, runner.transport, runner.mesh.pp_rank
    rank_of = boundary.stages.rank_of
    last = boundary.stages.stage_of_layer(runner.cut.layers.decoder - 1)
    output: Any = None
    message: Message | None = None
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
    own: tuple[Tensor, ...] = (output.last_hidden_state,) if rank == rank_of[last] else ()
    return BaseModelOutput(last_hidden_state=transport.broadcast(own, rank_of[last])[0])


def _full_call(runner: StageRunner, arguments: dict[str, Any]) -> dict[str, Any]:
    """Returns what the model would be called with to encode this, and decode a token of each row."""
    known = runner.signature.parameters
    found = {name: value for name, value in arguments.items() if name in known and isinstance(value, Tensor)}
    tokens = torch.zeros(batch_size(found), 1, dtype=torch.long, device=runner.mesh.device)
    return found | {DECODER_INPUTS[0]: tokens}
