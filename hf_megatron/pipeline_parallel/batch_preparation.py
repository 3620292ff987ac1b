"""Splits the batch of a pipelined call into microbatches and computes the denominators of its loss."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..compat.shared import Shared
from ..core.memory.training_kv_cache import leave_out
from ..data_parallel.packed_sequences import PackingInfo
from ..losses.targets import mask_all_targets, target_names
from ..parallel_state import ParallelState
from .forward_checks import CallChecks
from .layers_per_stage import stages_per_rank
from .microbatches import batch_size, split
from .packed_sequences import PackedRow, count_tokens
from .schedules import valid_microbatches
from .split_model import ModelPartition
from .trial_forward import TrialForward

# Microbatches per pipeline rank unless the user sets a number: the 1F1B bubble is at most a fifth.
_MICROBATCHES_PER_RANK = 4
# Divisors of the summed losses of a batch: by name of the targets, and by sample.
Denominators = tuple[dict[str, Any], Any]


@dataclass(frozen=True)
class MicrobatchPlan:
    """Microbatches of one call.

    Attributes:
        microbatches: arguments of each. The last ones repeat another microbatch if the schedule needs more than the
            batch has; their weight is 0.
        weights: share of the batch's samples (or tokens, of a packed sequence) in each.
        denominators (*optional*): divisors of the batch's loss; `None` without one.
        packing_info (`PackingInfo`): document boundaries of the microbatches.
    """

    microbatches: list[dict[str, Any]]
    weights: list[float]
    denominators: Denominators | None
    packing_info: PackingInfo


class BatchPreparation(Shared):
    """Prepares the batches of one pipelined model.

    Args:
        schedule (`str`): name of the pipeline schedule.
        takes_cache (`bool`): whether the model's forward has a `use_cache` argument.
    """

    def __init__(
        self,
        model: Any,
        state: ParallelState,
        cut: ModelPartition,
        checks: CallChecks,
        trial_forward: TrialForward,
        *,
        schedule: str,
        takes_cache: bool,
    ):
        self.model, self.state, self.cut = model, state, cut
        self.checks, self.trial_forward = checks, trial_forward
        self.schedule, self.takes_cache = schedule, takes_cache
        self._last_packing_info: PackingInfo | None = None
        # Attention implementations that were seen to keep packed documents apart.
        self._masks_documents: set[str] = set()

    def max_microbatches(self) -> int:
        """Returns the number of microbatches of a batch with enough samples."""
        config = self.state.config
        return config.num_microbatches or _MICROBATCHES_PER_RANK * config.pp_size

    def prepare(
        self, arguments: dict[str, Any], *, for_backward: bool, unsharded: bool = False, is_read: bool = False
    ) -> MicrobatchPlan:
        """Splits a batch into microbatches.

        Args:
            arguments: of the call; `num_items_in_batch` is removed.
            for_backward (`bool`): whether the schedule runs backwards of the loss.
            unsharded (`bool`, defaults to `False`): whether the batch stays one microbatch (generation with a cache).
            is_read (`bool`, defaults to `False`): whether `Pipeline.reading` replaces the outputs.
        """
        self.checks.require_one_stage_each(arguments, fills_cache=unsharded)
        self.checks.reject_skipped_layers()
        self.cut.require_order(self.model)
        if for_backward or torch.is_grad_enabled():
            self.cut.reject_added(self.model, self.state.shardings)
        samples, num_items = batch_size(arguments), arguments.pop("num_items_in_batch", None)
        packed = self._find_packed_row(arguments) if for_backward else None
        targets = target_names(arguments)
        count = self._count_microbatches(arguments, samples, packed, for_backward=for_backward, unsharded=unsharded)
        # In evaluation, the decoder of an encoder-decoder may mask differently without a cache (T5Gemma).
        keeps_cache = unsharded or (self.cut.layers.decoder > 0 and not self.model.training)
        if not keeps_cache and self.takes_cache:
            leave_out(self.model, arguments)
        if count > 1 and (is_read or targets):
            self.checks.reject_batch_statistics(arguments)
        if packed is None:
            modalities = self.state.modalities
            # [batch, ...] -> `count` times [batch / count, ...]; sizes differ by one sample at most.
            microbatches = split(arguments, min(count, samples), self.model.config, modalities=modalities)
            weights = [batch_size(microbatch) / samples for microbatch in microbatches]
        else:
            # [1, tokens] -> [1, tokens of some documents].
            microbatches = packed.microbatches(count)
            weights = [count_tokens(microbatch) / packed.length for microbatch in microbatches]
        if not unsharded:
            self.trial_forward.of_call(microbatches[0], is_read=is_read)
        denominators: Denominators | None = None
        if targets:
            # Comes after the trial forward, which finds out how the model's loss counts its labels.
            denominators = self.state.loss.denominators(
                arguments, samples, num_items, over_ranks=torch.is_grad_enabled()
            )
        elif is_read:
            denominators = {"labels": 1}, self.state.loss.row_denominator(samples)
        # The schedule may need more microbatches than there are: the shortest is repeated with all targets masked.
        missing = count - len(microbatches)
        shortest = mask_all_targets(microbatches[min(range(len(weights)), key=weights.__getitem__)])
        microbatches, weights = microbatches + [shortest] * missing, weights + [0.0] * missing
        self._last_packing_info = PackingInfo(microbatches)
        return MicrobatchPlan(microbatches, weights, denominators, self._last_packing_info)

    def _count_microbatches(
        self,
        arguments: dict[str, Any],
        samples: int,
        packed: PackedRow | None,
        *,
        for_backward: bool,
        unsharded: bool,
    ) -> int:
        """Returns a number of microbatches that the schedule can run."""
        units = samples if packed is None else len(packed.microbatches(self.max_microbatches()))
        at_most = min(units, self.max_microbatches())
        # In lockstep (ZeRO stage 3, experts over dp ranks) each forward is collective over dp: the number must match.
        if self.state.in_lockstep or self.checks.counts_over_ranks(arguments):
            at_most = self._min_over_dp_ranks(at_most)
        if unsharded or (not for_backward and self.checks.has_batch_statistics(arguments)):
            return 1
        if for_backward:
            config = self.state.config
            return valid_microbatches(self.schedule, config.pp_size, stages_per_rank(config), at_most)
        return at_most

    def _find_packed_row(self, arguments: dict[str, Any]) -> PackedRow | None:
        """Returns the documents of a packed sequence that may be split between them.

        Only after an earlier call has shown that the attention implementation keeps documents apart.
        """
        last, self._last_packing_info = self._last_packing_info, None
        implementation = self.model.config.get_text_config()._attn_implementation
        if last is not None and last.finds_documents:
            self._masks_documents.add(implementation)
        if implementation not in self._masks_documents or self.checks.mixes_documents(arguments):
            return None
        return PackedRow.of_call(arguments)

    def _min_over_dp_ranks(self, microbatches: int) -> int:
        """Returns the smallest number of all data-parallel ranks, which wait for each other in every forward."""
        lowest = torch.tensor(microbatches, device=self.state.mesh.device)
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.state.mesh.dp_group)
        return int(lowest)
