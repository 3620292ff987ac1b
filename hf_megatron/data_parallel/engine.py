"""Data parallelism of one model: how its gradients are reduced and how its weights are shared."""

import copy
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.shared import Shared
from ..compat.torch_autograd import is_functional, leave_uncompiled, left_inference_mode
from ..compat.torch_dtensor import local_tensor
from ..compat.torch_fsdp import find_units
from ..core.off_stage import is_off_stage, local_named_parameters
from ..core.placement import ParameterSharding
from ..core.runtime import RUNTIME
from ..errors import NonFiniteGradientError, UnsupportedError
from ..parallel_state import ParallelState, parallel_state
from .autograd_boundary import (
    GradientWatch,
    reject_hooks,
    reject_partial_backward,
    with_trained_inputs,
)
from .batch_checks import SharedBatch
from .fsdp import no_sync
from .fsdp_checks import SplitPlaces, reject_cast, reject_copy
from .grad_reducer import GradientReducer
from .grad_status import GradStatus
from .grad_store import GradStore, PlainGradients
from .grad_sync_groups import GradSyncGroup
from .inplace_edits import PartVersions, unedited
from .module_checks import ModuleGuards, ParameterList

# Stock loops hand over parameters, not models: each one carries its engine.
_MARK = "_hf_megatron"


# Whose optimizers step on each parameter by itself.
_ONE_BY_ONE = ("torch.optim.", "transformers.optimization.", "apex.", "transformer_engine.", "lion_pytorch.")


