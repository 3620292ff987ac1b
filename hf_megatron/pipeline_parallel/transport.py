"""Activations and their gradients between neighbouring stages.

Both sides know from the batch which shapes will travel once they have seen them; only the first time a batch of a kind
comes by does a header go ahead.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedError

_HEADER_SIZE = 256
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
# Sends that may be under way: the receiver takes them in order.
_IN_FLIGHT = 2

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def encode(tensors: tuple[Tensor, ...]) -> Tensor:
    """Writes the shapes and dtypes of tensors of any shape as `[256]` integers."""
    numbers = [len(tensors)]
    for tensor in tensors:
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    if len(numbers) > _HEADER_SIZE:
        raise UnsupportedError(f"{len(tensors)} tensors leave a pipeline stage; their shapes do not fit the header.")
    return torch.tensor(numbers + [0] * (_HEADER_SIZE - len(numbers)))


def decode(header: Tensor) -> Shapes:
    """Reads what `encode` wrote, `[256]`."""
    numbers = iter(header.tolist())
    shapes = []
    for _ in range(next(numbers)):
        dtype = _DTYPES[next(numbers)]
        shapes.append((tuple(next(numbers) for _ in range(next(numbers))), dtype))
    return tuple(shapes)


def _shapes_of(tensors: tuple[Tensor, ...]) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


@dataclass
class Arriving:
    """Tensors on their way to this rank."""

    tensors: tuple[Tensor, ...]
    works: list[Any]

    def wait(self) -> tuple[Tensor, ...]:
        """Returns the tensors, of any shape, once they are there."""
        for work in self.works:
            work.wait()
        return self.tensors


class Transport:
    """Sends and receives over the ranks of a pipeline.

    Args:
        group (`ProcessGroup`): the pipeline's ranks.
        device (`torch.device`): where received tensors go.

    Attributes:
        known: kinds of messages -> their shapes.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self._is_gloo = dist.get_backend(group) == "gloo"
        self.known: dict[Hashable, Shapes] = {}
        self._sends: deque[tuple[list[Any], tuple[Tensor, ...]]] = deque()

    def send(self, tensors: tuple[Tensor, ...], peer: int, tag: int, kind: Hashable) -> None:
        """Starts sending tensors of any shape; `UnsupportedError` for one kind with different shapes.

        Args:
            tensors: kept until they are sent.
            peer (`int`): rank in the group.
            tag (`int`): the same on both sides, different for messages that are under way together.
            kind: equal for messages of equal shapes; `None` if the receiver knows them.
        """
        tensors = tuple(tensor.detach().contiguous() for tensor in tensors)
        shapes = _shapes_of(tensors)
        held = tensors
        if kind is not None and kind not in self.known:
            self.known[kind] = shapes
            held = (encode(tensors).to(self.device), *tensors)
        elif kind is not None and self.known[kind] != shapes:
            raise UnsupportedError(
                f"What leaves a pipeline stage has the shapes {shapes} and had {self.known[kind]} for a batch of the "
                "same shapes: they must follow from the batch."
            )
        works = [work for tensor in held for work in self._start(dist.isend, tensor, peer, tag)]
        self._sends.append((works, held))
        while len(self._sends) > _IN_FLIGHT:
            self._finish_oldest()

    def receive(self, peer: int, tag: int, kind: Hashable) -> Arriving:
        """Starts receiving tensors of a kind."""
        if kind not in self.known:
            self.known[kind] = self.learn(peer, tag, kind)
        return self.receive_shapes(self.known[kind], peer, tag)

    def forget(self, kinds: Iterable[Hashable]) -> None:
        """Forgets kinds `(stage, kind)` of messages that come once."""
        once = set(kinds)
        for name in [name for name in self.known if once and isinstance(name, tuple) and name[1] in once]:
            del self.known[name]

    def learn(self, peer: int, tag: int, kind: Hashable) -> Shapes:
        """Returns the shapes of a kind that arrives for the first time, from the header that goes ahead."""
        header = torch.empty(_HEADER_SIZE, dtype=torch.int64, device=self.device)
        for work in self._start(dist.irecv, header, peer, tag):
            work.wait()
        return decode(header)

    def receive_shapes(self, shapes: Shapes, peer: int, tag: int) -> Arriving:
        """Starts receiving tensors of known shapes."""
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes)
        works = [work for tensor in tensors for work in self._start(dist.irecv, tensor, peer, tag)]
        return Arriving(tensors, works)

    def broadcast(self, tensors: tuple[Tensor, ...], source: int) -> tuple[Tensor, ...]:
        """Gives every rank the tensors, of any shape, of one of the group; the others pass none."""
        is_source = dist.get_rank(self.group) == source
        header = encode(tensors) if is_source else torch.empty(_HEADER_SIZE, dtype=torch.int64)
        header = header.to(self.device)
        dist.broadcast(header, group=self.group, group_src=source)
        if not is_source:
            tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in decode(header))
        for tensor in tensors:
            dist.broadcast(tensor, group=self.group, group_src=source)
        return tensors

    def sum_with(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Adds another rank's tensor, of any shape, in place; both ranks call it and get the same bits."""
        other = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        ends = ((dist.isend, tensor.detach().contiguous()), (dist.irecv, other))
        # Together: NCCL would have both wait for what neither has begun to send.
        operations = [dist.P2POp(operation, end, group=self.group, group_peer=peer, tag=tag) for operation, end in ends]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        tensor += other

    def flush(self) -> None:
        """Waits for all sends."""
        while self._sends:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        works, _ = self._sends.popleft()
        for work in works:
            work.wait()

    def _start(self, operation: Any, tensor: Tensor, peer: int, tag: int) -> list[Any]:
        if self._is_gloo:
            end = "group_dst" if operation is dist.isend else "group_src"
            return [operation(tensor, group=self.group, tag=tag, **{end: peer})]
        return dist.batch_isend_irecv([dist.P2POp(operation, tensor, group=self.group, group_peer=peer, tag=tag)])
