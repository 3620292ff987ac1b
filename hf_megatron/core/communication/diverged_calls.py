"""Ranks that wait for each other in different calls, such as `generate()` on one rank during a training step.

No collective reports this: each rank waits for a message that the others will only send afterwards, until the timeout.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from .call_stack import COLLECTIVE_CALLS

# Seconds in one call of a collective after which a rank counts as blocked: longer than the transfer of a tensor, and
# short enough to be noticed within ten seconds.
BLOCKED_SECONDS = 4.0
# The same if some ranks may only wait for a slow network, which may carry gigabytes or lose its connection for a while.
SLOW_SECONDS = 60.0


def describe_diverged_calls(beats: Mapping[int, Mapping[str, Any]], ended: Iterable[int]) -> str | None:
    """Returns an error text if no rank can continue because ranks are in different calls, otherwise `None`.

    At least one rank must be in one of `COLLECTIVE_CALLS`, every other rank must be blocked in communication or have
    ended, and they must not all be in the same call.

    Args:
        beats: rank -> its last heartbeat; of all ranks.
        ended: ranks whose script has ended.
    """
    ended = set(ended)
    running = {rank: beat for rank, beat in beats.items() if rank not in ended}
    shortest = min((beat["blocked_seconds"] for beat in running.values()), default=0.0)
    if shortest <= BLOCKED_SECONDS:
        return None
    calls: dict[str, list[int]] = {}
    lines: dict[str, str] = {}
    for rank, beat in running.items():
        name, line = beat["call"]
        calls.setdefault(name, []).append(rank)
        lines.setdefault(name, line)
    alone = min((name for name in calls if name in COLLECTIVE_CALLS), key=lambda name: len(calls[name]), default=None)
    if alone is None or (len(calls) == 1 and not ended):
        return None
    if shortest <= SLOW_SECONDS and _find_unfinished(running):
        return None
    places = [f"{_ranks(ranks)} in {name}() ({lines[name] or 'no user code'})" for name, ranks in calls.items()]
    if ended:
        places.append(f"{_ranks(sorted(ended))} at the end of the script")
    text = (
        f"The ranks are in different calls and wait for each other: {', '.join(places)}. Call {alone}() on every rank, "
        "and use its result on one."
    )
    if alone == "from_pretrained":
        text += " To load a stock model on one rank, call it inside hf_megatron.load_unsharded()."
    return text


def _find_unfinished(beats: Mapping[int, Mapping[str, Any]]) -> set[int]:
    """Returns blocked ranks that may wait for each other only, and so for the network: all of them are in one call."""
    left = set(beats)

    def may_finish(rank: int) -> bool:
        peers = {other for other in left if other != rank and beats[other]["call"][0] == beats[rank]["call"][0]}
        waited = beats[rank]["waited_ranks"]
        return bool(peers) if waited is None else set(waited) - {rank} <= peers

    while stuck := {rank for rank in left if not may_finish(rank)}:
        left -= stuck
    return left


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if ranks[1:] else ''} {', '.join(map(str, ranks))}"
