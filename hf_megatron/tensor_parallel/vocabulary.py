"""Tokens outside the vocabulary: an error, as in one process, where each rank looks for its own rows only."""

from torch import Tensor

from ..upstream import check_soon


def require_tokens(ids: Tensor, vocabulary: int, what: str, ignore_index: int | None = None) -> None:
    """Raises `IndexError` unless ids of any shape are rows of the vocabulary; on an accelerator the device fails."""
    outside = (ids < 0) | (ids >= vocabulary)
    if ignore_index is not None:
        outside &= ids != ignore_index
    check_soon(
        ~outside.any(),
        lambda: IndexError(f"{what} {int(ids[outside][0])} is out of bounds: there are {vocabulary}, from 0 on."),
    )
