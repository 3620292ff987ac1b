"""Checks of training loops with ZeRO stage 3, whose weights are unsharded only during the model's forward."""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ..compat.shared import Shared
from ..compat.torch_fsdp import unsharded_parameters
from ..core.forward_hooks import ForwardHooks
from ..core.mesh import is_weight_axis
from ..core.off_stage import is_off_stage
from ..errors import UnsupportedError


class FullWithinForward(Shared):
    """Forward pre-hook of a module with parameters; raises if they are sharded because the model was not called.

    Unsharding them for such a call would give the right output but lose the gradient: FSDP2 reduces gradients at the
    end of the backward of the module's unit, which belongs to the model's forward.
    """

    def __init__(self, name: str):
        self.name = name

    def install(self, module: nn.Module, hooks: ForwardHooks) -> None:
        hooks.add_to(module, "zero 3 weights", self._enter)

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and any(map(is_sharded, module._parameters.values())):
            raise UnsupportedError(
                f"{self.name} ({type(module).__name__}) was called outside of the model's forward: with zero_stage=3 "
                "its weights are unsharded during that forward only. Read its output with a forward hook, or load the "
                "model with zero_stage=2."
            )


def is_sharded(parameter: Any) -> bool:
    """Returns whether a parameter is an FSDP2 shard at present."""
    return isinstance(parameter, DTensor) and is_weight_axis(parameter.device_mesh.mesh_dim_names[0])  # type: ignore[index]


