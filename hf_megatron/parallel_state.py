"""Parallel state of one model, stored on it: configuration, shardings, and what each parallel axis installed."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn

from .compat.instance_patches import ModelPatches
from .compat.patch_registry import PATCH_REGISTRY
from .compat.shared import Shared
from .config import MegatronConfig
from .core.axes import Axes
from .core.collected_values import Collection
from .core.forward_hooks import ForwardHooks
from .core.mesh import ParallelMesh
from .core.placement import ADAPTER, GradientRule, ParameterSharding, Placement
from .core.runtime import RUNTIME
from .errors import ConfigError
from .losses.batch_loss import BatchLoss
from .models.layers import LayerSequence
from .models.spec import ModelSpec

_STATE = "_hf_megatron"
_AROUND = "_hf_megatron_around"
_INNER = "_hf_megatron_inner"


class StagePartition(Protocol):
    """Partition of a model's layers into pipeline stages; see `pipeline_parallel/split_model.py`."""

    @property
    def layers(self) -> LayerSequence:
        """The layers in the order in which they run."""

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of weights that the first and the last rank of the pipeline both hold."""

    @property
    def sources(self) -> Mapping[str, str]:
        """Names of tied weights -> names of the parameters that they are tied to."""

    def retie(self, tied: tuple[str, ...], sources: Mapping[str, str]) -> None:
        """Replaces the names of tied weights, after modules were wrapped or unwrapped."""

    def owner(self, name: str) -> int:
        """Returns the pipeline rank of a weight or buffer; the first of the two for a tied weight."""

    def describe_stages(self, name: str) -> str:
        """Returns a description of the stages that hold a weight."""

    def ends(self, model: nn.Module) -> list[nn.Module]:
        """Returns the modules with parameters outside the layers that run on this rank."""


class Pipeline(Protocol):
    """Pipeline of a model whose layers are split over ranks; see `pipeline_parallel/pipeline.py`.

    Attributes:
        runner (`StageRunner`): runs this rank's stages.
        loss_scale (`LossScale`): expected gradient of the next loss.
        recorder (`SpanRecorder`, *optional*): measures the actions of this rank.
        wants_logits (`bool`): whether evaluation returns logits.
    """

    runner: Any
    loss_scale: Any
    recorder: Any
    wants_logits: bool

    def reading(self, read: Callable[[Any, slice], tuple[Tensor, ...]]) -> AbstractContextManager:
        """Makes calls inside return the results `[batch, ...]` of `read` on the last stage's outputs, on every rank."""

    def describe(self) -> dict[str, Any]:
        """Returns the schedule and its sizes."""


class DataParallelEngine(Protocol):
    """Engine that reduces a model's gradients over the data-parallel ranks; see `data_parallel/engine.py`.

    Attributes:
        parameters (`ModelParameters`): the model's parameters and their shardings.
        callbacks (`StepCallbacks`): functions called around optimizer steps.
        step_status (`StepStatus`): gradient checks of the current step, and skipped steps.
        is_rerunning: whether a step is being recomputed, which must leave no gradients.
    """

    parameters: Any
    callbacks: Any
    step_status: Any
    reducer: Any
    is_rerunning: bool

    def scan(self) -> None:
        """Registers modules and parameters that were added or replaced."""

    def sync_user_edits(self) -> None:
        """Informs autograd about weights that were edited in place, before they are used."""

    def refresh_main_weights(self) -> None:
        """Copies the parameters' values into the optimizers' main weights."""

    def gradients_apart(self) -> AbstractContextManager[None]:
        """Leaves no gradients of backwards inside, and reduces none."""

    def replaced(self, parameters: list[Tensor]) -> None:
        """Registers that parameters, of any shape, were replaced by others of another size."""

    def full_root(self) -> AbstractContextManager[None]:
        """Unshards the weights outside the layers for module calls without gradients, in ZeRO stage 3."""


@dataclass(frozen=True)
class MicrobatchSpan:
    """Position of a microbatch in its batch.

    Attributes:
        first_token: index of its first token, counted over all samples in order.
        rows, tokens: number of its samples, and of tokens in each.
        is_repeated: whether it only fills the schedule and repeats another microbatch.
    """

    first_token: int
    rows: int
    tokens: int
    is_repeated: bool = False


@dataclass
class CurrentCall:
    """Metadata of the model's current forward.

    Attributes:
        numbers_tokens: whether it was called without position ids, so that the model numbers the tokens itself.
        packing_info (`PackingInfo`, *optional*): document boundaries of packed samples.
        span (`MicrobatchSpan`, *optional*): the microbatch that a pipeline computes.
    """

    numbers_tokens: bool = False
    packing_info: Any = None
    span: MicrobatchSpan | None = None


