"""Regions of a model, built from its structure."""

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import ModelOutput

from ..compat.shared import Shared
from ..core.communication.rng import TensorParallelRng
from ..core.forward_hooks import ForwardHooks
from ..core.off_stage import computes_here
from ..models.spec import lookup
from .gathered_input import GatheredInputs
from .layer_rng import draw_alone
from .per_token_arguments import SequenceArguments
from .region import SEQUENCE_DIM, FullSequenceRegion, SequenceStack, UniformRegion
from .structure import Structure
from .styles import style

ROUTER_LOGITS = "router_logits"
# Suffix of the config fields with the probability of skipping a layer.
_LAYERDROP = "layerdrop"


class Regions(Shared):
    """All regions of a model; with `sequence_parallel` the residual stream between blocks is sharded.

    With `packs`, layers of a sharded sequence save shards for backward, and recompute what can be recomputed.

    Attributes:
        of_linear: column or row-parallel linear -> the uniform region that it reads or ends.
    """

    def __init__(
        self,
        structure: Structure,
        styles: Mapping[str, str],
        group: dist.ProcessGroup,
        rng: TensorParallelRng,
        *,
        sequence_parallel: bool,
        packs: bool,
        sequence_dim: int = SEQUENCE_DIM,
        residual_streams_first: bool = False,
    ):
        self.group, self.rng = group, rng
        stacks = structure.stacks if sequence_parallel else ()
        self.stacks = {
            name: SequenceStack(group, sequence_dim=sequence_dim, residual_streams_first=residual_streams_first)
            for name in stacks
        }
        self.unsharded = structure.unsharded if sequence_parallel else {}
        # Shared by all regions, so that at most one regathered input exists at a time.
        inputs = GatheredInputs(sequence_dim, group) if packs else None
        self.uniform = {
            block: UniformRegion(group, rng, self.stacks.get(structure.stack_of.get(block, "")), inputs)
            for block in structure.uniform
        }
        self.of_linear = {row: self.uniform[block] for block, row in structure.uniform.items()}
        for block, region in self.uniform.items():
            inside = (name for name in styles if f"{name}.".startswith(f"{block}."))
            # All column-parallel linears of a block read the input that its region gathered once.
            self.of_linear |= {name: region for name in inside if style(styles[name]).is_column}

    def install(
        self,
        model: Any,
        hooks: ForwardHooks,
        arguments: Mapping[str, int],
        per_token_inputs: Mapping[str, tuple[str, ...]],
        unshardable: Mapping[str, str] | None = None,
        full_prefix: tuple[int, ...] = (),
    ) -> Callable[[Tensor, str], Tensor] | None:
        """Installs all hooks; returns the function that ends a stack where a pipeline stage ends inside of it.

        That function takes hidden states `[batch, sequence / tp, hidden]` and the name of the list of layers.

        Args:
            hooks: hook table of the model.
            arguments: further per-token arguments of the layers -> the sequence dim along which they are split.
            per_token_inputs: patterns of blocks -> their further arguments that are gathered along the sequence.
            unshardable: arguments with which layers of a sharded sequence cannot be called -> why.
            full_prefix: indices of the layers before which the loop reads full hidden states.
        """
        for block, region in self.uniform.items():
            region.install(model.get_submodule(block), hooks)
        for block, name in self.unsharded.items():
            further = lookup(block, per_token_inputs) or ()
            FullSequenceRegion(self.stacks[name], self.rng, further).install(model.get_submodule(block), hooks)
        for name, stack in self.stacks.items():
            layers: Any = model.get_submodule(name)
            # With layer drop no fixed layer is the first or the last one.
            stack.has_layer_drop = leaves_layers_out(model.config)
            stack.install(layers, hooks, full_prefix)
            # Off-stage layers are placeholders.
            owned = list(filter(computes_here, layers))
            for layer in owned:
                draw_alone(layer, self.rng)
            if arguments or unshardable:
                SequenceArguments(arguments, self.group, unshardable or {}).install(owned, hooks)
        for name, stack in self.stacks.items():
            stack.check_ends(_around_layers(model, name), model, name, hooks)
        return self._exit_without_gather if self.stacks else None

    def _exit_without_gather(self, hidden_states: Tensor, layers: str) -> Tensor:
        return self.stacks[layers].exit_without_gather(hidden_states) if layers in self.stacks else hidden_states

    def gather_token_outputs(self, part: Any) -> Any:
        """Gathers per-token outputs of layers with a sharded sequence, `[local tokens, ...]` -> `[tokens, ...]`."""
        for stack in self.stacks.values():
            part = stack.gather_token_outputs(part)
        return part

    def join_router_logits(self, model: Any, args: tuple, output: Any) -> None:
        """Forward hook that gathers the router logits a model returns, if its routers see shards of the sequence."""
        if isinstance(output, ModelOutput) and isinstance(parts := output.get(ROUTER_LOGITS), tuple):
            output[ROUTER_LOGITS] = tuple(map(self.gather_token_outputs, parts))


def leaves_layers_out(config: PreTrainedConfig) -> bool:
    """Returns whether a model, or one of its sub-models, skips layers at random in training."""
    parts = (part for part in vars(config).values() if isinstance(part, PreTrainedConfig))
    rates = (value for name, value in vars(config).items() if name.endswith(_LAYERDROP))
    return any(rates) or any(map(leaves_layers_out, parts))


def _around_layers(model: Any, stack: str) -> nn.Module:
    """Returns the module around a stack whose forward ends after the last layer, on the stage that has that layer."""
    if model.base_model is not model or "." not in stack:
        return model.base_model
    # A composite model: its language model or encoder that contains the stack.
    return model.get_submodule(stack.partition(".")[0])
