"""sentence-transformers: embeddings gathered over data-parallel ranks, collective saves and identical evaluation.

Its models wrap a transformers model. With `gather_across_devices=True` in-batch negatives come from all data-parallel
ranks, so that a step matches the single-process step on the global batch.
This module is imported before Accelerate, so it must not import Accelerate at the top.
"""

from collections.abc import Callable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.communication.collectives import gather_from_ranks
from ..errors import UnsupportedError
from ..parallel_state import parallel_state
from .accelerate.wrapped_models import parallelized_submodule

# Losses that compare samples of a batch and have no `gather_across_devices`.
_COMPARE_ROWS = frozenset(
    (
        *("CoSENTLoss", "OnlineContrastiveLoss", "MegaBatchMarginLoss", "GlobalOrthogonalRegularizationLoss"),
        *("BatchAllTripletLoss", "BatchHardTripletLoss", "BatchSemiHardTripletLoss"),
        "ContrastiveTensionLossInBatchNegatives",
        # The regularizer of sparse encoders squares means over the batch.
        "FlopsLoss",
    )
)
# Losses of cross encoders that are means over samples. Others draw negatives from the batch, or divide by the number of
# documents that all of its queries have.
_MEANS_OF_PAIRS = frozenset(("BinaryCrossEntropyLoss", "CrossEntropyLoss", "MSELoss", "MarginMSELoss"))
_CROSS_ENCODERS = "sentence_transformers.cross_encoder."


def get_rank(original: Callable) -> int:
    """Returns the data-parallel rank, the position of this rank's samples among gathered embeddings."""
    from .accelerate.batch_shards import batches_are_ours, get_batch_group

    if not batches_are_ours():
        rank: int = original()
        return rank
    return 0 if (group := get_batch_group()) is None else dist.get_rank(group)


def gather_embeddings(original: Callable, tensor: Tensor, with_grad: bool = False) -> Tensor:
    """Gathers embeddings over the data-parallel ranks, `[batch, ...]` to `[global batch, ...]`, differentiably or not.

    Raises:
        UnsupportedError: on all ranks, if their batch sizes differ.
    """
    from .accelerate.batch_shards import batches_are_ours, get_batch_group

    if not batches_are_ours():
        joined: Tensor = original(tensor, with_grad)
        return joined
    if (group := get_batch_group()) is None:
        return tensor
    rows = _samples_on_all_ranks(tensor, group)
    if with_grad:
        # The backward sums the gradients `[global batch, ...]` of all ranks and keeps this rank's slice.
        return gather_from_ranks(tensor, 0, rows, group, sum_gradient=True)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    # As upstream does: only this rank's own embeddings keep a gradient.
    parts[dist.get_rank(group)] = tensor
    return torch.cat(parts)


def _samples_on_all_ranks(tensor: Tensor, group: Any) -> int:
    local_count = torch.tensor([tensor.shape[0]], device=tensor.device)
    counts = [torch.empty_like(local_count) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, local_count, group=group)
    rows = [int(count) for count in counts]
    if len(set(rows)) > 1:
        raise UnsupportedError(
            f"gather_across_devices=True needs the same batch size on all data-parallel ranks, got {rows}. Set "
            "drop_last=True in the DataLoader (dataloader_drop_last=True in Trainer's arguments), or train on a number "
            "of samples that is a multiple of the batch size times the data-parallel ranks."
        )
    return sum(rows)


class _Called:
    """A parallelized model whose `forward` goes through `__call__`, so that its hooks run."""

    def __init__(self, model: Any):
        self._model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model with its hooks."""
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def forward(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the inner model with its hooks; upstream calls its `forward` directly."""
    model = self.model
    if parallel_state(model) is None:
        return original(self, *args, **kwargs)
    # An instance attribute takes precedence over the submodule of this name.
    vars(self)["model"] = _Called(model)
    try:
        return original(self, *args, **kwargs)
    finally:
        del vars(self)["model"]


