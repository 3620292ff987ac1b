"""Point-to-point communication of activations and their gradients between neighboring stages.

The shapes of a message follow from the kind of the batch. Only the first message of a kind is preceded by a header with
shapes and dtypes; both sides remember them.
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
# Maximum number of unfinished sends, whose tensors are kept alive.
IN_FLIGHT = 2

Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


def encode(message: Message) -> Tensor:
    """Returns a header `[4096]` of integers with the shapes and dtypes of a message's tensors, and its layout."""
    # Number of tensors; dtype index, number of dims and dims of each; length and bytes of the layout; zeros.
    numbers = [len(message.tensors)]
    for tensor in message.tensors:
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    layout = list(message.layout.encode())
    numbers += [len(layout), *layout]
    if len(numbers) > _HEADER_SIZE:
        raise UnsupportedError(
            f"A pipeline stage sends {len(message.tensors)} tensors, whose shapes do not fit the header."
        )
    return torch.tensor(numbers + [0] * (_HEADER_SIZE - len(numbers)))


def decode(header: Tensor) -> tuple[Shapes, str]:
    """Returns the shapes and the layout from a header `[4096]` of `encode`."""
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
    """Tensors that are being received.

    Attributes:
        waited_ranks: the rank of the job that sends them.
    """

    tensors: tuple[Tensor, ...]
    works: list[Any]
    waited_ranks: tuple[int, ...]
    layout: str = ""

    def wait(self) -> tuple[Tensor, ...]:
        """Waits for the tensors, of any shape, and returns them."""
        for work in self.works:
            work.wait()
        return self.tensors


class Transport:
    """Point-to-point communication between the ranks of a pipeline.

    Args:
        group (`ProcessGroup`): the pipeline's ranks.
        device (`torch.device`): device of received tensors.
        directions (`tuple[ProcessGroup, ProcessGroup]`): groups of the same ranks for activations and for their
            gradients.

    Attributes:
        known: kind of message -> its shapes and layout.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        directions: tuple[dist.ProcessGroup, dist.ProcessGroup],
    ):
        self.group, self.device = group, device
        self._activations, self._gradients = directions
        self.known: dict[Hashable, tuple[Shapes, str]] = {}
        self._sends: deque[tuple[list[Any], tuple[Tensor, ...]]] = deque()

    def send(self, message: Message, peer: int, tag: int, kind: Hashable) -> None:
        """Starts sending a message.

        Args:
            message: its tensors are kept alive until they are sent.
            peer (`int`): rank in the group.
            tag (`int`): the same on both sides; different for messages that are in flight at the same time.
            kind: equal for messages of equal shapes; `None` for gradients, whose shapes the receiver knows.

        Raises:
            UnsupportedError: if an earlier message of this kind had other shapes.
        """
        held = tensors = tuple(tensor.detach().contiguous() for tensor in message.tensors)
        described = _get_shapes(tensors), message.layout
        if kind is not None and kind not in self.known:
            # First message of its kind: the header precedes the tensors.
            self.known[kind] = described
            held = (encode(message).to(self.device), *tensors)
        elif kind is not None and self.known[kind] != described:
            raise UnsupportedError(
                f"A pipeline stage sends tensors of the shapes {described}, but sent {self.known[kind]} for an earlier "
                "batch of the same shapes: they must be determined by the batch."
            )
        group = self._gradients if kind is None else self._activations
        works = [dist.isend(tensor, group=group, group_dst=peer, tag=tag) for tensor in held]
        self._sends.append((works, held))
        while len(self._sends) > IN_FLIGHT:
            self._finish_oldest()

    def receive(self, peer: int, tag: int, kind: Hashable) -> Arriving:
        """Starts receiving tensors of a kind."""
        if kind not in self.known:
            self.known[kind] = self.learn(peer, tag, kind)
        shapes, layout = self.known[kind]
        return self._receive(shapes, self._activations, peer, tag, layout)

    def forget(self, kinds: Iterable[Hashable]) -> None:
        """Removes the shapes of kinds that are used once; entries are keyed by `(stage, kind)`."""
        once = set(kinds)
        for name in [name for name in self.known if once and isinstance(name, tuple) and name[1] in once]:
            del self.known[name]

    def learn(self, peer: int, tag: int, kind: Hashable) -> tuple[Shapes, str]:
        """Receives the header of the first message of a kind; returns its shapes and layout."""
        shapes = (((_HEADER_SIZE,), torch.int64),)
        (header,) = self._receive(shapes, self._activations, peer, tag).wait()
        return decode(header)

    def receive_gradients(self, shapes: Shapes, peer: int, tag: int) -> Arriving:
        """Starts receiving the gradients of outputs of these shapes."""
        return self._receive(shapes, self._gradients, peer, tag)

    def _receive(self, shapes: Shapes, group: dist.ProcessGroup, peer: int, tag: int, layout: str = "") -> Arriving:
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes)
        works = [dist.irecv(tensor, group=group, group_src=peer, tag=tag) for tensor in tensors]
        return Arriving(tensors, works, (dist.get_global_rank(self.group, peer),), layout)

    def broadcast(self, tensors: tuple[Tensor, ...], source: int, layout: str = "") -> Message:
        """Broadcasts a message, with tensors of any shape, from one rank of the group; collective.

        Args:
            tensors, layout: the message; ignored on the other ranks.
            source (`int`): rank in the group.
        """
        is_source = dist.get_rank(self.group) == source
        header = encode(Message(tensors, layout)) if is_source else torch.empty(_HEADER_SIZE, dtype=torch.int64)
        header = header.to(self.device)
        # The header [4096] comes first, so that the other ranks can allocate the tensors.
        dist.broadcast(header, group=self.group, group_src=source)
        if not is_source:
            shapes, layout = decode(header)
            tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes)
        for tensor in tensors:
            dist.broadcast(tensor, group=self.group, group_src=source)
        return Message(tensors, layout)

    def sum_with(self, tensor: Tensor, peer: int, tag: int) -> None:
        """Adds another rank's tensor, of any shape, in place; both ranks call it and get the same bits."""
        other = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        ends = ((dist.isend, tensor.detach().contiguous()), (dist.irecv, other))
        # Batched: with NCCL, separate sends on both ranks would wait for each other.
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
