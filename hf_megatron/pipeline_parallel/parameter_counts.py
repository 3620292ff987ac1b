"""Parameter counts of the full model; each rank of a pipeline holds its own stages only."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..compat.ecosystem import name_without_tuners
from ..parallel_state import ParallelState


@dataclass(frozen=True)
class ParameterCounts:
    """Names of all parameters of a model, whose sizes are in the plan.

    Attributes:
        names: names of all parameters; a tied parameter has its first name.
        embeddings: names of embedding weights.
        tied: other names of tied parameters.
    """

    names: tuple[str, ...]
    embeddings: frozenset[str]
    tied: frozenset[str]

    @classmethod
    def of_full(cls, model: Any) -> "ParameterCounts":
        """Counts the parameters of a meta model before it is split into stages."""
        embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        # On the meta device, a tied weight is a separate parameter under each of its names.
        tied = model.all_tied_weights_keys
        names = tuple(name for name, _ in model.named_parameters() if name not in tied)
        return cls(names, frozenset(embeddings), frozenset(tied))

    def bound(self, state: ParallelState) -> Callable[..., int]:
        """Returns the replacement of `model.num_parameters`."""

        def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
            """Returns the parameter count of the full model; collective over the pipeline with `only_trainable`."""
            left_out = self.embeddings if exclude_embeddings else frozenset()
            # Every rank lists the parameters of all stages; adapters have added some and renamed others.
            named = [(n, p) for n, p in model.named_parameters() if name_without_tuners(n) not in left_out]
            if not only_trainable:
                once = [(name, parameter) for name, parameter in named if name_without_tuners(name) not in self.tied]
                sizes = (state.shardings[name].shape if name in state.shardings else p.shape for name, p in once)
                return sum(map(math.prod, sizes))
            cut = state.cut
            assert cut is not None
            counted = sum(
                parameter.numel()
                for name, parameter in named
                if parameter.requires_grad and cut.owner(name) == state.mesh.pp_rank
            )
            # Each rank counts the parameters that it owns (a tied weight counts once), and the counts are summed.
            total = torch.tensor(counted, dtype=torch.int64, device=state.mesh.device)
            dist.all_reduce(total, group=state.mesh.pp_group)
            return int(total)

        return num_parameters
