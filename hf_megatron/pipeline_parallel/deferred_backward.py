"""Calls whose backward comes later, if at all: forwards that keep their graphs, and the pipeline in reverse."""

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ..compat.torch_autograd import keeps_graph, run_after_backward
from ..compat.torch_fsdp import finishing_itself
from ..errors import ConfigError
from ..losses.targets import target_names
from .differentiable_inputs import TrainedInputs
from .executor import Execution
from .kv_cache import StagedCache, new_inputs
from .loss_grad_scale import ScheduledGradients
from .microbatches import batch_size
from .outputs import Gradients, PipelineOutput, read_loss, read_sample_outputs, with_backward
from .pipeline import Pipeline
from .schedules import backward_plan, forward_plan


def run_forwards(pipeline: Pipeline, arguments: dict[str, Any]) -> PipelineOutput:
    """Runs forwards only, keeping their graphs if gradients are enabled.

    Returns:
        loss, auxiliary loss and logits, identical on all ranks of the pipeline.
    """
    state = pipeline.state
    targets, stages = target_names(arguments), pipeline.cut.boundary.stages
    decoder, parameters = pipeline.cut.layers.decoder, pipeline.signature.parameters
    cache = StagedCache.of_call(pipeline.model, arguments, parameters, stages, pipeline.runner.rank, decoder)
    samples, returns_logits = batch_size(arguments), pipeline.wants_logits or not targets
    # With `num_items_in_batch`, the caller multiplies the loss by the number of data-parallel ranks.
    ranks = state.mesh.dp_size if arguments.get("num_items_in_batch") is not None else 1

    # Names of the outputs `[batch, ...]`, which only the last stage knows: no trial forward precedes cached calls.
    names: list[str] = []

    def read(output: Any, span: slice) -> tuple[Tensor, ...]:
        share = (span.stop - span.start) / samples
        values: list[Tensor] = []
        if returns_logits:
            logits = read_sample_outputs(output, pipeline.model)
            names[:] = logits
            values += logits.values()
        if targets:
            values.append(read_loss(output, pipeline.model, state.loss, arguments) * (share / ranks))
        if targets and output.get("aux_loss") is not None:
            values.append(output["aux_loss"] * share)
        return tuple(values)

    values = list(values_of(pipeline, arguments, read, cache, names))
    fields: dict[str, Any] = {name: values.pop(0) for name in names}
    # Only the last stage knows whether the model has an auxiliary loss.
    fields |= zip(("loss", "aux_loss"), values, strict=False)
    if targets and ranks == 1 and torch.is_grad_enabled():
        # The loss of the global batch, as data-parallel ranks without a pipeline return it.
        fields["loss"] = state.loss.average_shares(fields["loss"])
    if cache is not None:
        cache.advance(new_inputs(arguments))
    # `to_tuple` has the order of the fields.
    output = PipelineOutput(**fields)
    if cache is not None:
        output[cache.name] = cache.cache
    return output


def values_of(
    pipeline: Pipeline,
    arguments: dict[str, Any],
    read: Callable[[Any, slice], tuple[Tensor, ...]],
    cache: StagedCache | None = None,
    names: list[str] | None = None,
) -> tuple[Tensor, ...]:
    """Returns the results of `read` for all microbatches, concatenated, on every rank; see `Pipeline.reading`.

    Args:
        names (`list[str]`, *optional*): filled by `read` on the last stage, and here on the other ranks.
    """
    runner = pipeline.runner
    inputs = TrainedInputs(arguments, pipeline.state.mesh.host_group("pp"))
    plan = pipeline.batches.prepare(
        inputs.arguments, for_backward=False, unsharded=cache is not None, is_read=pipeline.read is not None
    )
    # Slices of the batch dim, one per microbatch.
    edges = [0, *itertools.accumulate(map(batch_size, plan.microbatches))]
    spans = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
    execution = runner.create_execution(plan, lambda index, output: read(output, spans[index]), cache)
    is_random = pipeline.model.training or torch.is_grad_enabled()
    with runner.streams.call() if is_random else nullcontext():
        runner.run(execution, pipeline.plan_actions(forward_plan, len(plan.microbatches)))
    # One column per tensor that `read` returns: samples are concatenated, scalars summed.
    columns = zip(*execution.results, strict=True)
    values = tuple(torch.cat(column) if column[0].dim() else torch.stack(column).sum() for column in columns)
    # [batch, ...] or scalars, from the last stage's rank to all ranks of the pipeline.
    message = runner.transport.broadcast(values, runner.last_rank, " ".join(names or ()))
    values = message.tensors
    if names is not None:
        names[:] = message.layout.split()
    if torch.is_grad_enabled():
        backward = DeferredBackward(pipeline, execution, inputs)
        values = with_backward(backward, values, inputs.tensors, backward.store.parameters)
    return values


