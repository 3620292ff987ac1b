"""How many parameters a pipelined model has: the whole model's, of which a rank holds its stages'."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..parallel_state import ParallelState


@dataclass(frozen=True)
class ParameterCounts:
    """The sizes of a whole model's parameters.

    Attributes:
        sizes: by name, a tied one under its first.
        embeddings: names of those that are an embedding's.
    """

    sizes: dict[str, int]
    embeddings: frozenset[str]

    @classmethod
    def of_full(cls, model: Any) -> "ParameterCounts":
        """Counts the entries of a meta model that is not cut yet."""
        embeddings = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
        # The loader's model holds a tied weight in a parameter for each of its names.
        tied = model.all_tied_weights_keys
        sizes = {name: p.numel() for name, p in model.named_parameters() if name not in tied}
        return cls(sizes, frozenset(embeddings))

    def bound(self, state: ParallelState) -> Callable[..., int]:
        """Returns what stands in the place of `num_parameters` of one model."""

        def num_parameters(model: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
            """Counts the whole model's parameters; with `only_trainable` every rank of a pipeline has to call it."""
            left_out = self.embeddings if exclude_embeddings else frozenset()
            if not only_trainable:
                return sum(size for name, size in self.sizes.items() if name not in left_out)
            cut = state.cut
            assert cut is not None
            counted = sum(
                parameter.numel()
                for name, parameter in model.named_parameters()
                if parameter.requires_grad and name not in left_out and cut.owner(name) == state.mesh.pp_rank
            )
            total = torch.tensor(counted, dtype=torch.int64, device=state.mesh.device)
            dist.all_reduce(total, group=state.mesh.pp_group)
            return int(total)

        return num_parameters
