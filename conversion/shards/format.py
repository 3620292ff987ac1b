"""Format entry of `shard-*.safetensors` folders (see the package)."""

from collections.abc import Mapping

from torch import Tensor

from ...core.io.safetensors import SafetensorsWriter, TensorMeta
from ...errors import CheckpointError
from ..dcp.format import FORMAT as DCP
from ..format import Format
from ..interfaces import WEIGHT, Key, Writer
from ..output_folder import Output

FORMAT = Format(
    name="shards",
    title="transformers' shard-*.safetensors folder",
    marks="shard-*.safetensors",
    files=r"shard-.*",
    recognise=lambda path, names: False,
    open=DCP.open,
    create=lambda output, plan, architecture, options, iteration, optimizer: ShardsWriter(output, plan),
)


# The single file of a checkpoint written by one process.
ONLY_SHARD = "shard-00001-model-00001-of-00001.safetensors"


class ShardsWriter(Writer):
    """Writer of such a folder: weights in one file, which `from_pretrained` reads if there is a config.json.

    Raises:
        CheckpointError: moments are planned, which the format cannot hold.
    """

    def __init__(self, output: Output, plan: Mapping[Key, TensorMeta]):
        super().__init__(plan)
        others = [str(key) for key in plan if key.kind != WEIGHT]
        if others:
            raise CheckpointError(f"shard-*.safetensors hold weights only, not {others[0]}.")
        self._stream = SafetensorsWriter(output.create(ONLY_SHARD), {key.name: entry for key, entry in plan.items()})

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check(key, tensor)
        self._stream.write(key.name, tensor)

    def finish(self) -> None:
        self._stream.finish()
