"""Router biases that balance expert load without a loss (Wang et al., 2024; Megatron's router bias update).

    bias += rate * sign(mean load - load)        once per optimizer step that was not skipped

The load counts the choices of all training forwards whose gradients the step uses, on all ranks of the batch, without
those of padding tokens.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.shard_safe import shard_safe
from ..compat.shared import Shared
from ..compat.torch_autograd import in_backward, leave_uncompiled
from ..compat.torch_dtensor import local_tensor
from ..errors import ConfigError, UnsupportedError
from ..models.experts import find_experts
from ..parallel_state import ParallelState
from .padding import RouterPadding

_NAMES = ("e_score_correction_bias", "expert_bias", "balancing_biases")


def _biases(block: nn.Module, experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yields the biases of a block's router, by name: buffers, or parameters that are not trained."""
    held = [*block.named_buffers(), *block.named_parameters()]
    yield from ((name, value) for name, value in held if name.split(".")[-1] in _NAMES and value.numel() == experts)


def require_router_bias(model: Any, state: ParallelState) -> None:
    """Raises `ConfigError` if no router has a bias to update, `UnsupportedError` if the bias is sharded."""
    rate = state.config.router_bias_update_rate
    setting = f"MegatronConfig.router_bias_update_rate = {rate}"
    biases = [
        value
        for name, count in find_experts(model, state.spec).items()
        for _, value in _biases(model.get_submodule(name.rpartition(".")[0]), count)
    ]
    if not biases:
        raise ConfigError(
            f"{setting}: no router of {type(model).__name__} has a bias added to its scores ({', '.join(_NAMES)}). Set "
            "it to 0."
        )
    if state.shards_weights and any(isinstance(value, nn.Parameter) for value in biases):
        raise UnsupportedError(
            f"{setting} with zero_stage = 3: the router biases of {type(model).__name__} are parameters, which ZeRO "
            "stage 3 shards. Set zero_stage=2."
        )


class RouterBiases(Shared):
    """Counts the choices of this stage's routers and updates their biases after optimizer steps.

    Args:
        experts: module with experts -> its number of experts on all ranks.
        padding (`RouterPadding`): masks of the current forward.
        pieces (`bool`): whether tp ranks see different tokens.
    """

    def __init__(
        self, model: Any, state: ParallelState, experts: Mapping[str, int], padding: RouterPadding, *, pieces: bool
    ):
        self.model, self.state, self.experts, self.padding, self.pieces = model, state, experts, padding, pieces
        device = state.mesh.device
        self.tokens = {name: torch.zeros(count, dtype=torch.int64, device=device) for name, count in experts.items()}

    def install(self, engine: Any) -> None:
        """Registers hooks on the experts' inputs and on the steps of a model's optimizers."""
        for name in self.experts:
            module = self.model.get_submodule(name)
            module.register_forward_pre_hook(self._counting(name))
        engine.callbacks.on_stepped.append(self.update)
        engine.callbacks.on_discarded.append(self._clear)
        engine.callbacks.tell_skipped = True

    def _counting(self, name: str) -> Any:
        tokens = self.tokens[name]

        def add(chosen: Tensor, gradient: Tensor | None = None) -> None:
            exists = (chosen >= 0) & (chosen < len(tokens))
            tokens.scatter_add_(0, chosen.where(exists, 0).to(torch.int64), exists.to(torch.int64))

        @shard_safe
        @leave_uncompiled
        def count(experts: nn.Module, args: tuple) -> None:
            # A recomputed layer was counted in its first forward.
            if not experts.training or not torch.is_grad_enabled() or in_backward():
                return
            # [tokens, choices] of expert ids; padding has none.
            chosen = args[1].detach()
            tokens_here = args[0].numel() // args[0].shape[-1]
            chosen = self.padding.drop(name, chosen.reshape(tokens_here, -1)).flatten()
            # Count in the backward: gradients, and with them the counts, may be cleared between a forward and its
            # backward, but the choices of that forward still belong to the next step.
            trained = [value for value in (args[0], *args[2:]) if value.requires_grad]
            if trained:
                trained[0].register_hook(functools.partial(add, chosen))
            else:
                add(chosen)

        return count

    def _clear(self) -> None:
        for counts in self.tokens.values():
            counts.zero_()

    @torch.no_grad()
    def update(self) -> None:
        """Updates the biases by the choices counted since the last update; collective over a stage."""
        if not self.tokens:
            return
        mesh = self.state.mesh
        # [experts of all layers], summed over all ranks that have other tokens.
        total = torch.cat(list(self.tokens.values()))
        dist.all_reduce(total, group=mesh.group("dp_cp"))
        if self.pieces:
            # With a sequence-sharded MoE block tp ranks have different tokens, too.
            dist.all_reduce(total, group=mesh.tp_group)
        # The update needs the sign of the load's deviation only.
        sizes = [len(counts) for counts in self.tokens.values()]
        for (name, counts), load in zip(self.tokens.items(), total.split(sizes), strict=True):
            counts.zero_()
            step = (load.float().mean() - load).sign() * self.state.config.router_bias_update_rate
            for _, bias in _biases(self.model.get_submodule(name.rpartition(".")[0]), len(load)):
                # Every rank applies the same step: biases stay identical.
                local_bias = local_tensor(bias)
                local_bias.add_(step.to(local_bias).view(local_bias.shape))


def install_router_biases(
    model: Any, state: ParallelState, experts: Mapping[str, int], padding: RouterPadding, *, pieces: bool
) -> None:
    """Installs the update of a stage's router biases by the load of their experts."""
    RouterBiases(model, state, experts, padding, pieces=pieces).install(state.data_parallel)
