"""Reader of Megatron's legacy `torch` format: merges the ranks' local tensors into global ones."""

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ...errors import CheckpointError
from ..interfaces import WEIGHT, Key, MegatronModel, MegatronReader
from ..megatron.folder import RELEASE
from ..megatron.names import EMBEDDING, LAYER, OUTPUT, canonical, is_encoder_weight, is_mtp_name, split_expert_name
from ..megatron.splits import blocks_of, tensor_parallel_split
from ..torch_files.torch_save import StoredTensor
from .pre_core import grouped_by_head, reorder_encoder_qkv
from .rank_merge import MergedTensor, RankShard
from .ranks import Rank, RankFile, Ranks


class MegatronLegacyReader(MegatronReader):
    """A checkpoint that Megatron-LM saved with `--ckpt-format torch`, or before other formats existed.

    Layers are numbered in pipeline order from the number of layers on each stage, so uneven and virtual stages need no
    additional arguments. If several ranks hold a tensor, the first rank's is read and the others are compared with it.

    Attributes:
        arguments: Megatron-LM's arguments of the first rank, as far as the checkpoint has them.

    Raises:
        CheckpointError: naming a folder, file or tensor that is missing, unknown or inconsistent.
    """

    def __init__(self, path: str | Path, model: MegatronModel):
        self._ranks = Ranks.open(path, model.block)
        self._model = model
        self._merged: dict[str, MergedTensor] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        first = self._ranks.first
        self.arguments = first.arguments
        self.iteration = None if self._ranks.folder.name == RELEASE else first.iteration
        self.optimizer_unsupported_reason = _optimizer_unsupported_reason(self._ranks)
        self._collect()
        self._untie()
        self.entries = {Key(WEIGHT, name): tensor.entry() for name, tensor in self._merged.items()}
        for key, entry in self.entries.items():
            # Applied to meta tensors, so that wrong sizes are found before anything is read.
            self._in_order(key.name, entry.meta())

    def _collect(self) -> None:
        """Visits all stages in layer order (transformer_layer.py, get_transformer_layer_offset)."""
        ranks = self._ranks
        virtual = {len(file.chunks) for file in ranks.files.values()}
        if len(virtual) != 1:
            raise CheckpointError(f"{ranks.folder}: the ranks have different numbers of virtual stages: {virtual}.")
        layers = 0
        for chunk in range(virtual.pop()):
            for pp in range(ranks.sizes.pp):
                stage = {rank: file for rank, file in ranks.files.items() if rank.pp == pp}
                layers += self._collect_stage(stage, chunk, layers)
        _same(ranks.folder, "num_layers", self._model.num_layers, layers)

    def _collect_stage(self, stage: Mapping[Rank, RankFile], chunk: int, offset: int) -> int:
        """Collects the tensors of one stage, and returns its number of layers."""
        first = stage[min(stage)]
        keys = first.chunks[chunk].keys()
        for file in stage.values():
            if different := sorted(keys ^ file.chunks[chunk].keys()):
                raise CheckpointError(f"{file.path} and {first.path} have different tensors: {different[0]}.")
        main = f"{self._model.prefix}{self._model.block}.layers."
        blocks: dict[str, set[int]] = {main: set()}
        for key in keys:
            if (match := LAYER.match(key)) and not is_mtp_name(match[1]):
                blocks.setdefault(match[1], set()).add(int(match[2]))
        for layer_indices in map(sorted, blocks.values()):
            if layer_indices != list(range(len(layer_indices))):
                raise CheckpointError(
                    f"{first.path}: its layer indices are {layer_indices}, expected consecutive ones from 0."
                )
        if offset and len(blocks) > 1:
            raise CheckpointError(
                f"{first.path}: the layers of {', '.join(blocks)} on a later pipeline stage cannot be determined."
            )
        named = {_global_name(key, offset): key for key in keys}
        experts: dict[str, dict[int | None, str]] = {}
        for name, key in named.items():
            if expert_key := split_expert_name(name):
                experts.setdefault(expert_key[0], {})[expert_key[1]] = key
        for name, key in named.items():
            if expert_key := split_expert_name(name):
                if of_experts := experts.pop(expert_key[0], None):
                    self._add(expert_key[0], self._merge_experts(expert_key[0], stage, chunk, of_experts))
            else:
                final = canonical(name, named)
                self._add(final, self._dense(final, stage, chunk, key))
        # Without layers in the main block (another model type), the names are rejected later.
        return len(blocks[main] or max(blocks.values(), key=len))

    def _add(self, name: str, tensor: MergedTensor) -> None:
        there = self._merged.setdefault(name, tensor)
        if there is tensor:
            return
        if name != self._model.prefix + EMBEDDING:
            raise CheckpointError(f"{name} is on two pipeline stages: {there.pieces[0][0]} and {tensor.pieces[0][0]}.")
        # multi_token_prediction.py: a stage with MTP layers has a copy of the embedding.
        there.copies += [*tensor.copies, *zip(there.pieces[0], tensor.pieces[0], strict=True)]

    def _dense(self, name: str, stage: Mapping[Rank, RankFile], chunk: int, key: str) -> MergedTensor:
        try:
            split = tensor_parallel_split(name)
        except CheckpointError as error:
            raise CheckpointError(f"{stage[min(stage)].path}: {error}") from error
        if split is not None and split.replicated_in_te and _is_replicated(key, stage[min(stage)].chunks[chunk]):
            split = None
        of_tp: dict[int, list[RankShard]] = {}
        for rank, file in sorted(stage.items()):
            of_tp.setdefault(rank.tp, []).append(RankShard(file, chunk, key))
        copies = [(pieces[0], other) for pieces in of_tp.values() for other in pieces[1:]]
        firsts = [of_tp[tp][0] for tp in sorted(of_tp)]
        if split is None:
            copies += [(firsts[0], other) for other in firsts[1:]]
            firsts = firsts[:1]
        return MergedTensor(split, False, [firsts], copies)

    def _merge_experts(
        self, name: str, stage: Mapping[Rank, RankFile], chunk: int, keys: Mapping[int | None, str]
    ) -> MergedTensor:
        """Merges all experts of a layer, in the order of the expert-parallel ranks."""
        split = tensor_parallel_split(name)
        split = split.without_expert_dim() if split is not None else None
        tensors = stage[min(stage)].chunks[chunk]
        local: list[tuple[str, tuple[int, int] | None]]
        if None in keys:
            router = keys[None].partition(".experts.")[0] + ".router.weight"
            if len(keys) > 1 or router not in tensors or tensors[router].shape[0] % self._ranks.sizes.ep:
                raise CheckpointError(
                    f"{keys[None]} in {stage[min(stage)].path}: the number of experts cannot be determined."
                )
            count = tensors[router].shape[0] // self._ranks.sizes.ep
            local = [(keys[None], (index, count)) for index in range(count)]
        else:
            expert_indices = sorted(number for number in keys if number is not None)
            if expert_indices != list(range(len(expert_indices))):
                raise CheckpointError(
                    f"{stage[min(stage)].path}: the expert indices of {name} are {expert_indices}, expected "
                    "consecutive ones "
                    "from 0."
                )
            local = [(keys[number], None) for number in expert_indices]
        merged = MergedTensor(split, True, [])
        for ep in range(self._ranks.sizes.ep):
            files = [file for rank, file in sorted(stage.items()) if rank.ep == ep]
            for key, expert in local:
                pieces = [RankShard(file, chunk, key, expert) for file in files]
                if split is None or self._ranks.expert_tp == 1:
                    merged.copies += [(pieces[0], other) for other in pieces[1:]]
                    pieces = pieces[:1]
                merged.pieces.append(pieces)
        return merged

    def _untie(self) -> None:
        """Removes the last stage's copy of tied embeddings (language_module.py)."""
        name = "untie_embeddings_and_output_weights"
        untied = self._model.arguments.get(name, self.arguments.get(name, False))
        first, last = self._model.prefix + EMBEDDING, self._model.prefix + OUTPUT
        if untied or last not in self._merged or first not in self._merged:
            return
        copy = self._merged.pop(last)
        embedding = self._merged[first]
        embedding.copies += [*copy.copies, *zip(embedding.pieces[0], copy.pieces[0], strict=True)]

    def read(self, key: Key) -> Tensor:
        merged = self._merged[key.name]
        length = merged.piece_length * len(merged.pieces[0])
        blocks = blocks_of(key.name, merged.split, length, self._model)
        return self._in_order(key.name, merged.read(key.name, blocks, self.memory))

    def _in_order(self, name: str, tensor: Tensor) -> Tensor:
        """Reorders a tensor of any shape from the checkpoint's version to Megatron-Core's order."""
        first = self._ranks.first
        if ".self_attention.linear_qkv." not in name or ".layer_norm_" in name:
            return tensor
        try:
            if is_encoder_weight(name):
                return reorder_encoder_qkv(tensor, first.version)
            return grouped_by_head(tensor, first.version, self._model.arguments, self._ranks.sizes.tp, self.memory)
        except CheckpointError as error:
            raise CheckpointError(f"{first.path}: {name}: {error}") from error

    def close(self) -> None:
        self._ranks.close()