class DeferredBackward:
    """Runs a pipeline in reverse when its outputs are backpropagated; see `outputs.Backward`.

    Args:
        execution (`Execution`): the forwards, which keep their graphs.
        inputs (`TrainedInputs`): inputs of the call that require gradients.
    """

    def __init__(self, pipeline: Pipeline, execution: Execution, inputs: TrainedInputs):
        self.pipeline, self.execution, self.inputs = pipeline, execution, inputs
        self.store = pipeline.gradient_store()
        self.actions = pipeline.plan_actions(backward_plan, len(execution.microbatches))
        self._sizes = [batch_size(microbatch) for microbatch in execution.microbatches]
        self._require_unedited = pipeline.engine.unedited()
        self._is_over = False

    def __call__(self, upstream: tuple[Tensor, ...], *, accumulates: bool, wants_weights: bool) -> Gradients:
        """Computes gradients from the gradients `[batch, ...]`, or scalars, of the outputs."""
        if self._is_over:
            raise ConfigError(
                "The outputs of a pipelined model were backpropagated twice: their graph is gone. Call the first "
                "backward with retain_graph=True."
            )
        pipeline, execution, store = self.pipeline, self.execution, self.store
        self._require_unedited()
        pipeline.require_possible(accumulates, wants_weights, is_direct=False)
        pipeline.engine.pipeline_backwards += accumulates
        execution.backward.keeps_graphs = keeps_graph()
        self._is_over = not execution.backward.keeps_graphs
        sizes = self._sizes
        # [batch, ...] -> one [microbatch, ...] per microbatch; a scalar, a sum over microbatches, goes to all of them.
        chunks = [gradient.split(sizes) if gradient.dim() else [gradient] * len(sizes) for gradient in upstream]
        execution.backward.seeds = lambda microbatch_idx: tuple(chunk[microbatch_idx] for chunk in chunks)
        # User hooks have to see the complete gradient: it is stashed and handed to autograd then.
        gradients = ScheduledGradients(
            pipeline.loss_scale,
            store,
            self.actions,
            tied=pipeline.tied.parameters(),
            sum_tied=pipeline.tied.sum,
            seed=1.0,
            is_direct=accumulates and not store.has_user_hooks,
        )
        execution.backward.before_weights = gradients.before_backward
        with (
            gradients.collecting(reduces=False),
            finishing_itself(pipeline.model) if pipeline.state.shards_weights else nullcontext(),
        ):
            pipeline.runner.run(execution, self.actions)
        input_gradients = self.inputs.collect(pipeline.state.mesh.pp_group)
        if not gradients.is_direct and wants_weights:
            by_parameter = dict(zip(map(id, gradients.reached()), gradients.flush(1.0, keep=False), strict=True))
            return input_gradients, [by_parameter.get(id(parameter)) for parameter in store.parameters]
        if gradients.is_direct and gradients.synchronize:
            # Other outputs may be differentiated in the same backward: the reduction waits for all of them.
            run_after_backward(store.reduce)
        return input_gradients, [None] * len(store.parameters)
