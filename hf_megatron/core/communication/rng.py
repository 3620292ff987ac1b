"""The random streams of ranks that share a batch: one replicated, one of each rank.

Every training forward starts from one state of the default generator, that of the group's first rank, and of Python's
and numpy's. What all ranks compute alike draws from it. While a rank computes a part of its own, the default generator
holds a stream that is made of the replicated one's state and the rank; the replicated one moves on if that was drawn
from. Both are functions of the default generator's state, which `torch.utils.checkpoint` restores, so both are replayed
when something is computed again. Megatron keeps a second generator and teaches its own checkpoint function about it.

A model that draws nothing, or on all ranks alike, leaves a script the random numbers that it has in one process.

Every state is on the host, that of a CUDA generator (its seed and offset) too: nothing here waits for a device.
"""

import hashlib
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.shared import Shared
from ...compat.torch_autograd import in_backward
from ...errors import UnsupportedError

# Seed, position and the first of the words that a twister makes 624 of at a time, and a normal number that waits for
# its turn behind them: enough to tell states apart.
_BYTES_READ, _LAST_BYTES_READ = 512, 40
# Seeds of ranks' own streams end in these bits, so that they are known when somebody restores one.
_OWN, _OWN_BITS = 0x6F776E, 24
# Own streams of which the beginning is known: those of several forwards of a deep model that draws in every layer.
_KNOWN = 8192


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that random operations on a device draw from unless they are given another."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _distinction(state: Tensor) -> bytes:
    """Reads what tells the states `[bytes]` of a generator apart."""
    read = state.numpy()
    return read[:_BYTES_READ].tobytes() + read[-_LAST_BYTES_READ:].tobytes()


def _seed(state: Tensor, *numbers: int) -> int:
    """Makes the seed of a further stream of a generator's state `[bytes]`."""
    digest = hashlib.blake2b(_distinction(state), digest_size=8)
    digest.update(repr(numbers).encode())
    return int.from_bytes(digest.digest(), "big")


def _advance(device: torch.device) -> None:
    """Moves the default generator on by the least that it can."""
    torch.rand((), device=device)


@torch.compiler.disable
def broadcast_state(device: torch.device, *groups: dist.ProcessGroup, of_host: bool = False) -> None:
    """Gives every rank the random state of the first of its group, of one group after the other.

    Args:
        device (`torch.device`): whose generator is meant, beside the CPU's.
        groups: that take tensors on the host (`ParallelMesh.host_group`).
        of_host (`bool`, defaults to `False`): the states of Python and numpy too.
    """
    groups = tuple(group for group in groups if group.size() > 1)
    if not groups:
        return
    generators = dict.fromkeys((torch.default_generator, default_generator(device)))
    states = [generator.get_state() for generator in generators]
    further = [host_state()] if of_host else []
    packed = torch.cat([*states, *further])
    for group in groups:
        dist.broadcast(packed, group=group, group_src=0)
    found = packed.split([len(state) for state in [*states, *further]])
    for generator, state in zip(generators, found, strict=False):
        generator.set_state(state)
    if of_host:
        set_host_state(found[-1])


class TensorParallelRng(Shared):
    """The replicated and this rank's own stream, of which the default generator holds one at a time.

    Compiled code stays on the replicated stream: a switch would break its graph, and Inductor draws the numbers of a
    whole graph at its beginning.

    Args:
        device (`torch.device`): where random numbers are drawn.
        rank (`int`): in the group that shares the replicated stream.
    """

    def __init__(self, device: torch.device, rank: int):
        self.device, self.rank = device, rank
        self._generator = default_generator(device)
        # Seed of an own stream -> the replicated state it was made of, and what its first state is told by. Which
        # stream is live is read from its seed: a recomputation may begin on either one, and end, by an exception.
        self._made_of: dict[int, tuple[Tensor, bytes]] = {}

    def _is_own(self) -> bool:
        """Tells whether the default generator holds this rank's stream."""
        return self._generator.initial_seed() % (1 << _OWN_BITS) == _OWN

    def use_local_rng(self) -> None:
        """Continues with this rank's stream: what follows is a part of the whole."""
        if torch.compiler.is_compiling() or self._is_own():
            return
        replicated = self._generator.get_state()
        seed = _seed(replicated, self.rank) >> _OWN_BITS << _OWN_BITS | _OWN
        self._generator.manual_seed(seed)
        if seed not in self._made_of:
            if len(self._made_of) == _KNOWN:
                del self._made_of[next(iter(self._made_of))]
            self._made_of[seed] = replicated, _distinction(self._generator.get_state())

    def use_shared_rng(self) -> None:
        """Continues with the stream of all ranks: what follows is computed by all of them alike."""
        if torch.compiler.is_compiling() or not self._is_own():
            return
        seed = self._generator.initial_seed()
        known = self._made_of.get(seed)
        if known is None and not in_backward():
            # A forward of another model has failed on it.
            self._generator.manual_seed(seed >> _OWN_BITS)
            return
        if known is None:
            raise UnsupportedError(
                "A part of a layer is computed again, with random numbers of too long ago: call backward() before "
                "further forwards, or use gradient_checkpointing_enable()."
            )
        replicated, start = known
        was_used = _distinction(self._generator.get_state()) != start
        self._generator.set_state(replicated)
        if was_used:
            _advance(self.device)

    @contextmanager
    def replicated(self) -> Iterator[None]:
        """Draws from the stream of all ranks inside, and goes on with the one that was live."""
        was_own = not torch.compiler.is_compiling() and self._is_own()
        self.use_shared_rng()
        yield
        if was_own:
            self.use_local_rng()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draws from this rank's stream inside, and goes on with the one that was live."""
        was_own = torch.compiler.is_compiling() or self._is_own()
        self.use_local_rng()
        yield
        if not was_own:
            self.use_shared_rng()


