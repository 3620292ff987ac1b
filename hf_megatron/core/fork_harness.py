"""Runs a function on several ranks that are forked from this process.

This process has already imported torch and transformers; a fork starts in milliseconds, a fresh interpreter takes
seconds. Process groups exist only in the forks, and every call creates new forks: the function may be a closure and
may leave any state in its process.
"""

import contextlib
import functools
import gc
import importlib
import importlib.util
import io
import os
import re
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..compat.ecosystem import forget_accelerate_state
from ..compat.patch_registry import PATCH_REGISTRY
from ..errors import RankError
from .io.safe_paths import replace_file

# Seconds that the other ranks have to fail on their own after one rank failed, before they are killed.
_GRACE_SECONDS = 10.0

# Modules that torch, transformers and this library import lazily: imported before the fork, so that no rank repeats
# it.
_LAZY_IMPORTS = (
    "torch._dynamo",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.replicate_with_fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining",
    "accelerate",
    "transformers.modelcard",
    "transformers.modeling_layers",
    "transformers.modeling_utils",
    "transformers.training_args",
    "hf_megatron.core.communication.watchdog",
    "hf_megatron.conversion",
    "hf_megatron.data_parallel.untracked_leaves",
    "hf_megatron.parallelize",
)
# Cached functions: called once before the fork, so that no rank has to repeat them.
_CACHED = (
    ("hf_megatron.models.registry", "registered_types"),
    ("hf_megatron.compat.transformers_loading", "build_weight_conversions"),
    ("hf_megatron.model_cards.card", "card_template"),
)
# Optional packages that transformers imports when it saves a model.
_OPTIONAL_IMPORTS = ("peft",)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    device: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on `world_size` forked ranks of a job, with one CPU thread each.

    Args:
        function (`Callable`): runs on every rank; its result must be picklable, and tensors in it are moved to the
            CPU.
        world_size (`int`): number of ranks.
        timeout (`float`, defaults to 120): seconds until all ranks are killed.
        device (`str`, defaults to `"cpu"`): `"cpu"` (gloo) or `"cuda"` (NCCL). With fewer GPUs than ranks, ranks share
            GPUs. This process must not have initialized CUDA, as forks could not use it then.

    Returns:
        `list`: each rank's result, in rank order.

    Raises:
        RankError: one or more ranks failed or got stuck; contains the traceback of each failed rank.
    """

    def on_rank() -> Any:
        result = function(*args, **kwargs)
        if device == "cuda":
            # Pending sends would be lost when the rank exits.
            torch.cuda.synchronize()
            # Use a host barrier: after a device barrier, a rank may exit before another rank's barrier has completed.
            dist.barrier(dist.new_group(backend="gloo"))
        return result

    def join(rank: int, directory: Path) -> None:
        store = dist.FileStore(str(directory / "store"), world_size)
        backend = "gloo"
        if device == "cuda":
            backend, gpus = "nccl", torch.cuda.device_count()
            torch.cuda.set_device(rank % gpus)
            set_gpu_environment(rank, world_size, gpus)
            # cuDNN defaults to TF32 (10-bit mantissas), but results are compared with a CPU's.
            torch.backends.cudnn.allow_tf32 = False
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        # Otherwise a rank without work could exit before the others have connected to it.
        dist.barrier(device_ids=[torch.cuda.current_device()] if device == "cuda" else None)

    return run_forks(on_rank, range(world_size), world_size, join, timeout)


def run_forks(
    function: Callable[[], Any],
    ranks: Sequence[int],
    world_size: int,
    join: Callable[[int, Path], None],
    timeout: float,
) -> list[Any]:
    """Calls a function on forked ranks of a job; returns results and raises errors as `run_ranks`.

    Args:
        ranks: ranks of the job to fork.
        join (`Callable`): creates the process group; called with the rank and an empty folder that all ranks share.
    """
    make_ready_to_fork()
    directory = Path(tempfile.mkdtemp(prefix="hf_megatron_ranks_"))
    processes: dict[int, int] = {}
    try:
        for rank in ranks:
            process = os.fork()
            if process == 0:
                _be_rank(function, rank, world_size, directory, join)
            processes[rank] = process
        stuck = _wait(processes, directory, timeout)
        return _collect(directory, ranks, stuck, timeout)
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        shutil.rmtree(directory, ignore_errors=True)


@functools.cache
def make_ready_to_fork() -> None:
    """Runs the imports and cached functions once that every fork would otherwise repeat."""
    installed = [name for name in _OPTIONAL_IMPORTS if importlib.util.find_spec(name) is not None]
    for name in (*_LAZY_IMPORTS, *installed):
        importlib.import_module(name)
    for module_name, function_name in _CACHED:
        getattr(importlib.import_module(module_name), function_name)()
    PATCH_REGISTRY.import_replacements()


def leave_parents_objects() -> None:
    """Excludes the parent's objects from this fork's garbage collection, which would copy their memory pages."""
    gc.freeze()


def _be_rank(
    function: Callable[[], Any], rank: int, world_size: int, directory: Path, join: Callable[[int, Path], None]
) -> None:
    """Runs the function in the fork, writes its result, and exits the process."""
    status = 1
    try:
        leave_parents_objects()
        torch.set_num_threads(1)
        set_rank_environment(rank, world_size)
        forget_accelerate_state()
        join(rank, directory)
        result = function()
        try:
            outcome = _written((True, result))
            status = 0
        except Exception:
            outcome = _written((False, f"the result cannot be pickled:\n{traceback.format_exc()}"))
    except BaseException:
        outcome = _written((False, traceback.format_exc()))
    try:
        replace_file(directory / f"rank{rank}", lambda path: path.write_bytes(outcome))
    finally:
        # Skips the interpreter's and the test runner's exit handlers, which belong to the parent.
        os._exit(status)


def _written(outcome: tuple[bool, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(outcome, buffer)
    return buffer.getvalue()


def _wait(processes: dict[int, int], directory: Path, timeout: float) -> list[int]:
    """Waits for all ranks; returns those still running at the timeout, or after a failure and the grace period."""
    deadline = time.monotonic() + timeout
    running = dict(processes)
    while running and time.monotonic() < deadline:
        for rank, process in list(running.items()):
            finished, status = os.waitpid(process, os.WNOHANG)
            if finished:
                del running[rank]
                del processes[rank]
                if status != 0:
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        time.sleep(0.005)
    return sorted(running)


def _collect(directory: Path, ranks: Sequence[int], stuck: list[int], timeout: float) -> list[Any]:
    results, failures = [], []
    for rank in ranks:
        file = directory / f"rank{rank}"
        if rank in stuck:
            failures.append(
                f"rank {rank} was stuck and killed (time limit {timeout:g} s, {_GRACE_SECONDS:g} s after a failure)"
            )
        elif not file.exists():
            failures.append(f"rank {rank} died without a result")
        else:
            # A tensor on a GPU would initialize CUDA in this process, after which its forks could not use it.
            ok, value = torch.load(file, map_location="cpu", weights_only=False)
            if ok:
                results.append(value)
            else:
                failures.append(f"rank {rank} failed:\n{value}")
    if failures:
        raise RankError("\n".join(failures))
    return results


def find_unsupported_reason(text: str) -> str | None:
    """Returns the first error message of this library in the text of a `RankError`; `None` if there is none."""
    reasons = re.findall(r"^hf_megatron\.errors\.\w+: (.*)$", text, re.MULTILINE)
    return reasons[0] if reasons else None


_PEER_FAILED = "Connection closed by peer"


def first_reason(text: str) -> str:
    """Returns the last line of the first rank that failed with an error of this library, else of the first rank.

    A rank that lost the connection to its peer is named last: it reports where it waited, not what failed.
    """
    ranks = [[line for line in rank.splitlines() if line.strip().strip("^~ ")] for rank in text.split("\nrank ")]
    last = [lines[-1].strip() for lines in ranks if lines]
    named = [line for line in last if line.startswith("hf_megatron.errors.")]
    own = [line for line in last if _PEER_FAILED not in line]
    return (named or own or last)[0].removeprefix("hf_megatron.errors.")[:300]


def set_rank_environment(rank: int, world_size: int) -> None:
    """Sets the environment variables that a launcher would set for this rank; used by the fork harness."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
        # Without an interface, gloo resolves this host's name, which may time out.
        GLOO_SOCKET_IFNAME="lo",
        # Independent of whether the host has accelerators.
        ACCELERATE_USE_CPU="true",
    )


def set_gpu_environment(rank: int, world_size: int, gpus: int) -> None:
    """Sets the environment of a rank from `set_rank_environment` to use a GPU.

    NCCL does not support two ranks of one host on one GPU. Ranks that share a GPU get different host ids, and
    communicate through sockets.
    """
    os.environ["ACCELERATE_USE_CPU"] = "false"
    if gpus < world_size:
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", LOCAL_RANK=str(rank % gpus)
        )
