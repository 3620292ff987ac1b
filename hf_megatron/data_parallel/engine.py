"""Data parallelism of one model: how its gradients are reduced and how its weights are shared."""

import math
import operator
import types
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..config import MegatronConfig
from ..errors import ConfigError, NonFiniteGradientError, UnsupportedError
from ..mesh import ParallelMesh
from ..upstream import local_tensor
from .fully_sharded import no_sync
from .ownership import ParameterList, engine_of, mark, reducer_of
from .plain_gradients import PlainGradients
from .reduction import GradientReducer


@dataclass
class Verdict:
    """What is known of the gradients of one step before optimizers take them.

    Attributes:
        clipped: the loop has clipped them.
        finite: whether all are, once somebody has looked at all of them.
        scaled: a loss scaler has looked at them and decides itself whether to step.
        used: an optimizer has stepped on it; another one of the same model may still.
    """

    clipped: bool = False
    finite: bool | None = None
    scaled: bool = False
    used: bool = False


class DataParallel:
    """Attached to a laid out model; its parameters carry it (see `ownership.py`).

    Attributes:
        reducer (`GradientReducer`, *optional*): takes the gradients out of `.grad`; absent with one dp rank, where
            `.grad` is complete, and in stage 3, where FSDP2 reduces.
        skipped_steps (`int`): optimizer steps that were skipped for a gradient that is not finite.
        unsettled: numbers of pipelined forwards whose gradients are in the sums although nobody has called backward.
    """

    def __init__(self, model: nn.Module, config: MegatronConfig, mesh: ParallelMesh):
        self.model, self.config, self.mesh = model, config, mesh
        self.reducer: GradientReducer | None = None
        self._parameters = ParameterList(model)
        self._marked: list[nn.Parameter] = []
        self._mark(self._parameters.current())
        self._optimizers: list[weakref.ref] = []
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self.verdict = Verdict()
        self.unsettled: set[int] = set()
        self._shared: set[int] = set()
        if mesh.dp_size > 1 and config.zero_stage < 3:
            self.reduce_gradients()
        elif mesh.dp_size > 1 and mesh.pp_size == 1:
            # A pipeline has to scale a call's gradients, which FSDP2 would keep from it until they are reduced.
            model.no_sync = partial(no_sync, model)  # type: ignore[assignment]
        model.register_forward_pre_hook(self._before_forward)
        model.register_load_state_dict_post_hook(lambda *_: self.refresh_main_weights())
        register_optimizer_step_pre_hook(_refuse_unprepared)

    def __deepcopy__(self, memo: dict) -> "DataParallel":
        return self

    @property
    def optimizers(self) -> list[Any]:
        """What `prepare_optimizer` attached to the optimizers that still exist, in the order they were made."""
        attached = (reference() for reference in self._optimizers)
        return [optimizer for optimizer in attached if optimizer is not None]

    def is_shared(self, parameter: Tensor) -> bool:
        """Whether two pipeline stages hold this parameter."""
        return id(parameter) in self._shared

    def share(self, parameters: list[nn.Parameter]) -> None:
        """Takes note of parameters that the other end of the pipeline holds too."""
        self._shared = {id(parameter) for parameter in parameters}

    def add_optimizer(self, optimizer: Any) -> None:
        self._optimizers = [weakref.ref(other) for other in (*self.optimizers, optimizer)]

    @property
    def gradients(self) -> "GradientReducer | PlainGradients":
        """Where the gradients of the trainable parameters are added up."""
        return self.reducer or PlainGradients(p for p in self._marked if p.requires_grad)

    def require_settled(self) -> None:
        """Raises `ConfigError` if the gradients of a forward would be used that nobody called backward for."""
        if self.unsettled and not self.gradients.is_empty:
            raise ConfigError(
                "optimizer.step() after a training forward of a pipelined model whose loss was never backpropagated: "
                "its gradients exist already. Compute losses that are not trained on under torch.no_grad(), or call "
                "zero_grad() after them."
            )

    def reduce_gradients(self) -> None:
        """Takes gradients out of `.grad` from now on; twice is once."""
        if self.reducer is None:
            self.reducer = GradientReducer(
                self.model,
                self._parameters.current(),
                self.mesh,
                bucket_size=self.config.bucket_size,
                main_gradients=self.config.main_weights_in_fp32,
                keep_rows=self.config.zero_stage < 2,
            )
            model: Any = self.model
            model.no_sync = self.reducer.no_sync
            model.zero_grad = types.MethodType(_zero_grad, model)

    def scan(self) -> None:
        """Takes note of modules and parameters that were added or replaced since."""
        self._parameters.scan()
        self._mark(self._parameters.current())
        if self.reducer is not None:
            self.reducer.refresh(self._marked)

    def _mark(self, parameters: list[nn.Parameter]) -> None:
        """Lets every parameter know its engine."""
        for parameter in parameters:
            mark(parameter, self)
        self._marked = parameters

    def _before_forward(self, model: nn.Module, args: tuple) -> None:
        # A deep copy shares its hooks' engine, which reduces the original's gradients only.
        if model is not self.model and self.reducer is not None and model.training and torch.is_grad_enabled():
            raise UnsupportedError(
                f"A deep copy of a data parallel {type(model).__name__} can be evaluated, not trained: its gradients "
                "would not be reduced. Load it a second time with from_pretrained(..., megatron_config=...)."
            )
        parameters = self._parameters.current()
        if len(parameters) != len(self._marked) or not all(map(operator.is_, parameters, self._marked)):
            self._mark(parameters)
        if self.reducer is not None and torch.is_grad_enabled():
            self.reducer.begin(parameters)

    def names(self) -> dict[int, str]:
        """Identity of a parameter -> its name in the state dict; a tied one has the first."""
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def note_clipping(self, parameters: list[Tensor], norm: Tensor, max_norm: float) -> None:
        """Remembers that the loop clipped (a loop that only wants the norm clips to infinity), and what was finite."""
        verdict = self._open_verdict()
        verdict.clipped = verdict.clipped or math.isfinite(max_norm)
        finite = bool(torch.isfinite(norm))
        seen = {id(parameter) for parameter in parameters}
        if not finite or all(id(p) in seen for p in self.model.parameters() if p.requires_grad):
            verdict.finite = finite

    def note_scaler(self) -> None:
        """Remembers that a loss scaler looked at the gradients and decides itself whether to step."""
        self._open_verdict().scaled = True

    def _open_verdict(self) -> "Verdict":
        if self.verdict.used:
            self.verdict = Verdict()
        return self.verdict

    def count(self, *, skipped: bool) -> None:
        """Counts a step.

        Raises:
            NonFiniteGradientError: too many were skipped in a row.
        """
        if not skipped:
            self._skipped_in_a_row = 0
            return
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        limit = self.config.max_skipped_steps
        if self._skipped_in_a_row >= limit:
            raise NonFiniteGradientError(
                f"{limit} optimizer steps in a row had a gradient that is not finite (MegatronConfig.max_skipped_steps "
                f"= {limit}); on this rank {self._not_finite()}."
            )

    def _not_finite(self) -> str:
        reducer, bad = self.reducer, []
        for name, parameter in self.model.named_parameters():
            owned = reducer is not None and reducer.owns(parameter)
            gradient = reducer.gradient(parameter) if owned and reducer is not None else parameter.grad
            if gradient is not None and not torch.isfinite(local_tensor(gradient)).all():
                bad.append(name)
        return f"those of {', '.join(bad[:5])}" + (" and others" if len(bad) > 5 else "") if bad else "all are finite"

    def refresh_main_weights(self) -> None:
        for optimizer in self.optimizers:
            optimizer.refresh_main_weights()


def _refuse_unprepared(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
    """A stock optimizer would find no gradient at all, and do nothing."""
    first = next((p for group in optimizer.param_groups for p in group["params"]), None)
    engine = None if first is None else engine_of(first)
    if engine is not None:
        engine.require_settled()
    if first is not None and reducer_of(first) is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} steps on a data parallel model without knowing it: pass it through "
            "accelerator.prepare(...) or hf_megatron.prepare_optimizer(optimizer)."
        )


def _zero_grad(model: Any, set_to_none: bool = True) -> None:
    nn.Module.zero_grad(model, set_to_none)
    engine = vars(model)["_hf_megatron"].data_parallel
    if engine.model is model:
        engine.unsettled.clear()
        if engine.reducer is not None:
            engine.reducer.discard()
