"""The user's optimizer, stepping on local tensors: fp32 main weights and moments of what this rank owns.

Within a step leaves stand in the groups in the place of the parameters, which loops find there otherwise. The optimizer
stays the object it is: schedulers change its groups, `foreach` and `fused` apply.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch_autograd import step_hook_last
from ..compat.torch_dtensor import local_tensor
from ..compat.torch_memory import is_async_device
from ..config import MegatronConfig
from ..core.communication.full_tensor import placed_gradient
from ..core.off_stage import is_off_stage
from ..errors import ConfigError, UnsupportedError
from .buckets import owned_range
from .engine import DataParallel, get_engine
from .fsdp import reshard
from .grad_norm import clip_grad_norm, has_finite_gradients
from .grad_sync_groups import GradSyncGroup
from .optimizer_state import StateByParameter
from .param_gather import ParamAllGather
from .step_status import GradStatus

# Optimizers whose update of an entry depends on that entry alone: package -> classes.
ELEMENTWISE = {
    "torch": {"ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"},
    "apex": {"FusedAdam", "FusedSGD", "FusedAdagrad"},
    "transformer_engine": {"FusedAdam", "FusedSGD"},
    "lion_pytorch": {"Lion"},
}


_HALF = (torch.bfloat16, torch.float16)


@dataclass
class MainParam:
    """What the optimizer steps on in place of a parameter.

    Attributes:
        start, stop: the entries of the flattened local parameter that the leaf holds.
        tensor: of the parameter's local shape, or 1-D where dp ranks share the parameter.
        separate: has memory of its own (fp32 main weights, CPU offload) instead of the parameter's.
        flat: holds a part that other ranks do not step on.
        sharing: the ranks that step on the other parts.
    """

    name: str
    parameter: nn.Parameter
    start: int
    stop: int
    tensor: Tensor
    separate: bool
    flat: bool
    sharing: GradSyncGroup | None = None

    def view(self) -> Tensor:
        """Returns the leaf's entries in the parameter itself, `[entries]` or `[rows, ...]` as it is."""
        return self.own(self.parameter)

    def follow(self, *, main_weights: bool, may_wait: bool) -> None:
        """Takes over what happened to the parameter since the last step, outside of autograd: move, cast or edit.

        `may_wait` tells whether a comparison costs less than a copy: the host does not wait for a device.
        """
        present = self.view()
        if not self.separate and present.data_ptr() != self.tensor.data_ptr():
            # Moving the model gave its parameters new memory; leaves share it.
            self.separate = main_weights and present.dtype in _HALF and self.tensor.dtype not in _HALF
            self.tensor.data = present.to(self.tensor.dtype) if self.separate else present
        elif self.separate:
            present = present.to(self.tensor.device)
            rounded = self.tensor.to(present.dtype)
            if not may_wait or not torch.equal(present, rounded):
                self.tensor.copy_(torch.where(present == rounded, self.tensor, present))

    def take_over(self, state: dict[str, Any]) -> dict[str, Any]:
        """Turns a parameter's state, as a constructor made it (Adagrad's), into the leaf's."""
        shape = self.parameter.shape
        return {
            name: self.own(value).to(self.tensor, copy=True)
            if isinstance(value, Tensor) and value.shape == shape
            else value
            for name, value in state.items()
        }

    def own(self, tensor: Tensor) -> Tensor:
        """Returns the leaf's entries, `[entries]` or `[rows, ...]`, of a tensor of the parameter's shape."""
        local = local_tensor(tensor).detach()
        return local.view(-1)[self.start : self.stop] if self.flat else local


def _make_leaf(
    name: str, parameter: nn.Parameter, config: MegatronConfig, sharing: GradSyncGroup, *, is_sharded: bool
) -> MainParam:
    local = local_tensor(parameter).detach()
    if not local.is_contiguous():
        raise UnsupportedError(f"{name} is not contiguous in memory; its optimizer state cannot be shared.")
    shares = config.zero_stage > 0 and sharing.shard_size > 1 and not is_sharded
    start, stop = owned_range(local.numel(), sharing.shard_size, sharing.shard_rank) if shares else (0, local.numel())
    half = parameter.dtype in _HALF and config.fp32_main_params
    leaf = MainParam(name, parameter, start, stop, local, half or config.offload_optimizer, shares, sharing)
    leaf.tensor = leaf.view()
    if leaf.separate:
        device = torch.device("cpu") if config.offload_optimizer else local.device
        dtype = torch.float32 if half else local.dtype
        # A copy even where device and dtype are the same: numbers must not depend on where the state lies.
        leaf.tensor = leaf.tensor.to(device=device, dtype=dtype, copy=True)
    return leaf


