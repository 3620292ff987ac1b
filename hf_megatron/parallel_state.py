"""What hf_megatron knows of one model, kept on it; each parallel axis reads it, and leaves what it made there."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from .compat.instance_patches import ModelPatches
from .compat.patch_registry import PATCH_REGISTRY
from .compat.shared import Shared
from .config import MegatronConfig
from .core.axes import Axes
from .core.forward_hooks import ForwardHooks
from .core.mesh import ParallelMesh
from .core.placement import ADAPTER, ParameterSharding, Placement
from .core.runtime import RUNTIME
from .errors import ConfigError
from .losses.batch_loss import BatchLoss
from .models.layers import LayerSequence
from .models.spec import ModelSpec

_STATE = "_hf_megatron"
_AROUND = "_hf_megatron_around"
_INNER = "_hf_megatron_inner"


class StagePartition(Protocol):
    """How a model was cut into pipeline stages."""

    @property
    def layers(self) -> LayerSequence:
        """The layers in the order in which they run."""

    @property
    def tied(self) -> tuple[str, ...]:
        """Names of weights that the first and the last rank of the pipeline both hold."""

    def owner(self, name: str) -> int:
        """Returns the pipeline rank that a weight or buffer belongs to; of a tied weight the first stage's."""

    def stages_of(self, name: str) -> str:
        """Names the stages that hold a weight."""

    def ends(self, model: nn.Module) -> list[nn.Module]:
        """Lists the modules with parameters around the layers that run on this rank."""


class Pipeline(Protocol):
    """What runs a model whose layers lie on several ranks.

    Attributes:
        loss_scale: what is known of the factors that losses receive in backward.
        recorder (*optional*): measures what this rank does, when set.
        wants_logits: whether evaluation hands out logits.
    """

    loss_scale: Any
    recorder: Any
    wants_logits: bool

    def reading(self, read: Callable[[Any, slice], tuple[Tensor, ...]]) -> AbstractContextManager:
        """Makes calls inside return on every rank what `read` makes of the last stage's outputs, `[rows, ...]` each."""

    def describe(self) -> dict[str, Any]:
        """Returns the schedule and its sizes."""


class DataParallelEngine(Protocol):
    """Engine that reduces a model's gradients over the data-parallel ranks; see `data_parallel/engine.py`.

    Attributes:
        callbacks (`StepCallbacks`): functions called around optimizer steps.
        step_status (`StepStatus`): gradient checks of the current step, and skipped steps.
        is_rerunning: whether a step is being recomputed, which must leave no gradients.
    """

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

    def full_root(self) -> AbstractContextManager[None]:
        """Unshards the weights outside the layers for module calls without gradients, in ZeRO stage 3."""


@dataclass(frozen=True)
class MicrobatchSpan:
    """The part of a batch that a pipeline computes.

    Attributes:
        first_token: where it begins among the tokens of all rows, one row after another.
        rows, tokens: of it.
        is_repeated: whether another part is computed again, for nothing.
    """

    first_token: int
    rows: int
    tokens: int
    is_repeated: bool = False


