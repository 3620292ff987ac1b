"""Format entry of this library's sharded checkpoints (see the package)."""

from ...checkpoint.manifest import MANIFEST
from ..format import Format
from .reader import ShardedReader
from .writer import ShardedWriter

FORMAT = Format(
    name="sharded",
    title="hf_megatron sharded checkpoint",
    marks=MANIFEST,
    files=r"(shard|random|data)-.*|loop\..*|manifest\.json|latest",
    recognise=lambda path, names: MANIFEST in names,
    open=ShardedReader,
    create=lambda output, plan, architecture, options, iteration, optimizer: ShardedWriter(
        output, plan, architecture, iteration, optimizer
    ),
    moments=True,
    main_weights="narrower",
    card="sharded",
)
