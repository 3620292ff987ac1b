"""Normalization of a model's loss: one denominator for a batch that is split over ranks or microbatches.

    labels --resolve_targets--> targets --kernel--> sum over local targets / denominator --> same loss on every rank

The denominator is the first of these that applies: the batch totals that a pipeline sets for the current microbatch;
`num_items_in_batch`, which the caller has counted over all ranks; in training, the number of targets on all dp ranks
(cp ranks have the full labels); in evaluation, the number of this rank's targets, as stock loops expect: they gather
the losses of the ranks' batches, and not every rank need evaluate.

Gradients are averaged over the dp ranks. A mean over each rank's own targets would weight a token by the other tokens
on its rank; instead every rank contributes `sum of its losses x dp / targets of all ranks`, so that the average is the
single-process mean over the global batch. Trainer passes `num_items_in_batch` and multiplies the returned loss by the
number of dp ranks; the loss is divided by it first, whether or not the model's class uses the count
(`inline_losses.py`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.shared import Shared
from ..compat.torch_memory import check_soon
from ..core.communication.mean_grad_ops import average_over_ranks, mean_over_ranks, sum_over_ranks
from ..core.mesh import ParallelMesh
from ..errors import UnsupportedError
from .targets import count_targets, count_terms, scalar, strip_codebook, target_names, with_codebooks


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class LossDenominators:
    """Denominators of a microbatch's loss terms, with which the losses of all microbatches sum to the batch's mean.

    Attributes:
        targets (`Mapping`): for losses with one term per target: name of the targets -> scalar `Tensor` or number.
        rows (scalar `Tensor` or number): for losses with one term per sample.
        arguments: the microbatch.
        counts (`bool`): False for a padding microbatch, whose loss must not be counted.
        is_probe (`bool`): whether no label is ignored, so that a loss shows whether its class shifts labels.
    """

    targets: Mapping[str, Tensor | float]
    rows: Tensor | float
    arguments: Mapping[str, Any]
    counts: bool = True
    is_probe: bool = False


class BatchLoss(Shared):
    """Tracks the batch of the current call's loss and what its terms are divided by.

    Args:
        mesh (`ParallelMesh`): provides the ranks of a batch.
        shifts (`bool`, *optional*): whether the model's targets are the next tokens, as far as its class shows;
            `None` if nothing is known about its labels.
        divides_itself (`bool`): whether the loss uses `num_items_in_batch`.
        aux_loss_scope (`str`): `MegatronConfig.router_aux_loss_scope`.
        z_loss (`float`): `MegatronConfig.router_z_loss_coef`.

    Attributes:
        has_caller_count (`bool`): whether the current call got `num_items_in_batch`.
        terms (`int`): number of losses that the call has computed so far, not counting a pipeline's microbatches.
        microbatch_denominators (`LossDenominators`, *optional*): set inside `with_denominators`.
        copies (`int`): number of losses that the model computes from each label, as shown by the trial forward.
        shares (`list`, *optional*): terms of a checked call that the caller's count divides; they differ between ranks.
        rest (`Tensor`, *optional*): scalar, remainder of a checked call's loss without its shares.
        used (`set`): names of the targets from which the current microbatch has computed losses.
        join_tokens (`Callable`): gathers `[local tokens, ...]` to `[tokens, ...]` over the ranks that split a sequence.
    """

    def __init__(
        self, mesh: ParallelMesh, shifts: bool | None, divides_itself: bool, aux_loss_scope: str, z_loss: float = 0.0
    ):
        self.mesh, self.shifts, self.divides_itself, self.aux_loss_scope = mesh, shifts, divides_itself, aux_loss_scope
        self.z_loss = z_loss
        self._step_counts: Tensor | None = None
        self.has_caller_count = self._normalizes_over_ranks = False
        self.used: set[str] = set()
        self._counts = True
        self.terms, self.copies = 0, 1
        self.shares: list[Tensor] | None = None
        self.rest: Tensor | None = None
        self.microbatch_denominators: LossDenominators | None = None
        # Gathers per-token values, if ranks compute different tokens of a sequence.
        self.join_tokens: Callable[[Any], Any] = _same

    @property
    def has_data_parallel(self) -> bool:
        """Whether the batch is split over several ranks."""
        return self.mesh.axes.size("dp") > 1

    @property
    def over_ranks(self) -> bool:
        """Whether losses are now normalized over all dp ranks; a caller that has counted has synchronized them."""
        return self.has_data_parallel and (
            torch.is_grad_enabled() or self._normalizes_over_ranks or self.has_caller_count
        )

    @contextmanager
    def normalizing_over_ranks(self, *, counts: bool = True) -> Iterator[None]:
        """Normalizes evaluation losses over all ranks' shards of a batch, inside the context; collective.

        `counts` is False if this rank has no samples.
        """
        before, self._normalizes_over_ranks = self._normalizes_over_ranks, True
        try:
            with nullcontext() if counts else self.without_terms():
                yield
        finally:
            self._normalizes_over_ranks = before

    @contextmanager
    def without_terms(self) -> Iterator[None]:
        """Excludes this rank from the losses of all ranks, inside the context."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def mean(self, total: Tensor, terms: Tensor, at_least: int = 0, name: str = "labels") -> Tensor:
        """Returns the mean of a loss over its batch; `total` is the sum of this rank's terms, `terms` their number.

        Both are scalars. `at_least` is a lower limit of the number of terms on all ranks, `name` is the targets' name.
        """
        if self.microbatch_denominators is not None:
            self.require_terms(terms, name)
            # Regression labels have no ignored value, so a padding microbatch is masked by 0 here.
            return (total if self._counts else total * 0) / self.get_microbatch_denominator(name)
        self.terms += 1
        return self._mean(total, terms, at_least)

    def row_mean(self, total: Tensor, rows: int) -> Tensor:
        """Returns the mean of a loss with one term per sample, like `mean`."""
        if self.microbatch_denominators is not None:
            # With a pipeline these denominators hold the number of samples of the full batch.
            return total / self.microbatch_denominators.rows
        return self._mean(total, scalar(rows, total.device))

    def token_share(self, total: Tensor, tokens: Tensor, rows: int) -> Tensor:
        """Returns the mean of a loss with one term per token over the batch; microbatches are weighted by samples."""
        if self.microbatch_denominators is not None and self.aux_loss_scope != "batch":
            return self.row_mean(total / tokens.clamp(min=1) * rows, rows)
        return self._mean(total, tokens, at_least=1)

    def accumulate_counts(self, counts: Tensor) -> Tensor:
        """Sums counts of any shape over the ranks of the batch and over the training calls since the last step."""
        if self.over_ranks:
            counts = counts if self._counts else counts * 0
            # Any shape; the same totals on every dp rank.
            dist.all_reduce(counts, group=self.mesh.group("dp"))
        if not torch.is_grad_enabled():
            return counts
        so_far = counts if self._step_counts is None else self._step_counts + counts
        # A padding microbatch repeats another one, whose choices are counted already.
        if self.microbatch_denominators is None or self.microbatch_denominators.counts:
            self._step_counts = so_far
        return so_far

    def end_step(self) -> None:
        """Resets the counts."""
        self._step_counts = None

    def _mean(self, total: Tensor, terms: Tensor, at_least: int = 0) -> Tensor:
        if not self.over_ranks:
            return total / terms.clamp(min=at_least)
        # A rank without samples joins the all-reduce of [sum, terms] with zeros.
        if not self._counts:
            total, terms = total * 0, torch.zeros_like(terms)
        # All-reduce of [sum, terms]; the backward scales by dp / terms, undoing the average of gradients over dp.
        return mean_over_ranks(total, terms, self.mesh.group("dp"), at_least)

    def sum(self, part: Tensor) -> Tensor:
        """Sums a statistic of any shape over the dp ranks; its gradient is scaled for the average over ranks."""
        if not self.over_ranks:
            return part
        part = part if self._counts else part * 0
        return sum_over_ranks(part, self.mesh.group("dp"))

    def average_loss_factor(self, gradient: Tensor) -> Tensor:
        """Returns the scalar factor of a loss over all ranks' samples: the mean of the factors that the ranks apply."""
        return average_over_ranks(gradient, self.mesh.group("dp")) if self.has_data_parallel else gradient

    def divisor(self, targets: Tensor) -> Tensor:
        """Returns the denominator of a sum over this rank's targets, any shape; the dp average is then the mean."""
        # Targets of this rank, a scalar; summed over dp, then divided by dp.
        counted = count_targets(targets).float()
        if self.over_ranks:
            dist.all_reduce(counted, group=self.mesh.group("dp"))
            counted /= self.mesh.dp_size
        return counted

    def token_mean(self, losses: Tensor, counts: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Returns the mean of losses `[batch, sequence]` over the tokens at which `counts`, of the same shape, is 1.

        The losses of other tokens are 0; `num_items_in_batch` is the denominator if the caller has counted. Without any
        token the loss is 0, as in TRL.
        """
        if num_items_in_batch is not None:
            return self.record_share(losses.sum() / self.take_caller_denominator(num_items_in_batch))
        return self.mean(losses.sum(), counts.sum(), at_least=1)

    def take_caller_denominator(self, num_items_in_batch: Tensor | int) -> Tensor | float:
        """Returns the denominator if the caller has counted, and adds 1 to `terms`."""
        self.terms += 1
        # The complete loss of the call is divided by the number of ranks later.
        return (
            num_items_in_batch / self.mesh.dp_size if self.over_ranks and self.has_caller_count else num_items_in_batch
        )

    def record_share(self, share: Tensor) -> Tensor:
        """Records a term of any shape that the caller's count divides, if the call is checked, and returns it."""
        if self.shares is not None:
            self.shares.append(share)
        return share

    def get_microbatch_denominator(self, name: str) -> Tensor | float:
        """Returns the denominator of a sum over the microbatch's targets, and records that it was used."""
        assert self.microbatch_denominators is not None
        self.used.add(strip_codebook(name))
        return self.microbatch_denominators.targets[name]

    def require_terms(self, terms: Tensor, name: str) -> None:
        """Checks a microbatch's number of terms, a scalar, against the targets that its batch was counted by.

        Raises `UnsupportedError` if they differ; a trial forward uses the difference to detect shifted labels.
        """
        assert self.microbatch_denominators is not None
        denominators = self.microbatch_denominators
        if name not in denominators.targets:
            raise UnsupportedError(
                f"A loss over {name} is not supported with pipeline parallelism. Compute the loss from the outputs."
            )
        expected = self._terms(name, denominators.arguments)
        if denominators.is_probe and strip_codebook(name) == "labels" and terms != expected and self.shifts is not None:
            # An inline loss does not declare whether it shifts its labels: compare with the other count.
            shifted = count_terms(name, denominators.arguments, shifts=not self.shifts)
            self.shifts ^= bool(terms == shifted)
            if terms != shifted and expected > 0 and terms % expected == 0:
                # An inline loss does not declare either whether several outputs use the same labels.
                self.copies = int(terms / expected)
            expected = self._terms(name, denominators.arguments)
        check_soon(
            terms == expected.to(terms.device),
            lambda: UnsupportedError(
                f"Expected {int(expected)} loss terms for the {name}, got {int(terms)}. With pipeline parallelism, "
                "call the model without labels and compute the loss from its logits."
            ),
        )

    def _terms(self, name: str, arguments: Mapping[str, Any]) -> Tensor:
        return count_terms(name, arguments, shifts=bool(self.shifts)) * (self.copies if name == "labels" else 1)

    @contextmanager
    def with_denominators(self, denominators: LossDenominators | None) -> Iterator[None]:
        """Sets the denominators of losses inside the context, whatever `num_items_in_batch` is.

        `used` collects the names of the targets whose losses are computed.
        """
        self.used, self.microbatch_denominators = set(), denominators
        try:
            yield
        finally:
            self.microbatch_denominators = None

    def denominators(
        self, arguments: Mapping[str, Any], rows: int, num_items: Any, *, over_ranks: bool
    ) -> tuple[dict[str, Any], Any]:
        """Returns the denominators of a batch's losses: its number of targets by name, and of samples, scalars.

        With `over_ranks`, or inside `normalizing_over_ranks`, both are counted over all dp ranks and divided by their
        number. `num_items` is the caller's count.
        """
        divided = self.has_data_parallel and (over_ranks or self._normalizes_over_ranks or num_items is not None)
        factor = self.mesh.dp_size if divided else 1
        # The caller's count replaces the count of labels if the loss uses it.
        known = {"labels": num_items / factor} if num_items is not None and self.divides_itself else {}
        if len(known) == len(target_names(arguments)) and (not divided or self.aux_loss_scope == "batch"):
            return known, rows
        names = with_codebooks(arguments)
        terms = [self._terms(name, arguments).float() for name in names]
        # One all-reduce for all counts, [names + 1]; the last one is the number of samples.
        counts = torch.stack([*terms, scalar(rows, terms[0].device).float()])
        if divided:
            counts = counts if self._counts else counts * 0
            dist.all_reduce(counts, group=self.mesh.group("dp"))
        counts /= factor
        return dict(zip(names, counts, strict=False)) | known, counts[-1]

    def row_denominator(self, rows: int) -> Any:
        """Returns the number of samples of the global batch over the number of dp ranks, where it is a denominator."""
        if self.aux_loss_scope == "batch" or not self.over_ranks:
            return rows
        count = scalar(rows, self.mesh.device).float()
        dist.all_reduce(count, group=self.mesh.group("dp"))
        return count / self.mesh.dp_size

    def average_shares(self, loss: Tensor) -> Tensor:
        """Sums the ranks' losses that were divided by `denominators`: the batch's mean, a scalar on every rank."""
        # Denominators are divided by dp, so the losses of the ranks are divided by dp before they are summed.
        return self.sum(loss / self.mesh.dp_size) if self.has_data_parallel else loss

    def average_over_ranks_(self, losses: Tensor) -> None:
        """Replaces losses, of any shape, by their mean over all ranks of the batch, in place; not differentiable."""
        if self.has_data_parallel:
            dist.all_reduce(losses, group=self.mesh.group("dp"))
            losses /= self.mesh.dp_size
