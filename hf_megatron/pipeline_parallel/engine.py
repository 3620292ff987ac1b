"""`model(**batch)` over pipeline stages.

| call | what happens |
|---|---|
| training, with labels | the whole schedule, backwards included; `loss.backward()` says how much they count |
| gradients, without labels or in evaluation | forwards that keep their graphs; the reverse pipeline runs in backward |
| no gradients | forwards only |

Every rank of a pipeline gets the same batch, calls the model alike and gets the same numbers.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..batch_labels import is_target
from ..communication.random_streams import MicrobatchStreams
from ..data_parallel.engine import DataParallel
from ..data_parallel.fully_sharded import reshard
from ..data_parallel.gradient_store import GradientStore
from ..errors import ConfigError, MegatronError, UnsupportedError
from ..loss import IGNORE_INDEX, Share, has_labels, without_targets
from ..parallel_state import ParallelState
from ..patch_ledger import Shared
from ..tensor_parallel.vocabulary import require_tokens
from ..token_loss import TokenLoss
from ..upstream import at_end_of_backward, finishing_itself, keeps_graph, local_tensor
from .cache import StagedCache, cache_name, new_inputs
from .cut import Cut, stages_per_rank
from .executor import Execution
from .loss_scale import LossScale, ScheduledGradients
from .microbatches import batch_rows, describe, split
from .outputs import AbsentLogits, Backward, PipelineOutput, PipelineValues, ReportedPart
from .schedules import Action, backward_plan, forward_plan, rank_actions, schedule, valid_microbatches
from .trained_inputs import TrainedInputs
from .transport import Transport

if TYPE_CHECKING:
    from ..profile.spans import SpanRecorder

# Microbatches per stage unless the user says otherwise: a bubble of a fifth at most in 1F1B.
_PER_RANK = 4
_TIED_TAG = 0
# `torch.amp.GradScaler`'s default. Unscaled, most fp16 gradients would be zero before anything can be multiplied.
_SCALER_STARTS_AT = 2.0**16


class Pipeline(Shared):
    """Attached to a model whose layers lie on several ranks.

    Attributes:
        recorder (`SpanRecorder`, *optional*): measures what this rank does, when set.
        loss_scale (`LossScale`): what is known of the factors that losses receive in backward.
        wants_logits (`bool`): whether evaluation hands out logits.
    """

    def __init__(self, model: Any, state: ParallelState, cut: Cut, engine: DataParallel):
        self.model, self.config, self.mesh, self.engine = model, state.config, state.mesh, engine
        assert state.loss is not None
        self.boundary, self.cut, self.loss = cut.boundary, cut, state.loss
        config, mesh = state.config, state.mesh
        self.schedule = schedule(config.pipeline_schedule)
        self.stages_per_rank = stages_per_rank(config)
        self.transport = Transport(mesh.pp_group, mesh.device)
        self.recorder: SpanRecorder | None = None
        self.loss_scale = LossScale(self._usual_scale)
        self.wants_logits = True
        self._in_lockstep = state.in_lockstep
        self._tokens, self._classes = _tokens(model, state), _classes(model)
        self._streams = MicrobatchStreams(mesh.device, mesh.host_group("pp"))
        self._auxiliary: dict[Hashable, bool] = {}
        self._rehearsed: set[Hashable] = set()
        self._read: Callable[[Any, slice], tuple[Tensor, ...]] | None = None
        self._first, self._last = cut.boundary.stages.rank_of[0], cut.boundary.stages.rank_of[-1]
        engine.guards.append(lambda: self.loss_scale.require_settled(engine.gradients))
        engine.on_cleared.append(self.loss_scale.clear)
        self._install(state)

    def _install(self, state: ParallelState) -> None:
        model = self.model
        stock = type(model).forward
        self._signature = inspect.signature(stock)
        self._forward = functools.partial(stock, model)

        @functools.wraps(stock)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is not self.model:
                raise UnsupportedError("A deep copy of a pipelined model cannot be called: load it a second time.")
            return self(*args, **kwargs)

        state.patches.replace(model, "forward", types.MethodType(forward, model))

    def describe(self) -> dict[str, Any]:
        """Returns the schedule and its sizes; `microbatches` are those of a batch with enough rows."""
        return {
            "schedule": self.schedule.name,
            "ranks": self.config.pp_size,
            "stages_per_rank": self.stages_per_rank,
            "microbatches": self._microbatches_at_most(),
        }

    def _microbatches_at_most(self) -> int:
        return self.config.num_microbatches or _PER_RANK * self.config.pp_size

    # One call

    # A schedule sends and receives: compiled models run it as it is.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        arguments = self._arguments(args, kwargs)
        return_dict = arguments.pop("return_dict", None)
        self._require_tokens(arguments)
        if self._read is not None:
            return self._values_of(arguments, self._read)
        labels = has_labels(arguments)
        others = [name for name, value in arguments.items() if isinstance(value, Tensor) and is_target(name)]
        if others and (self.loss.shifts is None or not labels):
            raise UnsupportedError(
                f"{type(self.model).__name__} with {', '.join(others)}: a pipeline knows losses of `labels` alone, "
                "that are a mean over tokens or rows. Call it without and compute the loss from its logits."
            )
        if torch.is_grad_enabled() and labels and self.model.training:
            output = self._train(arguments)
        else:
            output = self._forward_only(arguments, labels)
        wants_dict = self.model.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _require_tokens(self, arguments: dict[str, Any]) -> None:
        """Raises `IndexError` on every rank, where the first or the last stage alone would look the tokens up."""
        ids, labels = arguments.get("input_ids"), arguments.get("labels")
        if ids is not None and self._tokens is not None:
            require_tokens(ids, self._tokens, "token id")
        if labels is not None and not labels.is_floating_point() and self._classes > 1:
            require_tokens(labels, self._classes, "label", arguments.get("ignore_index", IGNORE_INDEX))

    @contextmanager
    def reading(self, read: Callable[[Any, slice], tuple[Tensor, ...]]) -> Iterator[None]:
        """Makes calls inside return on every rank what `read` makes of the last stage's outputs.

        Args:
            read (`Callable`): (what the model returned for a microbatch, its rows in the batch) -> tensors
                `[rows, ...]`, and scalars, which are added up. Their backward runs the pipeline in reverse.
        """
        before, self._read = self._read, read
        try:
            yield
        finally:
            self._read = before

    def _arguments(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self._signature.bind_partial(self.model, *args, **kwargs).arguments
        bound.pop("self")
        for name, parameter in self._signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        return dict(bound)

    def _train(self, arguments: dict[str, Any]) -> PipelineOutput:
        """Runs the whole schedule."""
        is_counted = arguments.get("num_items_in_batch") is not None
        inputs = self._trained_inputs(arguments, splits_backward=self.schedule.splits_backward)
        microbatches, weights, denominators = self._prepare(inputs.arguments, for_backward=True)
        losses = torch.zeros(3, device=self.mesh.device)
        # A caller that has counted multiplies by the ranks.
        counted = self.mesh.dp_size if is_counted else 1

        def read(number: int, output: Any) -> tuple[Tensor, ...]:
            loss = self._loss_of(output) * (weights[number] / counted)
            losses[0] += loss.detach().float()
            if (aux_loss := output.get("aux_loss")) is not None:
                losses[1] += aux_loss.detach().float() * weights[number]
                losses[2] += 1
            return (loss,)

        sizes = self.schedule.name, self.config.pp_size, self.stages_per_rank, len(microbatches)
        actions = rank_actions(*sizes)[self.mesh.pp_rank]
        store = self._gradient_store()
        gradients = ScheduledGradients.before_backward_of(
            self.loss_scale, store, actions, tied=self.tied(), sum_tied=self.sum_tied
        )
        execution = self._execution(microbatches, weights, denominators, read)
        seed = torch.full((), gradients.seed, device=self.mesh.device)
        execution.seeds = lambda number: (seed,)
        execution.before_backward, execution.added = gradients.before_backward, store.take
        with gradients.collecting(), self._streams.call():
            self._run(execution, actions)
        of_inputs = inputs.collect(self.mesh.pp_group)
        dist.broadcast(losses, group=self.mesh.pp_group, group_src=self._last)
        if not is_counted or self.config.auxiliary_loss != "batch":
            self.loss.mean_over_ranks(losses[1:2] if is_counted else losses[:2])

        def backward(upstream: tuple[Tensor, ...], *, accumulates: bool, wants_weights: bool) -> Any:
            self._require_possible(accumulates, wants_weights, gradients.is_direct)
            # Waits for the device once: the factor decides whether there is anything to multiply.
            scale, keep = upstream[0].item(), keeps_graph()
            factor = scale / gradients.seed
            nothing: list[Tensor | None] = [None] * len(reached)
            of_weights = gradients.settle(scale, keep=keep) if accumulates or wants_weights else nothing
            return [gradient * factor for gradient in of_inputs], of_weights

        reached = gradients.reached()
        [loss] = self._values(backward, (losses[0],), inputs, reached)  # type: ignore[arg-type]
        aux_loss = None
        if self._has_auxiliary_loss(losses[2], execution.kinds[0]):
            aux_loss = ReportedPart.apply(self._anchor(), "aux_loss", losses[1])
        return PipelineOutput(loss=loss, aux_loss=aux_loss, logits=AbsentLogits())

    # Before the first call of a kind

    def _rehearse(self, arguments: dict[str, Any]) -> None:
        """Runs this rank's stages without their layers, and raises on every rank what any of them found.

        What a pipeline cannot do shows before anything is sent, not in the middle of a schedule.
        """
        names = frozenset(name for name, value in arguments.items() if value is not None)
        # Where dp ranks wait for each other in a forward, all of them do it in the same call.
        kind = (self.model.training, has_labels(arguments), self._read is None, None if self._in_lockstep else names)
        if kind in self._rehearsed:
            return
        found = None
        try:
            self._run_without_layers(arguments)
        except MegatronError as error:
            found = error
        except (AttributeError, TypeError) as error:
            found = UnsupportedError(f"Parts of it were not found where the pipeline is cut ({error}).")
            found.__cause__ = error
        except Exception:  # noqa: BLE001
            # What a batch does wrong shows in the schedule as in one process, by the same exception.
            found = None
        verdicts: list[str | None] = [None] * self.config.pp_size
        dist.all_gather_object(verdicts, None if found is None else str(found), group=self.mesh.pp_group)
        for rank, verdict in enumerate(verdicts):
            if verdict is not None:
                raise UnsupportedError(
                    f"{type(self.model).__name__} on pp rank {rank}: {verdict} Nothing has been computed yet."
                ) from (found if rank == self.mesh.pp_rank else None)
        self._rehearsed.add(kind)

    @torch.no_grad()
    def _run_without_layers(self, arguments: dict[str, Any]) -> None:
        part = dict(arguments)
        if "output_router_logits" in self._signature.parameters:
            # Layers record them.
            part["output_router_logits"] = False
        devices = [self.mesh.device] if self.mesh.device.type == "cuda" else []
        with torch.random.fork_rng(devices), self._quiet_autocast(), self.boundary.rehearsing():
            for stage in self.boundary.stages.of_rank(self.mesh.pp_rank):
                with self.loss.over(Share(1.0, 1.0, part)):
                    output = self.boundary.run(stage, None, lambda: self._forward(**part))
                    if stage == len(self.boundary.stages.ranges) - 1 and self._read is None:
                        (self._loss_of if has_labels(arguments) else self._logits_of)(output)
        if self.config.zero_stage == 3 and self.mesh.dp_size > 1:
            reshard(self.cut.ends(self.model))

    def _trained_inputs(self, arguments: dict[str, Any], *, splits_backward: bool) -> TrainedInputs:
        inputs = TrainedInputs(arguments)
        if splits_backward:
            inputs.require_first_stage(self.schedule.name)
        return inputs

    def _gradient_store(self) -> GradientStore:
        store = self.engine.gradients
        if self.engine.reducer is not None and store.is_watched:
            raise UnsupportedError(
                "Hooks on the gradients of parameters: with dp_size > 1 and zero_stage < 3 they would see this rank's "
                "gradients before they are averaged, of each microbatch. Remove them, or load the model with dp_size=1."
            )
        return store

    def _require_possible(self, accumulates: bool, wants_weights: bool, is_direct: bool) -> None:
        """Raises where gradients are asked for that are not handed out; `PlainGradients` hands out all."""
        if not accumulates and (is_direct or (wants_weights and self.engine.reducer is not None)):
            reason = "have been added to those of earlier losses" if is_direct else "are averaged over the dp ranks"
            raise UnsupportedError(
                f"torch.autograd.grad, or backward(inputs=...), of a pipelined model's loss: its gradients {reason}. "
                "Call loss.backward(), or load the model with dp_size=1."
            )

    def _has_auxiliary_loss(self, count: Tensor, kind: Hashable) -> bool:
        """Tells whether the last stage's outputs had one; asks the device for a call of each kind once."""
        if kind not in self._auxiliary:
            self._auxiliary[kind] = bool(count)
        return self._auxiliary[kind]

    def _anchor(self) -> Tensor:
        return torch.zeros((), requires_grad=True)

    def _values(
        self, backward: Backward, values: tuple[Tensor, ...], inputs: TrainedInputs, parameters: list[nn.Parameter]
    ) -> tuple[Tensor, ...]:
        """Gives values a node that inputs and parameters get their gradients from."""
        tensors = (*values, *inputs.tensors, *parameters)
        return PipelineValues.apply(self._anchor(), backward, len(values), len(inputs.tensors), *tensors)

    def _forward_only(self, arguments: dict[str, Any], labels: bool) -> PipelineOutput:
        """Runs forwards, whose graphs are kept if gradients are wanted."""
        parameters, stages = self._signature.parameters, self.boundary.stages
        cache = StagedCache.of_call(self.model, arguments, parameters, stages, self.mesh.pp_rank)
        rows = batch_rows(arguments)
        counted = self.mesh.dp_size if arguments.get("num_items_in_batch") is not None else 1

        def read(output: Any, part: slice) -> tuple[Tensor, ...]:
            share, values = (part.stop - part.start) / rows, []
            if self.wants_logits or not labels:
                values.append(self._logits_of(output))
            if labels:
                values.append(self._loss_of(output) * (share / counted))
            if labels and output.get("aux_loss") is not None:
                values.append(output["aux_loss"] * share)
            return tuple(values)

        values = list(self._values_of(arguments, read, cache))
        found: dict[str, Any] = {"logits": values.pop(0)} if self.wants_logits or not labels else {}
        # Only the last stage knows whether the model has an auxiliary loss.
        found |= zip(("loss", "aux_loss"), values, strict=False)
        if cache is not None:
            cache.advance(new_inputs(arguments))
        # In the order of the fields, which is that of tuples.
        output = PipelineOutput(**found)
        if cache is not None:
            output[cache.name] = cache.cache
        return output

    def _values_of(
        self,
        arguments: dict[str, Any],
        read: Callable[[Any, slice], tuple[Tensor, ...]],
        cache: StagedCache | None = None,
    ) -> tuple[Tensor, ...]:
        """Returns what `read` makes of the microbatches' outputs, together and on every rank; see `reading`."""
        inputs = self._trained_inputs(arguments, splits_backward=False)
        microbatches, weights, denominators = self._prepare(
            inputs.arguments, for_backward=False, whole=cache is not None
        )
        edges = [0, *itertools.accumulate(map(batch_rows, microbatches))]
        parts = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
        execution = self._execution(
            microbatches, weights, denominators, lambda number, output: read(output, parts[number]), cache
        )
        sizes = self.schedule.name, self.config.pp_size, self.stages_per_rank, len(microbatches)
        with self._streams.call() if self.model.training or torch.is_grad_enabled() else nullcontext():
            self._run(execution, forward_plan(*sizes)[self.mesh.pp_rank])
        columns = zip(*execution.results, strict=True)
        values = tuple(torch.cat(column) if column[0].dim() else torch.stack(column).sum() for column in columns)
        values = self.transport.broadcast(values, self._last)
        if torch.is_grad_enabled():
            values = self._kept(execution, values, backward_plan(*sizes)[self.mesh.pp_rank], inputs)
        return values

    def _kept(
        self, execution: Execution, values: tuple[Tensor, ...], actions: tuple[Action, ...], inputs: TrainedInputs
    ) -> tuple[Tensor, ...]:
        """Gives values of the last stage a backward that runs the pipeline in reverse."""
        rows = [batch_rows(microbatch) for microbatch in execution.microbatches]
        store, is_over = self._gradient_store(), False

        def backward(upstream: tuple[Tensor, ...], *, accumulates: bool, wants_weights: bool) -> Any:
            nonlocal is_over
            if is_over:
                raise ConfigError(
                    "The outputs of a pipelined model were backpropagated twice: their graph is gone. Call the first "
                    "backward with retain_graph=True."
                )
            self._require_possible(accumulates, wants_weights, is_direct=False)
            execution.keeps_graphs = keeps_graph()
            is_over = not execution.keeps_graphs
            parts = [gradient.split(rows) if gradient.dim() else [gradient] * len(rows) for gradient in upstream]
            execution.seeds = lambda number: tuple(part[number] for part in parts)
            # Hooks have to see the whole gradient.
            collected = ScheduledGradients(
                self.loss_scale,
                store,
                actions,
                tied=self.tied(),
                sum_tied=self.sum_tied,
                seed=1.0,
                is_direct=accumulates and not store.is_watched,
            )
            execution.before_backward = collected.before_backward
            shards_weights = self.config.zero_stage == 3 and self.mesh.dp_size > 1
            with (
                collected.collecting(reduces=False),
                finishing_itself(self.model) if shards_weights else nullcontext(),
            ):
                self._run(execution, actions)
            of_inputs = inputs.collect(self.mesh.pp_group)
            if not collected.is_direct and wants_weights:
                reached = map(id, collected.reached())
                found = dict(zip(reached, collected.hand_over(1.0, keep=False), strict=True))
                return of_inputs, [found.get(id(parameter)) for parameter in store.parameters]
            if collected.is_direct and collected.synchronise:
                # Other forwards may be under way in reverse in the same backward: none of them is the last.
                at_end_of_backward(store.reduce)
            return of_inputs, [None] * len(store.parameters)

        return self._values(backward, values, inputs, store.parameters)  # type: ignore[arg-type]

    # What calls share

    def _prepare(
        self, arguments: dict[str, Any], *, for_backward: bool, whole: bool = False
    ) -> tuple[list[dict[str, Any]], list[float], list[Any] | None]:
        """Makes microbatches, their shares of the rows, and the denominators of the batch's loss."""
        for name in ("output_attentions", "output_hidden_states"):
            if arguments.get(name) or getattr(self.model.config, name, False):
                raise UnsupportedError(f"{name}=True: no rank of a pipeline has those of all layers.")
        if not whole and (past := cache_name(arguments)) is not None:
            raise UnsupportedError(f"{past} in a training step: a pipeline fills caches in evaluation only.")
        rows = batch_rows(arguments)
        given = arguments.pop("num_items_in_batch", None)
        at_most = self._same_on_dp_ranks(min(rows, self._microbatches_at_most()))
        if whole:
            count = 1
        elif for_backward:
            count = valid_microbatches(self.schedule.name, self.config.pp_size, self.stages_per_rank, at_most)
        else:
            count = at_most
        if not whole and "use_cache" in self._signature.parameters:
            arguments["use_cache"] = False
        if count > 1 and (self._read is not None or has_labels(arguments)):
            self._refuse_batch_statistics(arguments)
        denominators = None
        if has_labels(arguments):
            denominators = self.loss.denominators(arguments, rows, given, over_ranks=for_backward)
        elif self._read is not None:
            denominators = [1, self.loss.row_denominator(rows)]
        microbatches = split(arguments, min(count, rows))
        if not whole:
            self._rehearse(microbatches[0])
        weights = [batch_rows(microbatch) / rows for microbatch in microbatches]
        missing = count - len(microbatches)
        return microbatches + [without_targets(microbatches[0])] * missing, weights + [0.0] * missing, denominators

    def _refuse_batch_statistics(self, arguments: dict[str, Any]) -> None:
        asked = arguments.get("output_router_logits")
        if asked is None:
            asked = getattr(self.model.config.get_text_config(), "output_router_logits", False)
        if asked and self.config.auxiliary_loss == "batch":
            raise ConfigError(
                "output_router_logits=True with several microbatches: the router loss of a batch cannot be computed "
                "from those of its microbatches. Set MegatronConfig.auxiliary_loss='sequence' (each row's own, the "
                "same on every layout) or 'microbatch' (each microbatch's own), or num_microbatches=1."
            )

    def _same_on_dp_ranks(self, microbatches: int) -> int:
        """Lets ranks with fewer rows decide for all, where dp ranks wait for each other in a forward."""
        if not self._in_lockstep:
            return microbatches
        lowest = torch.tensor(microbatches, device=self.mesh.device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.mesh.dp_group)
        return int(lowest)

    def _execution(
        self,
        microbatches: list[dict[str, Any]],
        weights: list[float],
        denominators: list[Any] | None,
        read: Callable[[int, Any], tuple[Tensor, ...]],
        cache: StagedCache | None = None,
    ) -> Execution:
        config = self.model.config

        def forward(number: int) -> Any:
            seen = {} if cache is None else {cache.name: cache.seen_by(self.boundary.stage)}
            share = None
            if denominators is not None:
                targets, rows = (value * (weights[number] or 1.0) for value in denominators)
                share = Share(targets, rows, microbatches[number])
            with self.loss.over(share), self._streams.of(self.boundary.stage, number):
                return self._forward(**(microbatches[number] | seen))

        flags = (
            self.model.training,
            getattr(config, "output_router_logits", None),
            self._autocast_dtype(),
            self.cut.dtypes(self.model),
        )
        return Execution(
            self.boundary,
            self.mesh.pp_rank,
            self.transport,
            forward,
            microbatches,
            [(flags, describe(microbatch)) for microbatch in microbatches],
            read,
            self.trainable(),
            self.schedule.splits_backward,
            None if self.recorder is None else self.recorder.record,
        )

    def _run(self, execution: Execution, actions: tuple[Action, ...]) -> None:
        with self._quiet_autocast():
            execution.run(actions)
        if self.config.zero_stage == 3 and self.mesh.dp_size > 1:
            reshard(self.cut.ends(self.model))

    def _usual_scale(self) -> float:
        """Guesses what the first loss will be multiplied by: in fp16 a scaler's first scale, else nothing."""
        return _SCALER_STARTS_AT if self._autocast_dtype() is torch.float16 else 1.0

    def _autocast_dtype(self) -> torch.dtype | None:
        device_type = self.mesh.device.type
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None

    @contextmanager
    def _quiet_autocast(self) -> Iterator[None]:
        """Casts weights for each microbatch: a cached cast would be part of several graphs."""
        before = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(before)

    def trainable(self) -> dict[int, list[nn.Parameter]]:
        """Returns the parameters with gradients of each of this rank's stages."""
        if not self.schedule.splits_backward:
            # Autograd finds them by itself.
            return {}
        found = {}
        for stage in self.boundary.stages.of_rank(self.mesh.pp_rank):
            parameters = {id(p): p for module in self.cut.modules_of(self.model, stage) for p in module.parameters()}
            found[stage] = [parameter for parameter in parameters.values() if parameter.requires_grad]
        return found

    def _tied(self) -> list[nn.Parameter]:
        """Parameters of this rank that the stage at the other end holds too."""
        if self.mesh.pp_rank not in (self._first, self._last):
            return []
        parameters = dict(self.model.named_parameters(remove_duplicate=False)) if self.cut.tied else {}
        return [parameters[name] for name in self.cut.tied]

    def tied(self) -> list[nn.Parameter]:
        """Lists the trained parameters of this rank that the stage at the other end holds too."""
        return [parameter for parameter in self._tied() if parameter.requires_grad]

    def sum_tied(self) -> None:
        """Adds up the gradients of tied parameters over both ends of the pipeline."""
        other = self._last if self.mesh.pp_rank == self._first else self._first
        for number, parameter in enumerate(self.tied()):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with self._measured("tied"):
                self.transport.sum_with(local_tensor(parameter.grad), other, _TIED_TAG + number)

    def _measured(self, kind: str) -> AbstractContextManager:
        if self.recorder is None:
            return nullcontext()
        return self.recorder.record(kind, self.boundary.stages.of_rank(self.mesh.pp_rank)[0])

    def _loss_of(self, output: Any) -> Tensor:
        if not self.loss.was_used:
            raise UnsupportedError(
                f"{type(self.model).__name__} computes its loss itself, each microbatch's by its own targets; with a "
                "pipeline call it without labels and compute the loss from its logits."
            )
        return output["loss"]

    def _logits_of(self, output: Any) -> Tensor:
        if output.get("logits") is None:
            raise UnsupportedError(
                f"{type(self.model).__name__} returns no logits; a pipeline hands out logits and losses only."
            )
        logits = output["logits"]
        return logits if isinstance(logits, Tensor) else logits.gather(warn=False)


def _tokens(model: Any, state: ParallelState) -> int | None:
    """Counts the token ids that a text model knows; others may have ids that stand for images."""
    if model.config.get_text_config() is not model.config:
        return None
    embedding = model.get_input_embeddings()
    name = next((name for name, module in model.named_modules() if module is embedding), None)
    claim = state.claims.get(f"{name}.weight")
    return None if claim is None else claim.shape[0]


def _classes(model: Any) -> int:
    """Counts the classes that labels choose from."""
    config = model.config
    return config.get_text_config().vocab_size if isinstance(model.loss_function, TokenLoss) else config.num_labels
