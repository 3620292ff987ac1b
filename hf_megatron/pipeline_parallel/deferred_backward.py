"""A call whose backward comes later, if at all: forwards that keep their graphs, and the pipeline in reverse."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compat.torch_autograd import at_end_of_backward, keeps_graph
from ..compat.torch_fsdp import finishing_itself
from ..errors import ConfigError
from ..losses.targets import target_names
from .differentiable_inputs import TrainedInputs
from .executor import Execution
from .kv_cache import StagedCache, new_inputs
from .loss_grad_scale import ScheduledGradients
from .microbatches import batch_size
from .outputs import Gradients, PipelineOutput, loss_of, values_of_rows, with_backward
from .schedules import Action, backward_plan, forward_plan
from .stage_runner import StageRunner


def run_forwards(runner: StageRunner, arguments: dict[str, Any]) -> PipelineOutput:
    """Runs forwards, whose graphs are kept if gradients are wanted."""
    labels, stages = target_names(arguments), runner.boundary.stages
    decoder, parameters = runner.cut.layers.decoder, runner.signature.parameters
    cache = StagedCache.of_call(runner.model, arguments, parameters, stages, runner.mesh.pp_rank, decoder)
    rows, takes_logits = batch_size(arguments), runner.wants_logits or not labels
    counted = runner.mesh.dp_size if arguments.get("num_items_in_batch") is not None else 1

    def read(output: Any, part: slice) -> tuple[Tensor, ...]:
        share = (part.stop - part.start) / rows
        values: list[Tensor] = []
        if takes_logits:
            logits = values_of_rows(output, runner.model)
            runner.trial_forward.require_same(tuple(logits))
            values += logits.values()
        if labels:
            values.append(loss_of(output, runner.model, runner.loss, arguments) * (share / counted))
        if labels and output.get("aux_loss") is not None:
            values.append(output["aux_loss"] * share)
        return tuple(values)

    values = list(values_of(runner, arguments, read, cache))
    names = runner.trial_forward.logits if takes_logits else ()
    found: dict[str, Any] = {name: values.pop(0) for name in names}
    # Only the last stage knows whether the model has an auxiliary loss.
    found |= zip(("loss", "aux_loss"), values, strict=False)
    if labels and counted == 1 and torch.is_grad_enabled():
        # The batch's, as on replicas without a pipeline.
        found["loss"] = runner.loss.mean_of_shares(found["loss"])
    if cache is not None:
        cache.advance(new_inputs(arguments))
    # In the order of the fields, which is that of tuples.
    output = PipelineOutput(**found)
    if cache is not None:
        output[cache.name] = cache.cache
    return output


def values_of(
    runner: StageRunner,
    arguments: dict[str, Any],
    read: Callable[[Any, slice], tuple[Tensor, ...]],
    cache: StagedCache | None = None,
) -> tuple[Tensor, ...]:
    """Returns what `read` makes of the microbatches' outputs, together and on every rank; see `Pipeline.reading`."""
    inputs = TrainedInputs(arguments, runner.mesh.host_group("pp"))
    microbatches, weights, denominators = runner.prepare(
        inputs.arguments, for_backward=False, unsharded=cache is not None
    )
    edges = [0, *itertools.accumulate(map(batch_size, microbatches))]
    parts = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
    execution = runner.execution(
        microbatches, weights, denominators, lambda number, output: read(output, parts[number]), cache
    )
    sizes = runner.schedule.name, runner.config.pp_size, runner.stages_per_rank, len(microbatches)
    with runner.streams.call() if runner.model.training or torch.is_grad_enabled() else nullcontext():
        runner.run(execution, forward_plan(*sizes)[runner.mesh.pp_rank])
    columns = zip(*execution.results, strict=True)
    values = tuple(torch.cat(column) if column[0].dim() else torch.stack(column).sum() for column in columns)
    values = runner.transport.broadcast(values, runner.last)
    if torch.is_grad_enabled():
        values = _kept(runner, execution, values, backward_plan(*sizes)[runner.mesh.pp_rank], inputs)
    return values


def _kept(
    runner: StageRunner,
    execution: Execution,
    values: tuple[Tensor, ...],
    actions: tuple[Action, ...],
    inputs: TrainedInputs,
) -> tuple[Tensor, ...]:
    """Gives values of the last stage a backward that runs the pipeline in reverse."""
    rows = [batch_size(microbatch) for microbatch in execution.microbatches]
    store, is_over = runner.gradient_store(), False
    require_unedited = runner.engine.unedited()

    def backward(upstream: tuple[Tensor, ...], *, accumulates: bool, wants_weights: bool) -> Gradients:
        nonlocal is_over
        if is_over:
            raise ConfigError(
                "The outputs of a pipelined model were backpropagated twice: their graph is gone. Call the first "
                "backward with retain_graph=True."
            )
        require_unedited()
        runner.require_possible(accumulates, wants_weights, is_direct=False)
        runner.engine.pipeline_backwards += accumulates
        execution.keeps_graphs = keeps_graph()
        is_over = not execution.keeps_graphs
        parts = [gradient.split(rows) if gradient.dim() else [gradient] * len(rows) for gradient in upstream]
        execution.seeds = lambda number: tuple(part[number] for part in parts)
        # Hooks have to see the whole gradient.
        collected = ScheduledGradients(
            runner.loss_scale,
            store,
            actions,
            tied=runner.tied(),
            sum_tied=runner.sum_tied,
            seed=1.0,
            is_direct=accumulates and not store.has_user_hooks,
        )
        execution.before_backward = collected.before_backward
        with (
            collected.collecting(reduces=False),
            finishing_itself(runner.model) if runner.shards_weights else nullcontext(),
        ):
            runner.run(execution, actions)
        of_inputs = inputs.collect(runner.mesh.pp_group)
        if not collected.is_direct and wants_weights:
            reached = map(id, collected.reached())
            found = dict(zip(reached, collected.flush(1.0, keep=False), strict=True))
            return of_inputs, [found.get(id(parameter)) for parameter in store.parameters]
        if collected.is_direct and collected.synchronize:
            # Other forwards may be under way in reverse in the same backward: none of them is the last.
            at_end_of_backward(store.reduce)
        return of_inputs, [None] * len(store.parameters)

    return with_backward(backward, values, inputs.tensors, store.parameters)
