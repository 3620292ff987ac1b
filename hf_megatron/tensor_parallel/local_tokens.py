"""What a head asks of the tokens that its input is of, where several ranks hold some of a row."""

from typing import Protocol

from torch import Tensor


class TokensOfRank(Protocol):
    """The tokens of a row that a rank holds, where several ranks hold some each."""

    @property
    def length(self) -> int:
        """Tokens of the row."""

    def own(self, targets: Tensor) -> Tensor:
        """Keeps this rank's of `[batch, sequence]`: `[batch, held]`."""

    def join(self, tensor: Tensor) -> Tensor:
        """Joins the ranks' `[batch, held, ...]` to `[batch, sequence, ...]`, differentiable."""

    def sum(self, part: Tensor) -> Tensor:
        """Sums a tensor of any shape over the ranks, with its gradient."""
