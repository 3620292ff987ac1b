"""Which weights that both ends of a pipeline hold have a gradient at either of them."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import UnsupportedError
from ..models.spec import module_name


def trained_of(model: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Parameter]]:
    """Lists the trained ones of parameters that two ranks hold, of any shape, with their names.

    Raises:
        UnsupportedError: one of them lies in a module of PEFT's, which has further parameters.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False)) if names else {}
    if missing := next((name for name in names if name not in parameters), None):
        raise UnsupportedError(
            f"{missing} is held by two stages of the pipeline, and an adapter was put around it, of which each would "
            "train its own. Leave its module out of target_modules, or load the model with pp_size=1."
        )
    return [(name, parameters[name]) for name in names if parameters[name].requires_grad]


def of_several_stages(stages: Sequence[Sequence[nn.Parameter]]) -> list[nn.Parameter]:
    """Lists the trained parameters, of any shape, that several stages of one rank have, as both ends of V-shaped ones.

    The backward of one of these is not the last that adds to their gradients.
    """
    counts = Counter(key for stage in stages for key in {id(parameter) for parameter in stage})
    found = {id(parameter): parameter for stage in stages for parameter in stage if parameter.requires_grad}
    return [parameter for key, parameter in found.items() if counts[key] > 1]


def held_at_either_end(
    model: Any, named: Sequence[tuple[str, nn.Parameter]], other: int, group: dist.ProcessGroup
) -> list[nn.Parameter]:
    """Lists the parameters of any shape that have a gradient here or at the other end, where both ends ask.

    A table of tokens has one in every call. Others, of entities for one, may be read by no part of it, and have none
    then, as in one process: an optimizer would move what it is given zeros for.

    Args:
        named: names and parameters, the same at both ends.
        other (`int`): rank of the other end in the group.
        group (`ProcessGroup`): the pipeline's ranks, taking tensors on the host.
    """
    tokens = model.get_input_embeddings()
    always = None if tokens is None else f"{module_name(model, tokens)}.weight"
    if all(name == always for name, _ in named):
        return [parameter for _, parameter in named]
    own = torch.tensor([name == always or parameter.grad is not None for name, parameter in named], dtype=torch.uint8)
    others = torch.empty_like(own)
    for work in [dist.isend(own, group=group, group_dst=other), dist.irecv(others, group=group, group_src=other)]:
        assert work is not None
        work.wait()
    is_held = (own | others).tolist()
    return [parameter for (_, parameter), held in zip(named, is_held, strict=True) if held]
