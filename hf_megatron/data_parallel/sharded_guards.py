"""What a loop cannot do with a model whose weights are whole within its forward only (stage 3): each is an error."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..errors import UnsupportedError
from ..patch_ledger import Shared


class WholeWithinForward(Shared):
    """Hook of a module that reads parameters of its own: raises where FSDP2 has not put them together.

    Putting them together for such a call would give the right output, and lose the gradient: FSDP2 reduces gradients
    when the backward of the module's unit is over, which is that of the model's forward.
    """

    def __init__(self, name: str):
        self.name = name

    def install(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self._enter)

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling() and any(map(is_sharded, module._parameters.values())):
            raise UnsupportedError(
                f"{self.name} ({type(module).__name__}) was called outside of the model's forward: with zero_stage=3 "
                "its weights are whole within it only. Read its output with a forward hook, or load the model with "
                "zero_stage=2."
            )


def is_sharded(parameter: Any) -> bool:
    """Tells whether this rank holds the part of a parameter that FSDP2 left it."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.mesh_dim_names[0].startswith("dp")  # type: ignore[index]


class AfterFirstForward(Shared):
    """Hook of a unit: raises before the model's first forward, after which FSDP2 knows the units and their root."""

    def __init__(self, name: str, has_run: Callable[[], bool]):
        self.name, self.has_run = name, has_run

    def install(self, unit: nn.Module) -> None:
        unit.register_forward_pre_hook(self._enter, prepend=True)

    def _enter(self, unit: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling() and not self.has_run():
            raise UnsupportedError(
                f"{self.name} was called before the model's first forward: with zero_stage=3 "
                "FSDP2 has not put its units together yet. Call the model first, or load it with zero_stage=2."
            )


def install_guards(model: nn.Module, has_run: Callable[[], bool]) -> None:
    """Guards every module with parameters of its own, after FSDP2 has installed its hooks.

    Args:
        has_run (`Callable`): tells whether the model was called.
    """
    for name, module in model.named_modules():
        if any(parameter is not None for parameter in module._parameters.values()):
            WholeWithinForward(name).install(module)
        if isinstance(module, FSDPModule) and module is not model:
            AfterFirstForward(name, has_run).install(module)  # type: ignore[arg-type]


def refuse_cast(parameters: Iterable[nn.Parameter], before: list[torch.dtype]) -> list[torch.dtype]:
    """Returns the dtypes of parameters of any shape; raises `UnsupportedError` if they changed since a forward."""
    dtypes = [parameter.dtype for parameter in parameters]
    if before and dtypes != before:
        raise UnsupportedError(
            "A model with zero_stage=3 was cast after its first forward, for which FSDP2 has made its buffers: cast it "
            "before, or load it with dtype=... ."
        )
    return dtypes


def refuse_copy(model: nn.Module, memo: dict) -> nn.Module:
    """Raises `UnsupportedError`: a copy would share the units of FSDP2."""
    raise UnsupportedError(
        f"copy.deepcopy of a {type(model).__name__} with zero_stage=3: FSDP2 cannot copy its units. Keep "
        "`model.state_dict()`, or load the model a second time."
    )
