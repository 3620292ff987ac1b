"""Writer of torch distributed checkpoints under the model's names in memory."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.io.safetensors import TensorMeta
from ...errors import CheckpointError
from ..interfaces import ADAMW, EXP_AVG, EXP_AVG_SQ, WEIGHT, Key, OptimizerState, Writer
from ..output_folder import Output
from .store_writer import StoreWriter


class DcpWriter(Writer):
    """Writer of checkpoints for `torch.distributed.checkpoint.load(model.state_dict(), checkpoint_id=...)`.

    Moments, steps and settings have the keys of `get_optimizer_state_dict` under `optimizer`, in both forms: flattened
    (`flatten_optimizer_state_dict=True`), which transformers' `load_optimizer_distributed` reads for any groups, and
    nested with the optimizer's own groups, which Accelerate reads. Accelerate expects the files in
    `pytorch_model_fsdp_0` and `optimizer_0`, and the weights under `model.`; load them with torch.

    Raises:
        CheckpointError: main weights are planned, or moments without optimizer state.
    """

    def __init__(self, output: Output, plan: Mapping[Key, TensorMeta], optimizer: OptimizerState | None = None):
        super().__init__(plan)
        self._optimizer = optimizer
        self._store = StoreWriter(output)
        self._paths: dict[str, tuple[str | int, ...]] = {}
        unknown = [str(key) for key in plan if key.kind not in (WEIGHT, EXP_AVG, EXP_AVG_SQ)]
        if unknown or (optimizer is None and any(key.kind != WEIGHT for key in plan)):
            raise CheckpointError(
                f"{', '.join(unknown[:5]) or 'Moments without a step'} cannot be stored in the dcp format."
            )

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check_once(key, tensor)
        path = (key.name,) if key.kind == WEIGHT else ("optimizer", "state", key.name, key.kind)
        name = ".".join(path)
        self._paths[name] = path
        self._store.write_chunk(name, tensor.shape, [0] * tensor.dim(), tensor)

    def finish(self) -> None:
        self.check_complete()
        if self._optimizer is not None:
            self._write_settings(self._optimizer)
        self._store.finish(self._paths)

    def _write_settings(self, optimizer: OptimizerState) -> None:
        groups = [_settings(group) for group in optimizer.hyperparameters] or [_settings({})]
        # Norms and biases usually belong to the group without weight decay.
        order = sorted(range(len(groups)), key=lambda index: float(groups[index]["weight_decay"]))
        members: list[list[str]] = [[] for _ in groups]
        for name in (key.name for key in self.plan if key.kind == EXP_AVG):
            flat = len(self.plan[Key(EXP_AVG, name)].shape) < 2
            group = order[0] if flat else order[-1]
            members[group].append(name)
            step = f"optimizer.state.{name}.step"
            self._paths[step] = ("optimizer", "state", name, "step")
            self._store.write_chunk(step, (), (), torch.tensor(float(optimizer.step)))
            for setting, value in groups[group].items():
                self._object(name, setting, value)
        for index, settings in enumerate(groups):
            for setting, value in {**settings, "params": members[index]}.items():
                self._object(index, setting, value)

    def _object(self, group: str | int, setting: str, value: Any) -> None:
        name = f"optimizer.param_groups.{group}.{setting}"
        self._paths[name] = ("optimizer", "param_groups", group, setting)
        self._store.write_object(name, value)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns AdamW's settings and the initial rate; Megatron's per-group factor is applied to weight decay."""
    settings = {name: group.get(name, default) for name, default in ADAMW.items()}
    settings["weight_decay"] = float(settings["weight_decay"]) * float(group.get("wd_mult", 1.0))
    settings["initial_lr"] = group.get("initial_lr", settings["lr"])
    return settings
