"""Folders of `shard-*.safetensors` as several ranks of transformers write them; they are read as `dcp`."""

from ..dcp.format import FORMAT as DCP
from ..format import Format
from .writer import ShardsWriter

FORMAT = Format(
    name="shards",
    title="transformers' shard-*.safetensors folder",
    marks="shard-*.safetensors",
    files=r"shard-.*",
    recognise=lambda path, names: False,
    open=DCP.open,
    create=lambda output, plan, architecture, options, iteration, optimizer: ShardsWriter(output, plan),
)
