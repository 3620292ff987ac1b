"""Writer of Hugging Face folders: safetensors under the names of the model's files."""

import json
from collections.abc import Mapping

from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor

from ...compat.transformers_loading import conversion_groups, revert_conversion
from ...core.io.safetensors import SafetensorsWriter, TensorMeta
from ...errors import CheckpointError
from ..architecture import Architecture
from ..interfaces import Key, TargetOptions, Writer
from ..output_folder import Output

INDEX = "model.safetensors.index.json"


class HuggingFaceWriter(Writer):
    """Writer of a folder's weights, in files of at most `options.max_shard_size`."""

    def __init__(
        self, output: Output, plan: Mapping[Key, TensorMeta], architecture: Architecture, options: TargetOptions
    ):
        super().__init__(plan)
        self.architecture = architecture
        self._names = architecture.saved_names
        first = {saved: name for name, saved in self._names.items()}
        groups = conversion_groups(architecture.model, [self._names[key.name] for key in plan])
        self._group_of = {first[name]: tuple(first[other] for other in group) for group in groups for name in group}
        self._waiting: dict[str, Tensor] = {}
        files = self._planned_files()
        split = split_torch_state_dict_into_shards(
            {name: entry.meta() for name, entry in files.items()},
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=options.max_shard_size,
        )
        self._streams = {
            name: SafetensorsWriter(output.create(name), {tensor: files[tensor] for tensor in tensors})
            for name, tensors in split.filename_to_tensors.items()
        }
        self._file_of = split.tensor_to_filename
        if split.is_sharded:
            total = sum(entry.numel for entry in files.values())
            content = {"metadata": {"total_parameters": total, **split.metadata}, "weight_map": self._file_of}
            output.add(INDEX, json.dumps(content, indent=2, sort_keys=True) + "\n")

    def _planned_files(self) -> dict[str, TensorMeta]:
        """Plans the content of the files, in the order in which it arrives."""
        files: dict[str, TensorMeta] = {}
        waiting: dict[str, Tensor] = {}
        for key, entry in self.plan.items():
            waiting[key.name] = entry.meta()
            files |= {name: TensorMeta.of(tensor) for name, tensor in self._complete(key.name, waiting).items()}
        if waiting:
            raise CheckpointError(
                f"{', '.join(waiting)} must be stored in one tensor of the file with weights that are missing."
            )
        return files

    def _complete(self, name: str, waiting: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the file tensors of a group once all its weights are present, otherwise nothing."""
        group = self._group_of[name]
        if any(other not in waiting for other in group):
            return {}
        return revert_conversion(self.architecture.model, {self._names[other]: waiting.pop(other) for other in group})

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check(key, tensor)
        self._waiting[key.name] = tensor
        for name, converted in self._complete(key.name, self._waiting).items():
            self._streams[self._file_of[name]].write(name, converted)

    def finish(self) -> None:
        for stream in self._streams.values():
            stream.finish()
