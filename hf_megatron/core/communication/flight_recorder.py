"""Exports torch's flight recorder of this rank's collectives as JSON, which is safe to read.

torch records collectives if `TORCH_FR_BUFFER_SIZE` is set: with NCCL hf_megatron sets it when the job starts; with
gloo (torch 2.13) the launch command must. torch's own dumps at NCCL's timeout are pickles for `torchfrtrace`.
"""

import json
from pathlib import Path

import torch.distributed as dist

from ...compat.torch_distributed import flight_record, group_members
from ..io.safe_paths import replace_file

# Value of the file's `kind` field.
FLIGHT_RECORD = "flight record"


def record_path(directory: Path, rank: int) -> Path:
    """Returns the path of a rank's record."""
    return directory / f"rank{rank:05}.json"


def write_flight_record(directory: Path, steps: int, waits: str | None) -> Path | None:
    """Writes this rank's flight record, without a collective; returns the path, `None` if nothing was recorded.

    Args:
        steps (`int`): number of optimizer steps so far.
        waits (`str`, *optional*): the operation in which the main thread waits.
    """
    recorded = flight_record()
    if recorded is None:
        return None
    rank = dist.get_rank()
    record = {
        "kind": FLIGHT_RECORD,
        "rank": rank,
        "ranks": dist.get_world_size(),
        "steps": steps,
        "waits": waits,
        "groups": group_members(),
        "entries": json.loads(recorded)["entries"],
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = record_path(directory, rank)
    replace_file(path, lambda partial: partial.write_text(json.dumps(record), encoding="utf-8"))
    return path
