"""PEFT's dicts of parameters by adapter, where their values are DTensors."""

import torch.distributed as dist
from torch import Tensor, nn

from ...tensor_parallel.local_parameters import ActiveForwards, local_view


class LocalDict(nn.ParameterDict):
    """Parameters of any shape that are local tensors in forwards, their gradients summed over a group of ranks."""

    forwards: ActiveForwards
    group: dist.ProcessGroup | None

    def __getitem__(self, key: str) -> Tensor | None:
        parameter = super().__getitem__(key)
        return local_view(parameter, self.group) if self.forwards else parameter
