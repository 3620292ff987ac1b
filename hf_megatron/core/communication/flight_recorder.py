"""What torch's flight recorder has of this rank's collectives, in a file of JSON that holds no code.

torch records them where `TORCH_FR_BUFFER_SIZE` says how many: set up for NCCL when the job starts; on gloo (torch 2.13)
by whoever launches it. Its own dumps at NCCL's timeout are pickles, for torch's `torchfrtrace`.
"""

import json
from pathlib import Path

import torch.distributed as dist

from ...compat.torch_distributed import flight_record, group_members
from ..io.safe_paths import replace_file

# What its file says that it is.
FLIGHT_RECORD = "flight record"


def record_path(directory: Path, rank: int) -> Path:
    """Names the record of a rank."""
    return directory / f"rank{rank:05}.json"


def write_flight_record(directory: Path, steps: int, waits: str | None) -> Path | None:
    """Writes what was recorded of this rank, without a collective; returns the file, `None` where nothing was.

    Args:
        steps (`int`): optimizer steps so far.
        waits (`str`, *optional*): what the main thread waits in.
    """
    recorded = flight_record()
    if recorded is None:
        return None
    rank = dist.get_rank()
    found = {
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
    replace_file(path, lambda partial: partial.write_text(json.dumps(found), encoding="utf-8"))
    return path
