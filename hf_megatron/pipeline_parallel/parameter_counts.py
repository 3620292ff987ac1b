"""Parameter counts of the full model; each rank of a pipeline holds its own stages only."""

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
    """Names of the parameters of a model.

    Attributes:
        names: names of all parameters; a tied parameter has its first name.
        tied: the other names of tied parameters, which may be separate parameters on the last stage.
        embeddings: names of embedding weights.
    """

    names: tuple[str, ...]
    tied: frozenset[str]
    embeddings: frozenset[str]

    @classmethod
    def of_full(cls, model: Any) -> "ParameterCounts":
        """Returns the names of a meta model before it is split into stages."""
        embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        # On the meta device, a tied weight is a separate parameter under each of its names.
        tied = frozenset(model.all_tied_weights_keys)
        names = tuple(name for name, _ in model.named_parameters() if name not in tied)
        return cls(names, tied, frozenset(embeddings))

    def bound(self, state: ParallelState) -> Callable[..., int]:
        """Returns the replacement of `model.num_parameters`."""

        def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
            """Returns the parameter count of the full model; collective over the pipeline with `only_trainable`."""
            left_out = self.embeddings if exclude_embeddings else frozenset()
            if not only_trainable:
                left_out |= self.tied
                # Off-stage parameters have their global shapes, and PEFT's adapters are listed on every stage.
                return sum(
                    p.numel() for name, p in model.named_parameters() if name_without_tuners(name) not in left_out
                )
            cut = state.cut
            assert cut is not None
            counted = sum(
                parameter.numel()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad
                and name_without_tuners(name) not in left_out
                and cut.owner(name) == state.mesh.pp_rank
            )
            # Each rank counts the parameters that it owns (a tied weight counts once), and the counts are summed.
            total = torch.tensor(counted, dtype=torch.int64, device=state.mesh.device)
            dist.all_reduce(total, group=state.mesh.pp_group)
            return int(total)

        return num_parameters
