"""A training call with labels: the whole schedule, backwards included; `loss.backward()` says how much they count."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.torch_autograd import keeps_graph
from ..compat.torch_memory import is_async_device
from ..core.off_stage import local_named_parameters
from ..data_parallel.inplace_edits import Contents
from ..errors import ConfigError
from .differentiable_inputs import TrainedInputs
from .loss_grad_scale import ScheduledGradients
from .outputs import Gradients, PipelineOutput, UnavailableLogits, loss_of, reported, with_backward
from .schedules import rank_actions
from .stage_runner import StageRunner

_SAME = 1e-6


def run_schedule(runner: StageRunner, arguments: dict[str, Any]) -> PipelineOutput:
    """Runs the whole schedule on the arguments of a call with labels."""
    is_counted = arguments.get("num_items_in_batch") is not None
    inputs = TrainedInputs(arguments, runner.mesh.host_group("pp"))
    if runner.schedule.splits_backward:
        inputs.require_first_stage(runner.schedule.name)
    microbatches, weights, denominators = runner.prepare(inputs.arguments, for_backward=True)
    losses = torch.zeros(3, device=runner.mesh.device)
    # A caller that has counted multiplies by the ranks.
    counted = runner.mesh.dp_size if is_counted else 1

    def read(number: int, output: Any) -> tuple[Tensor, ...]:
        loss = loss_of(output, runner.model, runner.loss, microbatches[number]) * (weights[number] / counted)
        losses[0] += loss.detach().float()
        if (aux_loss := output.get("aux_loss")) is not None:
            losses[1] += aux_loss.detach().float() * weights[number]
            losses[2] += 1
        return (loss,)

    sizes = runner.schedule.name, runner.config.pp_size, runner.stages_per_rank, len(microbatches)
    actions = rank_actions(*sizes)[runner.mesh.pp_rank]
    store = runner.gradient_store()
    gradients = ScheduledGradients.for_training(
        runner.loss_scale, store, actions, tied=runner.tied(), sum_tied=runner.sum_tied
    )
    execution = runner.execution(microbatches, weights, denominators, read)
    seed = torch.full((), gradients.seed, device=runner.mesh.device)
    execution.seeds = lambda number: (seed,)
    execution.before_backward, execution.added = gradients.before_backward, store.collect
    with gradients.collecting(), runner.streams.call():
        runner.run(execution, actions)
    of_inputs = inputs.collect(runner.mesh.pp_group)
    dist.broadcast(losses, group=runner.mesh.pp_group, group_src=runner.last)
    if not is_counted or runner.config.router_aux_loss_scope != "batch":
        runner.loss.mean_over_ranks(losses[1:2] if is_counted else losses[:2])

    require_unedited = runner.engine.unedited()
    contents = Contents(parameter for _, parameter in local_named_parameters(runner.model))

    def backward(upstream: tuple[Tensor, ...], *, accumulates: bool, wants_weights: bool) -> Gradients:
        require_unedited()
        contents.check("a weight")
        runner.require_possible(accumulates, wants_weights, gradients.is_direct)
        runner.engine.pipeline_backwards += accumulates
        keep = keeps_graph()
        # Known, it decides whether there is anything to multiply; a device would be waited for.
        is_read = not is_async_device(runner.mesh.device) or runner.loss_scale.is_unproven(gradients)
        given = upstream[0]
        unsharded = runner.loss.factor_of_ranks(given)
        if is_counted and is_read and not math.isclose(given.item(), unsharded.item(), rel_tol=_SAME):
            raise ConfigError(
                f"The loss of a pipelined model received the gradient {given.item()} on this rank and "
                f"{unsharded.item()} "
                "on average: gradients of a loss with num_items_in_batch are added up over data parallel ranks before "
                "that is known. Multiply it by the same factor on all of them."
            )
        scale = unsharded.item() if is_read else unsharded
        factor = scale / gradients.seed
        nothing: list[Tensor | None] = [None] * len(reached)
        of_weights = gradients.finalize(scale, keep=keep) if accumulates or wants_weights else nothing
        return [gradient * factor for gradient in of_inputs], of_weights

    reached = gradients.reached()
    [loss] = with_backward(backward, (losses[0],), inputs.tensors, reached)
    aux_loss = None
    if runner.has_auxiliary_loss(losses[2], execution.kinds[0][:2]):
        aux_loss = reported("aux_loss", losses[1])
    off_stage = {name: UnavailableLogits() for name in runner.trial_forward.logits}
    return PipelineOutput(loss=loss, aux_loss=aux_loss, **off_stage)