@dataclass(frozen=True)
class WeightNames:
    """Names of a pipelined model's weights.

    Attributes:
        all: names in the state dict of the full model, in its order; empty if no other stage holds any.
        off_stage: the names that other stages hold, as the model and as files spell them.
    """

    all: tuple[str, ...] = ()
    off_stage: frozenset[str] = frozenset()


@dataclass(frozen=True)
class RearrangedWeights:
    """Sharded weights that files store in another arrangement, while the loader reads them.

    Attributes:
        names: of the parameters.
        hook (*optional*): handle of the hook that makes the loader read them in full.
    """

    names: frozenset[str] = frozenset()
    hook: Any = None


@dataclass
class ParallelState(Shared):
    """Parallel layout of one model.

    Attributes:
        config (`MegatronConfig`): the configuration.
        axes (`Axes`): sizes and ranks of the mesh's axes; works without process groups.
        spec (`ModelSpec`): parallel description of the model's type.
        shardings: name -> sharding of every parameter of the full model, including other pipeline stages'.
        placed: name of an axis -> what it keeps between `place` and `install`.
        cut (`StagePartition`, *optional*), pipeline (`Pipeline`, *optional*): the pipeline stages, and what runs them.
        leaving (`Callable`, *optional*): (hidden states at the end of a pipeline stage, name of the layer list) ->
            tensor to send.
        full_sequence_fns: (name of a layer list, function) for each axis that shards hidden states between layers; the
            function wraps a function of the model's loop so that it gets full sequences. Outermost axis first.
        names (`WeightNames`): names of a pipelined model's weights.
        rearranged (`RearrangedWeights`): weights that files store in another arrangement, while they are loaded.
        loss (`BatchLoss`): denominators of the model's losses; set by `install`.
        patches (`ModelPatches`): attributes that were replaced on the model.
        hooks (`ForwardHooks`): table of the model's forward hooks.
        shared_apart: modules (experts) whose weights are replicated over other ranks than the rest of the model.
        is_quantized: whether linears hold quantized weights.
        create_stock_model (`Callable`, *optional*): creates the full model of `from_config` on the first rank; removed
            once its weights are drawn.
        modalities: inputs that a pipeline passes to its stages besides text and images.
        call (`CurrentCall`): metadata of the current forward.
        data_parallel (`DataParallelEngine`, *optional*): reduces gradients; set by `install`.
        collection (`Collection`, *optional*): collected full weights, for scripts that write them on one rank; set from
            the end of `Trainer.train()` until the next optimizer step.
    """

    config: MegatronConfig
    axes: Axes
    spec: ModelSpec
    shardings: dict[str, ParameterSharding]
    placed: dict[str, Any] = field(default_factory=dict)
    cut: StagePartition | None = None
    leaving: Callable[[Tensor, str], Tensor] | None = None
    full_sequence_fns: list[tuple[str, Callable[[Any], Any]]] = field(default_factory=list)
    names: WeightNames = field(default_factory=WeightNames)
    rearranged: RearrangedWeights = field(default_factory=RearrangedWeights)
    create_stock_model: Callable[[], nn.Module] | None = None
    # Set by `install`, and not used before.
    loss: BatchLoss = None  # type: ignore[assignment]
    patches: ModelPatches = field(default_factory=ModelPatches)
    hooks: ForwardHooks = field(default_factory=ForwardHooks)
    shared_apart: tuple[str, ...] = ()
    is_quantized: bool = False
    modalities: frozenset[str] = frozenset({"videos", "audio"})
    call: CurrentCall = field(default_factory=CurrentCall)
    pipeline: Pipeline | None = None
    data_parallel: DataParallelEngine | None = None
    collection: Collection | None = None
    _mesh: ParallelMesh | None = None

    def __deepcopy__(self, memo: dict) -> "ParallelState":
        duplicate = copy.copy(self)
        memo[id(self)] = duplicate
        duplicate.data_parallel = copy.deepcopy(self.data_parallel, memo)
        duplicate.hooks = copy.deepcopy(self.hooks, memo)
        duplicate.call = CurrentCall()
        return duplicate

    @property
    def mesh(self) -> ParallelMesh:
        """Process groups by axis; only a placed model has them."""
        assert self._mesh is not None, "a plan has no process groups"
        return self._mesh

    def connect(self, mesh: ParallelMesh) -> None:
        """Sets the process groups."""
        self._mesh = mesh

    @property
    def shards_weights(self) -> bool:
        """Whether data-parallel ranks shard the weights (ZeRO stage 3)."""
        return self.config.zero_stage == 3 and self.axes.size("dp_cp") > 1

    def shards(self, name: str) -> bool:
        """Returns whether ZeRO stage 3 shards a parameter; it does not shard adapters."""
        return self.shards_weights and name in self.shardings and self.shardings[name].style != ADAPTER

    @property
    def splits_weights(self) -> bool:
        """Whether an axis other than ZeRO stage 3 shards weights."""
        return self.axes.size("tp") > 1 or any(
            sharding.placement.on(self.axes).is_split for sharding in self.shardings.values()
        )

    @property
    def has_dtensors(self) -> bool:
        """Whether parameters are DTensors."""
        return self.splits_weights or self.shards_weights

    @property
    def in_lockstep(self) -> bool:
        """Whether data-parallel ranks hold shards of one weight, and therefore wait for each other in every forward."""
        axes = {split.axis for sharding in self.shardings.values() for split in sharding.placement.splits}
        return self.shards_weights or any(self.axes[axis].common(self.axes["dp"]).size > 1 for axis in axes)

    def placement(self, name: str) -> Placement:
        """Returns the placement of a tensor; tensors without a sharding (buffers) are replicated."""
        return self.shardings[name].placement if name in self.shardings else Placement()

    def average(self, name: str) -> str:
        """Returns the name of the axis that averages the gradient of a parameter, planned or added after loading."""
        return self.shardings[name].gradient.average if name in self.shardings else GradientRule().average

    def is_tied(self, name: str) -> bool:
        """Returns whether the first and the last rank of the pipeline both hold this parameter."""
        return self.cut is not None and name in self.cut.tied


