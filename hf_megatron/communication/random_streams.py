"""Random state per axis, derived from the default generator alone.

Dropout on a replicated activation must draw the same mask on every tp rank, dropout on a sharded one a different mask.
Megatron keeps a second generator state and teaches its own checkpoint function about it. Here the sharded stream is
seeded with one number drawn from the replicated stream, so `torch.utils.checkpoint`, which restores the default
generator, replays both.
"""

import torch
import torch.distributed as dist

_LARGEST_SEED = 2**31 - 1


def _draw(device: torch.device) -> int:
    return int(torch.randint(_LARGEST_SEED, (), device=device).item())


class ReplicatedState:
    """The replicated stream, parked while the sharded one runs."""

    def __init__(self, device: torch.device):
        self.device = device
        self._parked: torch.Tensor | None = None

    def enter_sharded(self, rank: int) -> None:
        """Parks the replicated stream and continues with this rank's own."""
        seed = _draw(self.device)
        self._parked = self._get()
        self._seed(seed * 1009 + rank + 1)

    def leave_sharded(self) -> None:
        """Continues the replicated stream; without a parked one nothing happens."""
        if self._parked is not None:
            self._set(self._parked)
            self._parked = None

    def synchronise(self, group: dist.ProcessGroup) -> None:
        """Gives every rank of the group the replicated stream of its first."""
        seed = torch.tensor(_draw(self.device), device=self.device)
        dist.broadcast(seed, src=dist.get_global_rank(group, 0), group=group)
        self._seed(int(seed.item()))

    def _get(self) -> torch.Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: torch.Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def _seed(self, seed: int) -> None:
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