def distributed_evaluation(original: Callable, model: Any, enabled: bool = True) -> AbstractContextManager[bool]:
    """Disables distributed evaluation: upstream would split sentences over ranks that hold shards of one model."""
    return original(model, enabled and parallel_state(model) is None)


def build_dataloader(original: Callable, self: Any, dataset: Any, batch_size: int, dataset_kind: str) -> Any:
    """Samples global training batches as a single process does: each from one dataset, without duplicates, by labels.

    Raises:
        UnsupportedError: the loss compares samples that are spread over the data-parallel ranks.
    """
    if dataset_kind == "train" and (ranks := _ranks_with_other_rows(self)) > 1:
        _reject_in_batch_losses(self)
        batch_size *= ranks if isinstance(dataset, Sized) else 1
    return original(self, dataset, batch_size, dataset_kind)


def get_train_dataloader(original: Callable, self: Any) -> Any:
    """Splits each batch over the ranks; upstream would give each rank different batches."""
    if _ranks_with_other_rows(self) == 1 or not isinstance(self.train_dataset, Sized):
        return original(self)
    dataloaders = self.accelerator.dataloader_config
    before, dataloaders.split_batches = dataloaders.split_batches, True
    try:
        return original(self)
    finally:
        dataloaders.split_batches = before


def _ranks_with_other_rows(trainer: Any) -> int:
    models = parallelized_submodule(trainer.model)
    state = parallel_state(models[0]) if models else None
    return 1 if state is None else state.mesh.dp_size


def _reject_in_batch_losses(trainer: Any) -> None:
    losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
    for part in (part for loss in losses if isinstance(loss, nn.Module) for part in loss.modules()):
        classes = {cls.__name__ for cls in type(part).__mro__} & _COMPARE_ROWS
        own = [cls.__name__ for cls in type(part).__mro__ if cls.__module__.startswith(_CROSS_ENCODERS + "losses")]
        classes |= set() if _MEANS_OF_PAIRS.intersection(own) else set(own)
        if classes:
            raise UnsupportedError(
                f"{type(part).__name__} ({', '.join(sorted(classes))}) compares the samples of a batch with each "
                "other, "
                "but each data-parallel rank holds only some of them and sentence-transformers does not gather them. "
                "Use dp_size=1, or a loss with gather_across_devices=True."
            )


def load_trained(original: Callable, self: Any, checkpoint_path: str) -> None:
    """Loads the weights of a sharded checkpoint of any layout."""
    from .trainer.checkpoints import load_from_checkpoint

    def load(trainer: Any, path: str, model: Any) -> None:
        original(trainer, path)

    load_from_checkpoint(load, self, checkpoint_path)


@contextmanager
def _without_card_examples(encoder: Any, model: Any) -> Iterator[None]:
    """Leaves the similarities of examples out of a model card: only the rank that writes it would call the model."""
    card, state = getattr(encoder, "model_card_data", None), parallel_state(model)
    if state is None or card is None or not (state.config.ranks_per_replica > 1 or state.shards_weights):
        yield
        return
    before, card.generate_widget_examples = card.generate_widget_examples, False
    try:
        yield
    finally:
        card.generate_widget_examples = before


def save(original: Callable, self: Any, path: str | None, *args: Any, **kwargs: Any) -> None:
    """Saves on the first rank; other ranks take part in gathering the parallelized model's weights."""
    models = parallelized_submodule(self)
    inside = {id(inner) for inner in models}
    if path is None or not inside:
        return original(self, path, *args, **kwargs)
    if dist.get_rank() == 0:
        with _without_card_examples(self, models[0]):
            return original(self, path, *args, **kwargs)
    for place, module in enumerate(self):
        in_root = place == 0 and getattr(module, "save_in_root", False)
        folder = Path(path) if in_root else Path(path, f"{place}_{type(module).__name__}")
        for inner in module.modules():
            if id(inner) in inside:
                inner.save_pretrained(folder)
                break
    return None
