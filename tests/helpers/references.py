"""Cached single-process reference runs shared by several tests."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hf_megatron.core.fork_harness import run_ranks


def run_single_process(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns the result of `function(*args, **kwargs)` on a single rank, cached if hashable; do not modify it."""
    call = (function, args, tuple(sorted(kwargs.items())))
    try:
        hash(call)
    except TypeError:
        return _run_cached.__wrapped__(*call)
    return _run_cached(*call)


@functools.cache
def _run_cached(function: Callable[..., Any], args: tuple, kwargs: tuple) -> Any:
    [result] = run_ranks(function, 1, *args, timeout=200, **dict(kwargs))
    return result


def train_single_process(train: Callable[..., Any], path: Path, *args: Any, **kwargs: Any) -> Any:
    """Returns the cached single-process result of `train(path, output, None, *args, **kwargs)`.

    The output folder is temporary.
    """
    return run_single_process(_train_in_temporary_folder, train, path, *args, **kwargs)


def _train_in_temporary_folder(train: Callable[..., Any], path: Path, *args: Any, **kwargs: Any) -> Any:
    with tempfile.TemporaryDirectory() as output:
        return train(path, Path(output), None, *args, **kwargs)
