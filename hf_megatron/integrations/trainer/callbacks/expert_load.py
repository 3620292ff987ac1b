"""Trainer callback that logs the token load of experts and warns about overloaded ranks."""

import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.trainer_callback import TrainerState

from ....compat.ecosystem import require_plots
from ....errors import ConfigError
from ....expert_parallel.expert_load import ExpertLoad, expert_load
from ....parallel_state import parallel_state
from .base import LoggingCallback

_MIB = 2**20


class ExpertLoadCallback(LoggingCallback):
    """Adds the expert load since the last log to each training log.

    | logged | |
    |---|---|
    | `expert_load/<layer>` | tokens of the busiest expert relative to the layer's mean |
    | `expert_load_of_ranks` | tokens of the busiest rank relative to the mean of the ranks, maximum over layers |
    | `experts_idle` | fraction of experts without a token |
    | `expert_mib_sent` | MiB of tokens dispatched to other ranks and combined in forwards, summed over all ranks |

    Args:
        limit (`float`, defaults to 2): a warning names the layer and its busiest expert when a rank has more than this
            many times the mean tokens of the ranks; a rank's time and memory grow with its tokens.
        directory (`str` or `Path`, *optional*): folder in which rank 0 writes a heat map `experts-step{N}.png` at each
            log.

    Raises:
        ConfigError: a limit of 1 or less; a directory is given and matplotlib is missing.
    """

    def __init__(self, limit: float = 2.0, directory: str | os.PathLike[str] | None = None) -> None:
        if not limit > 1:
            raise ConfigError(f"ExpertLoadCallback(limit={limit!r}): expected more than 1 (the mean load).")
        self.limit = limit
        self.directory = None if directory is None else Path(directory)
        if self.directory is not None:
            require_plots()

    def numbers(self, args: Any, state: TrainerState, model: Any, logs: dict[str, Any]) -> dict[str, float]:
        """Returns the expert load since the last training log."""
        # The single-process run of a script has no expert load.
        if "loss" not in logs or parallel_state(model) is None:
            return {}
        load = expert_load(model)
        if dist.get_rank() == 0:
            self._warn(load)
            if self.directory is not None:
                self.directory.mkdir(parents=True, exist_ok=True)
                load.draw(self.directory / f"experts-step{state.global_step}.png")
        return _numbers(load)

    def _warn(self, load: ExpertLoad) -> None:
        ranks = load.ranks_over_mean
        layer, rank = divmod(int(ranks.argmax()), ranks.shape[1])
        if ranks[layer, rank] <= self.limit:
            return
        held = load.held.of_rank(rank)
        token_counts = load.tokens[layer, held]
        warnings.warn(
            f"{load.layers[layer]}: the rank with experts {_runs(held.tolist())} has {ranks[layer, rank]:.1f} times "
            f"the mean tokens per rank, most for expert {int(held[token_counts.argmax()])} "
            f"({int(token_counts.max())} of "
            f"{int(load.tokens[layer].sum())}). The other ranks wait for it.",
            stacklevel=2,
        )


def _runs(values: list[int]) -> str:
    """Formats ascending integers as ranges, such as `0 to 3, 8 to 11`."""
    ends = [index for index, one in enumerate(values) if values[index + 1 : index + 2] != [one + 1]]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return ", ".join(f"{values[start]} to {values[end]}" for start, end in zip(starts, ends, strict=True))


def _numbers(load: ExpertLoad) -> dict[str, float]:
    busiest = load.over_mean.amax(1).tolist()
    return {
        **{f"expert_load/{layer}": round(value, 4) for layer, value in zip(load.layers, busiest, strict=True)},
        "expert_load_of_ranks": round(load.ranks_over_mean.max().item(), 4),
        "experts_idle": round(load.idle, 4),
        "expert_mib_sent": round(load.bytes_sent / _MIB, 3),
    }
