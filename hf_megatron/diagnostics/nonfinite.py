"""Locates the first non-finite value of a skipped step by rerunning its calls with hooks on every module.

All ranks skip a step with non-finite gradients. The watch keeps the arguments and RNG states of the step's model calls
and repeats the calls with hooks on every module. The first module in execution order that returns a non-finite value,
or receives a non-finite gradient, is the innermost one, because submodules return before the modules that contain them.
Non-finite values spread to other ranks only later, so the earliest finding of all ranks identifies the rank.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.torch_autograd import in_backward, without_dispatch_modes
from ..core.communication.rng import default_generator, host_state, set_host_state
from ..data_parallel.distributed_optimizer import sharded, stepping_optimizer
from ..errors import ConfigError
from ..parallel_state import ParallelState, parallel_state, unwrap_parallel_model
from .nonfinite_hooks import CallCheck, Found, NonFinite, nonfinite_weights


@dataclass(frozen=True)
class NonFiniteReport:
    """Result of a rerun.

    Attributes:
        step: number of optimizer steps before.
        first (*optional*): the first non-finite value; `None` if the rerun was finite.
        also: first non-finite value of each other rank that found one.
    """

    step: int
    first: NonFinite | None
    also: tuple[NonFinite, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with the same first finding: one, or all that reduced a gradient before any module hook saw it."""
        first = [one for one in (self.first, *self.also) if one is not None]
        same = [one for one in first if replace(one, rank=0) == replace(first[0], rank=0)]
        return tuple(one.rank for one in same)

    def __str__(self) -> str:
        if self.first is None:
            return (
                f"step {self.step} (counted from 0) had a non-finite gradient, but repeating the same calls gave "
                "finite values on all ranks: a hardware fault, or a training loop that changes gradients or outputs."
            )
        text = f"step {self.step} (counted from 0), first non-finite value, found by repeating the calls: {self.first}"
        if len(self.ranks) > 1:
            text += f"; same on ranks {', '.join(map(str, self.ranks))}, over which it was reduced before"
        others = [str(one.rank) for one in self.also if one.rank not in self.ranks]
        return text + (f"; later on ranks {', '.join(others)}" if others else "")


@dataclass(frozen=True)
class _Call:
    """A model call: its arguments, the RNG states before it, and the autocast dtype, if any."""

    args: tuple
    kwargs: dict[str, Any]
    states: tuple[Tensor, ...]
    autocast: torch.dtype | None


class NonFiniteWatch:
    """Reruns a skipped step and reports the rank, microbatch, stage, and module of the first non-finite value.

        watch = NonFiniteWatch(model, optimizer)
        ...  # the usual loop; a report is printed on rank 0 when a step was skipped
        watch.reports

    The arguments of a step's calls are kept until the next step.

    Args:
        model: parallelized, with or without adapters.
        optimizer: of the model; prepared.
        limit (`int`, defaults to 3): reports per run; a rerun takes as long as a few steps.
        say (`Callable`, *optional*): called with each report on global rank 0; prints it by default.

    Raises:
        ConfigError: the model was not parallelized or the optimizer was not prepared.
    """

    def __init__(
        self,
        model: Any,
        optimizer: torch.optim.Optimizer,
        *,
        limit: int = 3,
        say: Callable[[NonFiniteReport], None] | None = None,
    ):
        optimizer = stepping_optimizer(optimizer)
        state, held = parallel_state(model), sharded(optimizer)
        if state is None or held is None:
            raise ConfigError(
                "NonFiniteWatch requires a model loaded with megatron_config= and an optimizer prepared by "
                "prepare_optimizer, Trainer or Accelerate."
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
        """Removes the hooks and releases the kept arguments."""
        for hook in self._hooks:
            hook.remove()
        self._calls.clear()

    def _keep(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        # Do not check `training`: a trained model may be in eval mode, as models are after loading.
        if self._is_rerun or not torch.is_grad_enabled() or in_backward():
            return
        kind = self._state.mesh.device_type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        self._calls.append(_Call(args, dict(kwargs), _random_states(self._state.mesh.device), autocast))

    def _after_step(self, *args: Any) -> None:
        if self._held.step_was_skipped and len(self.reports) < self.limit:
            report = self._rerun()
            self.reports.append(report)
            if dist.get_rank() == 0:
                self._say(report)
        self._calls.clear()
        self._steps += 1

    def _rerun(self) -> NonFiniteReport:
        findings = [*nonfinite_weights(self.model, self._state)]
        before = _random_states(self._state.mesh.device)
        self._is_rerun = True
        try:
            with ExitStack() as stack:
                # Disable dispatch modes, so that a memory tracker counts the step only once.
                stack.enter_context(without_dispatch_modes())
                stack.enter_context(self._held.engine.gradients_apart())
                if self._state.pipeline is not None:
                    stack.enter_context(self._state.pipeline.loss_scale.ignored())
                for number, call in enumerate(self._calls):
                    findings += self._run_again(number, call)
        finally:
            self._is_rerun = False
            _set_random_states(self._state.mesh.device, before)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, min(findings, key=lambda one: one[0], default=None))
        firsts = sorted((one for one in of_ranks if one is not None), key=lambda one: one[0])
        if not firsts:
            return NonFiniteReport(self._steps, None)
        return NonFiniteReport(self._steps, firsts[0][1], tuple(one for _, one in firsts[1:]))

    def _run_again(self, number: int, call: _Call) -> list[Found]:
        """Repeats a model call and returns its non-finite values; gradients are discarded."""
        _set_random_states(self._state.mesh.device, call.states)
        check = CallCheck(unwrap_parallel_model(self.model), self._state, number)
        with check.looking():
            check.look_at_inputs(call.args, call.kwargs)
            # Accelerate's autocast is inside the model's forward; this restores one that the training loop entered.
            with torch.autocast(self._state.mesh.device_type, call.autocast, enabled=call.autocast is not None):
                output = self.model(*call.args, **call.kwargs)
            loss = output.get("loss") if isinstance(output, dict) else None
            if isinstance(loss, Tensor) and loss.requires_grad:
                check.look_at_loss(loss)
                loss.backward()
        return check.found()


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
