"""Streams merged Hugging Face files from any layout: no rank ever holds the full model.

The output is planned first, on meta tensors: transformers' own `revert_weight_conversion` determines the names and
shapes in the files (for example, fused experts become per-expert weights again). Then, parameter by parameter, the tp
ranks of the stage that owns it send their shards to its first rank, which sends the full tensor to rank 0; rank 0
writes it to its offset in the safetensors file and frees it.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.transformers_loading import conversion_groups, revert_conversion, untied_state_dict, without_progress_bars
from ..core.collected_values import is_full_or_collected, with_collected_values
from ..core.communication.rank_errors import propagate_errors
from ..core.off_stage import own_state_dict
from ..errors import UnsupportedError
from ..parallel_state import ParallelState, parallel_state
from .gather_full import Staging, fetch
from .stage_consistency import OwnedTensor, check_copies, merge_owned_tensors, tied_weights
from .weight_files import write_weights


def _converted(
    model: Any,
    state: ParallelState,
    tensors: Mapping[str, Tensor],
    owned_tensors: Mapping[str, OwnedTensor],
    keep_names: bool,
) -> Iterator[dict[str, Tensor]]:
    """Yields full tensors under their file names, one group that is converted together at a time; empty off rank 0."""
    groups = [[name] for name in owned_tensors] if keep_names else conversion_groups(model, list(owned_tensors))
    mesh, first = state.mesh, dist.get_rank() == 0
    gathers = mesh.axes.rank("stage") == 0
    alone = [owned_tensors[group[0]] for group in groups if len(group) == 1]
    sizes = [entry.nbytes for entry in alone if gathers and mesh.pp_rank in (0, entry.owner)]
    staging = Staging(max(sizes, default=0))
    for group in groups:
        place = staging if len(group) == 1 else None
        gathered = {name: fetch(model, state, name, owned_tensors[name], tensors.get(name), place) for name in group}
        full = {name: tensor for name, tensor in gathered.items() if first and tensor is not None}
        yield full if keep_names or not first else revert_conversion(model, full)


def _given(model: Any, tensors: Mapping[str, Tensor], keep_names: bool) -> Iterator[dict[str, Tensor]]:
    """Yields a caller's full tensors under their file names."""
    for group in [[name] for name in tensors] if keep_names else conversion_groups(model, list(tensors)):
        full = {name: tensors[name] for name in group}
        yield full if keep_names else revert_conversion(model, full)


def _untied(state: ParallelState, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drops other names of weights that both ends of a pipeline hold; only the last stage knows these names."""
    tied = {name: tensors[name] for name in (() if state.cut is None else state.cut.tied) if name in tensors}

    def is_copy(tensor: Tensor) -> bool:
        return any(tensor.shape == one.shape and torch.equal(tensor.cpu(), one.cpu()) for one in tied.values())

    return {name: tensor for name, tensor in tensors.items() if name in tied or not is_copy(tensor)}


def _require_full(state_dict: Mapping[str, Any], *, writes: bool) -> dict[str, Any]:
    """Returns a state dict with its collected values.

    Raises:
        UnsupportedError: a tensor is sharded or off-stage, and its full value was not collected.
    """
    full = with_collected_values(state_dict)
    # An empty state dict on the writing rank would mean a model without weights.
    if not all(map(is_full_or_collected, full.values())) or (writes and not full):
        raise UnsupportedError(
            "save_pretrained(state_dict=...) requires full tensors on rank 0, as returned by "
            "accelerator.get_state_dict(model). Omit state_dict to stream the weights from the ranks."
        )
    return full


def _save_given(
    model: Any,
    state: ParallelState,
    original: Callable,
    directory: str,
    full: Mapping[str, Tensor],
    max_shard_size: int | str,
    variant: str | None,
    keep_names: bool,
) -> None:
    """Writes a caller's full tensors; without communication, so that one rank may call it alone."""
    original(model, directory, state_dict={}, variant=variant)
    planned = untied_state_dict(model, _untied(state, full))
    meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in planned.items()}
    files = meta if keep_names else revert_conversion(model, meta)
    parameters = sum(planned[name].numel() for name, _ in model.named_parameters() if name in planned)
    streamed = _given(model, planned, keep_names)
    write_weights(directory, files, streamed, max_shard_size=max_shard_size, parameters=parameters, variant=variant)


def save_merged(
    model: Any,
    original: Callable,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict | None = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = "50GB",
    variant: str | None = None,
    token: str | bool | None = None,
    save_peft_format: bool = True,
    save_original_format: bool = True,
    distributed_checkpoint: bool = False,
    *,
    before_push: Callable[[str], None],
    push: Callable[[str, str | bool | None, dict[str, Any]], None],
    **kwargs: Any,
) -> None:
    """Implements `PreTrainedModel.save_pretrained` for a parallelized model; rank 0 writes.

    Collective, except with a state dict: rank 0 writes its full tensors, and other ranks return at once.

    Args:
        before_push: called with the directory after the weights are complete, on the rank that wrote them. Files that
            it adds are pushed too. It must not raise, as the other ranks continue.
        push: called on every rank with the directory, the token and the remaining keyword arguments.

    Raises:
        UnsupportedError: `distributed_checkpoint` is set, or the state dict on rank 0 does not hold full tensors.
        CheckpointError: weights are shared that the class does not tie, pipeline stages hold different copies of a
            tied weight, or the push failed.
    """
    state = parallel_state(model)
    assert state is not None
    if distributed_checkpoint:
        raise UnsupportedError(
            "save_pretrained(distributed_checkpoint=True): sharded checkpoints are not supported yet."
        )
    directory = os.fspath(save_directory)
    writes = dist.get_rank() == 0 and is_main_process
    if state_dict is not None:
        full = _require_full(state_dict, writes=writes)
        if writes:
            _save_given(model, state, original, directory, full, max_shard_size, variant, not save_original_format)
            before_push(directory)
        if push_to_hub:
            dist.barrier()
            push(directory, token, kwargs)
        return
    check_copies(state, tied_weights(model))
    with propagate_errors(f"Saving {directory}"):
        tensors = untied_state_dict(model, own_state_dict(model))
    # Stock code writes config, generation config and custom code; an empty state dict skips its weights.
    with without_progress_bars():
        original(model, directory, is_main_process=is_main_process, state_dict={}, variant=variant)

    owned_tensors = merge_owned_tensors(state, tensors)
    streamed = _converted(model, state, tensors, owned_tensors, not save_original_format)
    meta = {name: torch.empty(entry.shape, dtype=entry.dtype, device="meta") for name, entry in owned_tensors.items()}
    parameters = model.num_parameters()
    if writes:
        files = revert_conversion(model, meta) if save_original_format else meta
        write_weights(directory, files, streamed, max_shard_size=max_shard_size, parameters=parameters, variant=variant)
        before_push(directory)
    else:
        for _ in streamed:
            pass
    dist.barrier()
    if push_to_hub:
        push(directory, token, kwargs)
