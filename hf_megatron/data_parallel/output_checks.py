"""Comparison of the model's outputs over the ranks of a job, in its first training calls.

`outputs.loss` has to be the same on all ranks of a replica, and on all data-parallel ranks but for terms that the
caller's count divides. The gradient that flows into the outputs has to be the same on the ranks of a replica, which
compute one loss. Calls and backwards only record scalars; all ranks exchange them before the optimizer steps, so that
ranks that make other numbers of backwards do not wait for each other.
"""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..compat.shared import Shared
from ..compat.torch_autograd import is_functional, leave_uncompiled
from ..compat.torch_dtensor import local_tensor
from ..compat.torch_memory import is_fake
from ..core.axes import REPLICA_AXES
from ..core.communication.rank_errors import gather
from ..errors import ConfigError, RankError, UnsupportedError
from ..losses.inline_losses import get_output_loss
from ..losses.loss_terms import CHECKED_CALLS, differ_between_ranks
from ..parallel_state import ParallelState
from .autograd_boundary import LateOutput
from .batch_checks import batch_checksums

NAME = "output checks"


@dataclass
class CallRecord:
    """Record of a training call on one rank.

    Attributes:
        precision (`float`): of the loss's dtype.
        loss, rest: scalars, the loss and its remainder without the terms that differ between data-parallel ranks;
            `None` if there is none.
        gradients: name of an output -> two scalars, a checksum of its gradient that adds up over backwards, and the sum
            of the norms.
        batch: checksums of the tokens, labels and masks, if data-parallel ranks may have received the same ones.
    """

    precision: float = 0.0
    loss: Tensor | float | None = None
    rest: Tensor | float | None = None
    gradients: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    batch: dict[str, tuple] | None = None

    def add_gradient(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of an output, of any shape."""
        with torch.no_grad():
            checksum, norm = self.gradients.get(name, (0.0, 0.0))
            self.precision = max(self.precision, torch.finfo(gradient.dtype).eps)
            self.gradients[name] = checksum + _checksum(gradient), norm + torch.linalg.vector_norm(gradient)

    def to_numbers(self) -> "CallRecord":
        """Returns the record with numbers in place of tensors."""
        gradients = {name: (float(checksum), float(norm)) for name, (checksum, norm) in self.gradients.items()}
        loss = None if self.loss is None else float(self.loss)
        rest = None if self.rest is None else float(self.rest)
        return CallRecord(self.precision, loss, rest, gradients, self.batch)


def _checksum(gradient: Tensor) -> Tensor:
    """Returns a weighted sum of a gradient of any shape, a scalar, linear in it and without copies of its size."""
    for _ in range(gradient.dim()):
        # Unequal weights: gradients of logits add up to 0 over the vocabulary.
        size = gradient.shape[-1]
        weights = torch.arange(1, size + 1, device=gradient.device, dtype=torch.float32).mul_(0.7).cos_()
        gradient = gradient @ weights.to(gradient.dtype)
    return gradient


class _Recorded(torch.autograd.Function):
    """Identity of an output, of any shape, whose backward records the gradient that comes from outside the model."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, record: CallRecord, name: str) -> Tensor:
        ctx.record, ctx.name = record, name
        # Training loops scale a scalar loss in place, which autograd rejects for a view from a custom function.
        return value.view_as(value) if value.dim() else value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.record.add_gradient(ctx.name, gradient.detach())
        return gradient, None, None


class OutputComparison(Shared):
    """Records the first training calls of a model, and compares them over the ranks before a step.

    Args:
        model (`nn.Module`): the model; deep copies are not recorded.
        state (`ParallelState`): its parallel state.
    """

    def __init__(self, model: nn.Module, state: ParallelState):
        self.model, self.state = model, state
        self.records: list[CallRecord] = []
        self.calls = self.steps = 0
        self.is_done = state.axes.size("world") == 1
        self._is_recorded = False
        self._batch: Any = None

    def install(self) -> None:
        """Registers the checks with the model's hooks and its optimizers."""
        if self.is_done:
            return
        assert self.state.data_parallel is not None
        self.state.placed[NAME] = self
        self.state.hooks.add(NAME, self._enter, self._leave, always_exit=True)
        self.state.data_parallel.callbacks.guards.append(self.compare)

    @leave_uncompiled
    def _enter(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._is_recorded = not self.is_done and self.calls < CHECKED_CALLS and self._records(model)
        self._batch = None
        if self._is_recorded and model.training and self.state.axes.size("dp") > 1:
            self._batch = batch_checksums(args, kwargs) or None
        self.state.loss.shares = [] if self._is_recorded else None

    def _records(self, model: nn.Module) -> bool:
        engine = self.state.data_parallel
        is_rerunning = engine is not None and engine.is_rerunning
        parameters = list(model.parameters())
        # A dry run has no other ranks.
        self.is_done = any(is_fake(local_tensor(parameter)) for parameter in parameters)
        is_plain = not self.is_done and not any(map(is_functional, parameters))
        return is_plain and model is self.model and torch.is_grad_enabled() and not is_rerunning

    @leave_uncompiled
    def _leave(self, model: nn.Module, args: tuple, output: Any) -> Any:
        return self._record(output) if self._is_recorded else None

    def _record(self, output: Any) -> Any:
        self._is_recorded, batch = False, self.state.loss
        batch.shares, rest, batch.rest = None, batch.rest, None
        if output is None:
            return None
        record = CallRecord(batch=self._batch)
        if (loss := get_output_loss(output, takes_loss=batch.terms > 0)) is not None and not is_fake(loss):
            record.precision = torch.finfo(loss.dtype).eps
            record.loss, record.rest = loss.detach().clone(), rest
        self.calls += 1
        self.records.append(record)
        return _with_recorded_gradients(output, record)

    def compare(self) -> None:
        """Compares the recorded calls of all ranks; collective in the first steps of a model.

        Raises:
            ConfigError: on every rank, if ranks of a replica have different losses or gradients of outputs.
            UnsupportedError: on every rank, if `outputs.loss` has terms of one data-parallel rank's samples.
        """
        if self.is_done:
            return
        self.steps += 1
        local = (self.calls, [record.to_numbers() for record in self.records])
        self.records = []
        gathered = gather(local, None, "Checking the outputs of the ranks", error_type=RankError)
        # The same decision on every rank.
        self.is_done = self.steps >= CHECKED_CALLS or all(calls >= CHECKED_CALLS for calls, _ in gathered)
        records = [calls for _, calls in gathered]
        for axis in REPLICA_AXES:
            for ranks in self.state.axes.groups(axis) if self.state.axes.size(axis) > 1 else ():
                for index, calls in enumerate(zip(*(records[rank] for rank in ranks), strict=False)):
                    self._require_same(axis, index + 1, calls)
        for ranks in self.state.axes.groups("dp") if self.state.axes.size("dp") > 1 else ():
            calls_of_ranks = list(zip(*(records[rank] for rank in ranks), strict=False))
            for calls in calls_of_ranks:
                self._require_global_loss(calls)
            batches = [[call.batch for call in calls] for calls in calls_of_ranks]
            if batches and all(call[0] is not None and call.count(call[0]) == len(call) for call in batches):
                self._warn_of_one_batch()

    def _warn_of_one_batch(self) -> None:
        if self.steps == 1 and dist.get_rank() == 0:
            warnings.warn(
                f"All data-parallel ranks trained {type(self.model).__name__} on the same batch: each sample counts "
                "once per rank. Pass the DataLoader through accelerator.prepare(...), also in an overridden "
                "get_train_dataloader.",
                stacklevel=2,
            )

    def _require_same(self, axis: str, call: int, records: tuple[CallRecord, ...]) -> None:
        tolerance = max(record.precision for record in records) ** 0.5
        losses = [float(record.loss) for record in records if record.loss is not None]
        names = [name for name in records[0].gradients if all(name in record.gradients for record in records)]
        values = {f"the gradient of outputs.{name}": [record.gradients[name] for record in records] for name in names}
        values |= {"outputs.loss": [(loss, abs(loss)) for loss in losses]} if losses else {}
        for name, pairs in values.items():
            checksums, scale = [checksum for checksum, _ in pairs], max(norm for _, norm in pairs)
            if max(checksums) - min(checksums) > tolerance * scale:
                raise ConfigError(
                    f"{type(self.model).__name__}: {name} differs between the {axis} ranks of a replica (training call "
                    f"{call} of this step), which must compute one loss. Compute it from the full outputs and the full "
                    "batch on every rank, with the same random numbers, and exchange samples over "
                    "hf_megatron.data_parallel_group() only."
                )

    def _require_global_loss(self, records: tuple[CallRecord, ...]) -> None:
        rests = [float(record.rest) for record in records if record.rest is not None]
        scale = max((abs(float(record.loss)) for record in records if record.loss is not None), default=0.0)
        precision = max(record.precision for record in records)
        if rests and differ_between_ranks(rests, scale=scale, precision=precision):
            raise UnsupportedError(
                f"{type(self.model).__name__} adds a term to its loss that covers the samples of one data-parallel "
                "rank only. Call it without labels and compute the loss from its outputs, or use dp_size=1."
            )


def skip_comparison(state: ParallelState | None) -> None:
    """Skips the comparison of a model's ranks, for a caller that measures how much they differ."""
    if state is not None and NAME in state.placed:
        state.placed[NAME].is_done = True


def _with_recorded_gradients(output: Any, record: CallRecord) -> Any:
    """Returns a model's output whose tensors, of any shape, record their gradients."""

    def recorded(value: Any, name: str) -> Any:
        if isinstance(value, Tensor) and value.requires_grad and value.is_floating_point():
            return _Recorded.apply(value, record, name)
        if isinstance(value, LateOutput):
            before = value.leaving
            value.leaving = lambda tensor: _Recorded.apply(tensor if before is None else before(tensor), record, name)
        if type(value) is tuple:
            return tuple(recorded(item, f"{name}[{index}]") for index, item in enumerate(value))
        return value

    if not hasattr(output, "items"):
        return recorded(output, "tuple" if isinstance(output, tuple) else "tensor")
    for name, value in list(output.items()):
        if (seen := recorded(value, name)) is not value:
            output[name] = seen
    return output
