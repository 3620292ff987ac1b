"""Default process group of a job: backend, timeout and flight recorder."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...compat.patch_registry import PATCH_REGISTRY
from ...errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    import torch


# Ranks start at different times: joining the job gets at least this long, whatever a collective may take.
_START_SECONDS = 60.0


# Collectives that torch's flight recorder keeps, in memory of the host.
_RECORDED = "2000"


def ensure_process_group(timeout: float, cpu: bool = False) -> "torch.device":
    """Joins the job's process group through Accelerate's `PartialState`; returns this rank's device.

    A collective may take `timeout` seconds. With `cpu` the ranks are CPUs where there are accelerators too.

    Raises:
        ConfigError: something created Accelerate's state before, without joining the job's ranks.
    """
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    # Groups that are made from now on have the job's timeout.
    PATCH_REGISTRY.activate()
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise UnsupportedError(
                f"ACCELERATE_USE_{name} is set (accelerate's {name} plugin) beside megatron_config: launch without it."
            )
    use_cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    use_cpu = use_cpu or not torch.accelerator.is_available()
    records = _flight_records(is_nccl=not use_cpu)
    state = PartialState(cpu=use_cpu, timeout=timedelta(seconds=max(timeout, _START_SECONDS)))
    if not dist.is_initialized():
        raise ConfigError(
            "Accelerate's state was created before the model and did not join the job's ranks. On CPUs pass "
            "TrainingArguments(use_cpu=True) or Accelerator(cpu=True), or load the model first."
        )
    if dist.get_world_size() > 1:
        from ...core.communication.watchdog import watch_ranks

        # torchrun and accelerate launch hold the store in the launcher, which outlives the ranks.
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "false").lower() == "true"
        watch_ranks(timeout, store_host=None if by_launcher else 0, records=records)
    # Accelerate says `cpu:0`, which torch takes for another device than `cpu`: every weight would be copied.
    return torch.device("cpu") if state.device.type == "cpu" else state.device


def _flight_records(*, is_nccl: bool) -> Path | None:
    """Has torch record the last collectives of NCCL; returns where records of a job that stands still go.

    What is set already stays. On gloo nothing is recorded unless `TORCH_FR_BUFFER_SIZE` is set.
    """
    size, older = "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"
    if is_nccl and size not in os.environ:
        os.environ[size] = os.environ.get(older, _RECORDED)
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    if os.environ.get(size, "0") == "0":
        return None
    if named := os.environ.get("TORCH_FR_DUMP_TEMP_FILE"):
        return Path(named).parent
    folder = Path(tempfile.gettempdir(), f"hf_megatron_flight_{os.environ.get('MASTER_PORT', 'job')}")
    # What NCCL itself writes at its timeout, into a folder that has to be there.
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}_nccl_rank"
    return folder


def default_timeout(original: Callable, backend: Any = None) -> timedelta:
    """Gives groups made without a timeout of their own (meshes, FSDP2) the job's instead of half an hour."""
    from ...core.communication.watchdog import running_watch

    watch = running_watch()
    return original(backend) if watch is None else timedelta(seconds=watch.timeout)
