"""Expert load: tokens routed to each expert, and bytes sent for them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.ecosystem import require_plots
from ..compat.shared import Shared
from ..errors import ConfigError
from ..parallel_state import ParallelState, parallel_state
from .padding import RouterPadding
from .token_dispatcher import ExpertBlocks, Route

NAME = "expert load"


@dataclass(frozen=True)
class ExpertLoad:
    """Expert choices of one or more batches, on all ranks.

    Attributes:
        layers: names of the modules that hold experts.
        tokens: `[layers, experts]`, on the CPU.
        held (`ExpertBlocks`): which experts each rank holds.
        bytes_sent (`int`): bytes sent to other ranks and back in forwards, summed over all ranks.
    """

    layers: tuple[str, ...]
    tokens: Tensor
    held: ExpertBlocks
    bytes_sent: int

    @property
    def over_mean(self) -> Tensor:
        """Tokens of each expert relative to its layer's mean, `[layers, experts]`; 0 for a layer without tokens."""
        return self.tokens / self.tokens.float().mean(1, keepdim=True).clamp(min=1e-9)

    @property
    def ranks_over_mean(self) -> Tensor:
        """Tokens of each rank's experts relative to the mean over ranks, `[layers, ranks]`."""
        over_mean = self.over_mean
        return torch.stack([over_mean[:, self.held.of_rank(rank)].mean(1) for rank in range(self.held.ranks)], 1)

    @property
    def idle(self) -> float:
        """Fraction of experts without a token."""
        return (self.tokens == 0).float().mean().item()

    def draw(self, path: str | Path) -> None:
        """Saves a heat map of layers and experts; raises `ConfigError` without matplotlib."""
        require_plots()
        from matplotlib.figure import Figure

        figure = Figure(figsize=(2 + 0.25 * self.tokens.shape[1], 1.5 + 0.3 * len(self.layers)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(self.over_mean, aspect="auto", vmin=0, cmap="viridis")
        axes.set_yticks(range(len(self.layers)), self.layers)
        axes.set_xlabel("expert")
        figure.colorbar(image, label="tokens over the layer's mean")
        figure.savefig(path, dpi=120)


class ExpertCounts(Shared):
    """Counts the expert choices of training forwards on this rank, without synchronizing with the device.

    Args:
        layers: names of this stage's modules with experts.
        held (`ExpertBlocks`): which experts each rank holds, for the layer with the most.
        padding (`RouterPadding`): masks of the current forward.
    """

    def __init__(self, layers: list[str], held: ExpertBlocks, state: ParallelState, padding: RouterPadding):
        self.layers, self.held, self.state, self.padding = layers, held, state, padding
        self.tokens = torch.zeros(len(layers), held.experts, dtype=torch.int64, device=state.mesh.device)
        self.bytes_sent = 0

    def note(self, layer: str, chosen: Tensor, route: Route, width: int, rank: int) -> None:
        """Adds a layer's choices `[tokens, choices]`, and the bytes sent for them, `width` bytes per row."""
        # Ids that are no expert (-1 of padding, identity experts) add 0 to expert 0.
        ids = chosen.flatten()
        exists = (ids >= 0) & (ids < self.tokens.shape[1])
        self.tokens[self.layers.index(layer)].scatter_add_(0, ids.where(exists, 0), exists.to(torch.int64))
        # Each row travels to the expert and back; rows of the rank's own experts stay.
        self.bytes_sent += 2 * width * (sum(route.sent) - route.sent[rank])

    def read(self) -> ExpertLoad:
        """Returns the load summed over all ranks, and resets the counts; collective."""
        mesh, axes = self.state.mesh, self.state.axes
        # [layers * experts + 1], summed over the ranks of the stage.
        total = torch.cat([self.tokens.flatten(), self.tokens.new_tensor([self.bytes_sent])])
        dist.all_reduce(total, group=mesh.group("stage"))
        # Ranks that split the width of experts have counted the same tokens.
        *tokens, sent = total.tolist()
        counts = torch.tensor(tokens).view(self.tokens.shape) // axes.size("etp")
        stages: list[Any] = [None] * mesh.pp_size
        dist.all_gather_object(stages, (self.layers, counts, sent), group=mesh.host_group("pp"))
        self.tokens.zero_()
        self.bytes_sent = 0
        names = tuple(name for layers, _, _ in stages for name in layers)
        sent = sum(part for _, _, part in stages)
        return ExpertLoad(names, torch.cat([part for _, part, _ in stages]), self.held, sent)


def expert_load(model: Any) -> ExpertLoad:
    """Returns the tokens, without padding, routed to each expert in training forwards since the last call; collective.

    Raises:
        ConfigError: a model that was not loaded with `ep_size` of 2 or more.
    """
    state = parallel_state(model)
    counts = None if state is None else state.placed.get(NAME)
    if counts is None:
        raise ConfigError(
            f"expert_load: {type(model).__name__} has no expert-parallel layers. Load it with "
            "MegatronConfig(ep_size=...) of 2 or more."
        )
    load: ExpertLoad = counts.read()
    return load
