"""Merged Hugging Face files from any layout, streamed: no rank ever holds the whole model.

The output is planned first, on meta tensors: transformers' own `revert_weight_conversion` says which file names and
shapes come out (fused experts become per-expert weights again, for example). Then, parameter by parameter, the ranks
send their shards to rank 0, which writes each tensor to its place in the safetensors file and forgets it.
"""

import json
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..data_parallel.fully_sharded import whole_local
from ..errors import UnsupportedError
from ..mesh import ParallelMesh
from ..parallelize import ParallelState, parallel_state
from ..spec import Placement
from ..upstream import conversion_groups, local_tensor, revert_conversion, untied_state_dict

_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Staging:
    """Two buffers that full tensors are gathered into in turn: one fills while the other is written.

    Fresh memory for every tensor would be mapped and zeroed page by page, which takes as long as the gathering.
    """

    def __init__(self, largest: int):
        self.buffers = [torch.empty(largest, dtype=torch.uint8) for _ in range(2)]

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        self.buffers.reverse()
        return self.buffers[0][: shape.numel() * dtype.itemsize].view(dtype).view(shape)


def gather_to_first(
    parameter: Tensor,
    placement: Placement,
    mesh: ParallelMesh,
    staging: Staging | None = None,
    local: Tensor | None = None,
) -> Tensor | None:
    """The full tensor in CPU memory on tp rank 0, `None` elsewhere. Every tp rank calls it in the same order.

    With `staging` the tensor is valid until the second call after this one. `local` is this rank's tp shard where it is
    not what the parameter holds.
    """
    local = local_tensor(parameter.detach()) if local is None else local
    if placement.dim is None:
        return local.cpu() if mesh.tp_rank == 0 else None
    if mesh.tp_rank != 0:
        if mesh.tp_rank % placement.copies == 0 and local.numel():
            dist.send(local.contiguous(), group=mesh.tp_group, group_dst=0)
        return None
    dim, size, ranks = placement.dim, parameter.shape[placement.dim], mesh.tp_size
    if staging is None:
        full = torch.empty(parameter.shape, dtype=parameter.dtype)
    else:
        full = staging.take(parameter.shape, parameter.dtype)
    for rank in range(0, ranks, placement.copies):
        intervals = placement.intervals(size, ranks, rank)
        width = sum(stop - start for start, stop in intervals)
        if not width:
            continue
        shape = list(parameter.shape)
        shape[dim] = width
        piece = local
        if rank:
            direct = full.narrow(dim, *_start_and_length(intervals[0]))
            if len(intervals) == 1 and direct.is_contiguous() and local.device.type == "cpu":
                dist.recv(direct, group=mesh.tp_group, group_src=rank)
                continue
            piece = torch.empty(shape, dtype=parameter.dtype, device=local.device)
            dist.recv(piece, group=mesh.tp_group, group_src=rank)
        offset = 0
        for interval in intervals:
            start, length = _start_and_length(interval)
            full.narrow(dim, start, length).copy_(piece.narrow(dim, offset, length))
            offset += length
    return full


def _start_and_length(interval: tuple[int, int]) -> tuple[int, int]:
    return interval[0], interval[1] - interval[0]


def _placement(state: ParallelState, name: str) -> Placement:
    # Buffers are not claimed: every rank has them whole.
    return state.claims[name].placement if name in state.claims else Placement()


def gather_parameter(model: Any, name: str, value: Tensor, staging: Staging | None = None) -> Tensor | None:
    """A parameter, or a gradient of its layout, in full on rank 0 of the tp group; every rank calls it."""
    state = parallel_state(model)
    assert state is not None
    local = None
    if state.shards_weights and isinstance(value, DTensor):
        local = whole_local(value, value, state.mesh)
    return gather_to_first(value, _placement(state, name), state.mesh, staging, local)


def full_state_dict(model: Any) -> dict[str, Tensor]:
    """All weights in full, in CPU memory of tp rank 0; empty on the other ranks. Every rank calls it."""
    state = parallel_state(model)
    assert state is not None
    gathered = {}
    for name, tensor in model.state_dict().items():
        full = gather_parameter(model, name, tensor)
        if full is not None:
            gathered[name] = full
    return gathered


