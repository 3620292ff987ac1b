"""torch's flash kernels, called directly for the logsumexp that they return in addition to attention.

A block's backward takes the output and logsumexp over all keys (FlashAttention paper by Dao, section 3.1). The CPU
kernel takes equal lengths, so varlen blocks are computed one by one; on CUDA one call computes sequences of unequal
length.
"""

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor


def flash_forward_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns attention `[batch, heads, queries, width]` and its logsumexp; `mask` is added to the scores."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)


def flash_backward_on_cpu(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v for `out` and `lse`, which may cover more keys than `k` and `v`."""
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(gradient, q, k, v, out, lse, 0.0, causal, attn_mask=mask, scale=scale)


def supports_varlen_flash(q: Tensor) -> bool:
    """Returns whether torch's varlen flash kernel supports `[..., width]`.

    ROCm's kernel pads its logsumexp (pytorch#187872).
    """
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    width = q.shape[-1]
    return q.device.type == "cuda" and is_half and torch.version.hip is None and width % 8 == 0 and width <= 256


def flash_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, *, edges: tuple[list[int], list[int]], causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Returns attention `[tokens, heads, width]` and its logsumexp `[tokens, heads]`, for several blocks at once.

    Args:
        q, k, v: `[tokens, heads, width]`; keys and values may have fewer heads.
        edges: cumulative lengths of the blocks' queries and keys, from 0 to the total.
    """
    if q.device.type == "cpu":
        # One call per block, [1, heads, tokens, width]; results are concatenated along the tokens.
        blocks = _blocks_apart((q, k, v), edges)
        parts = [flash_forward_on_cpu(queries, keys, values, causal, None, scale) for queries, keys, values in blocks]
        outs, logarithms = zip(*parts, strict=True)
        return (
            torch.cat([out[0].transpose(0, 1) for out in outs]),
            torch.cat([logarithm[0].transpose(0, 1) for logarithm in logarithms]),
        )
    # One varlen call: [tokens of all blocks, heads, width]; the logsumexp comes back as [heads, tokens].
    places, longest = _flash_edges(edges, q.device)
    flash = torch.ops.aten._flash_attention_forward
    out, logarithm, *_ = flash(q, k, v, *places, *longest, 0.0, causal, False, scale=scale)
    return out, logarithm.transpose(0, 1)


def flash_varlen_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    edges: tuple[list[int], list[int]],
    causal: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Returns the gradients of q, k and v, `[tokens, heads, width]`; `out` and `lse` may cover more keys."""
    if q.device.type == "cpu":
        of_queries = _blocks_apart((gradient, out, lse.unsqueeze(-1)), (edges[0], edges[0]))
        parts = [
            flash_backward_on_cpu(grad_out, queries, keys, values, block_out, logarithm[..., 0], causal, None, scale)
            for (queries, keys, values), (grad_out, block_out, logarithm) in zip(
                _blocks_apart((q, k, v), edges), of_queries, strict=True
            )
        ]
        return tuple(torch.cat([part[0].transpose(0, 1) for part in column]) for column in zip(*parts, strict=True))
    places, longest = _flash_edges(edges, q.device)
    # Philox state of dropout, which is not used.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), dtype=torch.uint64, device=q.device)
    flash = torch.ops.aten._flash_attention_backward
    logarithm = lse.transpose(0, 1).contiguous()
    return flash(gradient, q, k, v, out, logarithm, *places, *longest, 0.0, causal, *state, scale=scale)


def _blocks_apart(
    tensors: tuple[Tensor, Tensor, Tensor], edges: tuple[list[int], list[int]]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields each block as `[1, heads, tokens, width]`; the first tensor has the first edges, the others the second."""
    for number in range(len(edges[0]) - 1):
        kinds = edges[0], edges[1], edges[1]
        first, second, third = (
            tensor[kind[number] : kind[number + 1]].transpose(0, 1).unsqueeze(0)
            for tensor, kind in zip(tensors, kinds, strict=True)
        )
        yield first, second, third


def _flash_edges(edges: tuple[list[int], list[int]], device: torch.device) -> tuple[list[Tensor], list[int]]:
    # Cumulative lengths on the device, and the longest block of each kind.
    places = [torch.tensor(one, dtype=torch.int32, device=device) for one in edges]
    return places, [max(stop - start for start, stop in pairwise(one)) for one in edges]
