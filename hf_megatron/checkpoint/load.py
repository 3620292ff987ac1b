"""What stock loading leaves open: weights that do not match, indexes outside their folder, shards with an offset."""

import json
import os
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError
from ..upstream import dtensor_from_local, local_tensor


def check_weight_index(path: str | os.PathLike[str]) -> None:
    """Refuses an index file whose shards lie outside its directory.

    Raises:
        CheckpointError: names the entry.
    """
    if not os.path.isdir(path):
        return
    for name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        index = os.path.join(path, name)
        if not os.path.isfile(index):
            continue
        with open(index, encoding="utf-8") as file:
            weight_map = json.load(file).get("weight_map", {})
        root = os.path.realpath(path)
        for shard in sorted(set(weight_map.values())):
            inside = os.path.commonpath([root, os.path.abspath(os.path.join(root, shard))]) == root
            if os.path.isabs(shard) or not inside:
                raise CheckpointError(
                    f"{index} names {shard!r}, which lies outside the checkpoint's directory; refused."
                )


def check_loaded(model: nn.Module, info: dict[str, Any], *, strict: bool) -> None:
    """Raises for missing, surplus or mis-shaped weights.

    Raises:
        CheckpointError: names the weights and the way round.
    """
    problems = []
    mismatched = info.get("mismatched_keys") or ()
    if mismatched:
        shown = [
            f"{name}: file {tuple(found)}, model {tuple(wanted)}" for name, found, wanted in sorted(mismatched)[:5]
        ]
        problems.append(f"{len(mismatched)} mis-shaped ({'; '.join(shown)})")
    for kind in ("missing_keys", "unexpected_keys"):
        names = sorted(info.get(kind) or ())
        if names and strict:
            problems.append(
                f"{len(names)} {kind.removesuffix('_keys')} ({', '.join(names[:5])}{', ...' if len(names) > 5 else ''})"
            )
    if info.get("error_msgs"):
        problems.append(str(info["error_msgs"]))
    if problems:
        raise CheckpointError(
            f"The weights do not match {type(model).__name__}: {'; '.join(problems)}. A new head on old weights, or "
            "weights to leave out, need MegatronConfig(strict_loading=False)."
        )


def drop_offsets(model: nn.Module) -> None:
    """Makes every shard start at the beginning of its storage, without copying it.

    A shard is read as a view into the mapped tensor. Up to torch 2.12 a DTensor around a view with an offset looks as
    if it had memory of its own, and `copy.deepcopy` of the model fails.
    """
    replaced: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DTensor) or not local_tensor(parameter).storage_offset():
                continue
            if id(parameter) not in replaced:
                local = torch.from_dlpack(local_tensor(parameter.detach()))
                replaced[id(parameter)] = nn.Parameter(dtensor_from_local(local, parameter), parameter.requires_grad)
            module._parameters[name] = replaced[id(parameter)]
