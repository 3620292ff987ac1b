"""What several tests compare with: runs in one process, of which each is made once."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_megatron.core.fork_harness import run_ranks


def in_one_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `function(*args, **kwargs)` returns on a single rank, or did when it was last asked; not to be changed."""
    call = (function, args, tuple(sorted(kwargs.items())))
    try:
        hash(call)
    except TypeError:
        return _result.__wrapped__(*call)
    return _result(*call)


@functools.cache
def _result(function: Callable[..., Any], args: tuple, kwargs: tuple) -> Any:
    [result] = run_ranks(function, 1, *args, timeout=200, **dict(kwargs))
    return result


def trained_alone(train: Callable[..., Any], path: Path, *args: Any, **kwargs: Any) -> Any:
    """`in_one_process` of `train(path, output, None, *args, **kwargs)`, whose output folder nobody sees."""
    return in_one_process(_train_with, train, path, *args, **kwargs)


def _train_with(train: Callable[..., Any], path: Path, *args: Any, **kwargs: Any) -> Any:
    with tempfile.TemporaryDirectory() as output:
        return train(path, Path(output), None, *args, **kwargs)
