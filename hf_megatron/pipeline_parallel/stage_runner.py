"""What every way of a pipelined call has in common: microbatches, their forwards on this rank's stages, gradients."""

import functools
import inspect
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.shared import Shared
from ..compat.torch_dtensor import local_tensor
from ..core.communication.rng import MicrobatchStreams
from ..core.memory.training_kv_cache import leave_out
from ..data_parallel.engine import DataParallel
from ..data_parallel.fsdp import reshard
from ..data_parallel.grad_store import GradStore
from ..data_parallel.packed_sequences import POSITIONS, PackingInfo
from ..errors import UnsupportedError
from ..losses.batch_loss import Share
from ..losses.inline_losses import with_known_targets
from ..losses.targets import mask_all_targets, target_names
from ..parallel_state import ParallelState
from .executor import Execution
from .forward_checks import CallChecks
from .kv_cache import StagedCache
from .layers_per_stage import stages_per_rank
from .loss_grad_scale import LossScale
from .microbatches import batch_size, parts_of_batch, split
from .off_stage_images import OffStageImages
from .p2p import Transport
from .packed_sequences import PackedRow, count_tokens
from .schedules import Action, schedule, valid_microbatches
from .split_model import ModelPartition
from .tied_weight_grads import held_at_either_end, of_several_stages, trained_of
from .trial_forward import TrialForward, autocast_dtype, quiet_autocast

if TYPE_CHECKING:
    from ..core.spans import SpanRecorder

# Microbatches per stage unless the user says otherwise: a bubble of a fifth at most in 1F1B.
_PER_RANK = 4
# What the sums of a batch's losses are divided by: its targets, by name, and its rows.
Denominators = tuple[dict[str, Any], Any]
# What a kind says of every microbatch.
_KIND = 2
# `torch.amp.GradScaler`'s default. Unscaled, most fp16 gradients would be zero before anything can be multiplied.
_SCALER_STARTS_AT = 2.0**16