def attach_state(model: nn.Module, state: ParallelState) -> None:
    """Stores the parallel state on a model and installs its table of forward hooks."""
    setattr(model, _STATE, state)
    RUNTIME.add_model(model)
    state.hooks.install(model)
    state.hooks.add("enabled", _require_enabled)


def share_state(wrapper: nn.Module, model: nn.Module, state: ParallelState) -> None:
    """Makes a wrapper of a parallelized model refer to its parallel state."""
    setattr(wrapper, _STATE, state)
    # A submodule would give the model a second name.
    vars(wrapper)[_INNER] = model


def share_state_around(module: nn.Module, model: nn.Module, state: ParallelState) -> None:
    """Makes a wrapper of a parallelized model, which may have adapters, refer to its parallel state."""
    share_state(module, unwrap_parallel_model(model), state)
    vars(module)[_AROUND] = model


def model_inside(module: nn.Module) -> Any:
    """Returns the parallelized model, with its adapters, inside a wrapper; any other module unchanged."""
    return vars(module).get(_AROUND, module)


def unwrap_parallel_model(model: nn.Module) -> Any:
    """Returns the parallelized model inside a wrapper; any other module unchanged."""
    return vars(model).get(_INNER, model)


def _require_enabled(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if not PATCH_REGISTRY.enabled:
        raise ConfigError(
            f"This {type(model).__name__} is parallelized, but hf_megatron.disable() restored the stock functions. "
            "Call hf_megatron.enable() first, or load the model without megatron_config."
        )


def is_rerunning_step(state: "ParallelState | None") -> bool:
    """Returns whether a step is being recomputed, which must leave no gradients or records."""
    return state is not None and state.data_parallel is not None and state.data_parallel.is_rerunning


def parallel_state(model: Any) -> ParallelState | None:
    """Returns the parallel state of a model, or `None` for a model that is not parallelized."""
    return vars(model).get(_STATE)


def data_parallel_group() -> dist.ProcessGroup | None:
    """Returns the ranks that hold the same shards and different batches: the group for a script's own collectives.

        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)

    Returns:
        `ProcessGroup`: group of the most recently loaded parallelized model, one rank for each replica and in their
        order; without such a model, the default group of the job, `None` in a process that has none.
    """
    models = RUNTIME.models
    state = parallel_state(models[-1]) if models else None
    if state is not None:
        return state.mesh.dp_group
    return dist.group.WORLD if dist.is_initialized() else None


# Public name: `hf_megatron.parallel_state` is this module.
get_parallel_state = parallel_state

__all__ = ["ParallelState", "attach_state", "data_parallel_group", "get_parallel_state", "parallel_state"]
