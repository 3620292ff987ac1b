"""RNG streams of a model-parallel group: one shared by all ranks, one local to each rank.

Every training forward starts from the default generator's state on the group's first rank, and from that rank's Python
and numpy states. Replicated computation draws from this shared stream. While a rank computes its shard, the default
generator holds a local stream seeded with the shared state and the rank; if it was drawn from, the shared stream then
advances by one draw. Both are functions of the default generator's state, which `torch.utils.checkpoint` restores, so
recomputation replays both. (Megatron keeps a second generator and adapts its own checkpoint function to it.)

A model that draws no random numbers, or the same ones on all ranks, leaves the script the states that a single-process
run has.

All states are on the host, including a CUDA generator's (its seed and offset): nothing here synchronizes with a
device.
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

# Bytes that distinguish two states: of a Mersenne Twister (624 words per batch) the seed, the position and the first
# words, and at the end a cached normal sample.
_BYTES_READ, _LAST_BYTES_READ = 512, 40
# Seeds of local streams end in these bits, so that a restored state is recognized as local.
_OWN, _OWN_BITS = 0x6F776E, 24
# Number of local streams whose origin is remembered: enough for several forwards of a deep model that draws in each
# layer.
_KNOWN = 8192


def default_generator(device: torch.device) -> torch.Generator:
    """Returns the generator that random operations on a device use by default."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _distinction(state: Tensor) -> bytes:
    """Returns the bytes that distinguish states `[bytes]` of a generator."""
    read = state.numpy()
    return read[:_BYTES_READ].tobytes() + read[-_LAST_BYTES_READ:].tobytes()


def _seed(state: Tensor, *values: int) -> int:
    """Derives the seed of another stream from a generator's state `[bytes]`."""
    digest = hashlib.blake2b(_distinction(state), digest_size=8)
    digest.update(repr(values).encode())
    return int.from_bytes(digest.digest(), "big")


def _advance(device: torch.device) -> None:
    """Advances the default generator by the smallest possible draw."""
    torch.rand((), device=device)


@torch.compiler.disable
def broadcast_state(device: torch.device, *groups: dist.ProcessGroup, of_host: bool = False) -> None:
    """Broadcasts the random state of each group's first rank, group by group.

    Args:
        device (`torch.device`): device of the generator to broadcast, in addition to the CPU's.
        groups: process groups that support host tensors (`ParallelMesh.host_group`).
        of_host (`bool`, defaults to `False`): whether to include the states of Python and numpy.
    """
    groups = tuple(group for group in groups if group.size() > 1)
    if not groups:
        return
    generators = dict.fromkeys((torch.default_generator, default_generator(device)))
    states = [generator.get_state() for generator in generators]
    further = [host_state()] if of_host else []
    # One broadcast per group for all states, on the host.
    packed = torch.cat([*states, *further])
    for group in groups:
        dist.broadcast(packed, group=group, group_src=0)
    received_states = packed.split([len(state) for state in [*states, *further]])
    for generator, state in zip(generators, received_states, strict=False):
        generator.set_state(state)
    if of_host:
        set_host_state(received_states[-1])