class StageRunner(Shared):
    """Runs this rank's stages of a model over the microbatches of batches.

    Attributes:
        forward, signature: the model's own forward.
        recorder (`SpanRecorder`, *optional*): measures what this rank does.
        loss_scale (`LossScale`): what is known of the factors that losses receive in backward.
        wants_logits (`bool`): whether evaluation hands out logits.
        read (`Callable`, *optional*): what calls return in place of a loss and logits; see `Pipeline.reading`.
    """

    def __init__(self, model: Any, state: ParallelState, cut: ModelPartition, engine: DataParallel):
        self.model, self.config, self.mesh, self.engine = model, state.config, state.mesh, engine
        self.boundary, self.cut, self.loss = cut.boundary, cut, state.loss
        self.forward = functools.partial(type(model).forward, model)
        self.signature = inspect.signature(self.forward)
        self.schedule = schedule(self.config.pipeline_schedule)
        self.stages_per_rank = stages_per_rank(self.config)
        self.transport = Transport(self.mesh.pp_group, self.mesh.device)
        self.recorder: SpanRecorder | None = None
        self.loss_scale = LossScale(self._usual_scale)
        self.wants_logits = True
        self.read: Callable[[Any, slice], tuple[Tensor, ...]] | None = None
        self.shards_weights = state.shards_weights
        self.checks = CallChecks(model, state, mixes_documents=cut.mixes_documents)
        self.images = OffStageImages(model, state.spec, self.forward, cut.boundary)
        self.trial_forward = TrialForward(model, state, cut, self.forward, self.images)
        self.streams = MicrobatchStreams(self.mesh.device, self.mesh.host_group("pp"))
        self.last, self.holders = cut.boundary.stages.rank_of[-1], cut.boundary.stages.ends
        self._in_lockstep = state.in_lockstep
        self._state = state
        self._auxiliary: dict[Hashable, bool] = {}
        self._packing_info: PackingInfo | None = None
        self._calls = 0
        # Implementations of attention.
        self._keep_documents_apart: set[str] = set()
        engine.callbacks.guards.append(lambda: self.loss_scale.require_final(engine.gradients))
        engine.callbacks.on_cleared.append(self.loss_scale.clear)

    # Microbatches

    def microbatches_at_most(self) -> int:
        """Returns into how many microbatches a batch with enough rows is cut."""
        return self.config.num_microbatches or _PER_RANK * self.config.pp_size

    def prepare(
        self, arguments: dict[str, Any], *, for_backward: bool, unsharded: bool = False
    ) -> tuple[list[dict[str, Any]], list[float], Denominators | None]:
        """Makes microbatches, their shares of the rows, and the denominators of the batch's loss."""
        self.checks.require_one_stage_each(arguments, fills_cache=unsharded)
        self.checks.reject_skipped_layers()
        self.cut.require_order(self.model)
        if for_backward:
            self.cut.reject_added(self.model, self._state.shardings)
        rows = batch_size(arguments)
        given = arguments.pop("num_items_in_batch", None)
        packed = self._packed_row(arguments) if for_backward else None
        units = rows if packed is None else len(packed.microbatches(self.microbatches_at_most()))
        at_most = min(units, self.microbatches_at_most())
        if self._in_lockstep or self.checks.counts_over_ranks(arguments):
            at_most = self._same_on_dp_ranks(at_most)
        losses = target_names(arguments)
        if unsharded or (not for_backward and self.checks.has_batch_statistics(arguments)):
            count = 1
        elif for_backward:
            count = valid_microbatches(self.schedule.name, self.config.pp_size, self.stages_per_rank, at_most)
        else:
            count = at_most
        # In evaluation a decoder behind an encoder may mask by whether it has a cache (T5Gemma).
        keeps = unsharded or (self.cut.layers.decoder > 0 and not self.model.training)
        if not keeps and "use_cache" in self.signature.parameters:
            leave_out(self.model, arguments)
        if count > 1 and (self.read is not None or losses):
            self.checks.reject_batch_statistics(arguments)
        if packed is None:
            microbatches = split(arguments, min(count, rows), self.model.config, modalities=self._state.modalities)
            weights = [batch_size(microbatch) / rows for microbatch in microbatches]
        else:
            microbatches = packed.microbatches(count)
            weights = [count_tokens(microbatch) / packed.length for microbatch in microbatches]
        if not unsharded:
            self.trial_forward.of_call(microbatches[0], is_read=self.read is not None)
        denominators: Denominators | None = None
        if losses:
            # Behind the trial_forward, which shows how a class counts its labels.
            denominators = self.loss.denominators(arguments, rows, given, over_ranks=torch.is_grad_enabled())
        elif self.read is not None:
            denominators = {"labels": 1}, self.loss.row_denominator(rows)
        missing = count - len(microbatches)
        shortest = mask_all_targets(microbatches[min(range(len(weights)), key=weights.__getitem__)])
        return microbatches + [shortest] * missing, weights + [0.0] * missing, denominators

    def _packed_row(self, arguments: dict[str, Any]) -> PackedRow | None:
        """Finds documents to cut a row between, once the model was seen to keep them apart in an earlier call."""
        known, self._packing_info = self._packing_info, None
        kind = self.model.config.get_text_config()._attn_implementation
        if known is not None and known.finds_documents:
            self._keep_documents_apart.add(kind)
        if kind not in self._keep_documents_apart or self.checks.mixes_documents(arguments):
            return None
        return PackedRow.of_call(arguments)

    def _same_on_dp_ranks(self, microbatches: int) -> int:
        """Lets ranks with fewer rows decide for all: dp ranks wait for each other in a forward."""
        lowest = torch.tensor(microbatches, device=self.mesh.device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.mesh.dp_group)
        return int(lowest)

    # Stages

    def execution(
        self,
        microbatches: list[dict[str, Any]],
        weights: list[float],
        denominators: Denominators | None,
        read: Callable[[int, Any], tuple[Tensor, ...]],
        cache: StagedCache | None = None,
    ) -> Execution:
        """Makes what runs microbatches on this rank's stages.

        Args:
            read (`Callable`): (microbatch number, what the last stage returned) -> tensors that are handed out.
        """
        carried, last = self.boundary.carried, len(self.boundary.stages.ranges) - 1
        self._state.packing_info = self._packing_info = PackingInfo(microbatches)
        parts = parts_of_batch(microbatches, weights)
        grows = cache is not None and bool(carried.containers or carried.read)

        def forward(number: int) -> Any:
            seen = {} if cache is None else {cache.name: cache.seen_by(self.boundary.stage)}
            share = None
            if denominators is not None:
                weight = weights[number] or 1.0
                targets, rows = denominators
                targets, rows = {name: value * weight for name, value in targets.items()}, rows * weight
                share = Share(targets, rows, microbatches[number], weights[number] > 0)
            arguments = self.images.arguments(microbatches[number] | seen, self.boundary.stage)
            if self.boundary.stage == last:
                arguments = with_known_targets(arguments, self.loss)
            self._state.part = parts[number]
            try:
                with self.loss.over(share), self.streams.of(self.boundary.stage, number):
                    return self.forward(**arguments)
            finally:
                self._state.part = None

        flags = (
            self.model.training,
            getattr(self.model.config, "output_router_logits", None),
            autocast_dtype(self.mesh.device.type),
            self.cut.dtypes(self.model),
        )
        return Execution(
            self.boundary,
            self.mesh.pp_rank,
            self.transport,
            forward,
            microbatches,
            [
                (flags, self.images.describe(microbatch), *self._only_once(number, microbatch, grows=grows))
                for number, microbatch in enumerate(microbatches)
            ],
            read,
            self.trainable(),
            self.schedule.splits_backward,
            None if self.recorder is None else self.recorder.record,
        )

    def _only_once(self, number: int, microbatch: dict[str, Any], *, grows: bool) -> tuple[int, ...]:
        """Tells equal microbatches apart whose ranks hold other tokens of a row, or whose keys that cross grow."""
        given = (microbatch.get(name) for name in ("attention_mask", POSITIONS))
        varies = self.mesh.axes.size("cp") > 1 and any(value is not None for value in given)
        return (self._calls, number) if varies or grows else ()

    def run(self, execution: Execution, actions: tuple[Action, ...]) -> None:
        """Runs this rank's actions of a schedule."""
        self._calls += 1
        with quiet_autocast():
            execution.run(actions)
        self.transport.forget(kind for kind in execution.kinds if len(kind) > _KIND)
        if self.shards_weights:
            reshard(self.cut.ends(self.model))

    def _usual_scale(self) -> float:
        """Guesses what the first loss will be multiplied by: in fp16 a scaler's first scale, else nothing."""
        return _SCALER_STARTS_AT if autocast_dtype(self.mesh.device.type) is torch.float16 else 1.0

    def has_auxiliary_loss(self, count: Tensor, kind: Hashable) -> bool:
        """Tells whether the last stage's outputs had one; asks the device for a call of each kind once."""
        if kind not in self._auxiliary:
            self._auxiliary[kind] = bool(count)
        return self._auxiliary[kind]

    # Gradients

    def gradient_store(self) -> GradStore:
        """Returns where gradients are added up; raises where hooks would see parts of them."""
        store = self.engine.gradients
        if self.engine.reducer is not None and store.has_user_hooks:
            raise UnsupportedError(
                "Hooks on the gradients of parameters: with dp_size > 1 and zero_stage < 3 they would see this rank's "
                "gradients before they are averaged, of each microbatch. Remove them, or load the model with dp_size=1."
            )
        return store

    def require_possible(self, accumulates: bool, wants_weights: bool, is_direct: bool) -> None:
        """Raises where gradients are asked for that are not handed out; `PlainGradients` hands out all."""
        if not accumulates and (is_direct or (wants_weights and self.engine.reducer is not None)):
            reason = "have been added to those of earlier losses" if is_direct else "are averaged over the dp ranks"
            raise UnsupportedError(
                f"torch.autograd.grad, or backward(inputs=...), of a pipelined model's loss: its gradients {reason}. "
                "Call loss.backward(), or load the model with dp_size=1."
            )

    def trainable(self) -> dict[int, list[nn.Parameter]]:
        """Returns the parameters with gradients of each of this rank's stages."""
        if not self.schedule.splits_backward:
            # Autograd finds them by itself.
            return {}
        return {
            stage: list({id(p): p for p in self.cut.parameters_of(self.model, stage) if p.requires_grad}.values())
            for stage in self.boundary.stages.of_rank(self.mesh.pp_rank)
        }

    def _tied(self) -> list[tuple[str, nn.Parameter]]:
        return trained_of(self.model, self.cut.tied if self.mesh.pp_rank in self.holders else ())

    def tied(self) -> list[nn.Parameter]:
        """Lists the trained parameters that another rank of the pipeline holds too, or several stages of this one."""
        own = self.boundary.stages.of_rank(self.mesh.pp_rank)
        modules = [nn.ModuleList(self.cut.modules_of(self.model, stage)) for stage in own]
        repeated = of_several_stages([list(stage.parameters()) for stage in modules])
        return [*{id(p): p for p in (*(p for _, p in self._tied()), *repeated)}.values()]

    def sum_tied(self) -> None:
        """Adds up the gradients of tied parameters over the two ranks that hold them."""
        other = self.holders[int(self.mesh.pp_rank == self.holders[0])]
        held = held_at_either_end(self.model, self._tied(), other, self.mesh.host_group("pp"))
        for number, parameter in enumerate(held):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with self._measured("tied"):
                self.transport.sum_with(local_tensor(parameter.grad), other, number)

    def _measured(self, kind: str) -> AbstractContextManager:
        stage = self.boundary.stages.of_rank(self.mesh.pp_rank)[0]
        return nullcontext() if self.recorder is None else self.recorder.record(kind, stage)
