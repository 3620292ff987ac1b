"""Dropout of adapters: masks of what every rank has are alike, those of parts are each rank's own."""

from torch import Tensor, nn

from ...core.communication.rng import TensorParallelRng


class _Dropout(nn.Dropout):
    streams: TensorParallelRng
    is_replicated: bool

    def forward(self, x: Tensor) -> Tensor:
        with self.streams.replicated() if self.is_replicated else self.streams.own():
            return super().forward(x)


def draw_in_turn(dropout: nn.Module, streams: TensorParallelRng, *, is_replicated: bool) -> None:
    """Has an adapter's dropout draw from the stream of what it is given, whichever one is live."""
    if isinstance(dropout, nn.Dropout):
        dropout.__class__ = _Dropout
        dropout.streams, dropout.is_replicated = streams, is_replicated  # type: ignore[assignment]