def _global_name(key: str, offset: int) -> str:
    """Returns the name with the global layer index; `mtp` layers have global indices already."""
    match = LAYER.match(key)
    if match is None:
        return key
    rest = key[match.end() :]
    if is_mtp_name(match[1]):
        return f"{match[0]}{rest.replace('mtp_model_layer.', 'transformer_layer.', 1)}"
    return f"{match[1]}{int(match[2]) + offset}.{rest}"


def _is_replicated(key: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Returns whether a down projection is replicated: it is then at least as wide as the input of the up projection.

    For keys and values the output is strictly wider, as it includes the rotary part.
    """
    up = tensors.get(key.replace("_down_proj", "_up_proj"))
    if up is None or len(up.shape) != 2:
        raise CheckpointError(f"{key} has no matching up projection.")
    out_features = tensors[key].shape[0]
    return out_features > up.shape[1] if "linear_kv" in key else out_features >= up.shape[1]


def _same(folder: Path, name: str, expected: object, actual: object) -> None:
    if expected != actual:
        raise CheckpointError(f"{folder}: {name} is {actual}, but {expected} in the model.")


def _optimizer_unsupported_reason(ranks: Ranks) -> str | None:
    if not any(file.optimizer for file in ranks.files.values()):
        return None
    return (
        f"{ranks.folder}: optimizer state of the legacy format is indexed by parameter or stored in flat buffers. Load "
        "the checkpoint in Megatron-LM and save it with --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable"
    )