@dataclass
class ParallelState(Shared):
    """The layout of one model.

    Attributes:
        axes (`Axes`): who is who; there also where no process group is.
        spec (`ModelSpec`): of the model's type.
        claims: of every parameter of the whole model, those of other pipeline stages included.
        placed: what each parallel axis remembers between `place` and `install`, by its name.
        cut, pipeline (*optional*): how the layers were cut into stages, and what runs them.
        leaving (`Callable`, *optional*): (hidden states where a pipeline stage ends, the name of their list of
            layers) -> what is sent on.
        full_sequence_fns: where ranks have parts of hidden states between layers, the name of the list of these and
            what hands a function of a loop whole ones; the outermost part of a sequence first.
        names: in the whole model's state dict, in its order; empty where no other stage holds any.
        elsewhere: those of them that other stages hold, under the names of files too.
        patches (`ModelPatches`): what was replaced on the model itself.
        hooks (`ForwardHooks`): what runs before and after the model's forward, in order.
        shared_apart: modules whose weights other ranks repeat than those of one batch, all of them alike.
        numbers_tokens: whether the call under way was given no positions of tokens.
        packing_info (*optional*): what the host knows of the rows of the call under way.
        part (*optional*): of the batch of the call under way, where a pipeline computes it part by part.
        rearranged: split parameters that files hold in another arrangement, while weights are read.
        reading (*optional*): handle of the hook that has the loader take those for whole ones.
        is_quantized: whether linears hold codes.
        media: what a pipeline gives to its stages beside text and images.
        loss (`BatchLoss`, *optional*): what the model's losses are divided by; there once it is installed.
    """

    config: MegatronConfig
    axes: Axes
    spec: ModelSpec
    shardings: dict[str, ParameterSharding]
    placed: dict[str, Any] = field(default_factory=dict)
    cut: StagePartition | None = None
    leaving: Callable[[Tensor, str], Tensor] | None = None
    full_sequence_fns: list[tuple[str, Callable[[Any], Any]]] = field(default_factory=list)
    names: tuple[str, ...] = ()
    off_stage_names: frozenset[str] = frozenset()
    rearranged: frozenset[str] = frozenset()
    reading: Any = None
    # Made when the weights are in; nobody asks before.
    loss: BatchLoss = None  # type: ignore[assignment]
    patches: ModelPatches = field(default_factory=ModelPatches)
    hooks: ForwardHooks = field(default_factory=ForwardHooks)
    shared_apart: tuple[str, ...] = ()
    is_quantized: bool = False
    modalities: frozenset[str] = frozenset({"videos", "audio"})
    numbers_tokens: bool = False
    packing_info: Any = None
    part: MicrobatchSpan | None = None
    pipeline: Pipeline | None = None
    data_parallel: DataParallelEngine | None = None
    _mesh: ParallelMesh | None = None

    def __deepcopy__(self, memo: dict) -> "ParallelState":
        duplicate = copy.copy(self)
        memo[id(self)] = duplicate
        duplicate.data_parallel = copy.deepcopy(self.data_parallel, memo)
        duplicate.hooks = copy.deepcopy(self.hooks, memo)
        return duplicate

    @property
    def mesh(self) -> ParallelMesh:
        """The axes with their process groups; only a model that was placed has them."""
        assert self._mesh is not None, "a plan has no process groups"
        return self._mesh

    def connect(self, mesh: ParallelMesh) -> None:
        """Gives the layout its process groups."""
        self._mesh = mesh

    @property
    def shards_weights(self) -> bool:
        """Whether the ranks that see parts of a batch split the weights themselves (stage 3)."""
        return self.config.zero_stage == 3 and self.axes.size("dp_cp") > 1

    def shards(self, name: str) -> bool:
        """Tells whether stage 3 splits a parameter over the ranks that see parts of the batch: not an adapter's."""
        return self.shards_weights and name in self.shardings and self.shardings[name].style != ADAPTER

    @property
    def splits_weights(self) -> bool:
        """Whether ranks hold parts of weights by any other axis than those of stage 3."""
        return self.axes.size("tp") > 1 or any(
            sharding.placement.on(self.axes).is_split for sharding in self.shardings.values()
        )

    @property
    def has_dtensors(self) -> bool:
        """Whether parameters are DTensors."""
        return self.splits_weights or self.shards_weights

    @property
    def in_lockstep(self) -> bool:
        """Whether ranks that see other data hold parts of one weight, and so wait for each other in every forward."""
        axes = {split.axis for sharding in self.shardings.values() for split in sharding.placement.splits}
        return self.shards_weights or any(self.axes[axis].common(self.axes["dp"]).size > 1 for axis in axes)

    def placement(self, name: str) -> Placement:
        """Returns where a tensor lies; buffers are not claimed, every rank has them whole."""
        return self.shardings[name].placement if name in self.shardings else Placement()

    def average(self, name: str) -> str:
        """Names the axis whose ranks average the gradient of a parameter."""
        return self.shardings[name].gradient.average if name in self.shardings else "dp_cp"

    def is_tied(self, name: str) -> bool:
        """Tells whether the first and the last rank of the pipeline both hold this parameter."""
        return self.cut is not None and name in self.cut.tied


def attach_state(model: nn.Module, state: ParallelState) -> None:
    """Makes a model one of ours."""
    setattr(model, _STATE, state)
    RUNTIME.add_model(model)
    state.hooks.install(model)
    state.hooks.add("enabled", _require_enabled)


def share_state(wrapper: nn.Module, model: nn.Module, state: ParallelState) -> None:
    """Has a module around a laid out model tell its layout."""
    setattr(wrapper, _STATE, state)
    # Not as one of its modules, which would have two names then.
    vars(wrapper)[_INNER] = model


def share_state_around(module: nn.Module, model: nn.Module, state: ParallelState) -> None:
    """Has a module around a laid out model, which may have adapters, tell its layout."""
    share_state(module, unwrap_parallel_model(model), state)
    vars(module)[_AROUND] = model


def model_inside(module: nn.Module) -> Any:
    """Returns the laid out model, with its adapters, that a module is made around; any other module as it is."""
    return vars(module).get(_AROUND, module)


def unwrap_parallel_model(model: nn.Module) -> Any:
    """Returns the model that was laid out, which may be inside of another module that tells its layout."""
    return vars(model).get(_INNER, model)


def _require_enabled(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    if not PATCH_REGISTRY.enabled:
        raise ConfigError(
            f"This {type(model).__name__} is laid out over ranks, and hf_megatron.disable() put the stock functions "
            "back: call hf_megatron.enable() first, or load the model without megatron_config."
        )


def is_rerunning_step(state: "ParallelState | None") -> bool:
    """Tells whether what a model computes now is a step's again, of which nothing is to stay."""
    return state is not None and state.data_parallel is not None and state.data_parallel.is_rerunning


def parallel_state(model: Any) -> ParallelState | None:
    """Returns the parallel state of a model, or `None` for a model this library did not lay out."""
    return vars(model).get(_STATE)


# Public name: `hf_megatron.parallel_state` is this module.
get_parallel_state = parallel_state

__all__ = ["ParallelState", "attach_state", "get_parallel_state", "parallel_state"]
