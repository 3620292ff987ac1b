"""Main params: the tensors that an optimizer steps on instead of the model parameters, one shard per rank."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.tensor_lists import list_local_tensors
from ..compat.torch_dtensor import local_tensor
from ..config import MegatronConfig
from ..errors import UnsupportedError
from .buckets import owned_range
from .full_params import FullParam
from .grad_sync_groups import GradSyncGroup

HALF = (torch.bfloat16, torch.float16)
# Entries that are compared at once.
_CHUNK = 1 << 22


@dataclass
class MainParam:
    """Main param: the tensor that the optimizer steps on instead of a model parameter.

    Attributes:
        start, stop: the entries of the flattened local parameter that it holds.
        tensor: has the parameter's local shape, or `[stop - start]` if dp ranks shard the optimizer state (`flat`).
        separate: whether it has its own memory (fp32 main params, CPU offload) instead of the parameter's.
        flat: whether it is a 1-D shard, and other ranks step on the other shards.
        sharing: the ranks that average the gradient and step on the other shards.
        full (`FullParam`, *optional*): what the optimizer steps on instead of `tensor`, if it needs full parameters.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    tensor: Tensor
    separate: bool
    flat: bool
    sharing: GradSyncGroup | None = None
    full: FullParam | None = None

    @property
    def stepped(self) -> Tensor:
        """The tensor of any shape that the optimizer's groups list during a step."""
        return self.tensor if self.full is None else self.full.tensor

    @property
    def covers_parameter(self) -> bool:
        """Whether the optimizer's state of this main param is that of all entries of the parameter."""
        is_local = local_tensor(self.parameter).numel() == self.parameter.numel()
        return self.full is not None or (is_local and not self.flat)

    def describe_shard(self) -> list[int]:
        """Returns an id of this rank's shard: entries and mesh coordinates, or whether it updates the full tensor."""
        if self.full is not None:
            return [int(self.full.tensor.shape == self.parameter.shape)]
        mesh, placements = getattr(self.parameter, "device_mesh", None), getattr(self.parameter, "placements", ())
        coordinate = () if mesh is None else mesh.get_coordinate() or ()
        place = (index for index, where in zip(coordinate, placements, strict=False) if not where.is_replicate())
        return [self.start, self.stop, *place]

    def view(self) -> Tensor:
        """Returns a view of the model parameter's entries, with the shape of `tensor`."""
        return self.own(self.parameter)

    def follow_memory(self, *, main_weights: bool) -> None:
        """Applies moves and casts of the model parameter since the last step to the main param.

        Args:
            main_weights (`bool`): whether half-precision parameters have fp32 main params.
        """
        present = self.view()
        if not self.separate and present.data_ptr() != self.tensor.data_ptr():
            # `model.to(...)` gave the parameter new memory, which the main param shares.
            self.separate = main_weights and present.dtype in HALF and self.tensor.dtype not in HALF
            self.tensor.data = present.to(self.tensor.dtype) if self.separate else present

    def follow_edits(self) -> None:
        """Applies edits of the model parameter since the last step to a main param with its own memory.

        In chunks whose intermediate results stay in the device's cache: memory is read and written once, 10 bytes per
        bf16 entry.
        """
        for present, main in zip(
            self.view().reshape(-1).split(_CHUNK), self.tensor.view(-1).split(_CHUNK), strict=True
        ):
            present = present.to(main.device)
            # Entries that equal the rounded main param were not edited: they keep their fp32 value.
            main.copy_(torch.where(present == main.to(present.dtype), main, present))

    def take_over(self, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the main param's shard of state that a constructor made for the full parameter (Adagrad)."""
        shape = self.parameter.shape
        return {
            name: self.own(value).to(self.tensor, copy=True)
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for name, value in state.items()
        }

    def own(self, tensor: Tensor) -> Tensor:
        """Returns the entries of the main param, in its shape, from a tensor of the parameter's shape."""
        local = local_tensor(tensor).detach()
        return local.view(-1)[self.start : self.stop] if self.flat else local


def list_views(leaves: Sequence[MainParam]) -> list[Tensor]:
    """Returns `MainParam.view` of each of them, without a Python call per main param."""
    locals_of_leaves = list_local_tensors([leaf.parameter for leaf in leaves])
    return [
        local.detach().view(-1)[leaf.start : leaf.stop] if leaf.flat else local.detach()
        for leaf, local in zip(leaves, locals_of_leaves, strict=True)
    ]


def follow_parameters(leaves: Iterable[MainParam], *, main_weights: bool, may_wait: bool) -> None:
    """Applies moves, casts and edits of model parameters since the last step to their main params.

    Edits through `.data` change no version counter, so the values are compared in each step.

    Args:
        main_weights (`bool`): whether half-precision parameters have fp32 main params.
        may_wait (`bool`): whether the host may read the result of a comparison (CPU), which then saves a copy.
    """
    for leaf in leaves:
        if not leaf.separate:
            leaf.follow_memory(main_weights=main_weights)
        elif not may_wait or not _equals_rounded(leaf.view(), leaf.tensor):
            leaf.follow_edits()


def _equals_rounded(parameter: Tensor, main: Tensor) -> bool:
    """Returns whether a parameter of any shape equals its main param, rounded; in chunks as `follow_edits`."""
    pieces = zip(parameter.reshape(-1).split(_CHUNK), main.view(-1).split(_CHUNK), strict=True)
    return all(torch.equal(piece.to(of_main.device), of_main.to(piece.dtype)) for piece, of_main in pieces)


def make_main_param(
    name: str, parameter: nn.Parameter, config: MegatronConfig, sharing: GradSyncGroup, *, is_sharded: bool
) -> MainParam:
    """Creates the main param of a local parameter of any shape.

    Args:
        sharing (`GradSyncGroup`): the ranks that average its gradient.
        is_sharded (`bool`): whether ZeRO stage 3 shards the parameter.

    Raises:
        UnsupportedError: the parameter is not contiguous in memory.
    """
    local = local_tensor(parameter).detach()
    if not local.is_contiguous():
        raise UnsupportedError(f"{name} is not contiguous in memory, so its optimizer state cannot be sharded.")
    shares = config.zero_stage > 0 and sharing.shard_size > 1 and not is_sharded
    start, stop = owned_range(local.numel(), sharing.shard_size, sharing.shard_rank) if shares else (0, local.numel())
    half = parameter.dtype in HALF and config.fp32_main_params
    leaf = MainParam(name, parameter, start, stop, local, half or config.offload_optimizer, shares, sharing)
    leaf.tensor = leaf.view()
    if leaf.separate:
        device = torch.device("cpu") if config.offload_optimizer else local.device
        dtype = torch.float32 if half else local.dtype
        # Copies even if device and dtype are the same: results must not depend on `offload_optimizer`.
        leaf.tensor = leaf.tensor.to(device=device, dtype=dtype, copy=True)
    return leaf