class TensorParallelRng(Shared):
    """Shared and rank-local RNG streams; the default generator holds one of them at a time.

    Compiled code stays on the shared stream: switching would break the graph, and Inductor draws the random numbers of
    a graph at its beginning.

    Args:
        device (`torch.device`): device on which random numbers are drawn.
        rank (`int`): rank in the group that shares the replicated stream.
    """

    def __init__(self, device: torch.device, rank: int):
        self.device, self.rank = device, rank
        self._generator = default_generator(device)
        # Seed of a local stream -> the shared state it was derived from, and the signature of its first state. The
        # active stream is recognized by its seed: a recomputation may start on either stream, and may end with an
        # exception.
        self._made_of: dict[int, tuple[Tensor, bytes]] = {}
        # Whether the shared stream stays active everywhere, as nothing draws (`RngObserver`).
        self.is_idle = False

    def get_signature(self) -> bytes:
        """Returns bytes that differ between two states of the default generator."""
        return _distinction(self._generator.get_state())

    def _is_own(self) -> bool:
        """Returns whether the default generator holds this rank's local stream."""
        return self._generator.initial_seed() % (1 << _OWN_BITS) == _OWN

    def use_local_rng(self) -> None:
        """Switches to the local stream: the following code computes this rank's shard."""
        if torch.compiler.is_dynamo_compiling() or self.is_idle or self._is_own():
            return
        replicated = self._generator.get_state()
        # The seed depends only on shared state and rank, so a recomputation from this state replays the local stream.
        seed = _seed(replicated, self.rank) >> _OWN_BITS << _OWN_BITS | _OWN
        self._generator.manual_seed(seed)
        if seed not in self._made_of:
            # Drop the oldest entry; only its recomputation would need it.
            if len(self._made_of) == _KNOWN:
                del self._made_of[next(iter(self._made_of))]
            self._made_of[seed] = replicated, _distinction(self._generator.get_state())

    def use_shared_rng(self) -> None:
        """Switches to the shared stream: the following code computes the same values on all ranks."""
        if torch.compiler.is_dynamo_compiling() or self.is_idle or not self._is_own():
            return
        seed = self._generator.initial_seed()
        known = self._made_of.get(seed)
        if known is None and not in_backward():
            # A failed forward of another model left its local stream active.
            self._generator.manual_seed(seed >> _OWN_BITS)
            return
        if known is None:
            raise UnsupportedError(
                "Activation recomputation needs a random state that is no longer stored. Call backward() before "
                "running further forward passes, or use gradient_checkpointing_enable()."
            )
        replicated, start = known
        was_used = _distinction(self._generator.get_state()) != start
        self._generator.set_state(replicated)
        # Otherwise the next local stream would be seeded from the same shared state and repeat its draws.
        if was_used:
            _advance(self.device)

    @contextmanager
    def replicated(self) -> Iterator[None]:
        """Draws from the shared stream inside, and then restores the stream that was active."""
        was_own = not torch.compiler.is_dynamo_compiling() and self._is_own()
        self.use_shared_rng()
        yield
        if was_own:
            self.use_local_rng()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Draws from the local stream inside, and then restores the stream that was active."""
        was_own = torch.compiler.is_dynamo_compiling() or self._is_own()
        self.use_local_rng()
        yield
        if not was_own:
            self.use_shared_rng()


class StreamOfPart(Shared):
    """RNG stream of one context-parallel rank's tokens, active while the rank processes them.

    Tensor-parallel ranks that split the heads or features of these tokens derive their local streams from it.

    Args:
        device (`torch.device`): device on which random numbers are drawn.
        rank (`int`): rank in the context-parallel group that shares the sequence.
    """

    def __init__(self, device: torch.device, rank: int):
        self.device, self.rank = device, rank
        self._generator = default_generator(device)
        self._replicated: Tensor | None = None
        self._start = b""

    def enter(self) -> None:
        """Switches to the stream of this rank's tokens."""
        self.leave()
        self._replicated = self._generator.get_state()
        self._generator.manual_seed(_seed(self._replicated, self.rank) >> _OWN_BITS << _OWN_BITS)
        self._start = _distinction(self._generator.get_state())

    def leave(self) -> None:
        """Restores the shared stream, advanced if this one was drawn from; calling it again has no effect."""
        if self._replicated is None:
            return
        was_used = _distinction(self._generator.get_state()) != self._start
        self._generator.set_state(self._replicated)
        self._replicated = None
        if was_used:
            _advance(self.device)


class MicrobatchStreams:
    """Shared RNG streams of a pipeline: one for each stage's forward of each microbatch.

    Args:
        device (`torch.device`): device on which random numbers are drawn.
        group (`ProcessGroup`): the pipeline's ranks, for host tensors.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup):
        self.device, self.group = device, group
        self._generator = default_generator(device)
        self._state: Tensor | None = None
        self._was_used = torch.zeros((), dtype=torch.uint8)

    @contextmanager
    def call(self) -> Iterator[None]:
        """Starts from the state of the pipeline's first rank, and ends with one that all of its ranks share."""
        broadcast_state(self.device, self.group)
        state = self._state = self._generator.get_state()
        self._was_used.zero_()
        try:
            yield
            # Stages may differ in whether they draw (embedding dropout); all ranks must advance or none.
            dist.all_reduce(self._was_used, dist.ReduceOp.MAX, group=self.group)
        finally:
            self._generator.set_state(state)
            self._state = None
        if self._was_used:
            _advance(self.device)

    @contextmanager
    def of(self, stage: int, microbatch: int) -> Iterator[None]:
        """Draws from the stream of one stage's forward; outside of a `call` the default generator is left as it is."""
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


# Words and position of Python's Mersenne Twister, and its cached normal sample.
_PYTHON = numpy.dtype([("words", "u4", 625), ("gauss", "f8")])


_NUMPY = numpy.dtype([("words", "u4", 624), ("place", "i8"), ("has_gauss", "i8"), ("gauss", "f8"), ("is_known", "?")])


_TWISTER = "MT19937"


def host_state() -> Tensor:
    """Packs Python's and numpy's states into bytes `[n]` of the same length on every rank.

    numpy's state is included only where its legacy global generator is a Mersenne Twister.
    """
    _, words, gauss = random.getstate()
    python = numpy.array([(words, math.nan if gauss is None else gauss)], _PYTHON)
    state = numpy.random.get_state(legacy=False)
    numpy_state = numpy.zeros(1, _NUMPY)
    if state["bit_generator"] == _TWISTER:
        twister = state["state"]
        numpy_state[0] = twister["key"], twister["pos"], state["has_gauss"], state["gauss"], True
    return torch.from_numpy(numpy.concatenate([python.view("u1"), numpy_state.view("u1")]))


def set_host_state(packed: Tensor) -> None:
    """Restores both states from bytes that `host_state` packed on this or another rank."""
    flat = packed.numpy()
    python, numpy_state = flat[: _PYTHON.itemsize].view(_PYTHON)[0], flat[_PYTHON.itemsize :].view(_NUMPY)[0]
    gauss = float(python["gauss"])
    random.setstate((3, tuple(python["words"].tolist()), None if math.isnan(gauss) else gauss))
    if numpy_state["is_known"]:
        words, place, has_gauss = numpy_state["words"].copy(), int(numpy_state["place"]), int(numpy_state["has_gauss"])
        numpy.random.set_state((_TWISTER, words, place, has_gauss, float(numpy_state["gauss"])))
