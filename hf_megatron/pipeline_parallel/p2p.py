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
from .stage_payload import Message

_HEADER_SIZE = 4096
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.bool)
# Sends that may be under way: the receiver takes them in order.
IN_FLIGHT = 2

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def encode(message: Message) -> Tensor:
    """Writes the shapes and dtypes of a message's tensors, and its layout, as `[4096]` integers."""
    numbers = [len(message.tensors)]
    for tensor in message.tensors:
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    layout = list(message.layout.encode())
    numbers += [len(layout), *layout]
    if len(numbers) > _HEADER_SIZE:
        raise UnsupportedError(
            f"{len(message.tensors)} tensors leave a pipeline stage; their shapes do not fit the header."
        )
    return torch.tensor(numbers + [0] * (_HEADER_SIZE - len(numbers)))


def decode(header: Tensor) -> tuple[Shapes, str]:
    """Reads the shapes and the layout that `encode` wrote, `[4096]`."""
    numbers = iter(header.tolist())
    shapes = []
    for _ in range(next(numbers)):
        dtype = _DTYPES[next(numbers)]
        shapes.append((tuple(next(numbers) for _ in range(next(numbers))), dtype))
    return tuple(shapes), bytes(next(numbers) for _ in range(next(numbers))).decode()


def _get_shapes(tensors: tuple[Tensor, ...]) -> Shapes:
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)


@dataclass
class Arriving:
    """Tensors on their way to this rank."""

    tensors: tuple[Tensor, ...]
    works: list[Any]
    layout: str = ""

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
        known: kinds of messages -> their shapes and layout.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self._is_gloo = dist.get_backend(group) == "gloo"
        self.known: dict[Hashable, tuple[Shapes, str]] = {}
        self._sends: deque[tuple[list[Any], tuple[Tensor, ...]]] = deque()

    def send(self, message: Message, peer: int, tag: int, kind: Hashable) -> None:
        """Starts sending a message; `UnsupportedError` for one kind with different shapes.

        Args:
            message: its tensors are kept until they are sent.
            peer (`int`): rank in the group.
            tag (`int`): the same on both sides, different for messages that are under way together.
            kind: equal for messages of equal shapes; `None` if the receiver knows them.
        """
        held = tensors = tuple(tensor.detach().contiguous() for tensor in message.tensors)
        described = _get_shapes(tensors), message.layout
        if kind is not None and kind not in self.known:
            self.known[kind] = described
            held = (encode(message).to(self.device), *tensors)
        elif kind is not None and self.known[kind] != described:
            raise UnsupportedError(
                f"What leaves a pipeline stage has the shapes {described} and had {self.known[kind]} for a batch of "
                "the same shapes: they must follow from the batch."
            )
        works = [work for tensor in held for work in self._start(dist.isend, tensor, peer, tag)]
        self._sends.append((works, held))
        while len(self._sends) > IN_FLIGHT:
            self._finish_oldest()

    def receive(self, peer: int, tag: int, kind: Hashable) -> Arriving:
        """Starts receiving tensors of a kind."""
        if kind not in self.known:
            self.known[kind] = self.learn(peer, tag, kind)
        shapes, layout = self.known[kind]
        return self.receive_shapes(shapes, peer, tag, layout)

    def forget(self, kinds: Iterable[Hashable]) -> None:
        """Forgets kinds `(stage, kind)` of messages that come once."""
        once = set(kinds)
        for name in [name for name in self.known if once and isinstance(name, tuple) and name[1] in once]:
            del self.known[name]

    def learn(self, peer: int, tag: int, kind: Hashable) -> tuple[Shapes, str]:
        """Returns the shapes and layout of a kind that arrives for the first time, from the header ahead of it."""
        header = torch.empty(_HEADER_SIZE, dtype=torch.int64, device=self.device)
        for work in self._start(dist.irecv, header, peer, tag):
            work.wait()
        return decode(header)

    def receive_shapes(self, shapes: Shapes, peer: int, tag: int, layout: str = "") -> Arriving:
        """Starts receiving tensors of known shapes."""
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes)
        works = [work for tensor in tensors for work in self._start(dist.irecv, tensor, peer, tag)]
        return Arriving(tensors, works, layout)

    def broadcast(self, tensors: tuple[Tensor, ...], source: int) -> tuple[Tensor, ...]:
        """Gives every rank the tensors, of any shape, of one of the group; the others pass none."""
        is_source = dist.get_rank(self.group) == source
        header = encode(Message(tensors)) if is_source else torch.empty(_HEADER_SIZE, dtype=torch.int64)
        header = header.to(self.device)
        dist.broadcast(header, group=self.group, group_src=source)
        if not is_source:
            tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in decode(header)[0])
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