class SafetensorsWriter:
    """Writes one safetensors file tensor by tensor; names, shapes and dtypes are known beforehand.

    The `safetensors` package writes a file from one dictionary that holds all of it.
    """

    def __init__(self, path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]):
        header: dict[str, Any] = {"__metadata__": dict(metadata)}
        offset = 0
        # Widest dtype first, as the safetensors package orders them, keeps every tensor aligned.
        for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])):
            size = tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": _DTYPE_NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, offset + size],
            }
            offset += size
        encoded = json.dumps(header, separators=(",", ":")).encode()
        encoded += b" " * (-len(encoded) % 8)
        self.header = header
        self.start = 8 + len(encoded)
        self.missing = set(tensors)
        self.path = path
        self.file: IO[bytes] = open(path + ".tmp", "wb")  # noqa: SIM115
        self.file.write(len(encoded).to_bytes(8, "little"))
        self.file.write(encoded)
        self.file.truncate(self.start + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        entry = self.header[name]
        if list(tensor.shape) != entry["shape"] or _DTYPE_NAMES[tensor.dtype] != entry["dtype"]:
            raise UnsupportedError(f"{name}: planned {entry}, got {tuple(tensor.shape)} {tensor.dtype}.")
        self.file.seek(self.start + entry["data_offsets"][0])
        data = tensor.contiguous()
        self.file.write(data.view(-1).view(torch.uint8).numpy().data)
        self.missing.discard(name)

    def close(self, *, complete: bool) -> None:
        self.file.close()
        if not complete or self.missing:
            os.remove(self.path + ".tmp")
            if complete:
                raise UnsupportedError(f"{self.path}: {sorted(self.missing)} were planned and never written.")
            return
        os.replace(self.path + ".tmp", self.path)


def _converted(
    model: Any, state: ParallelState, tensors: Mapping[str, Tensor], keep_names: bool
) -> Iterator[dict[str, Tensor]]:
    """Full tensors under their file names, one group that is converted together at a time; empty off rank 0."""
    groups = [[name] for name in tensors] if keep_names else conversion_groups(model, list(tensors))
    alone = [tensors[group[0]] for group in groups if len(group) == 1]
    largest = max((tensor.numel() * tensor.element_size() for tensor in alone), default=0)
    staging = Staging(largest if state.mesh.tp_rank == 0 else 0)
    for group in groups:
        place = staging if len(group) == 1 else None
        gathered = {name: gather_parameter(model, name, tensors[name], place) for name in group}
        if state.mesh.tp_rank == 0:
            full = {name: tensor for name, tensor in gathered.items() if tensor is not None}
            yield full if keep_names else revert_conversion(model, full)
        else:
            yield {}


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
    **kwargs: Any,
) -> None:
    """`save_pretrained` of a model that is split over ranks; every rank calls it, rank 0 writes.

    The arguments are those of `PreTrainedModel.save_pretrained`.

    Raises:
        UnsupportedError: `distributed_checkpoint`, or a state dict of the caller's own.
    """
    state = parallel_state(model)
    assert state is not None
    if distributed_checkpoint:
        raise UnsupportedError(
            "save_pretrained(distributed_checkpoint=True): sharded checkpoints are not supported yet."
        )
    if state_dict is not None:
        raise UnsupportedError(
            "save_pretrained(state_dict=...): pass no state dict, the weights are streamed from the ranks."
        )
    directory = os.fspath(save_directory)
    # Stock writes config, generation config and custom code; an empty state dict leaves the weights to us.
    original(model, directory, is_main_process=is_main_process, state_dict={}, variant=variant)

    tensors = untied_state_dict(model)
    meta = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    planned = revert_conversion(model, meta) if save_original_format else meta
    base = "model" if variant is None else f"model.{variant}"
    pattern = f"model{{suffix}}.{variant + '.' if variant else ''}safetensors"
    split = split_torch_state_dict_into_shards(planned, filename_pattern=pattern, max_shard_size=max_shard_size)
    writes = state.mesh.tp_rank == 0 and dist.get_rank() == 0 and is_main_process
    writers: OrderedDict[str, SafetensorsWriter] = OrderedDict()
    complete = False
    try:
        if writes:
            for filename, names in split.filename_to_tensors.items():
                path = os.path.join(directory, filename)
                writers[filename] = SafetensorsWriter(path, {name: planned[name] for name in names}, {"format": "pt"})
        # The next tensors are gathered while the last ones are written; two groups are in memory at a time.
        with ThreadPoolExecutor(1) as thread:
            pending: Future[None] | None = None
            for converted in _converted(model, state, tensors, not save_original_format):
                if pending is not None:
                    pending.result()
                if writes:
                    pending = thread.submit(_write, writers, split.tensor_to_filename, converted)
            if pending is not None:
                pending.result()
        complete = True
    finally:
        for writer in writers.values():
            writer.close(complete=complete)
    if writes:
        _remove_stale(directory, base, set(split.filename_to_tensors))
        index = os.path.join(
            directory,
            f"{base}.safetensors.index.json" if variant is None else f"model.safetensors.index.{variant}.json",
        )
        if split.is_sharded:
            total = sum(tensor.numel() for tensor in planned.values())
            content = {
                "metadata": {"total_parameters": total, **split.metadata},
                "weight_map": split.tensor_to_filename,
            }
            with open(index, "w", encoding="utf-8") as file:
                file.write(json.dumps(content, indent=2, sort_keys=True) + "\n")
        elif os.path.exists(index):
            os.remove(index)
    dist.barrier(group=state.mesh.tp_group)
    if push_to_hub:
        _push(model, directory, writes, token, kwargs)
        dist.barrier(group=state.mesh.tp_group)


def _write(writers: Mapping[str, SafetensorsWriter], files: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        writers[files[name]].write(name, tensor)


def _remove_stale(directory: str, base: str, written: set[str]) -> None:
    """Weight files of an earlier save that this one does not replace would be read beside the new ones."""
    stale = re.compile(rf"{re.escape(base)}(-\d{{5}}-of-\d{{5}})?\.safetensors")
    for filename in os.listdir(directory):
        if stale.fullmatch(filename) and filename not in written:
            os.remove(os.path.join(directory, filename))


def _push(model: Any, directory: str, writes: bool, token: str | bool | None, kwargs: dict[str, Any]) -> None:
    if not writes:
        return
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    repo_id = kwargs.pop("repo_id", os.path.basename(os.path.normpath(directory)))
    commit_message = kwargs.pop("commit_message", None) or "Upload model"
    create_pr = kwargs.pop("create_pr", False)
    repo_id = api.create_repo(repo_id, exist_ok=True, private=kwargs.pop("private", None)).repo_id
    api.upload_folder(repo_id=repo_id, folder_path=directory, commit_message=commit_message, create_pr=create_pr)
