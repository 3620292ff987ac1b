"""Runs a function on several ranks that are forked from this process.

This process has imported torch and transformers already; a fork starts in milliseconds where a fresh interpreter takes
seconds. Process groups exist only in the forks, and every call has forks of its own: what runs in them may be a closure
and may leave anything behind.
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
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..compat.ecosystem import forget_accelerate_state
from ..compat.patch_registry import PATCH_REGISTRY
from ..errors import RankError
from .io.safe_paths import replace_file

# After one rank failed, the others get this long to fail on their own before they are killed.
_GRACE_SECONDS = 10.0

# Imported by torch, transformers and this library when first used: by each rank again, unless they are here already.
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
# Functions that cache their result: called once before the fork, so that no rank has to repeat them.
_CACHED = (
    ("hf_megatron.models.registry", "registered_types"),
    ("hf_megatron.compat.transformers_loading", "build_weight_conversions"),
    ("hf_megatron.model_cards.card", "card_template"),
)
# Extras that transformers imports when it saves a model.
_OPTIONAL_IMPORTS = ("peft",)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    device: str = "cpu",
    **kwargs: Any,
) -> list[Any]:
    """Calls `function(*args, **kwargs)` on `world_size` forked ranks of a job, one thread each.

    Args:
        function (`Callable`): runs on every rank; what it returns must be picklable; its tensors are handed over in
            the memory of the CPU.
        world_size (`int`): ranks.
        timeout (`float`, defaults to 120): seconds until all ranks are killed.
        device (`str`, defaults to `"cpu"`): the ranks' own, over gloo; or `"cuda"`, over NCCL. Where there are fewer
            GPUs than ranks, some share one. This process must not have used a GPU before: forks cannot use it then.

    Returns:
        `list`: each rank's result, in the order of ranks.

    Raises:
        RankError: with the traceback of every rank that failed, and the names of those that were stuck.
    """

    def on_rank() -> Any:
        result = function(*args, **kwargs)
        if device == "cuda":
            # What a rank has only begun to send would end with it.
            torch.cuda.synchronize()
            # On the hosts: a rank that has left a barrier of devices may be gone before another's has ended.
            dist.barrier(dist.new_group(backend="gloo"))
        return result

    def join(rank: int, directory: Path) -> None:
        store = dist.FileStore(str(directory / "store"), world_size)
        backend = "gloo"
        if device == "cuda":
            backend, gpus = "nccl", torch.cuda.device_count()
            torch.cuda.set_device(rank % gpus)
            set_gpu_environment(rank, world_size, gpus)
            # Sums of products of ten bits each, by default, are compared with a CPU's.
            torch.backends.cudnn.allow_tf32 = False
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
        # A rank that has nothing to do would be gone before others are connected to it.
        dist.barrier(device_ids=[torch.cuda.current_device()] if device == "cuda" else None)

    return run_forks(on_rank, range(world_size), world_size, join, timeout)


def run_forks(
    function: Callable[[], Any],
    ranks: Sequence[int],
    world_size: int,
    join: Callable[[int, Path], None],
    timeout: float,
) -> list[Any]:
    """Calls a function on forks that each are a rank of a job; results and errors as of `run_ranks`.

    Args:
        ranks: of the job, one fork for each.
        join (`Callable`): (rank, an empty folder that all of them share) makes the process group.
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
    """Imports and builds once what every fork of this process would by itself."""
    installed = [name for name in _OPTIONAL_IMPORTS if importlib.util.find_spec(name) is not None]
    for name in (*_LAZY_IMPORTS, *installed):
        importlib.import_module(name)
    for module_name, function_name in _CACHED:
        getattr(importlib.import_module(module_name), function_name)()
    PATCH_REGISTRY.import_replacements()


def leave_parents_objects() -> None:
    """Keeps this fork's collector off the objects of the process it came from: looking at them copies their pages."""
    gc.freeze()


def _be_rank(
    function: Callable[[], Any], rank: int, world_size: int, directory: Path, join: Callable[[int, Path], None]
) -> None:
    """Runs the function in the fork, writes what it returned, and never returns itself."""
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
    """Waits for all ranks; returns those still running when time, or patience after a failure, ran out."""
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
            # A tensor on a GPU would have this process use it, after which no fork of it could.
            ok, value = torch.load(file, map_location="cpu", weights_only=False)
            if ok:
                results.append(value)
            else:
                failures.append(f"rank {rank} failed:\n{value}")
    if failures:
        raise RankError("\n".join(failures))
    return results


def find_unsupported_reason(text: str) -> str | None:
    """Returns the reason of this library's that is the last line of a rank of a `RankError`; `None` without one."""
    reasons = re.findall(r"^hf_megatron\.errors\.\w+: (.*)$", text, re.MULTILINE)
    return reasons[0] if reasons else None


def first_reason(text: str) -> str:
    """Returns the last line of the rank that gave a reason of this library's, else of the first, of a `RankError`."""
    ranks = [[line for line in rank.splitlines() if line.strip().strip("^~ ")] for rank in text.split("\nrank ")]
    last = [lines[-1].strip() for lines in ranks if lines]
    named = [line for line in last if line.startswith("hf_megatron.errors.")]
    return (named or last)[0].removeprefix("hf_megatron.errors.")[:300]


if TYPE_CHECKING:
    pass


def set_rank_environment(rank: int, world_size: int) -> None:
    """Exports what a launcher would for this rank; used by the fork harness of `hf_megatron.testing`."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        OMP_NUM_THREADS="1",
        # Without a name gloo asks the resolver for this host's address, which may not answer.
        GLOO_SOCKET_IFNAME="lo",
        # Whether or not there are accelerators beside them.
        ACCELERATE_USE_CPU="true",
    )


def set_gpu_environment(rank: int, world_size: int, gpus: int) -> None:
    """Makes a rank of `set_rank_environment` one on a GPU.

    NCCL refuses two ranks of one host on one GPU. Ranks that share one are given hosts of their own, which talk through
    sockets.
    """
    os.environ["ACCELERATE_USE_CPU"] = "false"
    if gpus < world_size:
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", LOCAL_RANK=str(rank % gpus)
        )
