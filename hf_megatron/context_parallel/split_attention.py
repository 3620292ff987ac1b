"""Attention of an attention module over a sequence that is split over ranks."""

from torch import Tensor

from ..errors import UnsupportedError
from .attention import context_attention, with_fully_masked_queries
from .kernels import Kernel
from .mask_specs import ContextMask


def attend_to_split_sequence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    mask: ContextMask,
    scale: float,
    softcap: float | None,
    is_causal: bool,
) -> Tensor:
    """Computes attention of a rank's tokens over the full sequence; returns `[batch, local, heads, value width]`.

    Args:
        query, key, value: `[batch, heads, local, width]`; keys and values may have fewer heads.
        sinks (`Tensor`, *optional*): `[heads]`, see `context_attention`.
        is_causal (`bool`): flag of the attention module, which sdpa uses instead of a causal mask.
    """
    if not (mask.spreads or is_causal) and mask.leaves_out_causal:
        raise UnsupportedError(
            "An attention module with is_causal = False and cp_size > 1: for a causal mask, sdpa gets `is_causal` "
            "instead of the mask. Set it to True, or use cp_size=1."
        )
    kernel = Kernel(scale, softcap)
    layout, fully_masked = mask.token_layout, mask.fully_masked
    out = context_attention(query, key, value, layout, mask.mask, kernel, sinks)
    # With a sink, eager attention returns zeros for such queries as well.
    if fully_masked is not None and sinks is None:
        out = with_fully_masked_queries(out, query, key, value, layout, layout.own(fully_masked), kernel)
    # transformers expects [batch, local, heads, width].
    return out.transpose(1, 2).contiguous()
