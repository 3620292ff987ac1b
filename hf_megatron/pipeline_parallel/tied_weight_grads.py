"""Gradients of tied weights, which the first and the last stage of a pipeline both hold."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..compat.shared import Shared
from ..compat.torch_dtensor import local_tensor
from ..core.parameter_walk import list_named_parameters
from ..errors import UnsupportedError
from ..models.spec import module_name
from .split_model import ModelPartition
from .stage_runner import StageRunner


class TiedGradients(Shared):
    """Sums the gradients of tied weights over the two ranks that hold them."""

    def __init__(self, model: Any, cut: ModelPartition, runner: StageRunner):
        self.model, self.cut, self.runner = model, cut, runner
        self.holders = cut.boundary.stages.ends

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Returns the trained parameters that the other end of the pipeline holds too, with their names."""
        return list_trained(self.model, self.cut.tied if self.runner.rank in self.holders else ())

    def parameters(self) -> list[nn.Parameter]:
        """Returns the trained parameters that another rank of the pipeline holds too, or several stages of this one."""
        stages = self.cut.boundary.stages.of_rank(self.runner.rank)
        repeated: list[nn.Parameter] = []
        if len(stages) > 1:
            modules = [nn.ModuleList(self.cut.list_modules(self.model, stage)) for stage in stages]
            repeated = list_shared_parameters([[*list_named_parameters(stage).values()] for stage in modules])
        return [*{id(p): p for p in (*(p for _, p in self.named()), *repeated)}.values()]

    def sum(self) -> None:
        """Adds the gradients of both ends; both end up with the same bits."""
        # The first stage's rank exchanges with the last one's, and the other way round.
        other = self.holders[int(self.runner.rank == self.holders[0])]
        group = self.runner.state.mesh.host_group("pp")
        for index, parameter in enumerate(held_at_either_end(self.model, self.named(), other, group)):
            # The other end has a gradient: both ends send and receive a tensor of the local shape.
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            with self.runner.measure("tied"):
                self.runner.transport.sum_with(local_tensor(parameter.grad), other, index)


def list_trained(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """Returns the trained ones of the named parameters, of any shape, with their names.

    Raises:
        UnsupportedError: if one of them is wrapped by PEFT, which adds parameters of its own at either end.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False)) if names else {}
    if missing := next((name for name in names if name not in parameters), None):
        raise UnsupportedError(
            f"{missing} is tied over two pipeline stages, and an adapter wraps it: each stage would train its own "
            "adapter. Leave its module out of target_modules, or use pp_size=1."
        )
    return [(name, parameters[name]) for name in names if parameters[name].requires_grad]


def list_shared_parameters(stages: Sequence[Sequence[nn.Parameter]]) -> list[nn.Parameter]:
    """Returns the trained parameters, of any shape, that several stages of one rank share.

    V-shaped schedules give a rank both ends of the pipeline. The backward of one stage is then not the last that adds
    to these parameters' gradients.
    """
    counts = Counter(key for stage in stages for key in {id(parameter) for parameter in stage})
    trained = {id(parameter): parameter for stage in stages for parameter in stage if parameter.requires_grad}
    return [parameter for key, parameter in trained.items() if counts[key] > 1]


def held_at_either_end(
    model: Any, named: Sequence[tuple[str, nn.Parameter]], other: int, group: dist.ProcessGroup
) -> list[nn.Parameter]:
    """Returns the parameters of any shape that have a gradient at either end; both ends call it.

    The token embedding has a gradient in every call. Other tied tables, of entities for example, may not be used in a
    call and have no gradient then, as in a single process: an optimizer would update a parameter with a zero gradient.

    Args:
        named: names and parameters, the same at both ends.
        other (`int`): rank of the other end in the group.
        group (`ProcessGroup`): the pipeline's ranks, with a backend for host tensors.
    """
    tokens = model.get_input_embeddings()
    # Its weight, or its trained tokens.
    always = "\0" if tokens is None else f"{module_name(model, tokens)}."
    if all(name.startswith(always) for name, _ in named):
        return [parameter for _, parameter in named]
    # One flag per parameter, exchanged between the two ends: [parameters].
    flags = [name.startswith(always) or parameter.grad is not None for name, parameter in named]
    local = torch.tensor(flags, dtype=torch.uint8)
    remote = torch.empty_like(local)
    for work in [dist.isend(local, group=group, group_dst=other), dist.irecv(remote, group=group, group_src=other)]:
        assert work is not None
        work.wait()
    is_held = (local | remote).tolist()
    return [parameter for (_, parameter), held in zip(named, is_held, strict=True) if held]