class AfterFirstForward(Shared):
    """Forward pre-hook of a unit; raises before the model's first forward, which initializes FSDP2."""

    def __init__(self, name: str, has_run: Callable[[], bool]):
        self.name, self.has_run = name, has_run

    def install(self, unit: nn.Module, hooks: ForwardHooks) -> None:
        hooks.add_to(unit, "zero 3 unit", self._enter)

    def _enter(self, unit: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not torch.compiler.is_compiling() and not self.has_run():
            raise UnsupportedError(
                f"{self.name} was called before the model's first forward, which initializes FSDP2 with zero_stage=3. "
                "Call the model first, or load it with zero_stage=2."
            )


def is_unit(module: nn.Module) -> bool:
    """Returns whether a module is an FSDP2 unit."""
    return isinstance(module, FSDPModule)


def install_guards(model: nn.Module, hooks: ForwardHooks, has_run: Callable[[], bool]) -> None:
    """Registers the checks on every inner module with direct parameters, after FSDP2 has installed its hooks.

    Args:
        has_run (`Callable`): returns whether the model was called.
    """
    for name, module in model.named_modules():
        # A call of the model itself unshards the model's own parameters.
        if module is model:
            continue
        if any(parameter is not None for parameter in module._parameters.values()):
            FullWithinForward(name).install(module, hooks)
        if is_unit(module):
            AfterFirstForward(name, has_run).install(module, hooks)


class SplitPlaces:
    """Parameters that FSDP2 has sharded, by place; it keeps using them even if a module gets another parameter."""

    def __init__(self, model: nn.Module):
        self.model = model
        # References are kept so that no other dict gets the same id.
        self._all = [module._parameters for module in model.modules()]
        self._known = set(map(id, self._all))
        self._holders = [holder for holder in self._all if holder]
        self._sharing, self._layouts = _sharing(self._found()), _layouts(self._found())
        self._taken: list[nn.Parameter | None] = []

    def _found(self) -> list[nn.Parameter | None]:
        return [parameter for holder in self._holders for parameter in holder.values()]

    def check(self) -> None:
        """Raises `UnsupportedError` if a parameter was tied, untied or replaced.

        Before the first forward, a parameter may be replaced by another one with the same shape and placements.
        """
        parameters = self._found()
        if not self._taken and _sharing(parameters) == self._sharing and _layouts(parameters) == self._layouts:
            # First forward: FSDP2 uses the parameters that it finds now.
            self._taken = parameters
        # Unsharded parameters replace the sharded ones during a forward and until a backward.
        if len(parameters) == len(self._taken) and all(map(operator.is_, parameters, self._taken)):
            return
        unsharded_ids = {id(parameter) for parameter in unsharded_parameters(self.model)}
        if len(parameters) != len(self._taken) or any(
            new is not old and id(new) not in unsharded_ids for new, old in zip(parameters, self._taken, strict=True)
        ):
            raise UnsupportedError(
                "A parameter of a model with zero_stage=3 was tied, untied or replaced, but FSDP2 would keep using the "
                "old one. Change the saved model in a single process before from_pretrained(..., megatron_config=...), "
                "copy values into the parameter, or load the model with zero_stage=2."
            )

    def reject_added(self, is_known: Callable[[nn.Parameter], bool]) -> None:
        """Raises `UnsupportedError` if a module that was added after sharding has trained or sharded weights.

        Args:
            is_known (`Callable`): whether another component reduces a parameter's gradient.
        """
        for name, module in self.model.named_modules():
            if id(module._parameters) in self._known:
                continue
            for param_name, parameter in module._parameters.items():
                if parameter is None or is_off_stage(parameter) or is_known(parameter):
                    continue
                if parameter.requires_grad or is_sharded(parameter):
                    raise UnsupportedError(
                        f"{name}.{param_name} was added to a model with zero_stage=3 after loading: FSDP2 neither "
                        "shards it "
                        "nor reduces its gradient. Define it in a model class of your own and load that with "
                        "from_pretrained(..., megatron_config=...), freeze it, or load the model with zero_stage=2."
                    )


class FsdpGuards:
    """Checks that run before each forward of a model with ZeRO stage 3."""

    def __init__(self, model: nn.Module):
        self.model = model
        self._dtypes: list[torch.dtype] = []
        # Identity of each unsharded weight -> its version counter when the forward began.
        self._versions: dict[int, int] = {}
        self.scan()

    def scan(self) -> None:
        """Registers the parameters that FSDP2 has sharded."""
        self._places = SplitPlaces(self.model)

    @property
    def has_run(self) -> bool:
        """Whether the model was called."""
        return bool(self._dtypes)

    def check_forward(self, parameters: Iterable[nn.Parameter], is_known: Callable[[nn.Parameter], bool]) -> None:
        """Raises `UnsupportedError` if FSDP2 would not see a change made since the last forward.

        Args:
            parameters: the parameters that FSDP2 shards.
            is_known (`Callable`): whether the gradient of a parameter is reduced by another component.
        """
        self._places.check()
        if torch.is_grad_enabled():
            self._places.reject_added(is_known)
        self.check_dtypes(parameters)

    def record_versions(self, unsharded: Sequence[torch.Tensor]) -> None:
        """Records the versions of the unsharded weights, of any shape, when a forward begins."""
        self._versions = {id(parameter): parameter._version for parameter in unsharded}

    def reject_edits(self, unsharded: Sequence[torch.Tensor]) -> None:
        """Raises `UnsupportedError` if a forward has edited unsharded weights, of any shape: FSDP2 discards them."""
        # The first forward creates the unsharded weights, with equal versions.
        created = [parameter._version for parameter in unsharded if id(parameter) not in self._versions]
        first = min(created, default=0)
        for parameter in unsharded:
            if parameter._version != self._versions.get(id(parameter), first):
                raise UnsupportedError(
                    f"A weight of shape {tuple(parameter.shape)} was edited during the forward of a model with "
                    "zero_stage=3, where FSDP2 discards the edit. Edit weights between steps, or load the model with "
                    "zero_stage=2."
                )

    def check_dtypes(self, parameters: Iterable[nn.Parameter]) -> None:
        """Raises `UnsupportedError` if the parameters were cast since the first forward."""
        dtypes = [parameter.dtype for parameter in parameters]
        # Fewer or more parameters were shared or added, which other checks report.
        if len(dtypes) == len(self._dtypes) and dtypes != self._dtypes:
            raise UnsupportedError(
                "A model with zero_stage=3 was cast after its first forward, but FSDP2 has allocated its buffers by "
                "then. Cast it before, or load it with dtype=... ."
            )
        self._dtypes = dtypes


def _sharing(parameters: list[nn.Parameter | None]) -> list[int]:
    """Returns an index per place; places that hold the same parameter have the same one."""
    indices: dict[int, int] = {}
    return [indices.setdefault(id(parameter), len(indices)) for parameter in parameters]


def _layouts(parameters: list[nn.Parameter | None]) -> list[Any]:
    """Returns shape, mesh and placements of each parameter that is a `DTensor`."""
    return [
        (parameter.shape, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        for parameter in parameters
    ]


def reject_copy(model: nn.Module, memo: dict) -> nn.Module:
    """Raises `UnsupportedError`: a copy would share the units of FSDP2."""
    raise UnsupportedError(
        f"copy.deepcopy of a {type(model).__name__} with zero_stage=3: FSDP2 cannot copy its units. Keep "
        "`copy.deepcopy(model.state_dict())`, or load the model a second time."
    )
