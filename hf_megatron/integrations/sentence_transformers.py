"""sentence-transformers: embeddings of the ranks that see other rows are joined, all save together and evaluate alike.

Its models are modules around one of transformers; in-batch negatives of `gather_across_devices=True` are those of all
data parallel ranks, so that a step is one process's on the batch of all.
Imported while the library is, which imports Accelerate later, so it imports none of it.
"""

from collections.abc import Callable, Sized
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core.communication.collectives import gather_from_ranks
from ..errors import UnsupportedError
from ..parallel_state import parallel_state
from .accelerate.wrapped_models import parallelized_submodule

# Losses of other rows of the batch that take no `gather_across_devices`.
_COMPARE_ROWS = frozenset(
    (
        *("CoSENTLoss", "OnlineContrastiveLoss", "MegaBatchMarginLoss", "GlobalOrthogonalRegularizationLoss"),
        *("BatchAllTripletLoss", "BatchHardTripletLoss", "BatchSemiHardTripletLoss"),
        "ContrastiveTensionLossInBatchNegatives",
    )
)


def get_rank(original: Callable) -> int:
    """Returns this rank's number among those that see other rows: where its own stand in what was gathered."""
    from .accelerate.batch_shards import batches_are_ours, data_parallel_group

    if not batches_are_ours():
        rank: int = original()
        return rank
    return 0 if (group := data_parallel_group()) is None else dist.get_rank(group)


def gather_embeddings(original: Callable, tensor: Tensor, with_grad: bool = False) -> Tensor:
    """Joins the rows of the ranks that see other rows, `[rows, ...]` to `[all rows, ...]`, with gradients or without.

    Raises:
        UnsupportedError: the ranks have different numbers of rows, on all of them.
    """
    from .accelerate.batch_shards import batches_are_ours, data_parallel_group

    if not batches_are_ours():
        joined: Tensor = original(tensor, with_grad)
        return joined
    if (group := data_parallel_group()) is None:
        return tensor
    rows = _samples_on_all_ranks(tensor, group)
    if with_grad:
        return gather_from_ranks(tensor, 0, rows, group, sum_gradient=True)
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    # As stock: this rank's own keeps its gradient.
    parts[dist.get_rank(group)] = tensor
    return torch.cat(parts)


def _samples_on_all_ranks(tensor: Tensor, group: Any) -> int:
    own = torch.tensor([tensor.shape[0]], device=tensor.device)
    counts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(counts, own, group=group)
    rows = [int(count) for count in counts]
    if len(set(rows)) > 1:
        raise UnsupportedError(
            f"gather_across_devices=True: the data parallel ranks have {rows} rows of this batch, and their embeddings "
            "can only be joined where each has as many. Set dataloader_drop_last=True, or train on a number of rows "
            "that per_device_train_batch_size times the data parallel ranks divides."
        )
    return sum(rows)


class _Called:
    """A laid out model whose `forward` is a call of it, with the hooks that its layout lives by."""

    def __init__(self, model: Any):
        self._model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model on its arguments, of any shape."""
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def forward(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the model inside of a module, of which stock calls `forward` by name."""
    model = self.model
    if parallel_state(model) is None:
        return original(self, *args, **kwargs)
    # In front of the submodule of this name.
    vars(self)["model"] = _Called(model)
    try:
        return original(self, *args, **kwargs)
    finally:
        del vars(self)["model"]


def distributed_evaluation(original: Callable, model: Any, enabled: bool = True) -> AbstractContextManager[bool]:
    """Has every rank evaluate the same, where stock deals sentences out to ranks that hold parts of one model."""
    return original(model, enabled and parallel_state(model) is None)


def build_dataloader(original: Callable, self: Any, dataset: Any, batch_size: int, dataset_kind: str) -> Any:
    """Draws the batches of all ranks as one process does: of one dataset each, without its duplicates, by its labels.

    Raises:
        UnsupportedError: a loss that compares rows of which every rank has some only.
    """
    if dataset_kind == "train" and (ranks := _ranks_with_other_rows(self)) > 1:
        _require_loss_of_rows(self)
        batch_size *= ranks if isinstance(dataset, Sized) else 1
    return original(self, dataset, batch_size, dataset_kind)


def get_train_dataloader(original: Callable, self: Any) -> Any:
    """Deals the rows of each batch out to the ranks, where stock deals whole batches out."""
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


def _require_loss_of_rows(trainer: Any) -> None:
    losses = trainer.loss.values() if isinstance(trainer.loss, dict) else [trainer.loss]
    for part in (part for loss in losses if isinstance(loss, nn.Module) for part in loss.modules()):
        if found := _COMPARE_ROWS.intersection(cls.__name__ for cls in type(part).__mro__):
            raise UnsupportedError(
                f"{type(part).__name__} ({', '.join(sorted(found))}) compares the rows of a batch with each other, of "
                "which each data parallel rank has some only, and sentence-transformers does not gather them. Use "
                "dp_size=1, or a loss with gather_across_devices=True."
            )


def load_trained(original: Callable, self: Any, checkpoint_path: str) -> None:
    """Loads the weights of a sharded checkpoint, whatever layout saved it."""
    from .trainer.checkpoints import load_from_checkpoint

    def load(trainer: Any, path: str, model: Any) -> None:
        original(trainer, path)

    load_from_checkpoint(load, self, checkpoint_path)


def save(original: Callable, self: Any, path: str | None, *args: Any, **kwargs: Any) -> None:
    """Saves on the first rank, while the others hand in their parts of the laid out model."""
    inside = {id(inner) for inner in parallelized_submodule(self)}
    if path is None or not inside or dist.get_rank() == 0:
        return original(self, path, *args, **kwargs)
    for place, module in enumerate(self):
        in_root = place == 0 and getattr(module, "save_in_root", False)
        folder = Path(path) if in_root else Path(path, f"{place}_{type(module).__name__}")
        for inner in module.modules():
            if id(inner) in inside:
                inner.save_pretrained(folder)
                break
    return None
