"""Weights that a loop edits in place between a forward and its backward, for which one process raises.

torch compares the version counters of what it saved. A DTensor counts edits on itself, while its local part is saved;
FSDP2 and pipelines compute with copies, or have computed everything when the loop edits.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.torch_dtensor import local_tensor
from ..compat.torch_memory import check_soon


class PartVersions:
    """Has the local parts of split weights count the edits that their DTensors have counted."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes note of edits of parameters of any shape since the last call, before a forward or backward."""
        for parameter in parameters:
            if isinstance(parameter, DTensor):
                version = parameter._version
                if self._seen.setdefault(id(parameter), version) != version:
                    self._seen[id(parameter)] = version
                    torch.autograd.graph.increment_version(local_tensor(parameter))


def unedited(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Returns what raises `RuntimeError`, as torch does, once one of the parameters of any shape was edited in place.

    It refuses more than torch, which goes on where backward does not need the values of a weight, as of biases.
    """
    kept = list(parameters)
    before = list(map(_version, kept))

    def require() -> None:
        edited = [parameter for parameter, version in zip(kept, before, strict=True) if _version(parameter) != version]
        if edited:
            raise _edited(f"a weight of shape {tuple(edited[0].shape)}")

    return require


class Contents:
    """The bits of weights as they are now, added up: for gradients that are computed before a loop can edit a weight.

    Edits through `.data` count nowhere. Reading the weights twice in a step is little beside computing with them; an
    exchange of entries with each other is not seen.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self._weights = list(map(local_tensor, weights))
        self._sum = self._added_up()

    def _added_up(self) -> Tensor:
        return torch.stack([_bits(weight).sum() for weight in self._weights]) if self._weights else torch.empty(0)

    def check(self, what: str) -> None:
        """Raises `RuntimeError`, on an accelerator without waiting for it, where a weight is no longer what it was."""
        if self._weights:
            check_soon(torch.eq(self._added_up(), self._sum).all(), lambda: _edited(what))


_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def _bits(weight: Tensor) -> Tensor:
    return weight.data.view(_WIDTHS[weight.element_size()])


def _edited(what: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} was edited between the forward and its backward. Edit weights after backward()."
    )


def _version(parameter: Tensor) -> tuple[int, ...]:
    if not isinstance(parameter, DTensor):
        return (parameter._version,)
    # Optimizers edit the part, and `.data = ...` exchanges it.
    part = local_tensor(parameter)
    return parameter._version, part._version, part.data_ptr()
