"""Where the first number that is not finite came from: the step's calls run again, and every module is looked at.

A step whose gradients are not finite was skipped on all ranks alike. The watch has kept what the model was called with,
and its random state; it calls it again with hooks on every module. The first module in the order of execution that
returns something that is not finite, or gets such a gradient, is the smallest one, since parts return before what is
around them. What other ranks find spreads to them later, so that the earliest of all ranks' findings names the rank.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from ..absent_weights import own_parameters
from ..communication.host_streams import host_state, set_host_state
from ..communication.random_streams import default_generator
from ..data_parallel.optimizer import sharded
from ..errors import ConfigError
from ..parallel_state import ParallelState, laid_out_model, parallel_state
from ..parts import works_on_parts
from ..registry.features import layer_patterns
from ..upstream import in_backward, local_tensor

WEIGHT, INPUT, OUTPUT, LOSS, GRADIENT = "weight", "input", "output", "loss", "gradient"
INPUT_GRADIENT = "gradient of the input"
_SAID = {
    INPUT: "argument",
    OUTPUT: "output of",
    LOSS: "loss of",
    GRADIENT: "gradient of the output of",
    INPUT_GRADIENT: "gradient of the input of",
}
# In the order in which a step comes to them.
_PHASES = {WEIGHT: 0, INPUT: 1, OUTPUT: 1, LOSS: 2, GRADIENT: 3, INPUT_GRADIENT: 3}


@dataclass(frozen=True)
class NonFinite:
    """The first number of a step that is not finite.

    Attributes:
        kind: `"weight"`, `"input"` (of the model), `"output"` (of a module), `"loss"`, `"gradient"` (of an output), or
            `"gradient of the input"` (of a layer).
        name: of the parameter, the argument or the module; `""` is the model itself.
        rank: of the job.
        call: of the model, in the step.
        microbatch: of the call, in a pipeline; 0 without.
        stage: of the pipeline.
        entry: of a weight, where its first such entry is in the whole model's; of experts' it begins with their number.
        after: of a gradient, the module whose output's gradient was the last before: the backward of what is between
            this and that made it; of several that read the same input it is one.
    """

    kind: str
    name: str
    rank: int
    call: int = 0
    microbatch: int = 0
    stage: int = 0
    entry: tuple[int, ...] = ()
    after: str = ""

    def __str__(self) -> str:
        name = self.name or "the model"
        if self.kind == WEIGHT:
            return f"rank {self.rank}: weight {name} at {list(self.entry)}"
        where = f"call {self.call} of the step, microbatch {self.microbatch}, stage {self.stage}"
        after = f", in the backward behind the output of {self.after}" if self.after else ""
        return f"rank {self.rank}: {_SAID[self.kind]} {name}{after}, {where}"


@dataclass(frozen=True)
class NonFiniteReport:
    """What a rerun showed.

    Attributes:
        step: optimizer steps before.
        first (*optional*): what was not finite first; `None` where the rerun was finite.
        also: the same of the other ranks, each rank's first.
    """

    step: int
    first: NonFinite | None
    also: tuple[NonFinite, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Who has found the same first: one, or all between which a gradient was added up before any module saw it."""
        first = [one for one in (self.first, *self.also) if one is not None]
        same = [one for one in first if replace(one, rank=0) == replace(first[0], rank=0)]
        return tuple(one.rank for one in same)

    def __str__(self) -> str:
        if self.first is None:
            return (
                f"step {self.step} had a gradient that is not finite, and the same calls again were finite on all "
                "ranks: a fault of a machine, or what a loop did to the gradients or made of the outputs."
            )
        text = f"step {self.step}, first not finite, found by the same calls again: {self.first}"
        if len(self.ranks) > 1:
            text += f"; ranks {', '.join(map(str, self.ranks))} alike, between which it was added up before"
        others = [str(one.rank) for one in self.also if one.rank not in self.ranks]
        return text + (f"; later on ranks {', '.join(others)}" if others else "")


@dataclass(frozen=True)
class _Call:
    """What a model was called with, and the random states before."""

    args: tuple
    kwargs: dict[str, Any]
    states: tuple[Tensor, ...]


