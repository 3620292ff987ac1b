"""Attention over split sequences as one operator of a compiled graph.

Which keys a query sees, and on which rank they are, is known on the host only, and the ranks communicate in the middle
of the computation: the compiler cannot trace it. The operator runs it eagerly and keeps its autograd graph; a second
operator runs the backward of that graph. Graphs refer to the mask and to the kept autograd graph by numbers in host
tensors, on whose values the compiler does not specialize.
"""

from typing import Any

import torch
from torch import Tensor

from ..compat.torch_autograd import recording_autograd_in_operator
from ..core.runtime import RUNTIME, keep_by_number
from ..errors import UnsupportedError
from .split_attention import attend_to_split_sequence


class _KeptGraph:
    """Autograd graph of one call; `backward` returns the gradients of its tensor inputs."""

    def __init__(self, inputs: list[Tensor | None], output: Tensor):
        self.inputs, self.output = inputs, output

    def backward(self, grad: Tensor) -> list[Tensor]:
        tensors = [tensor for tensor in self.inputs if tensor is not None]
        # The compiled graph may run several times over one forward (retain_graph=True).
        return list(torch.autograd.grad(self.output, tensors, grad, retain_graph=True))


@torch.library.custom_op("hf_megatron::context_attention", mutates_args=())
def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    is_causal: bool,
    keeps_graph: bool,
) -> tuple[Tensor, Tensor]:
    context_mask = RUNTIME.context_masks[int(mask)]
    with recording_autograd_in_operator(), torch.set_grad_enabled(keeps_graph):
        q, k, v = (tensor.detach().requires_grad_(keeps_graph) for tensor in (q, k, v))
        sinks = None if sinks is None else sinks.detach().requires_grad_(keeps_graph)
        output = attend_to_split_sequence(q, k, v, sinks, context_mask, scale, softcap, is_causal)
    graph = _KeptGraph([q, k, v, sinks], output)
    number = torch.tensor([id(graph)])
    if keeps_graph:
        keep_by_number(RUNTIME.attention_graphs, number, graph)
    return output.detach(), number


@_attention.register_fake
def _(q, k, v, sinks, mask, scale, softcap, is_causal, keeps_graph):  # type: ignore[no-untyped-def]
    output = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
    return output, torch.empty(1, dtype=torch.int64, device="cpu")


@torch.library.custom_op("hf_megatron::context_attention_backward", mutates_args=())
def _attention_backward(
    grad: Tensor, number: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None
) -> list[Tensor]:
    graph = RUNTIME.attention_graphs.get(int(number))
    if graph is None:
        raise UnsupportedError(
            "The saved tensors of compiled context-parallel attention were copied (by hooks on saved tensors?), which "
            "is not supported. Do not compile the layers, or set cp_size=1."
        )
    with recording_autograd_in_operator():
        gradients = graph.backward(grad)
    # Operators must not return views of each other or of their inputs.
    return [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]


@_attention_backward.register_fake
def _(grad, number, q, k, v, sinks):  # type: ignore[no-untyped-def]
    return [tensor.new_empty(tensor.shape) for tensor in (q, k, v, sinks) if tensor is not None]


def _save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks = inputs[:4]
    ctx.save_for_backward(output[1], q, k, v, sinks)


def _run_backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    number, q, k, v, sinks = ctx.saved_tensors
    gradients = _attention_backward(grad, number, q, k, v, sinks)
    return (*gradients, *[None] * (9 - len(gradients)))


_attention.register_autograd(_run_backward, setup_context=_save)


def run_compiled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    is_causal: bool,
) -> Tensor:
    """Computes `attend_to_split_sequence` inside of a compiled graph; `mask` is `ContextMask.number`."""
    keeps_graph = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return _attention(q, k, v, sinks, mask, scale, softcap, is_causal, keeps_graph)[0]
