"""Many cases beside each other, each in a process that may have ranks of its own."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..core.fork_harness import make_ready_to_fork


def in_forks(
    function: Callable[..., Any], cases: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[tuple[tuple[Any, ...], Callable[[], Any]]]:
    """Calls a function for each case, several at a time.

    Args:
        function (`Callable`): takes the case's values; what it takes, returns and raises must be picklable.
        cases (`Iterable`): values of each call.
        workers (`int`): forks of this process; one calls the function in this process.

    Yields:
        each case, as soon as it has ended, with a callable that returns what the function did, or raises it.
    """
    if workers == 1:
        yield from ((case, lambda case=case: function(*case)) for case in cases)
        return
    make_ready_to_fork()
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        pending = {pool.submit(function, *case): case for case in cases}
        try:
            for done in concurrent.futures.as_completed(pending):
                yield pending[done], done.result
        finally:
            # The caller may have stopped at one that failed.
            pool.shutdown(cancel_futures=True)
