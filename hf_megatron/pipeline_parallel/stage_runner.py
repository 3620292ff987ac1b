"""Runs this rank's pipeline stages over the microbatches of a batch."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..compat.shared import Shared
from ..core.communication.rng import MicrobatchStreams
from ..data_parallel.fsdp import reshard
from ..data_parallel.packed_sequences import POSITIONS
from ..losses.batch_loss import LossDenominators
from ..losses.inline_losses import with_known_targets
from ..parallel_state import ParallelState
from .batch_preparation import MicrobatchPlan
from .executor import Execution
from .kv_cache import StagedCache
from .microbatches import compute_microbatch_spans
from .off_stage_images import OffStageImages
from .p2p import Transport
from .schedules import Action, schedule
from .split_model import ModelPartition
from .trial_forward import autocast_dtype, quiet_autocast

if TYPE_CHECKING:
    from ..core.spans import SpanRecorder

# Length of a shape key that all microbatches of equal shapes have; longer keys belong to one microbatch.
_SHARED_KEY_LENGTH = 2


class StageRunner(Shared):
    """Runs schedules of one model on this rank's stages.

    Args:
        forward (`Callable`): the model's own forward.
        images (`OffStageImages`): adapts its arguments to each stage.

    Attributes:
        schedule: the pipeline schedule of the configuration.
        transport (`Transport`): point-to-point communication with the neighboring ranks.
        streams (`MicrobatchStreams`): random-number streams by stage and microbatch.
        recorder (`SpanRecorder`, *optional*): measures the actions of this rank.
    """

    def __init__(
        self,
        model: Any,
        state: ParallelState,
        cut: ModelPartition,
        forward: Callable[..., Any],
        images: OffStageImages,
    ):
        self.model, self.state, self.cut = model, state, cut
        self.forward, self.images = forward, images
        self.schedule = schedule(state.config.pipeline_schedule)
        self.transport = Transport(state.mesh.pp_group, state.mesh.device, state.mesh.direction_groups())
        self.streams = MicrobatchStreams(state.mesh.device, state.mesh.host_group("pp"))
        self.recorder: SpanRecorder | None = None
        self._calls = 0

    @property
    def rank(self) -> int:
        """This rank's index in the pipeline."""
        return self.state.mesh.pp_rank

    @property
    def last_rank(self) -> int:
        """The rank of the pipeline that has the last stage."""
        return self.cut.boundary.stages.rank_of[-1]

    def create_execution(
        self,
        plan: MicrobatchPlan,
        read: Callable[[int, Any], tuple[Tensor, ...]],
        cache: StagedCache | None = None,
    ) -> Execution:
        """Creates the execution of a batch on this rank's stages.

        Args:
            read (`Callable`): (microbatch index, output of the last stage) -> tensors to return.
            cache (`StagedCache`, *optional*): key-value cache of a generation.
        """
        boundary, last = self.cut.boundary, len(self.cut.boundary.stages.ranges) - 1
        self.state.call.packing_info = plan.packing_info
        spans = compute_microbatch_spans(plan.microbatches, plan.weights)
        grows = cache is not None and bool(boundary.carried.containers or boundary.carried.read)

        def forward(microbatch_idx: int) -> Any:
            """Runs the model's forward as the current stage, with its share of the loss and its random numbers."""
            cached = {} if cache is None else {cache.name: cache.seen_by(boundary.stage)}
            arguments = self.images.arguments(plan.microbatches[microbatch_idx] | cached, boundary.stage)
            # Only the last stage computes the loss.
            if boundary.stage == last:
                arguments = with_known_targets(arguments, self.state.loss)
            self.state.call.span = spans[microbatch_idx]
            try:
                with (
                    self.state.loss.with_denominators(_loss_denominators(plan, microbatch_idx)),
                    self.streams.of(boundary.stage, microbatch_idx),
                ):
                    return self.forward(**arguments)
            finally:
                self.state.call.span = None

        # Settings that change the shapes or dtypes of activations without changing the batch.
        settings = (
            self.model.training,
            getattr(self.model.config, "output_router_logits", None),
            autocast_dtype(self.state.mesh.device.type),
            self.cut.dtypes(self.model),
        )
        shape_keys = [
            (settings, self.images.describe(microbatch), *self._distinguish(idx, microbatch, grows=grows))
            for idx, microbatch in enumerate(plan.microbatches)
        ]
        return Execution(
            boundary,
            self.transport,
            forward,
            plan.microbatches,
            shape_keys,
            read,
            rank=self.rank,
            parameters=self._trainable_parameters(),
            splits_backward=self.schedule.splits_backward,
            record=None if self.recorder is None else self.recorder.record,
        )

    def _distinguish(self, microbatch_idx: int, microbatch: dict[str, Any], *, grows: bool) -> tuple[int, ...]:
        """Returns an addition to the shape key of a microbatch whose activations may differ in shape from its equals'.

        They do if cp ranks hold different tokens of a padded or packed sequence, or if a cache that is sent grows.
        """
        values = (microbatch.get(name) for name in ("attention_mask", POSITIONS))
        varies = self.state.axes.size("cp") > 1 and any(value is not None for value in values)
        return (self._calls, microbatch_idx) if varies or grows else ()

    def run(self, execution: Execution, actions: tuple[Action, ...]) -> None:
        """Runs this rank's actions of a schedule."""
        self._calls += 1
        with quiet_autocast():
            execution.run(actions)
        # Keys of single microbatches never occur again.
        self.transport.forget(key for key in execution.shape_keys if len(key) > _SHARED_KEY_LENGTH)
        # Modules before and after the layers stay unsharded during a schedule; see `fsdp.shard_weights`.
        if self.state.shards_weights:
            reshard(self.cut.ends(self.model))

    def measure(self, kind: str) -> AbstractContextManager:
        """Returns a context that records its duration under `kind`."""
        stage = self.cut.boundary.stages.of_rank(self.rank)[0]
        return nullcontext() if self.recorder is None else self.recorder.record(kind, stage)

    def _trainable_parameters(self) -> dict[int, list[nn.Parameter]]:
        """Returns the trainable parameters of each of this rank's stages, if backward is split."""
        if not self.schedule.splits_backward:
            # Autograd finds them itself.
            return {}
        return {
            stage: list({id(p): p for p in self.cut.list_parameters(self.model, stage) if p.requires_grad}.values())
            for stage in self.cut.boundary.stages.of_rank(self.rank)
        }


def _loss_denominators(plan: MicrobatchPlan, microbatch_idx: int) -> LossDenominators | None:
    """Returns the denominators of a microbatch's loss; `None` without a loss."""
    if plan.denominators is None:
        return None
    weight = plan.weights[microbatch_idx]
    targets, samples = plan.denominators
    # A repeated microbatch has weight 0 and no targets: any divisor but 0 will do.
    scale = weight or 1.0
    divisors = {name: value * scale for name, value in targets.items()}
    return LossDenominators(divisors, samples * scale, plan.microbatches[microbatch_idx], weight > 0)


def default_loss_scale(device: torch.device) -> float:
    """Returns the expected gradient of the first loss: `GradScaler`'s initial scale in fp16, else 1."""
    # Without it most fp16 gradients would underflow before the scale is known.
    return 2.0**16 if autocast_dtype(device.type) is torch.float16 else 1.0
