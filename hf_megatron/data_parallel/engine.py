"""Data-parallel engine of a model: connects its forwards, gradient reducer, optimizers and checks."""

import copy
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.graph_leaves import sync_versions
from ..compat.shared import Shared
from ..compat.torch_autograd import is_functional, leave_uncompiled, left_inference_mode
from ..compat.torch_dtensor import local_tensor
from ..compat.torch_fsdp import discard_unsharded_gradients, find_units, has_unsharded_gradients
from ..config import MegatronConfig
from ..core.mesh import ParallelMesh
from ..core.off_stage import is_off_stage, local_named_parameters
from ..core.parameter_walk import list_named_parameters
from ..core.runtime import RUNTIME
from ..errors import UnsupportedError
from ..parallel_state import ParallelState, parallel_state
from .autograd_boundary import (
    ForwardStatus,
    GradientWatch,
    reject_hooks,
    reject_partial_backward,
    with_trained_inputs,
)
from .batch_checks import SharedBatch
from .fsdp import no_sync
from .fsdp_checks import FsdpGuards, reject_copy
from .grad_reducer import GradientReducer
from .grad_store import GradStore, PlainGradients
from .inplace_edits import unedited
from .model_parameters import MARK, REPLACED, ModelParameters
from .module_checks import ModuleGuards
from .optimizer_classes import steps_on_single_parameters
from .parameter_identities import ParameterIdentities
from .step_status import StepCallbacks, StepStatus