class ShardedOptimizer:
    """What `prepare_optimizer` attaches to an optimizer as `_hf_megatron`."""

    def __init__(self, optimizer: torch.optim.Optimizer, engine: DataParallel):
        self.optimizer, self.engine = optimizer, engine
        self.step_was_skipped = False
        self.leaves: list[MainParam] = []
        self._used: GradStatus | None = None
        self._publishers: list[ParamAllGather] = []
        self._published: list[MainParam] = []
        # By identity; a leaf is its own.
        self._leaf_of: dict[int, Tensor] = {}
        # What the groups list outside of steps.
        self._listed: list[list[Tensor]] | None = None
        for group in optimizer.param_groups:
            self.adopt(group)
        self.find_state_by_parameter()
        engine.add_optimizer(self)
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def adopt(self, group: dict[str, Any]) -> None:
        """Makes leaves for a group's parameters."""
        self.engine.scan()
        names = self.engine.parameters.names()
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise self._untracked(parameter)
            if is_off_stage(parameter):
                self.optimizer.state.pop(parameter, None)
                continue
            sharing = self.engine.parameters.sync_group(parameter)
            name = names[id(parameter)]
            is_sharded = self.engine.state.shards(name)
            leaf = _make_leaf(name, parameter, self.engine.config, sharing, is_sharded=is_sharded)
            self.leaves.append(leaf)
            self._leaf_of |= {id(parameter): leaf.tensor, id(leaf.tensor): leaf.tensor}
            if parameter in self.optimizer.state:
                self.optimizer.state[leaf.tensor] = leaf.take_over(self.optimizer.state.pop(parameter))

    def _untracked(self, parameter: Tensor) -> ConfigError:
        # Its gradients are those of this rank's rows.
        is_reduced = self.engine.mesh.reduces_gradients
        other = get_engine(parameter)
        if other is not None:
            return ConfigError(
                f"The optimizer holds parameters of a {type(self.engine.model).__name__} and, with one of shape "
                f"{tuple(parameter.shape)}, of a {type(other.model).__name__}, and each is laid out for itself: "
                "give each model an optimizer of its own."
            )
        alone = "use dp_size=1 and cp_size=1" if is_reduced else "give it an optimizer of its own"
        return ConfigError(
            f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of "
            f"{type(self.engine.model).__name__}'s: make it one of the model's before its optimizer, or {alone}."
            + (" What is a deep copy has to be loaded a second time, to be trained." if is_reduced else "")
        )

    def _enter(self) -> None:
        """Puts leaves into the groups."""
        self._leave()
        listed = [group["params"] for group in self.optimizer.param_groups]
        local_params = [[parameter for parameter in group if not is_off_stage(parameter)] for group in listed]
        if untracked := [
            parameter for group in local_params for parameter in group if id(parameter) not in self._leaf_of
        ]:
            raise self._untracked(untracked[0])
        self._listed = listed
        for group, parameters in zip(self.optimizer.param_groups, local_params, strict=True):
            group["params"] = [self._leaf_of[id(parameter)] for parameter in parameters]

    def _leave(self) -> None:
        """Puts the parameters back."""
        for group, parameters in zip(self.optimizer.param_groups, self._listed or (), strict=bool(self._listed)):
            group["params"] = parameters
        self._listed = None

    @contextmanager
    def main_params_in_groups(self) -> Iterator[None]:
        """Lets torch find the leaves that states belong to."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def find_state_by_parameter(self) -> None:
        """Lets loops find the state of what this rank owns of a parameter by the parameter."""
        self.optimizer.state = StateByParameter(self.optimizer.state, lambda key: self._leaf_of.get(id(key)))

    def memory(self) -> dict[str, list[Tensor]]:
        """Lists what is kept beside the parameters, of any shape, by what it is for."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "main weights": [leaf.tensor for leaf in self.leaves if leaf.separate],
            "moments": [value for value in moments if isinstance(value, Tensor)],
        }

    # A step

    def collect(self) -> None:
        """Gives every leaf its gradient; every rank calls it after backward."""
        reducer = self.engine.reducer
        if reducer is not None:
            reducer.finalize()
        for leaf in self.leaves:
            gradient: Tensor | None
            if reducer is not None and reducer.owns(leaf.parameter):
                gradient = reducer.gradient(leaf.parameter)
                if gradient is not None and not leaf.flat:
                    gradient = gradient.view(leaf.tensor.shape)
            else:
                gradient = placed_gradient(leaf.parameter)
                gradient = None if gradient is None else leaf.own(gradient)
            leaf.tensor.grad = None if gradient is None else gradient.to(leaf.tensor.device, leaf.tensor.dtype)

    def parameters(self) -> list[nn.Parameter]:
        return [leaf.parameter for leaf in self.leaves]

    def come_last(self) -> None:
        """Puts leaves into the groups after everything that a loop does before steps."""
        step_hook_last(self.optimizer, self._hook)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # `args` begins with the optimizer itself.
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            raise UnsupportedError(f"{type(optimizer).__name__}.step(closure) on a model split over ranks.")
        engine = self.engine
        engine.check_before_step()
        may_wait = not is_async_device(engine.mesh.device)
        with torch.no_grad():
            for leaf in self.leaves:
                leaf.follow(main_weights=engine.config.fp32_main_params, may_wait=may_wait)
        self.step_was_skipped = False
        grad_status = engine.step_status.gradients if engine.step_status.gradients is not self._used else GradStatus()
        limit = engine.config.gradient_clipping
        if limit is not None and not grad_status.clipped:
            # A fused optimizer that a loss scaler steps divides by the scale itself.
            scale = getattr(optimizer, "grad_scale", None)
            clip_grad_norm(self.parameters(), limit if scale is None else limit * float(scale), in_step=True)
            grad_status = engine.step_status.gradients
        if not grad_status.scaled:
            if grad_status.finite is None:
                grad_status.finite = has_finite_gradients(self.parameters())
            self.step_was_skipped = not grad_status.finite
            engine.step_status.count(skipped=self.step_was_skipped)
        self.collect()
        if self.step_was_skipped:
            # Without a gradient no leaf moves, on any rank: the decision came from the norm over all of them.
            for leaf in self.leaves:
                leaf.tensor.grad = None
        self._used = engine.step_status.gradients
        engine.step_status.gradients.used = True
        self._enter()

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._leave()
        if self.step_was_skipped:
            self._discard()
            return
        if self.engine.state.shards_weights:
            # Weights that a forward without a backward has left whole are of before the step.
            reshard([self.engine.model])
        for leaf in self.leaves:
            if leaf.separate:
                leaf.view().copy_(leaf.tensor)
        self.publish()
        for stepped in self.engine.callbacks.on_stepped:
            stepped()

    def publish(self) -> None:
        """Makes parameters that dp ranks share, and that have moved, whole again on every one of them."""
        moved = [leaf for leaf in self.leaves if leaf.flat and leaf.tensor.grad is not None]
        if [id(leaf.parameter) for leaf in moved] != [id(leaf.parameter) for leaf in self._published]:
            together: dict[GradSyncGroup, list[nn.Parameter]] = {}
            for leaf in moved:
                assert leaf.sharing is not None
                together.setdefault(leaf.sharing, []).append(leaf.parameter)
            self._publishers = [ParamAllGather(parameters, sharing) for sharing, parameters in together.items()]
            self._published = moved
        for publisher in self._publishers:
            publisher.run()

    @torch.no_grad()
    def refresh_main_weights(self) -> None:
        """Takes the parameters' present values over into leaves with memory of their own."""
        for leaf in self.leaves:
            if leaf.separate:
                leaf.tensor.copy_(leaf.view())

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool) -> None:
        # A step that failed has left them there.
        self._leave()
        # Parameters that a loop has taken out of the groups keep their gradients.
        present = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        leaves = [leaf for leaf in self.leaves if id(leaf.parameter) in present]
        if set_to_none and self.engine.reducer is not None:
            self.engine.reducer.discard([leaf.parameter for leaf in leaves])
        for group in self.optimizer.param_groups if set_to_none else ():
            for parameter in filter(is_off_stage, group["params"]):
                parameter.grad = None
        for leaf in leaves:
            leaf.tensor.grad = None
            if set_to_none:
                leaf.parameter.grad = None
            elif leaf.parameter.grad is not None:
                leaf.parameter.grad.zero_()
        self._discard()

    def _discard(self) -> None:
        for discarded in self.engine.callbacks.on_discarded:
            discarded()


