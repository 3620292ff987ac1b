"""Components of a pipelined model, shared by training steps, evaluation and generation."""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..compat.shared import Shared
from ..data_parallel.engine import DataParallel
from ..data_parallel.grad_store import GradStore
from ..errors import UnsupportedError
from ..parallel_state import ParallelState
from .batch_preparation import BatchPreparation
from .buffer_checks import BufferCheck
from .forward_checks import CallChecks
from .layers_per_stage import stages_per_rank
from .loss_grad_scale import LossScale
from .loss_settings import ProblemType
from .off_stage_images import OffStageImages
from .schedules import Action
from .split_model import ModelPartition
from .stage_runner import StageRunner, default_loss_scale
from .tied_weight_grads import TiedGradients
from .trial_forward import TrialForward

if TYPE_CHECKING:
    from ..core.spans import SpanRecorder

# (schedule, pipeline ranks, stages per rank, microbatches) -> the actions of every rank.
ActionPlan = Callable[[str, int, int, int], Sequence[tuple[Action, ...]]]


class Pipeline(Shared):
    """Pipeline of one model whose layers are split over ranks.

    Attributes:
        signature: of the model's own forward.
        checks (`CallChecks`): checks of a call's arguments.
        trial_forward (`TrialForward`): runs the model without its layers before the first call of a kind.
        batches (`BatchPreparation`): splits batches into microbatches.
        runner (`StageRunner`): runs this rank's stages.
        tied (`TiedGradients`): gradients of weights that both ends of the pipeline hold.
        loss_scale (`LossScale`): expected gradient of the next loss.
        buffer_check (`BufferCheck`): rejects modules whose buffers count the calls.
        problem_type (`ProblemType`): setting of a classifier that its loss chooses.
        wants_logits (`bool`): whether evaluation returns logits.
        read (`Callable`, *optional*): replaces the outputs of calls; see `reading`.
    """

    def __init__(self, model: Any, state: ParallelState, cut: ModelPartition, engine: DataParallel):
        self.model, self.state, self.cut, self.engine = model, state, cut, engine
        # The class's own forward: the instance's is replaced by the pipeline (see `engine.install_pipeline`).
        forward = functools.partial(type(model).forward, model)
        self.signature = inspect.signature(forward)
        self.checks = CallChecks(model, state, mixes_documents=cut.mixes_documents)
        images = OffStageImages(model, state.spec, forward, cut.boundary)
        self.trial_forward = TrialForward(model, state, cut, forward, images)
        self.runner = StageRunner(model, state, cut, forward, images)
        self.batches = BatchPreparation(
            model,
            state,
            cut,
            self.checks,
            self.trial_forward,
            schedule=self.runner.schedule.name,
            takes_cache="use_cache" in self.signature.parameters,
        )
        self.tied = TiedGradients(model, cut, self.runner)
        self.loss_scale = LossScale(lambda: default_loss_scale(state.mesh.device))
        self.buffer_check = BufferCheck(model)
        self.problem_type = ProblemType(model, self.runner)
        self.wants_logits = True
        self.read: Callable[[Any, slice], tuple[Tensor, ...]] | None = None
        self._has_auxiliary_loss: dict[Hashable, bool] = {}
        # Gradients of a loss that was never backpropagated must not be used in a step.
        engine.callbacks.guards.append(lambda: self.loss_scale.require_final(engine.gradients))
        engine.callbacks.on_cleared.append(self.loss_scale.clear)

    @property
    def recorder(self) -> "SpanRecorder | None":
        """Measures what this rank does."""
        return self.runner.recorder

    @recorder.setter
    def recorder(self, recorder: "SpanRecorder | None") -> None:
        self.runner.recorder = recorder

    def describe(self) -> dict[str, Any]:
        """Returns the schedule and its sizes; `microbatches` is the number for a batch with enough samples."""
        return {
            "schedule": self.runner.schedule.name,
            "ranks": self.state.config.pp_size,
            "stages_per_rank": stages_per_rank(self.state.config),
            "microbatches": self.batches.max_microbatches(),
        }

    def plan_actions(self, plan: ActionPlan, microbatches: int) -> tuple[Action, ...]:
        """Returns this rank's actions of the schedule for a number of microbatches."""
        config = self.state.config
        return plan(self.runner.schedule.name, config.pp_size, stages_per_rank(config), microbatches)[self.runner.rank]

    @contextmanager
    def reading(self, read: Callable[[Any, slice], tuple[Tensor, ...]]) -> Iterator[None]:
        """Replaces the output of calls inside by the results of `read` on the last stage's outputs, on every rank.

        Args:
            read (`Callable`): (output of the model for a microbatch, its slice of the batch) -> tensors `[batch, ...]`,
                and scalars, which are summed. Their backward runs the pipeline in reverse.
        """
        before, self.read = self.read, read
        try:
            yield
        finally:
            self.read = before

    def has_auxiliary_loss(self, count: Tensor, kind: Hashable) -> bool:
        """Returns whether the last stage's outputs had an auxiliary loss; reads `count` once per kind of call."""
        # Reading the value makes the host wait for the device.
        if kind not in self._has_auxiliary_loss:
            self._has_auxiliary_loss[kind] = bool(count)
        return self._has_auxiliary_loss[kind]

    def gradient_store(self) -> GradStore:
        """Returns the storage of gradients; raises `UnsupportedError` if user hooks would see partial ones."""
        store = self.engine.gradients
        if self.engine.reducer is not None and store.has_user_hooks:
            raise UnsupportedError(
                "Hooks on the gradients of parameters: with dp_size or cp_size > 1 they would see this rank's gradient "
                "of each microbatch before it is averaged. Remove them, and read or change `parameter.grad` between "
                "backward() and step()."
            )
        return store

    def require_possible(self, accumulates: bool, wants_weights: bool, is_direct: bool) -> None:
        """Raises `UnsupportedError` if a backward asks for gradients that are not returned.

        Args:
            accumulates (`bool`): whether it adds gradients to `.grad` instead of returning them.
            wants_weights (`bool`): whether it asks for gradients of parameters.
            is_direct (`bool`): whether the gradients were accumulated before the backward.
        """
        # Again: hooks may have been registered since the forward.
        self.gradient_store()
        if not accumulates and (is_direct or (wants_weights and self.engine.reducer is not None)):
            reason = (
                "have been accumulated already. Call loss.backward(), or do not announce the scale of the loss."
                if is_direct
                else "are averaged over data-parallel ranks. Call loss.backward(), or use dp_size=1 and cp_size=1."
            )
            raise UnsupportedError(
                f"torch.autograd.grad, or backward(inputs=...), of a pipelined model's loss: its gradients {reason}"
            )