class DataParallel(Shared):
    """Attached to a laid out model; its parameters carry it (see `engine_of`).

    Attributes:
        reducer (`GradientReducer`, *optional*): takes the gradients out of `.grad`; absent with one dp rank, where
            `.grad` is complete, and in stage 3, where FSDP2 reduces.
        skipped_steps (`int`): optimizer steps that were skipped for a gradient that is not finite.
        guards: called before an optimizer takes the gradients; one that raises keeps it from stepping.
        on_stepped: called after an optimizer's step that was not skipped.
        on_cleared: called when the model's `zero_grad()` has cleared the gradients.
        on_discarded: called when gradients are given up, cleared by a model or an optimizer or skipped in a step.
        is_running: inside of a forward that records gradients.
        is_unknown: nobody has looked yet at the leaves of the graph of such a forward.
        was_differentiated: somebody has, in a backward since the last one.
        backwards: how many backwards through a pipeline have added to `.grad`.
    """

    def __init__(self, model: nn.Module, state: ParallelState):
        self.model, self.state = model, state
        self.config, self.mesh = state.config, state.mesh
        self._splits_weights = state.splits_weights
        self.reducer: GradientReducer | None = None
        self.is_rerun = False
        self.guards: list[Callable[[], None]] = []
        self.on_stepped: list[Callable[[], None]] = []
        self.on_cleared: list[Callable[[], None]] = []
        self.on_discarded: list[Callable[[], None]] = []
        self._shardings: dict[int, ParameterSharding] = {}
        # Of all stages' parameters: groups are made by all ranks together.
        averages = sorted({"dp"} | {sharding.gradient.average for sharding in state.shardings.values()})
        self._sharings = {axis: GradSyncGroup.along(axis, state.mesh) for axis in averages}
        self._parameters = ParameterList(model)
        self._modules = ModuleGuards(model)
        self._forward_hooks = -1
        self.is_running, self.is_unknown, self.was_differentiated = False, True, False
        self._left_inference_mode = ExitStack()
        self._part_versions = PartVersions()
        self._shared_batch = SharedBatch(self.mesh)
        self._marked: list[nn.Parameter] = []
        self._identities: set[int] = set()
        self._dtypes: list[torch.dtype] = []
        self._mark(self._parameters.current())
        self._optimizers: list[weakref.ref] = []
        self.skipped_steps = self.backwards = 0
        self._skipped_in_a_row = 0
        self.grad_status = GradStatus()
        if state.shards_weights:
            self._places = SplitPlaces(model)
            # A pipeline has to scale a call's gradients, which FSDP2 would keep from it until they are reduced.
            if state.cut is None:
                state.patches.replace(model, "no_sync", partial(no_sync, model))
            state.patches.replace(model, "__deepcopy__", types.MethodType(reject_copy, model))
        elif any(self.sharing(parameter).size > 1 for parameter in self._marked):
            self.reduce_gradients()
        else:
            # No backward waits for other replicas; Accelerate's LocalSGD asks every model for it.
            state.patches.replace(model, "no_sync", nullcontext)
        state.patches.replace(model, "zero_grad", types.MethodType(_zero_grad, model))
        state.hooks.add("data parallel", self._before_forward)
        if self.mesh.reduces_gradients:
            state.hooks.add("data parallel", exit=self._end, always_exit=True)
        if self.mesh.reduces_gradients and state.cut is None:
            self._watch = GradientWatch()
            state.hooks.add("gradient watch", exit=self._after_forward)
        model.register_load_state_dict_post_hook(self._after_load)

    def __deepcopy__(self, memo: dict) -> "DataParallel":
        """Gives a copied model an engine of its own; one whose gradients are reduced is not trained."""
        model = memo.get(id(self.model))
        if model is None or self.reducer is not None or self.state.cut is not None:
            return self
        duplicate = copy.copy(self)
        memo[id(self)] = duplicate
        duplicate.model, duplicate._parameters, duplicate._modules = model, ParameterList(model), ModuleGuards(model)
        duplicate._shardings, duplicate._marked, duplicate._identities, duplicate._optimizers = {}, [], set(), []
        duplicate.guards, duplicate.on_stepped, duplicate.on_cleared, duplicate.on_discarded = [], [], [], []
        duplicate.grad_status = GradStatus()
        duplicate.state = copy.deepcopy(self.state, memo)
        RUNTIME.add_model(model)
        return duplicate

    @property
    def has_run(self) -> bool:
        """Whether the model was called, in stage 3."""
        return bool(self._dtypes)

    @contextmanager
    def full_root(self) -> Iterator[None]:
        """Puts the weights around the layers together for what calls modules without gradients, in stage 3."""
        self._dtypes = reject_cast(self._split_by_units(self._parameters.current()), self._dtypes)
        with left_inference_mode():
            find_units(self.model)
            self.model.unshard()  # type: ignore[operator]
        try:
            yield
        finally:
            self.model.reshard()  # type: ignore[operator]

    @property
    def trained(self) -> list[nn.Parameter]:
        """What this rank trains of the model at present."""
        return [parameter for parameter in self._parameters.current() if parameter.requires_grad]

    def a_trained_parameter(self) -> nn.Parameter | None:
        """Returns one of this rank's parameters, of any shape, that is trained."""
        return next((parameter for parameter in self._marked if parameter.requires_grad), None)

    @property
    def optimizers(self) -> list[Any]:
        """What `prepare_optimizer` attached to the optimizers that still exist, in the order they were made."""
        attached = (reference() for reference in self._optimizers)
        return [optimizer for optimizer in attached if optimizer is not None]

    def sharding(self, parameter: Tensor) -> ParameterSharding | None:
        """Returns the claim of a parameter of any shape; one that came after the plan was made has none."""
        return self._shardings.get(id(parameter))

    def sharing(self, parameter: Tensor) -> GradSyncGroup:
        """Returns the ranks that average the gradient of a parameter of any shape."""
        sharding = self.sharding(parameter)
        return self._sharings["dp" if sharding is None else sharding.gradient.average]

    def is_split(self, parameter: Tensor) -> bool:
        """Tells whether ranks hold different parts of a parameter of any shape."""
        sharding = self.sharding(parameter)
        return sharding is not None and sharding.placement.on(self.state.axes).is_split

    def holders(self, parameter: Tensor) -> int:
        """Counts the ranks of the world that hold a parameter of any shape or a part of it."""
        sharding = self.sharding(parameter)
        tied = sharding is not None and self.state.is_tied(sharding.name)
        return self.state.axes.size("stage") * (2 if tied else 1)

    def reject_sums_over_parameters(self, optimizer: torch.optim.Optimizer, *, elementwise: bool = False) -> None:
        """Raises `UnsupportedError` for an optimizer that may look at all parameters together, over pipeline stages."""
        cls = type(optimizer)
        is_known = f"{cls.__module__}.".startswith(_ONE_BY_ONE) and not issubclass(cls, torch.optim.LBFGS)
        if self.state.cut is not None and not (is_known or elementwise):
            raise UnsupportedError(
                f"{cls.__name__} may take sums over all parameters, and a pipeline stage has its own only: use "
                "pp_size=1, or hf_megatron.prepare_optimizer(optimizer, elementwise=True) if it steps on each "
                "parameter by itself."
            )

    def add_optimizer(self, optimizer: Any) -> None:
        self._optimizers = [weakref.ref(other) for other in (*self.optimizers, optimizer)]

    @property
    def gradients(self) -> GradStore:
        """Where the gradients of the trainable parameters are added up."""
        return self.reducer or PlainGradients(p for p in self._marked if p.requires_grad)

    @contextmanager
    def gradients_apart(self) -> Iterator[None]:
        """Has backwards inside leave no gradients behind, and reduce none; those that are there stay."""
        store = self.gradients
        store.complete()
        before, synchronise = store.put_aside(), store.synchronise
        store.synchronise, self.is_rerun = False, True
        try:
            yield
        finally:
            store.take_back(before)
            store.synchronise, self.is_rerun = synchronise, False

    def check_before_step(self) -> None:
        """Raises `ConfigError` if the gradients are not what a loop takes them for."""
        for guard in self.guards:
            guard()

    def reduce_gradients(self) -> None:
        """Takes gradients out of `.grad` from now on; twice is once."""
        if self.reducer is None:
            self.reducer = GradientReducer(
                self._reduced(self._parameters.current()),
                self.name_of,
                self.sharing,
                bucket_size=self.config.bucket_size,
                main_gradients=self.config.fp32_main_params,
                keep_grad_buffer=self.config.zero_stage < 2,
            )
            self.state.patches.replace(self.model, "no_sync", self.reducer.no_sync)

    def scan(self) -> None:
        """Takes note of modules and parameters that were added or replaced since."""
        self._parameters.scan()
        self._modules.scan()
        self._mark(self._parameters.current())
        if self.state.shards_weights and self._reduced(self._marked):
            self.reduce_gradients()
        if self.reducer is not None:
            self.reducer.refresh(self._reduced(self._marked))

    def _reduced(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Lists those whose gradients FSDP2 does not reduce."""
        if not self.state.shards_weights:
            return parameters
        return [parameter for parameter in parameters if self.is_apart(parameter)]

    def is_apart(self, parameter: Tensor) -> bool:
        """Tells whether a parameter of any shape was placed after FSDP2 has split the others."""
        sharding = self.sharding(parameter)
        return sharding is not None and not self.state.shards(sharding.name)

    def _split_by_units(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """Lists those that FSDP2 splits, in stage 3."""
        others = {id(parameter) for parameter in self._reduced(parameters)}
        return [parameter for parameter in parameters if id(parameter) not in others]

    def reduces(self, parameter: Tensor) -> bool:
        """Tells whether the gradient of a parameter of any shape is taken out of `.grad`."""
        return self.reducer is not None and self.reducer.owns(parameter)

    def _mark(self, parameters: list[nn.Parameter]) -> None:
        """Lets every parameter know its engine, and the engine their claims."""
        names, shardings = self.names(), self.state.shardings
        for parameter in self.model.parameters():
            setattr(parameter, _MARK, self)
        self._shardings = {identity: shardings[name] for identity, name in names.items() if name in shardings}
        self._marked, self._identities = parameters, {id(parameter) for parameter in parameters}

    def holds(self, parameter: Tensor) -> bool:
        """Tells whether a tensor of any shape is one of the model's parameters."""
        return id(parameter) in self._identities

    def finds(self, parameter: Tensor) -> bool:
        """Tells whether a tensor of any shape came to the model with a module that was exchanged since."""
        # FSDP2 exchanges parameters on its own, for whole ones and back.
        if self.state.shards_weights or all(parameter is not other for other in self.model.parameters()):
            return False
        self.scan()
        return True

    def _before_forward(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        # A deep copy shares its hooks' engine, which reduces the original's gradients only.
        if model is not self.model and self.reducer is not None and model.training and torch.is_grad_enabled():
            raise UnsupportedError(
                f"A deep copy of a data parallel {type(model).__name__} can be evaluated, not trained: its gradients "
                "would not be reduced. Load it a second time with from_pretrained(..., megatron_config=...)."
            )
        parameters = self._parameters.current()
        if len(parameters) != len(self._marked) or not all(map(operator.is_, parameters, self._marked)):
            self._reject_functions(parameters)
            self._mark(parameters)
        if self.state.shards_weights:
            # FSDP2 makes its buffers in the first forward.
            self._left_inference_mode.enter_context(left_inference_mode())
            self._places.check()
            if torch.is_grad_enabled():
                self._places.reject_added(self.is_apart)
            self._dtypes = reject_cast(self._split_by_units(parameters), self._dtypes)
        self._modules.reject_embeddings(self.mesh, self.config.num_microbatches)
        self.follow_edits()
        self._shared_batch.check(args, kwargs)
        return self._begin(parameters, args, kwargs) if torch.is_grad_enabled() else None

    @leave_uncompiled
    def _begin(self, parameters: list[nn.Parameter], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Prepares for a forward that records gradients; returns its arguments where they change."""
        self._modules.reject_backward_hooks(self.mesh)
        if self.reducer is not None:
            self.reducer.begin(self._reduced(parameters))
            self._reject_trained_base(parameters)
        if self.mesh.reduces_gradients:
            before, self._forward_hooks = self._forward_hooks, self._modules.forward_hooks()
            self.is_unknown = before != self._forward_hooks or (self.is_unknown and not self.was_differentiated)
            self.is_running, self.was_differentiated = True, False
            reject_hooks(parameters, 0 if self.reducer is None else 1, self.name_of)
        if not self.mesh.reduces_gradients:
            return None
        return with_trained_inputs(args, kwargs, self.mesh.dp_size, lambda leaf: engine_of(leaf) is self)

    def _reject_trained_base(self, parameters: list[nn.Parameter]) -> None:
        """Raises `UnsupportedError` where stage 3 would reduce some gradients and this library others."""
        for parameter in parameters if self.state.shards_weights else ():
            if parameter.requires_grad and not self.reduces(parameter):
                raise UnsupportedError(
                    f"{self.name_of(parameter)} is trained beside adapters with zero_stage=3, which splits a frozen "
                    "base alone. Freeze it, or load the model with zero_stage=2."
                )

    @leave_uncompiled
    def _reject_functions(self, parameters: list[nn.Parameter]) -> None:
        """Raises `UnsupportedError` where `torch.func` has put other tensors in the place of the parameters."""
        is_local = self.reducer is None and not self.state.shards_weights and self.state.cut is None
        if not is_local and not all(parameter.is_leaf and not is_functional(parameter) for parameter in parameters):
            raise UnsupportedError(
                f"torch.func.functional_call of a {type(self.model).__name__} over data parallel ranks or pipeline "
                "stages: what stands in the place of its parameters is known to neither. Call the model itself, or "
                "use tensor parallelism alone."
            )

    @leave_uncompiled
    def follow_edits(self) -> None:
        """Has autograd know which weights were edited in place, before a forward or backward."""
        if self._splits_weights and not self.state.shards_weights:
            self._part_versions.follow(self._marked)

    def unedited(self) -> Callable[[], None]:
        """Returns what raises once a weight was edited in place, also one of other stages, so that all ranks raise."""
        # FSDP2 has others in their place within calls.
        return unedited([*self._marked, *filter(is_off_stage, self.model.parameters())])

    def _end(self, model: nn.Module, args: tuple, output: Any) -> None:
        self.is_running = False
        self._left_inference_mode.close()

    @leave_uncompiled
    def _after_forward(self, model: nn.Module, args: tuple, output: Any) -> Any:
        if not torch.is_grad_enabled():
            return output
        # The graph, which may outlive the model, must not keep it.
        engine = weakref.ref(self)
        # FSDP2 computes with other tensors, which lead nowhere near the parameters that a loop has.
        sharded = self._marked if self.state.shards_weights else []
        alongside = [p for p in sharded if p.requires_grad and not self.reduces(p)]
        require = self.unedited() if self.state.shards_weights else _pass
        begin, reject = partial(_begin_backward, engine, require), partial(_check_backward, engine)
        return self._watch.over(output, begin, reject, alongside)

    def names(self) -> dict[int, str]:
        """Maps identities of parameters to their names in the state dict; a tied one has the first."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def name_of(self, parameter: Tensor) -> str:
        """Returns the state dict's name of a parameter of any shape, in words where it has none."""
        return self.names().get(id(parameter), "a parameter")

    def record_clipping(self, max_norm: float, *, is_finite: bool, is_replicated: bool) -> None:
        """Remembers whether the loop clipped (not to infinity, for the norm alone) and if the norm is finite.

        `is_replicated` tells whether the norm is that of all gradients of the model, on every rank alike.
        """
        grad_status = self._open_grad_status()
        grad_status.clipped = grad_status.clipped or math.isfinite(max_norm)
        if not is_finite or is_replicated:
            grad_status.finite = is_finite

    def note_scaler(self) -> None:
        """Remembers that a loss scaler looked at the gradients and decides itself whether to step."""
        self._open_grad_status().scaled = True

    def _open_grad_status(self) -> "GradStatus":
        if self.grad_status.used:
            self.grad_status = GradStatus()
        return self.grad_status

    def count(self, *, skipped: bool) -> None:
        """Counts a step; raises `NonFiniteGradientError` where too many were skipped in a row."""
        if not skipped:
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        limit = self.config.max_skipped_steps
        if self._skipped_in_a_row >= limit:
            raise NonFiniteGradientError(
                f"{limit} optimizer steps in a row had a gradient that is not finite (MegatronConfig.max_skipped_steps "
                f"= {limit}); on this rank {self._not_finite()}."
            )

    def _not_finite(self) -> str:
        reducer, bad = self.reducer, []
        for name, parameter in local_named_parameters(self.model):
            owned = reducer is not None and reducer.owns(parameter)
            gradient = reducer.gradient(parameter) if owned and reducer is not None else parameter.grad
            if gradient is not None and not torch.isfinite(local_tensor(gradient)).all():
                bad.append(name)
        return f"those of {', '.join(bad[:5])}" + (" and others" if len(bad) > 5 else "") if bad else "all are finite"

    def _after_load(self, model: nn.Module, keys: Any) -> None:
        self.refresh_main_weights()

    def refresh_main_weights(self) -> None:
        for optimizer in self.optimizers:
            optimizer.refresh_main_weights()


def _pass() -> None:
    """Requires nothing."""


def _begin_backward(engine: "weakref.ref[DataParallel]", require_unedited: Callable[[], None]) -> None:
    require_unedited()
    alive = engine()
    if alive is not None and alive.reducer is not None:
        # Some may have been frozen in a forward that came after this backward's.
        alive.reducer.refresh(alive._reduced(alive._parameters.current()))
        alive.reducer.begin_backward()


def _check_backward(engine: "weakref.ref[DataParallel]", node: Any) -> None:
    if (alive := engine()) is not None:
        reject_partial_backward(alive._marked, node, are_sharded=alive.state.shards_weights)


def _zero_grad(model: Any, set_to_none: bool = True) -> None:
    nn.Module.zero_grad(model, set_to_none)
    state = parallel_state(model)
    assert state is not None
    engine: Any = state.data_parallel
    if engine.model is model:
        if set_to_none and engine.reducer is not None:
            engine.reducer.discard()
        for cleared in (*engine.on_cleared, *engine.on_discarded):
            cleared()


def carries_engine(parameter: Tensor) -> bool:
    """Returns whether a tensor of any shape carries its engine."""
    return _MARK in vars(parameter)


def engine_of(parameter: Tensor) -> DataParallel | None:
    """Returns the engine of the model that a parameter of any shape belongs to, if it is one of ours."""
    engine = vars(parameter).get(_MARK)
    if engine is None:
        # `Module.to` may have put another tensor into the parameter, without its attributes.
        engines = all_engines()
        engine = next((other for other in engines if other.holds(parameter)), None)
        if engine is None:
            engine = next((other for other in engines if other.finds(parameter)), None)
        if engine is not None:
            setattr(parameter, _MARK, engine)
    return engine


def all_engines() -> list[DataParallel]:
    """Lists the engines of the laid out models."""
    engines = (state.data_parallel for state in map(parallel_state, RUNTIME.models) if state is not None)
    return [engine for engine in engines if isinstance(engine, DataParallel)]


def data_parallel_engines() -> list[DataParallel]:
    """Lists those whose gradients ranks add up that see parts of a batch."""
    return [engine for engine in all_engines() if engine.mesh.reduces_gradients]


def reducer_of(parameter: Tensor) -> GradientReducer | None:
    """Returns the reducer that takes the gradient of a parameter of any shape out of `.grad`."""
    engine = engine_of(parameter)
    if engine is None or engine.reducer is None or not engine.reducer.owns(parameter):
        return None
    return engine.reducer