class StreamOfPart(Shared):
    """The stream of ranks that compute the same tokens of a row, while they do.

    Ranks that split the heads or features of these tokens make their own streams of it.

    Args:
        device (`torch.device`): where random numbers are drawn.
        rank (`int`): among those that share the row.
    """

    def __init__(self, device: torch.device, rank: int):
        self.device, self.rank = device, rank
        self._generator = default_generator(device)
        self._replicated: Tensor | None = None
        self._start = b""

    def enter(self) -> None:
        """Continues with the stream of these tokens."""
        self.leave()
        self._replicated = self._generator.get_state()
        self._generator.manual_seed(_seed(self._replicated, self.rank) >> _OWN_BITS << _OWN_BITS)
        self._start = _distinction(self._generator.get_state())

    def leave(self) -> None:
        """Goes on with the stream of all ranks, moved on if this one was drawn from; twice is once."""
        if self._replicated is None:
            return
        was_used = _distinction(self._generator.get_state()) != self._start
        self._generator.set_state(self._replicated)
        self._replicated = None
        if was_used:
            _advance(self.device)


class MicrobatchStreams:
    """The replicated streams of a pipeline: one for each stage's forward of each microbatch.

    Args:
        device (`torch.device`): where random numbers are drawn.
        group (`ProcessGroup`): the pipeline's ranks, for tensors on the host.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup):
        self.device, self.group = device, group
        self._generator = default_generator(device)
        self._state: Tensor | None = None
        self._was_used = torch.zeros((), dtype=torch.uint8)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Starts from the state of the pipeline's first rank, and ends on one that all of its ranks have."""
        broadcast_state(self.device, self.group)
        state = self._state = self._generator.get_state()
        self._was_used.zero_()
        try:
            yield
            dist.all_reduce(self._was_used, dist.ReduceOp.MAX, group=self.group)
        finally:
            self._generator.set_state(state)
            self._state = None
        if self._was_used:
            _advance(self.device)

    @contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Draws from the stream of one forward; outside of a `call` from the default generator as it is."""
        if self._state is None:
            yield
            return
        self._generator.manual_seed(_seed(self._state, stage, microbatch))
        start = _distinction(self._generator.get_state())
        try:
            yield
        finally:
            if _distinction(self._generator.get_state()) != start:
                self._was_used.fill_(1)


# Words and place of Python's twister, and the normal number that waits for its turn.
_PYTHON = numpy.dtype([("words", "u4", 625), ("gauss", "f8")])


_NUMPY = numpy.dtype([("words", "u4", 624), ("place", "i8"), ("has_gauss", "i8"), ("gauss", "f8"), ("is_known", "?")])


_TWISTER = "MT19937"


def host_state() -> Tensor:
    """Packs both states into bytes `[n]`, as many on every rank; of numpy's that of its default generator alone."""
    _, words, gauss = random.getstate()
    python = numpy.array([(words, math.nan if gauss is None else gauss)], _PYTHON)
    state = numpy.random.get_state(legacy=False)
    own = numpy.zeros(1, _NUMPY)
    if state["bit_generator"] == _TWISTER:
        twister = state["state"]
        own[0] = twister["key"], twister["pos"], state["has_gauss"], state["gauss"], True
    return torch.from_numpy(numpy.concatenate([python.view("u1"), own.view("u1")]))


def set_host_state(packed: Tensor) -> None:
    """Sets both states to what `host_state` packed, on this rank or another."""
    flat = packed.numpy()
    python, own = flat[: _PYTHON.itemsize].view(_PYTHON)[0], flat[_PYTHON.itemsize :].view(_NUMPY)[0]
    gauss = float(python["gauss"])
    random.setstate((3, tuple(python["words"].tolist()), None if math.isnan(gauss) else gauss))
    if own["is_known"]:
        words, place, has_gauss = own["words"].copy(), int(own["place"]), int(own["has_gauss"])
        numpy.random.set_state((_TWISTER, words, place, has_gauss, float(own["gauss"])))
