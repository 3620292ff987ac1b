"""Attention of one block of queries and keys, with its logsumexp (the log of the softmax denominator).

Blocks are merged by their logsumexp: `add_block` weights the outputs of two blocks of keys for the same queries.
Backward uses the logsumexp over all keys instead of a block's own (FlashAttention paper by Dao, section 3.1), so a
block's gradients equal its share of a single call with all keys.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .flash import (
    flash_backward_on_cpu,
    flash_forward_on_cpu,
    flash_varlen_backward,
    flash_varlen_forward,
    supports_varlen_flash,
)
from .load_balancing import Interval
from .masks import TILE, MaskBlock
from .varlen_batching import grouped, slice_tokens

_NOTHING = -math.inf


@dataclass(frozen=True)
class Kernel:
    """Computes attention weights from queries and keys.

    Args:
        scale (`float`): factor of the products of queries and keys.
        softcap (`float`, *optional*): scores are `softcap * tanh(score / softcap)`.
        joins (`bool`, *optional*): compute all blocks without a mask in one call of a varlen flash kernel. By default
            if there is one for the device and dtype.
    """

    scale: float
    softcap: float | None = None
    joins: bool | None = None

    def add_forward(
        self, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, blocks: Sequence[MaskBlock]
    ) -> None:
        """Merges blocks into `out` `[batch, heads, queries, width]` and `lse` `[batch, heads, queries]`, in place."""
        # Blocks without a mask in one varlen call per kind (causal or not), others one by one.
        groups, single = grouped(blocks, len(q)) if self._joins(q) else ([], blocks)
        for group in groups:
            parts = flash_varlen_forward(
                *(group.joined(q, group.queries), group.joined(k, group.keys), group.joined(v, group.keys)),
                edges=(group.edges(group.queries), group.edges(group.keys)),
                causal=group.causal,
                scale=self.scale,
            )
            outs, logarithms = (group.apart(part, group.queries) for part in parts)
            # A query may be in several blocks: merge their results one after the other.
            for interval, part, part_lse in zip(group.queries, outs, logarithms, strict=True):
                add_block(slice_tokens(out, interval), slice_tokens(lse, interval), part, part_lse)
        for block in single:
            queries = slice_tokens(q, block.queries)
            keys, values = slice_tokens(k, block.keys), slice_tokens(v, block.keys)
            part, part_lse = self.forward(queries, keys, values, causal=block.causal, mask=block.mask)
            add_block(slice_tokens(out, block.queries), slice_tokens(lse, block.queries), part, part_lse)

    def add_backward(
        self,
        gradients: tuple[Tensor, Tensor, Tensor],
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        blocks: Sequence[MaskBlock],
    ) -> None:
        """Adds the blocks' gradients of q, k and v in place; `given` is the gradient of `out`, over all keys."""
        groups, single = grouped(blocks, len(q)) if self._joins(q) else ([], blocks)
        for group in groups:
            # [batch, heads, tokens, width] -> [tokens of all blocks, heads, width]
            of_queries = (group.joined(tensor, group.queries) for tensor in (grad_out, q, out, _finite(lse)))
            given_parts, queries, outs, logarithms = of_queries
            parts = flash_varlen_backward(
                *(given_parts, queries, group.joined(k, group.keys), group.joined(v, group.keys), outs, logarithms),
                edges=(group.edges(group.queries), group.edges(group.keys)),
                causal=group.causal,
                scale=self.scale,
            )
            for gradient, intervals, part in zip(
                gradients, (group.queries, group.keys, group.keys), parts, strict=True
            ):
                for interval, chunk in zip(intervals, group.apart(part, intervals), strict=True):
                    slice_tokens(gradient, interval).add_(chunk)
        for block in single:
            places = block.queries, block.keys, block.keys
            chunk, keys, values = (slice_tokens(tensor, place) for tensor, place in zip((q, k, v), places, strict=True))
            towards, block_out, logarithm = (slice_tokens(tensor, block.queries) for tensor in (grad_out, out, lse))
            parts = self.backward(
                towards, chunk, keys, values, block_out, logarithm, causal=block.causal, mask=block.mask
            )
            for gradient, place, part in zip(gradients, places, parts, strict=True):
                slice_tokens(gradient, place).add_(part)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns the output `[batch, heads, queries, width]` and its logsumexp `[batch, heads, queries]`.

        Args:
            q, k, v: `[batch, heads, tokens, width]`; keys and values may have fewer heads.
            causal: a query sees keys up to its own position.
            mask: `[batch or 1, 1, queries, keys]`, true where a query sees a key.
        """
        mask = _to_device(mask, q)
        if self._is_fused(q):
            # Fused kernel for the full block; tiles below for soft-capped scores and other devices.
            out, lse = flash_forward_on_cpu(q, k, v, causal, _additive(mask, q), self.scale)
        else:
            parts = [self._forward_tile(q, k, v, tile, causal, mask) for tile in _tiles(q)]
            out, lse = (torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
        if mask is not None:
            # Queries without a key get zero weight in the merge.
            sees = mask.any(-1)
            lse = lse.masked_fill(~sees, _NOTHING)
            out = out.masked_fill(~sees.unsqueeze(-1), 0)
        return out, lse

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        mask: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this block's gradients of q, k and v; `out` and `lse` cover all keys."""
        lse, mask = _finite(lse), _to_device(mask, q)
        if self._is_fused(q):
            return flash_backward_on_cpu(gradient, q, k, v, out, lse, causal, _additive(mask, q), self.scale)
        # dk and dv accumulate over tiles and shared heads, hence in the logsumexp's precision.
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k, dtype=lse.dtype), torch.zeros_like(v, dtype=lse.dtype)
        groups = q.shape[1] // k.shape[1]
        # Scores of one tile of queries at a time, [batch, heads, tile, keys], recomputed from the logsumexp.
        for tile in _tiles(q):
            seen, part = _seen(k, tile, causal), slice(*tile)
            keys, values, grad_tile, q_tile = k[:, :, seen], v[:, :, seen], gradient[:, :, part], q[:, :, part]
            # P = softmax over all keys, from the saved logsumexp.
            scores, slope = self._scores(q_tile, keys, tile, causal, mask)
            weights = torch.exp(scores - lse[:, :, part].unsqueeze(-1))
            # Softmax backward: dS = P * (dP - rowsum(dO * O)); `along` is that row sum.
            towards = _per_group(grad_tile, values.transpose(-1, -2)).to(weights.dtype)
            along = (grad_tile * out[:, :, part]).sum(-1, keepdim=True).to(weights.dtype)
            # Through the soft-cap's derivative and the scale to the raw products.
            scored = weights * (towards - along) * slope * self.scale
            dq[:, :, part] = _per_group(scored.to(k.dtype), keys)
            # Key/value heads sum the gradients of the query heads that share them.
            dk[:, :, seen] += _sum_over_groups(scored.to(q.dtype).transpose(-1, -2) @ q_tile, groups)
            dv[:, :, seen] += _sum_over_groups(weights.to(gradient.dtype).transpose(-1, -2) @ grad_tile, groups)
        return dq, dk, dv

    def _forward_tile(
        self, q: Tensor, k: Tensor, v: Tensor, tile: Interval, causal: bool, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        seen = _seen(k, tile, causal)
        scores, _ = self._scores(q[:, :, slice(*tile)], k[:, :, seen], tile, causal, mask)
        lse = scores.logsumexp(-1)
        return _per_group(torch.exp(scores - _finite(lse).unsqueeze(-1)).to(v.dtype), v[:, :, seen]), lse

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        """Returns the scores `[batch, heads, queries, keys]` of all pairs, in the dtype of `q`."""
        raw = _per_group(q, k.transpose(-1, -2)) * self.scale
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap

    def _joins(self, q: Tensor) -> bool:
        return self.softcap is None and (supports_varlen_flash(q) if self.joins is None else self.joins)

    def _is_fused(self, q: Tensor) -> bool:
        return q.device.type == "cpu" and self.softcap is None

    def _scores(self, q: Tensor, k: Tensor, tile: Interval, causal: bool, mask: Tensor | None) -> tuple[Tensor, Any]:
        """Returns scores `[batch, heads, queries, keys]` of a tile of queries, and the derivative of the soft-cap."""
        raw = _per_group(q, k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * self.scale
        slope: Any = 1.0
        if self.softcap is not None:
            flat = torch.tanh(raw / self.softcap)
            raw, slope = flat * self.softcap, 1 - flat**2
        if causal:
            # The tile's first query has index tile[0], so it sees tile[0] + 1 keys.
            sees = torch.ones(raw.shape[-2:], dtype=torch.bool, device=raw.device).tril(tile[0])
            raw = raw.masked_fill(~sees, _NOTHING)
        return raw if mask is None else raw.masked_fill(~mask[:, :, slice(*tile)], _NOTHING), slope


def _tiles(q: Tensor) -> list[Interval]:
    """Splits the queries into tiles, so that the scores of only one tile exist at a time."""
    return [(start, min(start + TILE, q.shape[2])) for start in range(0, q.shape[2], TILE)] or [(0, 0)]


def _seen(k: Tensor, tile: Interval, causal: bool) -> slice:
    """Returns the keys that a tile of queries may see."""
    return slice(0, min(tile[1], k.shape[2]) if causal else k.shape[2])


def add_block(out: Tensor, lse: Tensor, other_out: Tensor, other_lse: Tensor) -> None:
    """Merges the attention of the same queries over other keys, in place; shapes as in `Kernel.forward`."""
    both = torch.logaddexp(lse, other_lse.to(lse.dtype))
    # Running softmax: rescale both outputs to the common denominator.
    base = _finite(both)
    out.mul_(torch.exp(lse - base).unsqueeze(-1)).add_(other_out * torch.exp(other_lse - base).unsqueeze(-1))
    lse.copy_(both)


def _finite(lse: Tensor) -> Tensor:
    """Replaces -inf, the logsumexp of no keys, by 0: `exp(-inf - 0)` is 0 but `exp(-inf + inf)` is NaN."""
    return lse.masked_fill(lse == _NOTHING, 0)


def _to_device(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Copies a mask, which is computed on the host, to the queries' device."""
    return None if mask is None else mask.to(q.device, non_blocking=True)


def _additive(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, _NOTHING)


def _per_group(left: Tensor, right: Tensor) -> Tensor:
    """Multiplies `[batch, heads, n, m]` by `[batch, kv_heads, m, k]`; each kv head serves neighboring heads."""
    groups = left.shape[1] // right.shape[1]
    return left @ (right if groups == 1 else right.repeat_interleave(groups, dim=1))


def _sum_over_groups(gradient: Tensor, groups: int) -> Tensor:
    """Sums the gradients `[batch, heads, ...]` of the heads that share a key/value head."""
    return gradient if groups == 1 else gradient.unflatten(1, (-1, groups)).sum(2)
