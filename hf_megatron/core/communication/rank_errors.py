"""Error propagation across ranks: an error on one rank, or different operations, are raised on all of them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ...errors import CheckpointError, ConfigError, MegatronError


class _Sent(NamedTuple):
    """A rank's value and its operation, which reveals a rank that took part in another collective."""

    doing: str
    value: Any


def rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    """Returns this rank and the world size; `(0, 1)` without a process group."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def gather(
    value: Any,
    group: ProcessGroup | None,
    doing: str,
    *,
    on_first: bool = False,
    error_type: type[MegatronError] = CheckpointError,
) -> list[Any]:
    """Gathers every rank's value on every rank.

    Args:
        doing (`str`): the current operation; its first word must be identical on all ranks, the rest may contain
            rank-specific paths.
        on_first (`bool`): whether to gather on the first rank only; the other ranks get an empty list.
        error_type (`type`, defaults to `CheckpointError`): class of the error; `RankError` for operations that neither
            save nor load.

    Raises:
        MegatronError: another rank is gone, or runs another operation; an `error_type`.
    """
    rank, size = rank_and_size(group)
    if size == 1:
        return [value]
    values: list[Any] = [None] * size if rank == 0 or not on_first else []
    try:
        if on_first:
            dist.gather_object(_Sent(doing, value), values or None, group=group, group_dst=0)
        else:
            dist.all_gather_object(values, _Sent(doing, value), group=group)
    except RuntimeError as error:
        raise error_type(f"{doing}: rank {rank} lost the connection to the other ranks: {error}") from error
    for other, sent in enumerate(values):
        there = sent.doing if isinstance(sent, _Sent) else "another collective"
        if there.partition(" ")[0] != doing.partition(" ")[0]:
            raise error_type(
                f"{doing}: rank {other} of {size} is at another collective: {there}. All ranks must make the same "
                "calls in the same order; check for branches taken, or errors caught, on one rank only."
            )
    return [sent.value for sent in values]


def gather_on_first(value: Any, group: ProcessGroup | None, doing: str) -> list[Any]:
    """Gathers every rank's value on rank 0; the other ranks get an empty list. Raises as `gather`."""
    return gather(value, group, doing, on_first=True)


def raise_on_all_ranks(error: BaseException | None, group: ProcessGroup | None, doing: str) -> None:
    """Raises one `CheckpointError` on all ranks if any of them passes an error instead of `None`."""
    text = None
    if error is not None:
        text = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    texts = gather(text, group, doing)
    failed = [rank for rank, other in enumerate(texts) if other is not None]
    if not failed:
        return
    others = f"rank{'s' if failed[2:] else ''} {', '.join(map(str, failed[1:]))}"
    also = f" ({others} failed too)" if failed[1:] else ""
    raise CheckpointError(f"{doing} failed on rank {failed[0]}: {texts[failed[0]]}{also}") from error


@contextmanager
def propagate_errors(doing: str) -> Iterator[None]:
    """Raises an error of any rank of the default group on all of them at the end, as `raise_on_all_ranks`."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # noqa: BLE001 - the other ranks must receive the error before it is raised
        error = caught
    raise_on_all_ranks(error, None, doing)


def agree(facts: dict[str, Any]) -> None:
    """Checks that `facts` are identical on all ranks; raises `ConfigError` naming the first difference."""
    gathered: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, facts)
    for name in sorted({key for other in gathered for key in other}):
        values = [other.get(name) for other in gathered]
        if any(value != values[0] for value in values):
            listing = ", ".join(f"rank {rank}: {value!r}" for rank, value in enumerate(values))
            raise ConfigError(f"The ranks disagree on {name}: {listing}.")
