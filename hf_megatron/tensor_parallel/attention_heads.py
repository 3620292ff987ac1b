"""Per-head state outside the linears: ALiBi-like tensors and lists of per-head norms."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..core.communication.collectives import copy_to_ranks
from ..core.communication.mean_grad_ops import sum_over_ranks
from ..core.forward_hooks import ForwardHooks
from ..core.mesh import ParallelMesh
from ..errors import PlanError, UnsupportedError
from .local_parameters import local_view


@dataclass
class LocalArguments:
    """Slices arguments of an attention block to this rank's heads: ALiBi, masks that carry it, learned biases.

    Args:
        names (`tuple[str, ...]`): the arguments, each `None`, `[batch, heads, ...]` or `[batch * heads, 1, ...]`; a
            4-dim tensor with a single entry for all heads is not sliced.
        heads (`int`): number of heads of the full model.
        mesh (`ParallelMesh`): gradients of learned arguments are summed over its tp ranks.
    """

    names: tuple[str, ...]
    heads: int
    mesh: ParallelMesh

    def install(self, block: nn.Module, hooks: ForwardHooks) -> None:
        hooks.add_to(block, "local arguments", self._enter)

    def _enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]):
        # Arguments may be positional or named.
        places = {name: place for place, name in enumerate(inspect.signature(block.forward).parameters)}
        positional, named, missing = list(args), dict(kwargs), []
        for name in self.names:
            if name in named:
                named[name] = self._cut(name, named[name])
            elif places.get(name, len(args)) < len(args):
                positional[places[name]] = self._cut(name, positional[places[name]])
            else:
                missing.append(name)
        if missing:
            raise UnsupportedError(f"{type(block).__name__} was called without arguments {', '.join(missing)}.")
        return tuple(positional), named

    def _cut(self, name: str, value: Tensor | None) -> Tensor | None:
        # [batch, 1, ...] broadcasts over all heads.
        if value is None or (value.dim() == 4 and value.shape[1] == 1):
            return value
        # Each rank uses the slice of its heads, so a learned bias gets its gradient from all ranks.
        value = copy_to_ranks(value, self.mesh.tp_group)
        share, rank = self.heads // self.mesh.tp_size, self.mesh.tp_rank
        if value.dim() == 4 and value.shape[1] == self.heads:
            # [batch, heads, ...] -> [batch, heads / tp, ...]
            return value.narrow(1, rank * share, share)
        if value.dim() == 3 and value.shape[0] % self.heads == 0:
            # [batch * heads, 1, ...] -> [batch * heads / tp, 1, ...]
            per_head = value.unflatten(0, (-1, self.heads))
            return per_head.narrow(1, rank * share, share).flatten(0, 1)
        raise UnsupportedError(
            f"argument {name!r} of shape {tuple(value.shape)} has no dim of {self.heads} heads. Expected "
            "[batch, heads, ...] or [batch * heads, 1, ...]."
        )


class NormPerHead(nn.Module):
    """One `nn.LayerNorm` per head in `norms`: `[batch, heads / tp, sequence, head_dim]` -> the same shape.

    Every rank keeps all norms, so that parameter names do not depend on the layout, and applies the norms of its
    heads. With fewer key/value heads than ranks, neighboring ranks apply the same norms.
    """

    mesh: ParallelMesh
    norms: nn.ModuleList

    def forward(self, hidden_states: Tensor) -> Tensor:
        # [all heads, head_dim], replicated. Each rank uses a slice: the gradient is all-reduced.
        weights = [local_view(norm._parameters["weight"]) for norm in self.norms]
        weight = copy_to_ranks(torch.stack(weights), self.mesh.tp_group)  # type: ignore[arg-type]
        heads = hidden_states.shape[1]
        # `copies` neighboring ranks hold the same heads, so they take the same slice.
        copies = self.mesh.tp_size * heads // len(self.norms)
        weight = weight.narrow(0, self.mesh.tp_rank // copies * heads, heads)
        # [batch, heads / tp, sequence, head_dim]; one weight row per head.
        normed = F.layer_norm(hidden_states, hidden_states.shape[-1:], eps=self.norms[0].eps)  # type: ignore[arg-type]
        return normed * weight.unsqueeze(1)


class NormOfRanks(nn.Module):
    """RMS norm over features that are split over the ranks: `[..., local features]` -> the same shape.

    Attributes:
        width: number of features on all ranks; their shares may differ.
    """

    mesh: ParallelMesh
    width: int
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        hidden_fp32 = hidden_states.float()
        # All-reduce the sum of squares, [..., 1]: the mean is taken over the features of all ranks.
        squares = sum_over_ranks(hidden_fp32.pow(2).sum(-1, keepdim=True), self.mesh.tp_group) / self.width
        return self.weight * (hidden_fp32 * torch.rsqrt(squares + self.variance_epsilon)).to(hidden_states.dtype)


def make_sharded_norm(norm: Any, group: dist.ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Returns the forward of an RMS norm over features that are split equally over the ranks."""

    def forward(hidden: Tensor) -> Tensor:
        hidden_fp32 = hidden.float()
        # The ranks hold equally many features, so the global mean is the mean of the local means, [..., 1].
        squares = sum_over_ranks(hidden_fp32.pow(2).mean(-1, keepdim=True), group) / dist.get_world_size(group)
        return norm.weight * (hidden_fp32 * torch.rsqrt(squares + norm.variance_epsilon)).to(hidden.dtype)

    return forward


def require_rms_norm(module: nn.Module, name: str) -> None:
    """Raises `PlanError` unless the module is an RMS norm as in transformers, with a weight only."""
    if "variance_epsilon" not in vars(module) or [*module._parameters] != ["weight"]:
        raise PlanError(
            f"{name}: style 'sharded_rms_norm' needs an RMS norm with only a weight, got {type(module).__name__}."
        )


def check_norm_per_head(module: nn.Module, name: str) -> None:
    """Raises `PlanError` when the module is not a list of `nn.LayerNorm` without bias."""
    norms = module._modules.get("norms")
    plain = isinstance(norms, nn.ModuleList) and all(type(n) is nn.LayerNorm and n.bias is None for n in norms)
    if not plain:
        raise PlanError(
            f"{name}: style 'per_head_norm' needs `norms`, a list of LayerNorms without bias, got a "
            f"{type(module).__name__}."
        )


# Prefix of attributes that a module reads from its config.
OF_CONFIG = "config."


class LocalConfig:
    """Config proxy for one module: local values for some sizes; everything else is delegated to the config.

    A copy would miss later changes of the config, such as another attention implementation.
    """

    def __init__(self, config: Any, sizes: Mapping[str, int]):
        vars(self).update(_config=config, _sizes=dict(sizes))

    def __getattr__(self, name: str) -> Any:
        return self._sizes[name] if name in self._sizes else getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._config, self._sizes)


def give_sizes(module: nn.Module, sizes: Mapping[str, int]) -> None:
    """Sets local sizes on a module; sizes in its config change for this module only."""
    of_config = {name.removeprefix(OF_CONFIG): size for name, size in sizes.items() if name.startswith(OF_CONFIG)}
    for name, size in sizes.items():
        if not name.startswith(OF_CONFIG):
            setattr(module, name, size)
    if of_config:
        # nn.Module declares attributes of unknown names as tensors or modules.
        module.config = LocalConfig(module.config, of_config)  # type: ignore[assignment]
