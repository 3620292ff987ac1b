"""Experts whose widths are split over tp, and the special modules that transformers' tp plans use around them."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.shared import Shared
from ..core.communication.collectives import copy_to_ranks, reduce_from_ranks
from ..core.communication.mean_grad_ops import scale_gradient
from ..core.communication.rng import TensorParallelRng
from ..core.forward_hooks import ForwardHooks
from ..errors import UnsupportedError


class PartialSum(Shared):
    """Hooks of a block with sharded parameters and its own forward, such as the experts of one MoE layer.

    Every floating-point input (hidden states, routing weights) is replicated and gets a partial gradient on each rank;
    the output is a partial sum.
    """

    def __init__(self, group: dist.ProcessGroup, rng: TensorParallelRng, *, copy_inputs: bool = True):
        self.group, self.rng = group, rng
        self.copy_inputs = copy_inputs

    def install(self, module: nn.Module, hooks: ForwardHooks) -> None:
        hooks.add_to(module, "partial sum", self._enter if self.copy_inputs else None, self._leave)

    def _copy(self, value: Any) -> Any:
        # Integer inputs, such as expert indices, have no gradient to sum.
        if isinstance(value, Tensor) and value.is_floating_point():
            # Identity in the forward; the gradient is all-reduced.
            return copy_to_ranks(value, self.group)
        return value

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        return tuple(map(self._copy, args)), {name: self._copy(value) for name, value in kwargs.items()}

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> Any:
        self.rng.use_shared_rng()
        if isinstance(output, Tensor):
            # [tokens, hidden]: each rank computed its slice of every expert's width.
            return reduce_from_ranks(output, self.group)
        if output is None:
            return None
        raise UnsupportedError(f"{type(module).__name__} returned {type(output).__name__}; experts return one tensor.")


class SummedInside(Shared):
    """Hook of experts that contain a norm of the all-reduced product, before routing weights are applied.

    Their hidden states get a partial gradient on each rank; routing weights multiply full tensors only.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter)

    def _enter(self, module: nn.Module, args: tuple) -> tuple:
        # [tokens, hidden]: replicated in the forward, gradient summed over the ranks.
        return copy_to_ranks(args[0], self.group), *args[1:]


class NormOfSum(Shared):
    """Hook of a norm whose input is a partial sum: normalizing is not linear, so the input is all-reduced first."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter)

    def _enter(self, module: nn.Module, args: tuple) -> tuple:
        # [..., hidden] partial sum -> all-reduced.
        return (reduce_from_ranks(args[0], self.group),)


class SharedIdentity:
    """Hook of an identity expert inside a partial sum: every rank holds the same value and adds its share of it."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(lambda module, args: (args[0] / self.ranks, *args[1:]))


class SharedLogits:
    """Hook of a router inside a partial sum: all ranks compute the same loss from its logits, its last output."""

    def __init__(self, ranks: int):
        self.ranks = ranks

    def install(self, module: nn.Module) -> None:
        module.register_forward_hook(
            # The sum over tp that follows would count the gradient once per rank.
            lambda module, args, output: (*output[:-1], scale_gradient(output[-1], 1 / self.ranks))
        )


class LatentWithRotary(Shared):
    """Hook of an MLA down projection, whose output has a latent and a rotary part with different gradient rules.

    The latent part feeds column-parallel linears, which sum its gradient. The rotary part reaches only this rank's
    heads, so its gradient is summed over tp here (transformers' `MlaKvAProjParallel`).
    """

    def __init__(self, rotary_dim: int, group: dist.ProcessGroup):
        self.rotary_dim = rotary_dim
        self.group = group

    def install(self, module: nn.Module, hooks: ForwardHooks) -> None:
        hooks.add_to(module, "latent with rotary", exit=self._leave)

    def _leave(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        # [batch, sequence, latent + rotary_dim], replicated.
        latent, rotary = output.split([output.shape[-1] - self.rotary_dim, self.rotary_dim], dim=-1)
        return torch.cat([latent, copy_to_ranks(rotary, self.group)], dim=-1)
