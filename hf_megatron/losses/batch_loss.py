"""The loss of a model that computes it itself: one denominator for a batch whose parts lie on several ranks.

    labels --targets_of--> targets --kernel--> sum over this rank's targets / denominator --> one number on every rank

The denominator is, in this order: what a pipeline says of the batch whose microbatch is under way;
`num_items_in_batch`, which the caller has counted over all ranks; in training the targets of all ranks that see parts
of one batch (dp x cp); else, in evaluation, this rank's own targets, as stock loops expect: they gather the losses of
the ranks' batches, and not every rank need evaluate.

Gradients are averaged over the dp ranks. A mean over each rank's own targets would weigh a token by its neighbours;
here every rank contributes `sum of its losses x dp / targets of all ranks`, so that the average is one process's mean
over the whole batch. A caller that has counted multiplies what it gets by the ranks: it gets the loss divided by them,
whatever the model's class made of the count (`batch_labels.py`).
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
from .targets import count_targets, count_terms, name_of_all, scalar, target_names, with_codebooks


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Share:
    """What the terms of one microbatch are divided by, so that those of all microbatches are the batch's mean.

    Attributes:
        targets (`Mapping`): for losses with a term per target, by the name of their targets: scalar `Tensor` or number.
        counts (`bool`): whether it is none that repeats another one for nothing.
        rows (scalar `Tensor` or number): for what has a term per row.
        arguments: the microbatch.
        is_probe (`bool`): whether it has every label, so that a loss shows whether its class shifts them.
    """

    targets: Mapping[str, Tensor | float]
    rows: Tensor | float
    arguments: Mapping[str, Any]
    counts: bool = True
    is_probe: bool = False


class BatchLoss(Shared):
    """Knows which batch the loss of the call under way belongs to, and what its terms are divided by.

    Args:
        mesh (`ParallelMesh`): gives the ranks that see parts of one batch.
        shifts (`bool`, *optional*): whether the model's targets are the next tokens, as far as its class says;
            `None` where nothing is known of its labels.
        divides_itself (`bool`): whether the loss follows `num_items_in_batch`.
        auxiliary (`str`): `MegatronConfig.router_aux_loss_scope`.
        z_loss (`float`): `MegatronConfig.router_z_loss_coef`.

    Attributes:
        counted (`bool`): whether the caller of the call under way has counted the targets of its batch.
        terms (`int`): losses that the call has taken so far, those of a pipeline's microbatches left out.
        copies (`int`): losses that the model takes of each label, as far as a trial_forward has shown.
        used (`set`): names of the targets that the microbatch under way has taken losses of.
        join_tokens (`Callable`): `[tokens, ...]` of this rank -> of all ranks that share the rows.
    """

    def __init__(
        self, mesh: ParallelMesh, shifts: bool | None, divides_itself: bool, auxiliary: str, z_loss: float = 0.0
    ):
        self.mesh, self.shifts, self.divides_itself, self.auxiliary = mesh, shifts, divides_itself, auxiliary
        self.z_loss = z_loss
        self._of_step: Tensor | None = None
        self.counted = self._together = False
        self.used: set[str] = set()
        self._counts = True
        self.terms, self.copies = 0, 1
        self.share: Share | None = None
        # Of what has an entry for each token that this rank computes, where ranks compute some of a row each.
        self.join_tokens: Callable[[Any], Any] = _same

    @property
    def has_data_parallel(self) -> bool:
        """Whether several ranks see parts of one batch."""
        return self.mesh.axes.size("dp") > 1

    @property
    def over_ranks(self) -> bool:
        """Whether a loss taken now is that of one batch of all ranks; a caller that has counted waited for them."""
        return self.has_data_parallel and (torch.is_grad_enabled() or self._together or self.counted)

    @contextmanager
    def together(self, *, counts: bool = True) -> Iterator[None]:
        """Takes the losses of evaluation inside over all ranks' parts of a batch: every rank has to take them.

        `counts` tells whether this rank has a part at all.
        """
        before, self._together = self._together, True
        try:
            with nullcontext() if counts else self.without_terms():
                yield
        finally:
            self._together = before

    @contextmanager
    def without_terms(self) -> Iterator[None]:
        """Adds nothing of this rank to the losses of all ranks inside."""
        self._counts = False
        try:
            yield
        finally:
            self._counts = True

    def mean(self, total: Tensor, terms: Tensor, at_least: int = 0, name: str = "labels") -> Tensor:
        """Averages a loss over its batch: `total` is the sum of this rank's, `terms` their number, scalars both.

        `at_least` is what fewer terms of all ranks count as, `name` that of the targets.
        """
        if self.share is not None:
            self.require_terms(terms, name)
            # Labels that are no classes have no value that says that they do not count.
            return (total if self._counts else total * 0) / self.divisor_of_share(name)
        self.terms += 1
        return self._mean(total, terms, at_least)

    def row_mean(self, total: Tensor, rows: int) -> Tensor:
        """Averages what has a term per row, as `mean` does."""
        if self.share is not None:
            return total / self.share.rows
        return self._mean(total, scalar(rows, total.device))

    def token_share(self, total: Tensor, tokens: Tensor, rows: int) -> Tensor:
        """Averages over the tokens of the batch what has a term per token; microbatches count by their rows."""
        if self.share is not None and self.auxiliary != "batch":
            return self.row_mean(total / tokens.clamp(min=1) * rows, rows)
        return self._mean(total, tokens, at_least=1)

    def counts_of_step(self, counts: Tensor) -> Tensor:
        """Adds counts of any shape up over the parts of the batch, and those of training calls since the last step."""
        if self.over_ranks:
            counts = counts if self._counts else counts * 0
            dist.all_reduce(counts, group=self.mesh.group("dp"))
        if not torch.is_grad_enabled():
            return counts
        so_far = counts if self._of_step is None else self._of_step + counts
        if self.share is None or self.share.counts:
            self._of_step = so_far
        return so_far

    def end_step(self) -> None:
        """Begins to count anew."""
        self._of_step = None

    def _mean(self, total: Tensor, terms: Tensor, at_least: int = 0) -> Tensor:
        if not self.over_ranks:
            return total / terms.clamp(min=at_least)
        if not self._counts:
            total, terms = total * 0, torch.zeros_like(terms)
        return mean_over_ranks(total, terms, self.mesh.group("dp"), at_least)

    def sum(self, part: Tensor) -> Tensor:
        """Sums a statistic of any shape over the parts of the batch, with its gradient."""
        if not self.over_ranks:
            return part
        part = part if self._counts else part * 0
        return sum_over_ranks(part, self.mesh.group("dp"))

    def factor_of_ranks(self, gradient: Tensor) -> Tensor:
        """Returns what a loss of all ranks' rows is multiplied by, a scalar, from what this rank multiplies it by."""
        return average_over_ranks(gradient, self.mesh.group("dp")) if self.has_data_parallel else gradient

    def divisor(self, targets: Tensor) -> Tensor:
        """Returns what a sum over this rank's targets of any shape is divided by, for the average over ranks."""
        counted = count_targets(targets).float()
        if self.over_ranks:
            dist.all_reduce(counted, group=self.mesh.group("dp"))
            counted /= self.mesh.dp_size
        return counted

    def token_mean(self, losses: Tensor, counts: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor:
        """Averages losses `[batch, sequence]` over the tokens that `counts`, of the same shape, has as 1.

        The losses of other tokens are 0; `num_items_in_batch` is the denominator where the caller has counted. Without
        any token the loss is 0, as in TRL.
        """
        if num_items_in_batch is not None:
            return losses.sum() / self.given(num_items_in_batch)
        return self.mean(losses.sum(), counts.sum(), at_least=1)

    def given(self, num_items_in_batch: Tensor | int) -> Tensor | float:
        """Returns what a sum is divided by where the caller has counted."""
        self.terms += 1
        # The loss of the call is divided by the ranks when it is complete.
        return num_items_in_batch / self.mesh.dp_size if self.over_ranks and self.counted else num_items_in_batch

    def divisor_of_share(self, name: str) -> Tensor | float:
        """Returns what a sum over the microbatch's targets is divided by, and notes that it was asked for."""
        assert self.share is not None
        self.used.add(name_of_all(name))
        return self.share.targets[name]

    def require_terms(self, terms: Tensor, name: str) -> None:
        """Compares a microbatch's terms, a scalar, with the targets that its batch was counted by.

        Raises `UnsupportedError` where they differ; a trial_forward finds out whether labels are shifted.
        """
        assert self.share is not None
        share = self.share
        if name not in share.targets:
            raise UnsupportedError(
                f"A loss of {name}, which a pipeline cannot count. Compute the loss from the outputs."
            )
        expected = self._terms(name, share.arguments)
        if share.is_probe and name_of_all(name) == "labels" and terms != expected and self.shifts is not None:
            # A class that writes its loss out says nowhere else whether it shifts its labels.
            shifted = count_terms(name, share.arguments, shifts=not self.shifts)
            self.shifts ^= bool(terms == shifted)
            if terms != shifted and expected > 0 and terms % expected == 0:
                # Nor whether several outputs have the same.
                self.copies = int(terms / expected)
            expected = self._terms(name, share.arguments)
        check_soon(
            terms == expected.to(terms.device),
            lambda: UnsupportedError(
                f"A loss with {int(terms)} terms where the {name} have {int(expected)}: with a pipeline call the model "
                "without labels and compute the loss from its logits."
            ),
        )

    def _terms(self, name: str, arguments: Mapping[str, Any]) -> Tensor:
        return count_terms(name, arguments, shifts=bool(self.shifts)) * (self.copies if name == "labels" else 1)

    @contextmanager
    def over(self, share: Share | None) -> Iterator[None]:
        """Has the losses inside divided by this, whatever the model calls them with; `used` names those that are."""
        self.used, self.share = set(), share
        try:
            yield
        finally:
            self.share = None

    def denominators(
        self, arguments: Mapping[str, Any], rows: int, given: Any, *, over_ranks: bool
    ) -> tuple[dict[str, Any], Any]:
        """Returns what the sums of a batch's losses are divided by: its targets, by name, and its rows, scalars.

        `over_ranks` counts those of all ranks that see parts of one batch, over the number of dp ranks, as evaluation
        that takes them together does. `given` is what the caller has counted.
        """
        divided = self.has_data_parallel and (over_ranks or self._together or given is not None)
        factor = self.mesh.dp_size if divided else 1
        known = {"labels": given / factor} if given is not None and self.divides_itself else {}
        if len(known) == len(target_names(arguments)) and (not divided or self.auxiliary == "batch"):
            return known, rows
        names = with_codebooks(arguments)
        terms = [self._terms(name, arguments).float() for name in names]
        counts = torch.stack([*terms, scalar(rows, terms[0].device).float()])
        if divided:
            counts = counts if self._counts else counts * 0
            dist.all_reduce(counts, group=self.mesh.group("dp"))
        counts /= factor
        return dict(zip(names, counts, strict=False)) | known, counts[-1]

    def row_denominator(self, rows: int) -> Any:
        """Returns the rows of the whole batch over the number of dp ranks, where something is divided by them."""
        if self.auxiliary == "batch" or not self.over_ranks:
            return rows
        count = scalar(rows, self.mesh.device).float()
        dist.all_reduce(count, group=self.mesh.group("dp"))
        return count / self.mesh.dp_size

    def mean_of_shares(self, loss: Tensor) -> Tensor:
        """Averages what ranks made of their parts by `denominators`: the loss of the batch, a scalar on every rank."""
        return self.sum(loss / self.mesh.dp_size) if self.has_data_parallel else loss

    def mean_over_ranks(self, losses: Tensor) -> None:
        """Replaces losses of a batch, of any shape, by the mean over all ranks that see parts of it."""
        if self.has_data_parallel:
            dist.all_reduce(losses, group=self.mesh.group("dp"))
            losses /= self.mesh.dp_size
