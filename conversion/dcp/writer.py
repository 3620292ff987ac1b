"""Writes distributed checkpoints of torch under the model's names in memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...files.safetensors import TensorMeta
from ..output import Output
from ..tensors import EXP_AVG, EXP_AVG_SQ, WEIGHT, Key, OptimizerState, Writer
from .store_writer import StoreWriter

# What torch's AdamW keeps of a group (torch.optim.AdamW); all of them have to be there for it to be loaded.
_SETTINGS: tuple[tuple[str, Any], ...] = (
    ("lr", 1e-3),
    ("betas", (0.9, 0.999)),
    ("eps", 1e-8),
    ("weight_decay", 0.01),
    ("amsgrad", False),
    ("maximize", False),
    ("foreach", None),
    ("capturable", False),
    ("differentiable", False),
    ("fused", None),
    ("decoupled_weight_decay", True),
)


class DcpWriter(Writer):
    """Writes what `torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=...)` loads.

    Moments, steps and settings lie where `get_optimizer_state_dict` has them under the key `optimizer`, in both forms:
    that of `flatten_optimizer_state_dict=True`, which transformers' `load_optimizer_distributed` asks for whatever the
    groups are, and the nested one with the optimizer's own groups, which Accelerate asks for. Accelerate expects the
    files in `pytorch_model_fsdp_0` and `optimizer_0`, the weights under `model.`; load them with torch.

    Args:
        output: the directory.
        plan: every tensor in the order in which it will come; main weights have no place.
        optimizer: of the moments.

    Raises:
        CheckpointError: main weights are planned.
    """

    def __init__(self, output: Output, plan: Mapping[Key, TensorMeta], optimizer: OptimizerState | None = None):
        self.plan, self._optimizer = plan, optimizer
        self._missing = dict.fromkeys(plan)
        self._store = StoreWriter(output)
        self._paths: dict[str, tuple[str | int, ...]] = {}
        unknown = [str(key) for key in plan if key.kind not in (WEIGHT, EXP_AVG, EXP_AVG_SQ)]
        if unknown or (optimizer is None and any(key.kind != WEIGHT for key in plan)):
            raise CheckpointError(f"{', '.join(unknown[:5]) or 'Moments without a step'} cannot be stored here.")

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check(key, tensor)
        if key not in self._missing:
            raise CheckpointError(f"{key} came twice.")
        del self._missing[key]
        name = key.name if key.kind == WEIGHT else f"optimizer.state.{key.name}.{key.kind}"
        path = (key.name,) if key.kind == WEIGHT else ("optimizer", "state", key.name, key.kind)
        self._paths[name] = path
        self._store.write_chunk(name, tensor.shape, [0] * tensor.dim(), tensor)

    def finish(self) -> None:
        if self._missing:
            raise CheckpointError(f"{[str(key) for key in self._missing][:5]} were planned and never came.")
        if self._optimizer is not None:
            self._write_settings(self._optimizer)
        self._store.finish(self._paths)

    def _write_settings(self, optimizer: OptimizerState) -> None:
        stepped = [key.name for key in self.plan if key.kind == EXP_AVG]
        groups = [_settings(group) for group in optimizer.hyperparameters] or [_settings({})]
        # Norms and biases are usually those that do not decay.
        order = sorted(range(len(groups)), key=lambda index: float(groups[index]["weight_decay"]))
        members: dict[int, list[str]] = {index: [] for index in range(len(groups))}
        for name in stepped:
            flat = len(self.plan[Key(EXP_AVG, name)].shape) < 2
            group = order[0] if flat else order[-1]
            members[group].append(name)
            step = f"optimizer.state.{name}.step"
            self._paths[step] = ("optimizer", "state", name, "step")
            self._store.write_chunk(step, (), (), torch.tensor(float(optimizer.step)))
            for setting, value in groups[group].items():
                self._object(f"optimizer.param_groups.{name}.{setting}", ("param_groups", name, setting), value)
        for index, settings in enumerate(groups):
            for setting, value in {**settings, "params": members[index]}.items():
                self._object(f"optimizer.param_groups.{index}.{setting}", ("param_groups", index, setting), value)

    def _object(self, name: str, path: tuple[str | int, ...], value: Any) -> None:
        self._paths[name] = ("optimizer", *path)
        self._store.write_object(name, value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Those of AdamW, and where its rate began; a rate that Megatron scales by a factor per group is scaled."""
    settings = {name: group.get(name, default) for name, default in _SETTINGS}
    settings["weight_decay"] = float(settings["weight_decay"]) * float(group.get("wd_mult", 1.0))
    settings["initial_lr"] = group.get("initial_lr", settings["lr"])
    return settings