class DataParallel(Shared):
    """Data-parallel engine of one parallelized model; its parameters refer to it (see `get_engine`).

    Attributes:
        parameters (`ModelParameters`): the model's parameters and how they are sharded.
        reducer (`GradientReducer`, *optional*): reduces gradients into buckets; `None` with one data-parallel rank,
            where `.grad` is complete, and in ZeRO stage 3, where FSDP2 reduces them.
        callbacks (`StepCallbacks`): called around optimizer steps.
        step_status (`StepStatus`): gradient checks of the current step, and skipped steps.
        forward_status (`ForwardStatus`): what is known of the autograd graph.
        is_rerunning: whether a step is being recomputed, which must leave no gradients.
        pipeline_backwards (`int`): number of backwards through a pipeline that have added to `.grad`.
        has_replaced: whether parameters were replaced by others of another size; optimizers may hold the old ones.
    """

    def __init__(self, model: nn.Module, state: ParallelState):
        self.model, self.state = model, state
        # Read in every forward and backward: the property walks all shardings.
        self._splits_weights = state.splits_weights
        self.parameters = ModelParameters(model, state)
        self.identities = ParameterIdentities(model)
        self.reducer: GradientReducer | None = None
        self.callbacks = StepCallbacks()
        self.step_status = StepStatus(state.config.max_skipped_steps, self._describe_nonfinite)
        self.forward_status = ForwardStatus()
        self.is_rerunning = False
        self.pipeline_backwards = 0
        self.has_replaced = False
        self._modules = ModuleGuards(model)
        self._fsdp = FsdpGuards(model) if state.shards_weights else None
        self._shared_batch = SharedBatch(state.mesh)
        # Forwards after which a script's collectives over the default group are looked for.
        self._watched_forwards = 3 if state.config.ranks_per_replica > 1 else 0
        self._left_inference_mode = ExitStack()
        self._watch: GradientWatch | None = None
        self._optimizers: list[weakref.ref] = []
        self.parameters.mark(self.parameters.current(), self)
        self._install(state)

    def _install(self, state: ParallelState) -> None:
        """Registers the engine's hooks and replaces the model's methods that it takes part in."""
        model = self.model
        if self._fsdp is not None:
            # A pipeline scales the gradients of a call, which FSDP2 would hold back until they are reduced.
            if state.cut is None:
                state.patches.replace(model, "no_sync", partial(no_sync, model))
            state.patches.replace(model, "__deepcopy__", types.MethodType(reject_copy, model))
        elif any(self.parameters.sync_group(parameter).size > 1 for parameter in self.parameters.marked):
            self.reduce_gradients()
        else:
            # No backward waits for other replicas; Accelerate's LocalSGD calls it on every model.
            state.patches.replace(model, "no_sync", nullcontext)
        state.patches.replace(model, "zero_grad", types.MethodType(_zero_grad, model))
        state.hooks.add("data parallel", self._before_forward)
        if self.mesh.reduces_gradients:
            state.hooks.add("data parallel", exit=self._end_forward, always_exit=True)
        if self.mesh.reduces_gradients and state.cut is None:
            self._watch = GradientWatch()
            state.hooks.add("gradient watch", exit=self._watch_outputs)
        model.register_load_state_dict_post_hook(self._after_load)

    def __deepcopy__(self, memo: dict) -> "DataParallel":
        """Creates an engine for a copied model; a copy whose gradients would be reduced cannot be trained."""
        model = memo.get(id(self.model))
        if model is None or self.reducer is not None or self.state.cut is not None:
            return self
        duplicate = copy.copy(self)
        memo[id(self)] = duplicate
        duplicate.model, duplicate._modules, duplicate._optimizers = model, ModuleGuards(model), []
        duplicate.state = copy.deepcopy(self.state, memo)
        duplicate.parameters = self.parameters.for_copy(model, duplicate.state)
        duplicate.identities = ParameterIdentities(model)
        duplicate.callbacks = StepCallbacks()
        duplicate.step_status = StepStatus(self.config.max_skipped_steps, duplicate._describe_nonfinite)
        duplicate.forward_status = copy.copy(self.forward_status)
        RUNTIME.add_model(model)
        return duplicate

    @property
    def config(self) -> MegatronConfig:
        """The model's configuration."""
        return self.state.config

    @property
    def mesh(self) -> ParallelMesh:
        """The ranks of the job by axis."""
        return self.state.mesh

    # Forward

    def _before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        # A deep copy shares the engine through its hooks, and the engine reduces only the original's gradients.
        if model is not self.model and self.reducer is not None and model.training and torch.is_grad_enabled():
            raise UnsupportedError(
                f"A deep copy of a data parallel {type(model).__name__} can be evaluated, not trained: its gradients "
                "would not be reduced. Load it a second time with from_pretrained(..., megatron_config=...)."
            )
        parameters = self.parameters.current()
        if not self.parameters.is_marked(parameters):
            self._reject_functions(parameters)
            self.parameters.mark(parameters, self)
        if self._fsdp is not None:
            # FSDP2 creates its buffers in the first forward; inference tensors could not be trained later.
            self._left_inference_mode.enter_context(left_inference_mode())
            split = self.parameters.split_by_fsdp(parameters)
            self._fsdp.check_forward(split, self.parameters.is_outside_fsdp)
            self._fsdp.record_versions(self.identities.unsharded())
        self._modules.reject_embeddings(self.mesh, self.config.num_microbatches)
        # Autograd saves local tensors in this forward: their version counters must include earlier edits.
        self.sync_user_edits()
        self._shared_batch.check(args, kwargs)
        return self._begin_forward(parameters, args, kwargs) if torch.is_grad_enabled() else None

    @leave_uncompiled
    def _begin_forward(self, parameters: list[nn.Parameter], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Prepares for a forward that records gradients; returns its arguments if they change."""
        if self._watched_forwards and self.model.training:
            self._watched_forwards -= 1
            RUNTIME.awaits_backward = not RUNTIME.has_warned_of_collective
        self._modules.reject_backward_hooks(self.mesh)
        if self.parameters.uncompared:
            self.parameters.require_equal_on_ranks()
        if self.reducer is not None:
            self.reducer.begin_forward(self.parameters.reduced(parameters))
            self._reject_trained_base(parameters)
        if not self.mesh.reduces_gradients:
            return None
        self.forward_status.begin(self._modules.forward_hooks())
        self.reject_gradient_hooks()
        return with_trained_inputs(args, kwargs, self.mesh.dp_size, lambda leaf: get_engine(leaf) is self)

    def reject_gradient_hooks(self) -> None:
        """Raises `UnsupportedError` for a user's hook on a gradient that is not reduced yet when it runs."""
        # The reducer registers one hook per parameter; any other one is the user's.
        reject_hooks(self.parameters.marked, 0 if self.reducer is None else 1, self.parameters.name)

    def _end_forward(self, model: nn.Module, args: tuple, output: Any) -> None:
        self.forward_status.is_running = False
        self._left_inference_mode.close()
        if self._fsdp is not None and output is not None:
            self._fsdp.reject_edits(self.identities.unsharded())

    @leave_uncompiled
    def _watch_outputs(self, model: nn.Module, args: tuple, output: Any) -> Any:
        """Registers a forward's outputs, of any shape, so that their backward prepares the reducer first."""
        if not torch.is_grad_enabled():
            return output
        # The graph may outlive the model and must not keep it alive.
        engine = weakref.ref(self)
        # FSDP2 computes with unsharded tensors, whose graph does not lead to the parameters that a loop has.
        sharded = self.parameters.marked if self._fsdp is not None else []
        alongside = [p for p in sharded if p.requires_grad and not self.reduces(p)]
        require = self.unedited() if self._fsdp is not None else _pass
        begin, reject = partial(_begin_backward, engine, require), partial(_check_backward, engine)
        assert self._watch is not None
        return self._watch.over(output, begin, reject, alongside)

    def _reject_trained_base(self, parameters: list[nn.Parameter]) -> None:
        """Raises `UnsupportedError` if stage 3 would leave some gradients to FSDP2 and some to the reducer."""
        for parameter in parameters if self._fsdp is not None else ():
            if parameter.requires_grad and not self.reduces(parameter):
                raise UnsupportedError(
                    f"{self.parameters.name(parameter)} is trained together with adapters and zero_stage=3, which "
                    "splits only a frozen base model. Freeze it, or load the model with zero_stage=2."
                )

    @leave_uncompiled
    def _reject_functions(self, parameters: list[nn.Parameter]) -> None:
        """Raises `UnsupportedError` if `torch.func` has replaced the parameters by other tensors."""
        kind = type(self.model).__name__
        if any(map(is_functional, parameters)) and dist.get_world_size() > 1:
            raise UnsupportedError(
                f"torch.func.grad or another transform of a {kind} on several ranks: neither its collectives nor the "
                "reduction of its gradients run inside transforms. Call the model itself and loss.backward()."
            )
        # Without a reducer, FSDP2 or a pipeline, functional parameters work as in a plain model.
        is_local = self.reducer is None and self._fsdp is None and self.state.cut is None
        if not is_local and not all(parameter.is_leaf for parameter in parameters):
            raise UnsupportedError(
                f"torch.func.functional_call of a {kind} is not supported with data or context parallelism, or "
                "pipeline stages: gradients of the tensors that replace its parameters are not reduced. Call the model "
                "itself, or use tensor parallelism only."
            )

    @contextmanager
    def full_root(self) -> Iterator[None]:
        """Unshards the weights outside the layers for module calls without gradients, in ZeRO stage 3."""
        assert self._fsdp is not None
        self._fsdp.check_dtypes(self.parameters.split_by_fsdp(self.parameters.current()))
        with left_inference_mode():
            # A call before the first forward: FSDP2 has not initialized its units yet.
            find_units(self.model)
            self.model.unshard()  # type: ignore[operator]
        try:
            yield
        finally:
            self.model.reshard()  # type: ignore[operator]

    @property
    def has_run(self) -> bool:
        """Whether the model was called, in ZeRO stage 3."""
        return self._fsdp is not None and self._fsdp.has_run

    # Weights

    def scan(self) -> None:
        """Registers modules and parameters that were added or replaced."""
        self.identities.reset()
        self.parameters.scan()
        self._modules.scan()
        self.parameters.mark(self.parameters.current(), self)
        reduced = self.parameters.reduced(self.parameters.marked)
        if self._fsdp is not None and reduced:
            self.reduce_gradients()
        if self.reducer is not None:
            self.reducer.refresh(reduced)

    def adopts(self, parameter: Tensor) -> bool:
        """Returns whether a tensor of any shape came to the model with a replaced module; scans the model then."""
        # FSDP2 swaps parameters for unsharded ones and back.
        if self._fsdp is not None or id(parameter) not in self.identities.current():
            return False
        self.scan()
        return True

    def replaced(self, parameters: list[Tensor]) -> None:
        """Registers that parameters, of any shape, were replaced by others of another size.

        Optimizers that hold the old ones raise before their next step.
        """
        self.has_replaced = True
        for parameter in parameters:
            vars(parameter)[REPLACED] = True
        for optimizer in self.optimizers:
            optimizer.find_replaced()
        if self._fsdp is not None:
            self._fsdp.scan()
        self.scan()

    @leave_uncompiled
    def sync_user_edits(self) -> None:
        """Informs autograd about weights that were edited in place; called before a forward or backward."""
        if self._splits_weights and self._fsdp is None:
            sync_versions(self.parameters.marked)

    def unedited(self) -> Callable[[], None]:
        """Returns a check that raises if a weight was edited in place since, on any pipeline stage."""
        # In ZeRO stage 3 the unsharded parameters replace the marked ones during calls: read the model's as well.
        return unedited([*self.parameters.marked, *filter(is_off_stage, list_named_parameters(self.model).values())])

    def _after_load(self, model: nn.Module, keys: Any) -> None:
        self.refresh_main_weights()

    def refresh_main_weights(self) -> None:
        """Copies the parameters' values into the optimizers' main weights."""
        for optimizer in self.optimizers:
            optimizer.refresh_main_weights()

    # Gradients

    def discard_unsharded_gradients(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Discards gradients, of any shape, that FSDP2 accumulates inside `no_sync` and `.grad` does not show."""
        if self._fsdp is not None:
            discard_unsharded_gradients(self.identities.sharded_states(), parameters)

    def require_reduced(self) -> None:
        """Raises `UnsupportedError` if FSDP2 has accumulated gradients that are not reduced, as inside `no_sync`."""
        if self._fsdp is not None and has_unsharded_gradients(self.identities.sharded_states()):
            raise UnsupportedError(
                "Gradients of a model with zero_stage=3 were read or clipped inside no_sync(), where they are not "
                "reduced. Read them after the last backward of the step, or load the model with zero_stage=2."
            )

    def any_trained_parameter(self) -> nn.Parameter | None:
        """Returns one of this rank's trained parameters, of any shape."""
        return next((parameter for parameter in self.parameters.marked if parameter.requires_grad), None)

    def output_anchor(self) -> Any | None:
        """Returns the autograd node that every backward through the model's outputs runs, if they are watched."""
        return None if self._watch is None else self._watch.node

    @property
    def gradients(self) -> GradStore:
        """Storage of the trainable parameters' gradients."""
        return self.reducer or PlainGradients(p for p in self.parameters.marked if p.requires_grad)

    @contextmanager
    def gradients_apart(self) -> Iterator[None]:
        """Leaves no gradients of backwards inside, and reduces none; gradients that exist stay."""
        store = self.gradients
        # A reduction in flight writes into the buffers that are stashed next.
        store.complete()
        stashed, synchronize = store.stash(), store.synchronize
        store.synchronize, self.is_rerunning = False, True
        try:
            yield
        finally:
            store.unstash(stashed)
            store.synchronize, self.is_rerunning = synchronize, False

    def reduce_gradients(self) -> None:
        """Creates the gradient reducer if there is none."""
        if self.reducer is None:
            self.reducer = GradientReducer(
                self.parameters.reduced(self.parameters.current()),
                self.parameters.name,
                self.parameters.sync_group,
                bucket_size=self.config.bucket_size,
                main_gradients=self.config.fp32_main_params,
                keep_grad_buffer=self.config.zero_stage < 2,
            )
            self.state.patches.replace(self.model, "no_sync", self.reducer.no_sync)

    def reduces(self, parameter: Tensor) -> bool:
        """Returns whether the gradient of a parameter of any shape is reduced into buckets."""
        return self.reducer is not None and self.reducer.owns(parameter)

    def begin_backward(self) -> None:
        """Prepares the reducer for a backward."""
        if self.reducer is not None:
            # Parameters may have been frozen in a forward after the one that is differentiated.
            self.reducer.refresh(self.parameters.reduced(self.parameters.current()))
            self.reducer.begin_backward()

    def _describe_nonfinite(self) -> str:
        reducer, bad = self.reducer, []
        for name, parameter in local_named_parameters(self.model):
            is_reduced = reducer is not None and reducer.owns(parameter)
            gradient = reducer.gradient(parameter) if is_reduced and reducer is not None else parameter.grad
            if gradient is not None and not torch.isfinite(local_tensor(gradient)).all():
                bad.append(name)
        names = ", ".join(bad[:5]) + (" and others" if len(bad) > 5 else "")
        return f"the non-finite gradients are those of {names}" if bad else "all gradients are finite"

    # Optimizers

    @property
    def optimizers(self) -> list[Any]:
        """Optimizers attached by `prepare_optimizer` that still exist, in the order they were created."""
        attached = (reference() for reference in self._optimizers)
        return [optimizer for optimizer in attached if optimizer is not None]

    def add_optimizer(self, optimizer: Any) -> None:
        """Attaches an optimizer."""
        self._optimizers = [weakref.ref(other) for other in (*self.optimizers, optimizer)]

    def check_before_step(self) -> None:
        """Raises `ConfigError` if the gradients cannot be used for a step."""
        for guard in self.callbacks.guards:
            guard()

    def reject_sums_over_parameters(self, optimizer: torch.optim.Optimizer, *, declared: bool = False) -> None:
        """Raises `UnsupportedError` for LBFGS, and for others that may combine parameters of several pipeline stages.

        Args:
            declared (`bool`): whether the caller declared that it does not.
        """
        cls = type(optimizer)
        if issubclass(cls, torch.optim.LBFGS):
            raise UnsupportedError(
                f"{cls.__name__} is not supported: it combines values of all parameters, and computes gradients in "
                "its step. Use an optimizer that steps without a closure, such as AdamW."
            )
        if self.state.cut is not None and not (declared or steps_on_single_parameters(cls)):
            raise UnsupportedError(
                f"{cls.__name__} may combine values of all parameters, but a pipeline stage has only its own. Use "
                "pp_size=1, or call hf_megatron.prepare_optimizer(optimizer, layer_wise=True) if it steps on each "
                "parameter separately."
            )


def _pass() -> None:
    """Requires nothing."""


def _begin_backward(engine: "weakref.ref[DataParallel]", require_unedited: Callable[[], None]) -> None:
    require_unedited()
    if (alive := engine()) is not None:
        # Again: hooks may have been registered since the forward.
        alive.reject_gradient_hooks()
        alive.begin_backward()


def _check_backward(engine: "weakref.ref[DataParallel]", node: Any) -> None:
    if (alive := engine()) is not None:
        reject_partial_backward(alive.parameters.marked, node, are_sharded=alive.state.shards_weights)


def _zero_grad(model: Any, set_to_none: bool = True) -> None:
    # `.grad` holds proxies: the gradients themselves are discarded in the buckets.
    nn.Module.zero_grad(model, set_to_none)
    state = parallel_state(model)
    assert state is not None
    engine: Any = state.data_parallel
    if engine.model is model:
        if set_to_none and engine.reducer is not None:
            engine.reducer.discard()
        engine.discard_unsharded_gradients()
        for cleared in (*engine.callbacks.on_cleared, *engine.callbacks.on_discarded):
            cleared()


def get_engine(parameter: Tensor) -> DataParallel | None:
    """Returns the engine of the parallelized model that a parameter of any shape belongs to."""
    engine = vars(parameter).get(MARK)
    if engine is None:
        # `Module.to` may have put another tensor into the parameter, without its attributes.
        engines = all_engines()
        engine = next((other for other in engines if other.parameters.holds(parameter)), None)
        if engine is None:
            engine = next((other for other in engines if other.adopts(parameter)), None)
        if engine is not None:
            setattr(parameter, MARK, engine)
    return engine


def all_engines() -> list[DataParallel]:
    """Returns the engines of the parallelized models."""
    engines = (state.data_parallel for state in map(parallel_state, RUNTIME.models) if state is not None)
    return [engine for engine in engines if isinstance(engine, DataParallel)]


def data_parallel_engines() -> list[DataParallel]:
    """Returns the engines whose gradients are reduced over ranks with different data."""
    return [engine for engine in all_engines() if engine.mesh.reduces_gradients]


def get_reducer(parameter: Tensor) -> GradientReducer | None:
    """Returns the reducer of the gradient of a parameter of any shape."""
    engine = get_engine(parameter)
    if engine is None or engine.reducer is None or not engine.reducer.owns(parameter):
        return None
    return engine.reducer
