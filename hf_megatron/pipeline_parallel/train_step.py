"""Training call with labels: the full schedule runs in the forward; `loss.backward()` only scales the gradients."""

import math
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.torch_autograd import keeps_graph
from ..compat.torch_memory import is_async_device
from ..core.off_stage import is_off_stage
from ..core.parameter_walk import list_named_parameters
from ..data_parallel.inplace_edits import Contents
from ..errors import ConfigError
from .batch_preparation import MicrobatchPlan
from .differentiable_inputs import TrainedInputs
from .loss_grad_scale import ScheduledGradients
from .outputs import Gradients, PipelineOutput, UnavailableLogits, read_loss, reported, with_backward
from .pipeline import Pipeline
from .schedules import rank_actions

# Relative difference of two fp32 scales that are the same but for rounding.
_SAME = 1e-6


class TrainStep:
    """One training call of a pipelined model: `forward` runs the schedule, `backward` scales its gradients.

    Attributes:
        is_counted: whether the caller passed `num_items_in_batch`, and multiplies the loss by the number of
            data-parallel ranks.
        losses (`Tensor`): `[3]`, sums over microbatches: loss, auxiliary loss, number of auxiliary losses.
        gradients (`ScheduledGradients`): gradients of the schedule, not scaled yet.
        input_gradients: gradients of inputs that require them, not scaled yet.
    """

    gradients: ScheduledGradients
    input_gradients: list[Tensor]
    _reached: list[nn.Parameter]

    def __init__(self, pipeline: Pipeline):
        self.pipeline, self.state = pipeline, pipeline.state
        self.is_counted = False
        self.losses = torch.zeros(3, device=self.state.mesh.device)

    def forward(self, arguments: dict[str, Any]) -> PipelineOutput:
        """Runs the schedule on a batch with labels; returns the loss, identical on all ranks of the pipeline."""
        pipeline, runner = self.pipeline, self.pipeline.runner
        self.is_counted = arguments.get("num_items_in_batch") is not None
        inputs = TrainedInputs(arguments, self.state.mesh.host_group("pp"))
        if runner.schedule.splits_backward:
            inputs.require_first_stage(runner.schedule.name)
        plan = pipeline.batches.prepare(inputs.arguments, for_backward=True)
        actions = pipeline.plan_actions(rank_actions, len(plan.microbatches))
        self.gradients = ScheduledGradients.for_training(
            pipeline.loss_scale,
            pipeline.gradient_store(),
            actions,
            tied=pipeline.tied.parameters(),
            sum_tied=pipeline.tied.sum,
        )
        # The plan stays out of the attributes: autograd keeps this object until the loss is gone.
        execution = runner.create_execution(plan, partial(self._read, plan))
        seed = torch.full((), self.gradients.seed, device=self.state.mesh.device)
        execution.backward.seeds = lambda microbatch_idx: (seed,)
        execution.backward.before_weights = self.gradients.before_backward
        execution.backward.on_added = self.gradients.store.collect
        with self.gradients.collecting(), runner.streams.call(), pipeline.buffer_check.watching(len(plan.microbatches)):
            runner.run(execution, actions)
        self.input_gradients = inputs.collect(self.state.mesh.pp_group)
        self._share_losses()
        # The gradients belong to the present weights, which must not change before the backward.
        self._require_unedited = pipeline.engine.unedited()
        named = list_named_parameters(pipeline.model)
        self._contents = Contents([parameter for parameter in named.values() if not is_off_stage(parameter)])
        self._reached = self.gradients.reached()
        [loss] = with_backward(self.backward, (self.losses[0],), inputs.tensors, self._reached)
        aux_loss = None
        if pipeline.has_auxiliary_loss(self.losses[2], execution.shape_keys[0][:2]):
            aux_loss = reported("aux_loss", self.losses[1])
        unavailable = {name: UnavailableLogits() for name in pipeline.trial_forward.logits}
        return PipelineOutput(loss=loss, aux_loss=aux_loss, **unavailable)

    def _read(self, plan: MicrobatchPlan, microbatch_idx: int, output: Any) -> tuple[Tensor, ...]:
        """Returns the loss of a microbatch on the last stage, weighted by its share of the batch."""
        weight, ranks = plan.weights[microbatch_idx], self.state.mesh.dp_size if self.is_counted else 1
        loss = read_loss(output, self.pipeline.model, self.state.loss, plan.microbatches[microbatch_idx])
        loss = loss * (weight / ranks)
        # Sums stay on the device; `_share_losses` broadcasts them after the schedule.
        self.losses[0] += loss.detach().float()
        if (aux_loss := output.get("aux_loss")) is not None:
            self.losses[1] += aux_loss.detach().float() * weight
            self.losses[2] += 1
        return (loss,)

    def _share_losses(self) -> None:
        """Broadcasts the sums from the last stage, and averages them over data-parallel ranks."""
        dist.broadcast(self.losses, group=self.state.mesh.pp_group, group_src=self.pipeline.runner.last_rank)
        if not self.is_counted or self.state.config.router_aux_loss_scope != "batch":
            # Counted losses are divided by the count of all ranks already.
            self.state.loss.average_over_ranks_(self.losses[1:2] if self.is_counted else self.losses[:2])

    def backward(self, upstream: tuple[Tensor, ...], *, accumulates: bool, wants_weights: bool) -> Gradients:
        """Scales the gradients of the schedule by the gradient of the loss; see `outputs.Backward`."""
        pipeline, gradients = self.pipeline, self.gradients
        self._require_unedited()
        self._contents.check("a weight")
        pipeline.require_possible(accumulates, wants_weights, gradients.is_direct)
        pipeline.engine.pipeline_backwards += accumulates
        # A known scale avoids a multiplication by 1, but reading it makes the host wait for an asynchronous device.
        is_read = not is_async_device(self.state.mesh.device) or pipeline.loss_scale.is_unproven(gradients)
        # `upstream[0]`: gradient of the loss, a scalar; its average over data-parallel ranks.
        average = self.state.loss.average_loss_factor(upstream[0])
        if self.is_counted and is_read:
            self._require_same_scale(upstream[0], average)
        scale = average.item() if is_read else average
        weight_gradients: Any = [None] * len(self._reached)
        if accumulates or wants_weights:
            weight_gradients = gradients.finalize(scale, keep=keeps_graph())
        factor = scale / gradients.seed
        return [gradient * factor for gradient in self.input_gradients], weight_gradients

    @staticmethod
    def _require_same_scale(local: Tensor, average: Tensor) -> None:
        """Raises `ConfigError` if data-parallel ranks scale a counted loss differently."""
        if not math.isclose(local.item(), average.item(), rel_tol=_SAME):
            raise ConfigError(
                f"The loss of a pipelined model received the gradient {local.item()} on this rank and {average.item()} "
                "on average over data-parallel ranks. With num_items_in_batch, gradients are summed over these ranks "
                "before the factor is known: multiply the loss by the same factor on all of them."
            )