class NonFiniteWatch:
    """Runs a skipped step again and says which rank, microbatch, stage and module was not finite first.

        watch = NonFiniteWatch(model, optimizer)
        ...  # the usual loop; a report is printed on rank 0 when a step was skipped
        watch.reports

    The arguments of a step's calls are kept until the next one.

    Args:
        model: laid out, with adapters or without.
        optimizer: of the model; prepared.
        limit (`int`, defaults to 3): reports of a run; a rerun takes as long as a few steps.
        say (`Callable`, *optional*): called with each report on rank 0 of the job; prints it by default.

    Raises:
        ConfigError: the model or the optimizer was not laid out.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        limit: int = 3,
        say: Callable[[NonFiniteReport], None] | None = None,
    ):
        state, held = parallel_state(model), sharded(optimizer)
        if state is None or held is None:
            raise ConfigError(
                "NonFiniteWatch follows a model that was loaded with megatron_config= and an optimizer that "
                "prepare_optimizer, Trainer or Accelerate has prepared."
            )
        self.model, self.optimizer, self.limit = model, optimizer, limit
        self.reports: list[NonFiniteReport] = []
        self._state: ParallelState = state
        self._held = held
        self._say = say or _print
        self._calls: list[_Call] = []
        self._steps = 0
        self._is_rerun = False
        self._hooks = [
            model.register_forward_pre_hook(self._keep, with_kwargs=True),
            optimizer.register_step_post_hook(self._after_step),
        ]

    def stop(self) -> None:
        """Takes the hooks away and lets go of what was kept."""
        for hook in self._hooks:
            hook.remove()
        self._calls.clear()

    def _keep(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._is_rerun or not (model.training and torch.is_grad_enabled()) or in_backward():
            return
        self._calls.append(_Call(args, dict(kwargs), _random_states(self._state.mesh.device)))

    def _after_step(self, *args: Any) -> None:
        if self._held.step_was_skipped and len(self.reports) < self.limit:
            report = self._rerun()
            self.reports.append(report)
            if dist.get_rank() == 0:
                self._say(report)
        self._calls.clear()
        self._steps += 1

    def _rerun(self) -> NonFiniteReport:
        found = [*_weights(self.model, self._state)]
        before = _random_states(self._state.mesh.device)
        self._is_rerun = True
        try:
            with ExitStack() as stack:
                stack.enter_context(self._held.engine.gradients_apart())
                if self._state.pipeline is not None:
                    stack.enter_context(self._state.pipeline.loss_scale.unnoticed())
                for number, call in enumerate(self._calls):
                    found += self._run_again(number, call)
        finally:
            self._is_rerun = False
            _set_random_states(self._state.mesh.device, before)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, min(found, key=lambda one: one[0], default=None))
        firsts = sorted((one for one in of_ranks if one is not None), key=lambda one: one[0])
        if not firsts:
            return NonFiniteReport(self._steps, None)
        return NonFiniteReport(self._steps, firsts[0][1], tuple(one for _, one in firsts[1:]))

    def _run_again(self, number: int, call: _Call) -> list["_Found"]:
        """Calls the model as before, and returns what is not finite; gradients go nowhere."""
        _set_random_states(self._state.mesh.device, call.states)
        recorder = _Recorder(laid_out_model(self.model), self._state, number)
        with recorder.recording():
            recorder.inputs(call.args, call.kwargs)
            output = self.model(*call.args, **call.kwargs)
            loss = output.get("loss") if isinstance(output, dict) else None
            if isinstance(loss, Tensor) and loss.requires_grad:
                recorder.loss(loss)
                loss.backward()
        return recorder.found()


# What comes first in a step sorts first.
_Found = tuple[tuple[int, ...], NonFinite]


class _Recorder:
    """Looks at what every module of a model returns in one call, and at the gradients of that."""

    def __init__(self, model: nn.Module, state: ParallelState, call: int):
        self.model, self.state, self.call = model, state, call
        # Kind, name, microbatch, stage, and whether all is finite.
        self._seen: list[tuple[str, str, int, int, Tensor]] = []
        self._followed: set[Any] = set()

    @contextmanager
    def recording(self) -> Iterator[None]:
        hooks = [
            module.register_forward_hook(self._hook_of(name), always_call=False)
            for name, module in self.model.named_modules()
            if module is not self.model
        ]
        hooks += [
            self.model.get_submodule(name).register_forward_pre_hook(self._hook_of_inputs(name))
            for name in layer_patterns(self.model)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _hook_of(self, name: str) -> Callable[..., None]:
        @works_on_parts
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            # What is computed again in backward was seen before.
            if in_backward() or (place := self._place()) is None:
                return
            for value in _floats(output):
                self._look(OUTPUT, name, *place, value.detach())
                # What a part has returned as it is was seen there.
                if value.requires_grad and value.grad_fn not in self._followed:
                    self._followed.add(value.grad_fn)
                    value.register_hook(lambda gradient: self._look(GRADIENT, name, *place, gradient))

        return hook

    def _hook_of_inputs(self, name: str) -> Callable[..., None]:
        """Makes a hook of a layer: what a stage receives is no module's output there."""

        @works_on_parts
        def hook(module: nn.Module, args: Any) -> None:
            if in_backward() or (place := self._place()) is None:
                return
            for value in _floats(args):
                if value.requires_grad:
                    value.register_hook(lambda gradient: self._look(INPUT_GRADIENT, name, *place, gradient))

        return hook

    def _place(self) -> tuple[int, int] | None:
        """Returns the microbatch and the stage under way; `None` where a pipeline runs no microbatch."""
        if self.state.pipeline is None:
            return 0, 0
        part, cut = self.state.part, self.state.cut
        if part is None or part.is_repeated:
            return None
        rows = part.first_token // part.tokens if part.tokens else 0
        return rows // max(part.rows, 1), cut.boundary.stage  # type: ignore[union-attr]

    def _look(self, kind: str, name: str, microbatch: int, stage: int, value: Tensor) -> None:
        self._seen.append((kind, name, microbatch, stage, torch.isfinite(local_tensor(value)).all()))

    def inputs(self, args: tuple, kwargs: dict[str, Any]) -> None:
        named = {str(place): value for place, value in enumerate(args)} | kwargs
        for name, value in named.items():
            for tensor in _floats(value):
                self._look(INPUT, name, 0, 0, tensor.detach())

    def loss(self, value: Tensor) -> None:
        self._look(LOSS, "", 0, 0, value.detach())

    def found(self) -> list[_Found]:
        if not self._seen:
            return []
        devices = {flag.device for *_, flag in self._seen}
        finite = {
            id(flag): value
            for device in devices
            for flag, value in _values([flag for *_, flag in self._seen if flag.device == device])
        }
        rank, found, last = dist.get_rank(), [], ""
        for place, (kind, name, microbatch, stage, flag) in enumerate(self._seen):
            if not finite[id(flag)]:
                after = last if kind in (GRADIENT, INPUT_GRADIENT) else ""
                one = NonFinite(kind, name, rank, self.call, microbatch, stage, after=after)
                found.append((_order(one, place), one))
            last = name if kind == GRADIENT else last
        return found


