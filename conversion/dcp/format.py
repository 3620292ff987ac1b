"""Format entry of torch distributed checkpoints (see the package)."""

from collections.abc import Sequence
from pathlib import Path

from ..architecture import Architecture, OwnWeights
from ..format import Format
from ..shards.reader import SHARD
from .reader import DcpReader
from .store_reader import METADATA
from .writer import DcpWriter


def _recognise(path: Path, names: Sequence[str]) -> bool:
    of_accelerate = (path / name / METADATA for name in names if name.startswith("pytorch_model_fsdp"))
    return METADATA in names or any(map(SHARD.fullmatch, names)) or any(file.exists() for file in of_accelerate)


def _open(path: Path, architecture: Architecture, verify: bool) -> DcpReader:
    reader = DcpReader(path, architecture.saved_names, architecture.first_name, architecture.most_stored)
    if architecture.ties_always and (names := tuple(reader.different_copies())):
        reader.close()
        raise OwnWeights(str(path), names)
    return reader


FORMAT = Format(
    name="dcp",
    title="torch DCP under Hugging Face names",
    marks=f"{METADATA} or shard-*.safetensors",
    files=r".*\.distcp",
    recognise=_recognise,
    open=_open,
    create=lambda output, plan, architecture, options, iteration, optimizer: DcpWriter(output, plan, optimizer),
    moments=True,
)
