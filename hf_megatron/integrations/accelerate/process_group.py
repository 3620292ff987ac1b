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


# Minimum timeout for joining the job, because ranks start at different times; independent of the collective timeout.
_START_SECONDS = 60.0


# Number of collectives that torch's flight recorder keeps, in host memory.
_RECORDED = "2000"


def ensure_process_group(timeout: float, cpu: bool = False) -> "torch.device":
    """Joins the job's process group through Accelerate's `PartialState`; returns this rank's device.

    Args:
        timeout (`float`): seconds that a collective may take.
        cpu (`bool`, defaults to `False`): whether to use CPUs even if there are accelerators.

    Raises:
        ConfigError: Accelerate's state was created earlier, without joining the job's ranks.
    """
    import torch
    import torch.distributed as dist
    from accelerate import PartialState

    # Groups created from now on get the job's timeout.
    PATCH_REGISTRY.activate()
    for name in ("FSDP", "DEEPSPEED"):
        if os.environ.get(f"ACCELERATE_USE_{name}", "false").lower() in ("true", "1"):
            raise UnsupportedError(
                f"ACCELERATE_USE_{name} is set, but accelerate's {name} plugin cannot be combined with "
                "megatron_config. Launch without the plugin."
            )
    use_cpu = cpu or os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes")
    use_cpu = use_cpu or not torch.accelerator.is_available()
    records = _flight_records(is_nccl=not use_cpu)
    state = PartialState(cpu=use_cpu, timeout=timedelta(seconds=max(timeout, _START_SECONDS)))
    if not dist.is_initialized():
        raise ConfigError(
            "Accelerate's state was created before the model and did not join the job's process group. On CPUs pass "
            "TrainingArguments(use_cpu=True) or Accelerator(cpu=True), or load the model first."
        )
    if dist.get_world_size() > 1:
        from ...core.communication.watchdog import watch_ranks

        # torchrun and accelerate launch host the store in the launcher, which outlives the ranks.
        by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "false").lower() == "true"
        watch_ranks(timeout, store_host=None if by_launcher else 0, records=records)
    # Accelerate returns `cpu:0`, which torch treats as a different device than `cpu`: every weight would be copied.
    return torch.device("cpu") if state.device.type == "cpu" else state.device


def _flight_records(*, is_nccl: bool) -> Path | None:
    """Enables torch's flight recorder for NCCL; returns the folder for the records of a hung job, if any.

    Existing settings are kept. On gloo nothing is recorded unless `TORCH_FR_BUFFER_SIZE` is set.
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
    # Prefix of NCCL's own dump at its timeout; the folder must exist, so it is next to ours and not inside.
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}_nccl_rank"
    return folder


def default_timeout(original: Callable, backend: Any = None) -> timedelta:
    """Returns the job's timeout for groups created without one (meshes, FSDP2), instead of half an hour."""
    from ...core.communication.watchdog import running_watch

    watch = running_watch()
    return original(backend) if watch is None else timedelta(seconds=watch.timeout)
