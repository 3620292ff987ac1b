"""Detection of weights that are edited in place between a forward and its backward, which plain torch rejects.

Autograd compares version counters of the tensors that it saved. A DTensor counts edits on itself, while autograd saves
its local tensor; FSDP2 and pipelines compute with copies, or have run the backward before the loop edits a weight.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..compat.torch_dtensor import local_tensor
from ..compat.torch_memory import check_soon


def unedited(parameters: Iterable[nn.Parameter]) -> Callable[[], None]:
    """Returns a function that raises `RuntimeError`, as torch does, if a parameter was edited in place meanwhile.

    It is stricter than torch, which accepts edits of weights whose values the backward does not need, such as biases.
    """
    kept = list(parameters)
    before = _versions(kept)

    def require() -> None:
        present = _versions(kept)
        if present == before:
            return
        edited = [kept[index] for index, version in enumerate(present) if version != before[index]]
        raise _edited(f"a weight of shape {tuple(edited[0].shape)}")

    return require


class Contents:
    """Checksums of the present weights, for gradients that are computed before the training loop can edit a weight.

    Checksums also see edits through `.data`, which no version counter counts, but not a permutation of entries. A step
    reads the weights twice.
    """

    def __init__(self, weights: Iterable[Tensor]):
        self._weights = list(map(local_tensor, weights))
        self._sum = self._added_up()

    @torch.no_grad()
    def _added_up(self) -> Tensor:
        return torch.stack([_sum_bits(weight) for weight in self._weights]) if self._weights else torch.empty(0)

    def check(self, what: str) -> None:
        """Raises `RuntimeError` if a weight has changed; on an accelerator later, so that the host does not wait."""
        if self._weights:
            check_soon(torch.eq(self._added_up(), self._sum).all(), lambda: _edited(what))


_WIDTHS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Bytes of an integer that `sum` adds up without a conversion.
_WORD = 8


def _sum_bits(weight: Tensor) -> Tensor:
    """Returns a sum of a weight's bits as integers, an int64 scalar."""
    bits, size = weight.data, weight.element_size()
    if not bits.is_contiguous() or bits.storage_offset() * size % _WORD:
        return bits.view(_WIDTHS[size]).sum()
    # Several entries in one word: `sum` on a CPU would first copy narrower integers to int64, which takes four times as
    # long and up to eight times the weight's memory.
    bits, in_words = bits.flatten(), bits.numel() * size // _WORD * _WORD // size
    return bits[:in_words].view(torch.int64).sum() + bits[in_words:].view(_WIDTHS[size]).sum()


def _edited(what: str) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{what} was edited between the forward and its backward. Edit weights after backward()."
    )


def _versions(parameters: Sequence[Tensor]) -> list[Any]:
    return [_sharded_version(p) if isinstance(p, DTensor) else p._version for p in parameters]


def _sharded_version(parameter: DTensor) -> tuple[int, ...]:
    # Optimizers edit the local tensor, and `.data = ...` replaces it.
    part = local_tensor(parameter)
    return parameter._version, part._version, part.data_ptr()