def _order(one: NonFinite, place: int) -> tuple[int, ...]:
    """Sorts by when a step comes to what was found; `place` is that on its rank."""
    phase = _PHASES[one.kind]
    stage = -one.stage if phase == _PHASES[GRADIENT] else one.stage
    return int(one.kind != WEIGHT), one.call, phase, one.microbatch, stage, place, one.rank


def _values(flags: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
    """Reads flags of one device with one wait."""
    return zip(flags, torch.stack([*flags]).tolist(), strict=True)


def _floats(values: Any) -> Iterator[Tensor]:
    for value in tree_iter(values):
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            yield value


def _weights(model: Any, state: ParallelState) -> Iterator[_Found]:
    """Yields the weights of this rank that are not finite, with the entry of the whole weight."""
    rank = dist.get_rank()
    for place, (name, parameter) in enumerate(own_parameters(model)):
        local = local_tensor(parameter).detach()
        if not local.is_floating_point() or bool(torch.isfinite(local).all()):
            continue
        entry = [int(number) for number in torch.nonzero(~torch.isfinite(local))[0]]
        if name in state.claims and not state.shards(name):
            held = state.placement(name).intervals(state.claims[name].shape, state.axes)
            entry = [_global(index, ranges) for index, ranges in zip(entry, held, strict=True)]
        cut: Any = state.cut
        one = NonFinite(WEIGHT, name, rank, stage=0 if cut is None else cut.stage_of(name), entry=tuple(entry))
        yield _order(one, place), one


def _global(index: int, ranges: Sequence[tuple[int, int]]) -> int:
    for start, stop in ranges:
        if index < stop - start:
            return start + index
        index -= stop - start
    return index


def _random_states(device: torch.device) -> tuple[Tensor, ...]:
    generators = dict.fromkeys((torch.default_generator, default_generator(device)))
    return (*(generator.get_state() for generator in generators), host_state())


def _set_random_states(device: torch.device, states: tuple[Tensor, ...]) -> None:
    generators = dict.fromkeys((torch.default_generator, default_generator(device)))
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
    set_host_state(states[-1])


def _print(report: NonFiniteReport) -> None:
    print(f"hf_megatron: {report}", flush=True)