class _TakenOver:
    """Mixin of a prepared optimizer's class."""

    _hf_megatron: ShardedOptimizer

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._hf_megatron.zero_grad(set_to_none)

    def register_step_pre_hook(self, hook: Any) -> Any:
        handle = super().register_step_pre_hook(hook)  # type: ignore[misc]
        self._hf_megatron.come_last()
        return handle

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)  # type: ignore[misc]
        self._hf_megatron.adopt(self.param_groups[-1])  # type: ignore[attr-defined]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"A prepared {type(self).__name__} cannot be copied or pickled: it steps on this rank's part of its model. "
            "Copy or save optimizer.state_dict(), or use accelerator.save_state()."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of what this rank owns under the parameters' names in the model."""
        with self._hf_megatron.main_params_in_groups():
            packed = super().state_dict()  # type: ignore[misc]
        names = [leaf.name for leaf in self._hf_megatron.leaves]
        groups = [{**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]]
        return {"state": {names[index]: state for index, state in packed["state"].items()}, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        index_of = {leaf.name: index for index, leaf in enumerate(self._hf_megatron.leaves)}
        named = [name for group in state_dict["param_groups"] for name in group["params"]]
        unknown = sorted(set(map(str, named)) - index_of.keys())
        if unknown:
            raise ConfigError(f"The optimizer's state dict names parameters that it does not hold: {unknown[:5]}.")
        state = {index_of[name]: value for name, value in state_dict["state"].items()}
        groups = [{**g, "params": [index_of[name] for name in g["params"]]} for g in state_dict["param_groups"]]
        with self._hf_megatron.main_params_in_groups():
            super().load_state_dict({"state": state, "param_groups": groups})  # type: ignore[misc]
        self._hf_megatron.find_state_by_parameter()


@cache
def _taken_over(base: Any) -> type:
    return type(base.__name__, (_TakenOver, base), {})


def sharded(optimizer: Any) -> ShardedOptimizer | None:
    """Returns what `prepare_optimizer` attached, if it did."""
    return vars(optimizer).get("_hf_megatron")


def stepping_optimizer(optimizer: Any) -> Any:
    """Returns the optimizer that steps: the one inside of Accelerate's, or itself."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def is_elementwise(optimizer_class: type) -> bool:
    package = optimizer_class.__module__.partition(".")[0]
    return optimizer_class.__name__ in ELEMENTWISE.get(package, ())


def prepare_optimizer(optimizer: torch.optim.Optimizer, *, elementwise: bool = False) -> torch.optim.Optimizer:
    """Makes an optimizer of a laid out model step on what this rank owns; Trainer and Accelerate call it themselves.

    Returns the same object, whose groups hold local tensors while it steps. `UnsupportedError` for a class that looks
    at whole parameters (Adafactor, Muon, LBFGS, block-wise 8-bit) or is unknown; `ConfigError` for parameters of
    several models, and for an optimizer that has stepped already.

    Args:
        optimizer (`torch.optim.Optimizer`): made from the model's parameters, before its first step.
        elementwise (`bool`, defaults to `False`): the class is not in `ELEMENTWISE`, and its update of an entry does
            depend on that entry alone.
    """
    if sharded(optimizer) is not None:
        return optimizer
    engines = [get_engine(p) for p in _parameters(optimizer)]
    engine = next((engine for engine in engines if engine is not None), None)
    if engine is None:
        return optimizer
    engine.reject_sums_over_parameters(optimizer, elementwise=elementwise)
    name = type(optimizer).__name__
    # Adagrad makes its state when it is made.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ConfigError(f"{name} has stepped already; prepare it before its first step.")
    sees_full_params = engine.config.zero_stage == 0 and not any(
        engine.parameters.is_split(p) for p in _parameters(optimizer)
    )
    if not (elementwise or sees_full_params or is_elementwise(type(optimizer))):
        raise UnsupportedError(
            f"{type(optimizer).__module__}.{name} is not known to be elementwise (known: {', '.join(known())}): it "
            "would see parts of parameters and compute something else. Use zero_stage=0 with tp_size=1, where it sees "
            "whole ones, or hf_megatron.prepare_optimizer(optimizer, elementwise=True) if each entry is updated from "
            "that entry alone."
        )
    half = any(p.dtype in _HALF for p in _parameters(optimizer))
    if half and engine.config.fp32_main_params and engine.config.zero_stage < 3:
        engine.reduce_gradients()
    # Attached last: the mixin's methods need it.
    state = ShardedOptimizer(optimizer, engine)
    optimizer._hf_megatron = state  # type: ignore[attr-defined]
    optimizer.__class__ = _taken_over(type(optimizer))  # type: ignore[arg-type]
    return optimizer


def known() -> list[str]:
    return sorted({name for names in ELEMENTWISE.values() for name in names})


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
