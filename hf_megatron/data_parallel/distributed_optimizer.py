"""Distributed optimizer: the user's optimizer steps on fp32 main params and moments of this rank's shards.

During a step the optimizer's groups list the main params instead of the model parameters, which they list at all other
times. The optimizer stays the same object: learning rate schedulers can change its groups, and `foreach` and `fused`
apply.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.bitsandbytes_overrides import copy_overrides, has_positional_overrides
from ..compat.tensor_lists import list_local_tensors
from ..compat.torch_autograd import in_backward, step_hook_last
from ..compat.torch_memory import is_async_device
from ..core.communication.full_tensor import list_placed_gradients
from ..core.off_stage import OffStageTensor, is_off_stage
from ..errors import CheckpointError, ConfigError, UnsupportedError
from .combined_optimizers import COMBINED, find_parts, list_stepping
from .engine import DataParallel, get_engine
from .finite_verdict import FiniteVerdict, skips_on_device
from .fsdp import reshard
from .grad_norm import clip_grad_norm, has_finite_gradients
from .grad_sync_groups import GradSyncGroup
from .layer_wise import LayerWiseStep
from .main_params import HALF, MainParam, follow_parameters, list_views, make_main_param
from .model_parameters import REPLACED, reject_replaced
from .optimizer_classes import is_elementwise, is_layer_wise, known_elementwise
from .optimizer_state import StateByParameter, has_stepped, has_tensors
from .param_gather import ParamAllGather
from .step_status import GradStatus

# Key of an optimizer's state dict: parameter name -> `MainParam.describe_shard()`.
SHARDS = "shards"


class ShardedOptimizer:
    """State that `prepare_optimizer` attaches to an optimizer as `_hf_megatron`.

    Attributes:
        leaves: main params of this rank, in the order of the groups.
        holds_replaced: whether one of its parameters was replaced by one of another size.
        layer_wise (`LayerWiseStep`, *optional*): distributes full parameters over the ranks, for an optimizer that
            needs them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: DataParallel, *, layer_wise: bool = False):
        self.optimizer, self.engine = optimizer, engine
        self.layer_wise = LayerWiseStep(engine) if layer_wise else None
        # Whether the gradients of the last step were finite.
        self._was_finite: bool | FiniteVerdict = True
        self.holds_replaced = False
        self.leaves: list[MainParam] = []
        self._class = type(optimizer)
        self._is_known = is_elementwise(type(optimizer)) or is_layer_wise(type(optimizer))
        self._used: GradStatus | None = None
        self._publishers: list[ParamAllGather] = []
        self._published: list[MainParam] = []
        # Identity of a parameter or of a main param -> main param.
        self._leaf_of: dict[int, Tensor] = {}
        # For each group, its parameters when it was last stepped on, and the main params that replaced them.
        self._entered: list[tuple[list[Tensor], list[Tensor]]] = []
        # Addresses of the parameters' memory in the last step.
        self._addresses: list[int] = []
        # The groups' parameters while main params replace them during a step.
        self._listed: list[list[Tensor]] | None = None
        for group in optimizer.param_groups:
            self.adopt(group)
        # The groups' values before a step that is skipped.
        self._unstepped: list[dict[str, Any]] = []
        self.find_state_by_parameter()
        engine.add_optimizer(self)
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because a gradient was not finite.

        Waits for the device if the optimizer took the verdict there.
        """
        return not self._was_finite

    def adopt(self, group: dict[str, Any]) -> None:
        """Creates the main params of a group's parameters."""
        self.engine.scan()
        names = self.engine.parameters.names()
        leaves: list[MainParam] = []
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise self._untracked(parameter)
            if is_off_stage(parameter):
                self.optimizer.state.pop(parameter, None)
                continue
            sharing = self.engine.parameters.sync_group(parameter)
            name = names[id(parameter)]
            is_sharded = self.engine.state.shards(name)
            leaves.append(make_main_param(name, parameter, self.engine.config, sharing, is_sharded=is_sharded))
        if self.layer_wise is not None:
            self.layer_wise.add(leaves)
        self.leaves.extend(leaves)
        self._entered, self._addresses = [], []
        for leaf in leaves:
            self._leaf_of |= {id(tensor): leaf.stepped for tensor in (leaf.parameter, leaf.tensor, leaf.stepped)}
            if leaf.parameter in self.optimizer.state:
                state = self._take_over(leaf)
                if leaf.full is None or leaf.full.owner == self.engine.state.axes.world_rank:
                    self.optimizer.state[leaf.stepped] = state

    def _take_over(self, leaf: MainParam) -> dict[str, Any]:
        """Removes the state that the optimizer's constructor made for a parameter, and returns the main param's."""
        state = self.optimizer.state.pop(leaf.parameter)
        # Flags, such as Moonlight's `use_muon`, do not depend on the tensor.
        if leaf.full is not None and has_tensors(state):
            name = type(self.optimizer).__name__
            raise UnsupportedError(
                f"{name} created state for {leaf.name} in its constructor, but it steps on another tensor: the full "
                "parameter. Create the state in the first step, as torch's Adam does."
            )
        return leaf.take_over(state)

    def _untracked(self, parameter: Tensor) -> ConfigError:
        # With data parallelism, gradients of such a parameter would be computed from the local samples only.
        is_reduced = self.engine.mesh.reduces_gradients
        other = get_engine(parameter)
        if other is not None:
            return ConfigError(
                f"The optimizer holds parameters of two parallelized models: a {type(self.engine.model).__name__} and "
                f"a {type(other.model).__name__} (one of shape {tuple(parameter.shape)}). Create one optimizer per "
                "model."
            )
        alone = "use dp_size=1 and cp_size=1" if is_reduced else "create a separate optimizer for it"
        return ConfigError(
            f"The optimizer holds a parameter of shape {tuple(parameter.shape)} that is not one of "
            f"{type(self.engine.model).__name__}'s: add it to the model before creating the optimizer, or {alone}."
            + (" To train a deep copy, load the model a second time instead." if is_reduced else "")
        )

    def _enter(self, left_out: Container[int] = ()) -> None:
        """Lists the main params in the groups instead of the parameters; off-stage parameters are left out.

        Args:
            left_out: identities of main params that are left out too.
        """
        self._leave()
        listed = [group["params"] for group in self.optimizer.param_groups]
        if not _are_same([parameters for parameters, _ in self._entered], listed):
            local_params = [[parameter for parameter in group if not is_off_stage(parameter)] for group in listed]
            if untracked := [
                parameter for group in local_params for parameter in group if id(parameter) not in self._leaf_of
            ]:
                raise self._untracked(untracked[0])
            self._entered = [
                (list(parameters), [self._leaf_of[id(parameter)] for parameter in group])
                for parameters, group in zip(listed, local_params, strict=True)
            ]
        self._listed = listed
        for group, (_, stepped) in zip(self.optimizer.param_groups, self._entered, strict=True):
            group["params"] = [tensor for tensor in stepped if id(tensor) not in left_out]

    def _leave(self) -> None:
        """Lists the model parameters in the groups again."""
        for group, parameters in zip(self.optimizer.param_groups, self._listed or (), strict=bool(self._listed)):
            group["params"] = parameters
        self._listed = None

    @contextmanager
    def main_params_in_groups(self) -> Iterator[None]:
        """Lists the main params in the groups inside, as torch expects when it reads or writes optimizer state."""
        self._enter()
        try:
            yield
        finally:
            self._leave()

    def find_state_by_parameter(self) -> None:
        """Replaces the state dict by one in which a parameter's key returns the state of its main param."""
        self.optimizer.state = StateByParameter(self.optimizer.state, lambda key: self._leaf_of.get(id(key)))

    def memory(self) -> dict[str, list[Tensor]]:
        """Returns the tensors of any shape that are kept in addition to the parameters, by their use."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "main weights": [leaf.tensor for leaf in self.leaves if leaf.separate],
            "moments": [value for value in moments if isinstance(value, Tensor)],
        }

    # A step

    def collect(self) -> None:
        """Sets `.grad` of every main param to this rank's shard of the reduced gradient; collective."""
        # No Python call per parameter, as in `local_gradients`.
        reducer = self.engine.reducer
        others = self.leaves
        if reducer is not None:
            reducer.finalize()
            gradients, places = reducer.list_gradients(), reducer.places
            others = [leaf for leaf in self.leaves if id(leaf.parameter) not in places]
            for leaf in self.leaves:
                if id(leaf.parameter) in places:
                    # Flat `[stop - start]` from the bucket; in the local shape if this rank owns all entries.
                    gradient, main = gradients.get(id(leaf.parameter)), leaf.tensor
                    if gradient is not None and not leaf.flat:
                        gradient = gradient.view(main.shape)
                    if gradient is not None and (gradient.dtype != main.dtype or gradient.device != main.device):
                        gradient = gradient.to(main.device, main.dtype)
                    main.grad = gradient
        # Gradients in `.grad` are complete: one data-parallel rank, or reduced by FSDP2.
        placed = list_placed_gradients([leaf.parameter for leaf in others])
        for leaf, gradient in zip(others, list_local_tensors(placed), strict=True):
            main = leaf.tensor
            if gradient is not None:
                gradient = gradient.detach()
                if leaf.flat:
                    gradient = gradient.view(-1)[leaf.start : leaf.stop]
                if gradient.dtype != main.dtype or gradient.device != main.device:
                    gradient = gradient.to(main.device, main.dtype)
            main.grad = gradient

    def parameters(self) -> list[nn.Parameter]:
        return [leaf.parameter for leaf in self.leaves]

    def _parameters_of_step(self) -> list[nn.Parameter]:
        """Returns the parameters of all optimizers of the model: the first one to step clips and checks for all."""
        if len(self.engine.optimizers) == 1:
            return self.parameters()
        return list({id(p): p for optimizer in self.engine.optimizers for p in optimizer.parameters()}.values())

    def find_replaced(self) -> None:
        """Finds out whether the groups have parameters that were replaced by others of another size."""
        self.holds_replaced = any(REPLACED in vars(parameter) for parameter in _parameters(self.optimizer))

    def come_last(self) -> None:
        """Moves this step pre-hook to the end, so that user hooks still find the model parameters in the groups."""
        step_hook_last(self.optimizer, self._hook)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # `args[0]` is the optimizer itself.
        if any(value is not None for value in (*args[1:], kwargs.get("closure"))):
            raise UnsupportedError(
                f"{type(optimizer).__name__}.step(closure) is not supported on a parallelized model: the gradients are "
                "reduced before the step. Compute loss and gradients first, then call step() without a closure."
            )
        engine = self.engine
        if self.holds_replaced:
            reject_replaced(optimizer, _parameters(optimizer))
        engine.check_before_step()
        if engine.state.cut is not None and in_backward():
            # Each stage runs the hooks of its own parameters only, and a prepared step is collective.
            raise UnsupportedError(
                "A prepared optimizer's step() inside of a backward is not supported with "
                f"pp_size={engine.config.pp_size}. Call it after backward() instead of in a hook."
            )
        self._follow_parameters()
        self._take_back_verdict()
        self._was_finite = True
        grad_status = engine.step_status.gradients if engine.step_status.gradients is not self._used else GradStatus()
        limit = engine.config.gradient_clipping
        if limit is not None and not grad_status.clipped:
            # With a loss scaler, a fused optimizer divides the gradients by `grad_scale` in its step: scale the limit.
            scale = getattr(optimizer, "grad_scale", None)
            clip_grad_norm(self._parameters_of_step(), limit if scale is None else limit * float(scale), in_step=True)
            grad_status = engine.step_status.gradients
        if not grad_status.scaled:
            takes_verdict = self._takes_verdict()
            if grad_status.finite is None:
                grad_status.finite = has_finite_gradients(self._parameters_of_step(), may_wait=not takes_verdict)
            if takes_verdict and isinstance(grad_status.finite, FiniteVerdict):
                self._was_finite = grad_status.finite
                engine.step_status.count_later(grad_status.finite)
                optimizer.found_inf = grad_status.finite.found_inf  # type: ignore[attr-defined]
            else:
                self._was_finite = bool(grad_status.finite)
                engine.step_status.count(skipped=not self._was_finite)
        self.collect()
        if self._was_finite is False:
            # Main params without a gradient are not updated. The decision is the same on all ranks: it comes from the
            # gradient norm over all of them.
            for leaf in self.leaves:
                leaf.tensor.grad = None
            # Schedule-free optimizers count their steps in the groups.
            self._unstepped = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        elif self.layer_wise is not None:
            self.layer_wise.gather()
        self._used = engine.step_status.gradients
        engine.step_status.gradients.used = True
        copy_overrides(optimizer, ((leaf.parameter, leaf.stepped) for leaf in self.leaves))
        self._enter(self._not_stepped())

    def _takes_verdict(self) -> bool:
        """Returns whether the optimizer skips a step on the device, so that the host need not know.

        Identical on all ranks: they count skipped steps together.
        """
        return (
            self.layer_wise is None
            and not self.engine.callbacks.tell_skipped
            and not self.engine.config.offload_optimizer
            and skips_on_device(self.optimizer, self._class)
        )

    def _take_back_verdict(self) -> None:
        # Also before a step: the one before may have raised. A loss scaler sets, and deletes, a tensor of its own.
        verdict = self._was_finite
        if isinstance(verdict, FiniteVerdict) and vars(self.optimizer).get("found_inf") is verdict.found_inf:
            del self.optimizer.found_inf  # type: ignore[attr-defined]

    def _not_stepped(self) -> set[int]:
        """Returns the identities of main params that the optimizer must not see in this step.

        Classes that only their users know may read the state of parameters without a gradient, or step on them with
        a gradient of zeros (Keller Jordan's Muon). Known classes skip them; bitsandbytes' count them.
        """
        if self._is_known:
            return set()
        hidden = [leaf for leaf in self.leaves if self._was_finite is False or leaf.full is not None]
        return {id(leaf.stepped) for leaf in hidden if leaf.stepped.grad is None}

    @torch.no_grad()
    def _follow_parameters(self) -> None:
        """Applies edits of the model parameters to the main params."""
        may_wait = not is_async_device(self.engine.mesh.device)
        addresses = list(map(Tensor.data_ptr, list_local_tensors([leaf.parameter for leaf in self.leaves])))
        # Main params that share the memory of their parameters follow as long as that memory is the same.
        leaves = self.leaves
        if addresses == self._addresses:
            leaves = [leaf for leaf in self.leaves if leaf.separate]
        else:
            # Publishers may have views of the previous memory.
            self._published, self._publishers = [], []
        self._addresses = addresses
        follow_parameters(leaves, main_weights=self.engine.config.fp32_main_params, may_wait=may_wait)

    @torch.no_grad()
    def switch(self, method: Callable[[], None], *, is_training: bool) -> None:
        """Runs `train` or `eval` of a schedule-free optimizer on the main params, and updates the parameters.

        Collective, unless all groups are in that mode already: Trainer calls `train` in every step.
        """
        if all(group.get("train_mode") is is_training for group in self.optimizer.param_groups):
            return
        if self.engine.state.shards_weights:
            reshard([self.engine.model])
        self._follow_parameters()
        with self.main_params_in_groups():
            method()
        self._write_back([leaf for leaf in self.leaves if leaf.flat])

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        self._leave()
        # After a step that was skipped on the device, what follows copies unchanged weights.
        self._take_back_verdict()
        if self._was_finite is False:
            for group, values in zip(optimizer.param_groups, self._unstepped, strict=True):
                group.update(values)
            self._discard()
            return
        if self.engine.state.shards_weights:
            # A forward without a backward leaves weights unsharded: they hold the values from before the step.
            reshard([self.engine.model])
        if self.layer_wise is not None:
            self.layer_wise.scatter()
        self._write_back([leaf for leaf in self.leaves if leaf.flat and leaf.tensor.grad is not None])
        for stepped in self.engine.callbacks.on_stepped:
            stepped()

    def _write_back(self, moved: list[MainParam]) -> None:
        """Copies main params into the model parameters, and all-gathers the parameters of which shards have `moved`."""
        # fp32 main params -> this rank's shard of the model parameters -> all-gather over the dp ranks.
        separate = [leaf for leaf in self.leaves if leaf.separate]
        if separate:
            torch._foreach_copy_(list_views(separate), [leaf.tensor for leaf in separate])
        self.publish(moved)

    def publish(self, moved: list[MainParam]) -> None:
        """All-gathers the parameters of which shards have `moved`; collective over the ranks that share them."""
        # The buckets are rebuilt only if other parameters than in the last step have gradients.
        if [id(leaf.parameter) for leaf in moved] != [id(leaf.parameter) for leaf in self._published]:
            together: dict[GradSyncGroup, list[nn.Parameter]] = {}
            for leaf in moved:
                assert leaf.sharing is not None
                together.setdefault(leaf.sharing, []).append(leaf.parameter)
            # Main params with their own memory must not keep that of weights that are moved away between steps.
            keep_views = not any(leaf.separate for leaf in self.leaves)
            self._publishers = [
                ParamAllGather(parameters, sharing, keep_views=keep_views) for sharing, parameters in together.items()
            ]
            self._published = moved
        for publisher in self._publishers:
            publisher.run()

    @torch.no_grad()
    def refresh_main_weights(self) -> None:
        """Copies the model parameters' values into main params that have their own memory."""
        for leaf in self.leaves:
            if leaf.separate:
                leaf.tensor.copy_(leaf.view())

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool) -> None:
        # A step that raised may have left the main params in the groups.
        self._leave()
        # Parameters that were removed from the groups keep their gradients.
        listed = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        present = set(map(id, listed))
        leaves = [leaf for leaf in self.leaves if id(leaf.parameter) in present]
        if set_to_none and self.engine.reducer is not None:
            self.engine.reducer.discard([leaf.parameter for leaf in leaves])
        self.engine.discard_unsharded_gradients(leaf.parameter for leaf in leaves)
        if set_to_none:
            for parameter in listed:
                if isinstance(parameter, OffStageTensor):
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
    """Mixin of a prepared optimizer's class; redirects its methods to `ShardedOptimizer`."""

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
            f"A prepared {type(self).__name__} cannot be copied or pickled: it steps on this rank's shards. "
            "Copy or save optimizer.state_dict(), or use accelerator.save_state()."
        )

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of this rank's shards; parameters are identified by their names in the model."""
        with self._hf_megatron.main_params_in_groups():
            packed = super().state_dict()  # type: ignore[misc]
        names = [leaf.name for leaf in self._hf_megatron.leaves]
        groups = [{**group, "params": [names[index] for index in group["params"]]} for group in packed["param_groups"]]
        return {
            "state": {names[index]: state for index, state in packed["state"].items()},
            "param_groups": groups,
            SHARDS: {leaf.name: leaf.describe_shard() for leaf in self._hf_megatron.leaves},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own_shards = {leaf.name: leaf.describe_shard() for leaf in self._hf_megatron.leaves}
        # State dicts that users made themselves have no shards to compare.
        saved_shards = state_dict.get(SHARDS, {})
        mismatched = [name for name, shard in saved_shards.items() if own_shards.get(name, shard) != shard]
        if mismatched:
            raise CheckpointError(
                f"This optimizer state dict has another rank's or layout's shard of {mismatched[0]} (and "
                f"{len(mismatched) - 1} more). Save and load optimizer.state_dict() on every rank, or use "
                "accelerator.save_state() or Trainer's checkpoints, which load on any layout."
            )
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


class _ScheduleFree(_TakenOver):
    """Mixin of a prepared schedule-free optimizer's class, which moves the parameters in `train` and `eval` too."""

    def train(self) -> None:
        self._hf_megatron.switch(super().train, is_training=True)  # type: ignore[misc]

    def eval(self) -> None:
        self._hf_megatron.switch(super().eval, is_training=False)  # type: ignore[misc]


@cache
def _taken_over(base: Any) -> type:
    # Accelerate and Trainer call `train` and `eval` of every optimizer that has them.
    mixin = _ScheduleFree if hasattr(base, "train") and hasattr(base, "eval") else _TakenOver
    return type(base.__name__, (mixin, base), {})


def sharded(optimizer: Any) -> ShardedOptimizer | None:
    """Returns the state that `prepare_optimizer` attached to an optimizer, or `None`."""
    return vars(optimizer).get("_hf_megatron")


def list_sharded(optimizer: torch.optim.Optimizer) -> list[ShardedOptimizer]:
    """Returns what `prepare_optimizer` attached to an optimizer, or to the parts of a combined one."""
    parts = vars(optimizer).get(COMBINED, [optimizer])
    return [state for part in parts if (state := sharded(part)) is not None]


def stepping_optimizer(optimizer: Any) -> Any:
    """Returns the torch optimizer inside an `AcceleratedOptimizer`, or the optimizer itself."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, *, elementwise: bool = False, layer_wise: bool = False
) -> torch.optim.Optimizer:
    """Prepares the optimizer of a parallelized model: it then steps on this rank's shards.

    Trainer and Accelerate call it themselves. An optimizer without parameters of a parallelized model is returned
    unchanged. Of an optimizer that steps several others, which share out its parameters, these are prepared.

    Args:
        optimizer (`torch.optim.Optimizer`): created from the model's parameters, before its first step.
        elementwise (`bool`, defaults to `False`): set it for an unknown class that updates each entry of a parameter
            from that entry only.
        layer_wise (`bool`, defaults to `False`): set it for an unknown class that updates each parameter from that
            parameter, its gradient and its own state only. One rank then updates the full parameter, and keeps its
            state.

    Returns:
        the same optimizer, whose groups list main params while it steps.

    Raises:
        UnsupportedError: if the class is unknown, or combines values of several parameters (LBFGS).
        ConfigError: if the optimizer holds parameters of several models, or has stepped already.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"prepare_optimizer takes a torch.optim.Optimizer, got {type(optimizer).__name__}.")
    if elementwise and layer_wise:
        raise ConfigError("prepare_optimizer(elementwise=True, layer_wise=True): set one of them.")
    if sharded(optimizer) is not None:
        return optimizer
    engines = [get_engine(p) for p in _parameters(optimizer)]
    engine = next((engine for engine in engines if engine is not None), None)
    if engine is None:
        return optimizer
    if parts := find_parts(optimizer):
        for part in parts:
            prepare_optimizer(part, elementwise=elementwise, layer_wise=layer_wise)
        vars(optimizer)[COMBINED] = list_stepping(parts)
        return optimizer
    engine.reject_sums_over_parameters(optimizer, declared=elementwise or layer_wise)
    name = type(optimizer).__name__
    if any(map(has_stepped, optimizer.state.values())):
        raise ConfigError(f"{name} has stepped already; prepare it before its first step.")
    if engine.state.cut is not None and has_positional_overrides(optimizer):
        # Positions in the groups differ on a stage, which leaves out the other stages' parameters.
        raise UnsupportedError(
            "GlobalOptimManager.register_parameters is not supported with pipeline stages. Call "
            "GlobalOptimManager.override_config alone."
        )
    layer_wise = layer_wise or (is_layer_wise(type(optimizer)) and not elementwise)
    sees_full_params = engine.config.zero_stage == 0 and not any(
        engine.parameters.is_split(p) for p in _parameters(optimizer)
    )
    if not (elementwise or layer_wise or sees_full_params or is_elementwise(type(optimizer))):
        raise UnsupportedError(
            f"{type(optimizer).__module__}.{name} is not known to be elementwise (known: "
            f"{', '.join(known_elementwise())}): on shards of parameters it may compute something else. Call "
            "hf_megatron.prepare_optimizer(optimizer, layer_wise=True) if it updates each parameter from that "
            "parameter and its gradient only, or prepare_optimizer(optimizer, elementwise=True) if it updates each "
            "entry from that entry only."
        )
    half = any(p.dtype in HALF for p in _parameters(optimizer))
    if half and engine.config.fp32_main_params and engine.config.zero_stage < 3:
        engine.reduce_gradients()
    # The class is swapped last: the mixin's methods need `_hf_megatron`.
    state = ShardedOptimizer(optimizer, engine, layer_wise=layer_wise)
    optimizer._hf_megatron = state  # type: ignore[attr-defined]
    optimizer.__class__ = _taken_over(type(optimizer))  # type: ignore[arg-type]
    return optimizer


def _are_same(lists: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    """Returns whether lists have the same tensors of any shape."""
    # Compared by identity: `==` of lists would compare tensors that differ.
    return [list(map(id, one)) for one in lists] == [list(map(id, one)) for one in others]


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
