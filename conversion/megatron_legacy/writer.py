"""Writer of Megatron's legacy `torch` format: shards each tensor and appends the shards to the files of their ranks."""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...core.io.safetensors import TensorMeta
from ...errors import CheckpointError
from ..interfaces import WEIGHT, Key, MegatronModel, TargetOptions, Writer
from ..megatron.folder import TRACKER, folder_name, tracker_text
from ..megatron.names import (
    EMBEDDING,
    EXPERTS,
    LAYER,
    OUTPUT,
    build_local_expert_name,
    extra_states,
    is_encoder_weight,
    is_mtp_name,
    local,
)
from ..megatron.sizes import check_sizes
from ..megatron.splits import RankSplit, blocks_of, rank_views, tensor_parallel_split
from ..output_folder import Output
from ..torch_files.archive_writer import ArchiveWriter, StorageSlot
from .ranks import FILE, Rank, all_ranks, rank_folder


@dataclass
class _Shard:
    """A shard with the same bytes in the files of one or several ranks.

    Attributes:
        expert: index in the global tensor, `None` for the full tensor.
        blocks: lengths of the blocks that ranks split separately.
        tp: tensor-parallel rank of the shard.
        names: name of the tensor in each of these files.
    """

    split: RankSplit | None
    expert: int | None
    tp: int
    names: dict[Rank, str]
    blocks: tuple[int, ...]
    slots: dict[Rank, int] = field(default_factory=dict)

    def pieces(self, tensor: Tensor, size: int) -> tuple[Tensor, ...]:
        """Returns the shard's bytes as consecutive tensors `[rows, ...]`."""
        unsharded = tensor if self.expert is None else tensor[self.expert]
        if self.split is None:
            return (unsharded.contiguous(),)
        views = rank_views(unsharded, self.split, self.tp, size, self.blocks)
        if self.split.dim == 0:
            return tuple(view.contiguous() for view in views)
        return (torch.cat(views, self.split.dim),)


class MegatronLegacyWriter(Writer):
    """A checkpoint for Megatron-LM's `--ckpt-format torch`, without optimizer state and RNG states.

    Megatron-LM needs `--no-load-optim --no-load-rng` to load it unless it is a release.

    Args:
        options: numbers of ranks; the layers must divide evenly over the pipeline stages.
        iteration: optimizer steps of the run; `None` writes a release.
        local_names: use the names of Megatron-Core's local layers instead of TransformerEngine's.
        grouped_experts: use the names of TEGroupedMLP instead of SequentialMLP's; `None` follows `local_names`.
        expert_tp_size: tensor-parallel ranks that share an expert: 1, or `None` for all of them.

    Raises:
        CheckpointError: naming sizes that do not divide, or a tensor that Megatron-Core does not have.
    """

    def __init__(
        self,
        output: Output,
        plan: Mapping[Key, TensorMeta],
        model: MegatronModel,
        options: TargetOptions,
        iteration: int | None = None,
        local_names: bool = False,
        grouped_experts: bool | None = None,
        expert_tp_size: int | None = None,
    ):
        super().__init__(plan)
        self._model, self._options = model, options
        self._local = local_names
        self._grouped = not local_names if grouped_experts is None else grouped_experts
        self._sizes = Rank(options.tp_size, options.pp_size, options.ep_size)
        self._ranks = list(all_ranks(self._sizes))
        self._expert_tp = self._sizes.tp if expert_tp_size is None else expert_tp_size
        check_sizes(model, options, plan)
        if self._expert_tp not in (1, options.tp_size):
            raise CheckpointError(f"expert_tp_size {self._expert_tp} is neither 1 nor tp_size {options.tp_size}.")
        self._shards = {key: self._plan(key, entry) for key, entry in plan.items()}
        models, folder = self._models(), folder_name(iteration)
        content = {"args": self._arguments(), "checkpoint_version": 3.0, "iteration": iteration or 0}
        output.add(TRACKER, tracker_text(iteration))
        self._files: dict[Rank, ArchiveWriter] = {}
        for rank, weights in models.items():
            file = output.create(f"{folder}/{rank_folder(rank, self._sizes)}/{FILE}")
            self._files[rank] = ArchiveWriter(file, {**content, "model": weights})

    def _plan(self, key: Key, entry: TensorMeta) -> list[_Shard]:
        """Returns the shards of a tensor, with the files they are written to."""
        if key.kind != WEIGHT:
            raise CheckpointError(
                f"{key}: the legacy format is written without optimizer state. Leave it out, or write torch_dist."
            )
        split = tensor_parallel_split(key.name)
        if split is not None and split.replicated_in_te and not self._local:
            split = None
        size, experts = self._sizes.tp, EXPERTS in key.name
        if experts and self._expert_tp == 1:
            split = None
        blocks = blocks_of(key.name, split, entry.shape[split.dim] if split is not None else 0, self._model)
        if split is not None:
            try:
                rank_views(entry.meta(), split, 0, size, blocks)
            except CheckpointError as error:
                raise CheckpointError(f"{key}, tp_size {size}: {error}") from error
        if experts and entry.shape[0] % self._sizes.ep:
            raise CheckpointError(f"{key}: {entry.shape[0]} experts are not divisible by ep_size {self._sizes.ep}.")
        indices: Iterable[int | None] = range(entry.shape[0]) if experts else (None,)
        if experts and split is not None:
            split = split.without_expert_dim()
        shards = []
        for expert in indices:
            places = list(self._places(key.name, expert, entry))
            for tp in range(size if split is not None else 1):
                names = {rank: name for rank, name in places if split is None or rank.tp == tp}
                shards.append(_Shard(split, expert, tp, names, blocks))
        return shards

    def _places(self, name: str, expert: int | None, entry: TensorMeta) -> Iterator[tuple[Rank, str]]:
        """Yields the ranks that hold a tensor, and its local name."""
        last = self._sizes.pp - 1
        match = LAYER.match(name)
        stage, local_name = last, name
        if match and not is_mtp_name(match[1]):
            # The module name before "layers", after a possible language model prefix.
            layers = self._model.num_layers_per_block[match[1].split(".")[-3]]
            number, of_stage = int(match[2]), layers // self._sizes.pp
            if number >= layers:
                raise CheckpointError(f"{name}: the layer index is out of range, num_layers is {layers}.")
            stage = number // of_stage
            local_name = f"{match[1]}{number % of_stage}.{name[match.end() :]}"
        elif is_encoder_weight(name) or name.startswith(f"{self._model.prefix}embedding."):
            stage = 0
        if self._local:
            local_name = local(local_name)
        eps = range(self._sizes.ep)
        if expert is not None:
            of_rank = entry.shape[0] // self._sizes.ep
            eps = range(expert // of_rank, expert // of_rank + 1)
            local_name = build_local_expert_name(local_name, expert % of_rank, self._grouped)
        for tp, ep in product(range(self._sizes.tp), eps):
            yield Rank(tp, stage, ep), local_name
            # language_module.py: with tied embeddings the last stage has its own copy.
            if name == self._embedding and stage != last and self._tied:
                yield Rank(tp, last, ep), self._output

    @property
    def _embedding(self) -> str:
        return self._model.prefix + EMBEDDING

    @property
    def _output(self) -> str:
        return self._model.prefix + OUTPUT

    @property
    def _tied(self) -> bool:
        return Key(WEIGHT, self._output) not in self.plan

    def _models(self) -> dict[Rank, OrderedDict[str, Any]]:
        """Returns each rank's dict of weights; storages are numbered in the order in which they are written."""
        models: dict[Rank, OrderedDict[str, Any]] = {rank: OrderedDict() for rank in self._ranks}
        for key, shards in self._shards.items():
            for shard in shards:
                pieces = shard.pieces(self.plan[key].meta(), self._sizes.tp)
                shape = list(pieces[0].shape)
                if shard.split is not None and shard.split.dim == 0:
                    shape[0] = sum(piece.shape[0] for piece in pieces)
                entry = TensorMeta(tuple(shape), self.plan[key].dtype)
                for rank, name in shard.names.items():
                    shard.slots[rank] = len(models[rank])
                    models[rank][name] = StorageSlot(shard.slots[rank], entry)
        for rank, model in models.items():
            last, prefix = rank.pp == self._sizes.pp - 1, self._model.prefix
            model.update(dict.fromkeys(extra_states(model, self._local, last, prefix)))
        return models

    def _arguments(self) -> Namespace:
        """Returns Megatron-LM's arguments; it checks some of them when loading (training/checkpointing.py)."""
        tp, pp, ep = self._sizes
        arguments = dict(self._model.arguments)
        if unfit := next((name for name, value in arguments.items() if not _is_plain(value)), None):
            raise CheckpointError(f"The argument {unfit} is {arguments[unfit]!r}: expected a plain value.")
        arguments |= {
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "virtual_pipeline_model_parallel_size": None,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": self._expert_tp,
            "context_parallel_size": 1,
            "data_parallel_size": 1,
            "use_distributed_optimizer": False,
            "ckpt_format": "torch",
            "transformer_impl": "local" if self._local else "transformer_engine",
            "untie_embeddings_and_output_weights": not self._tied,
            "make_vocab_size_divisible_by": self._options.make_vocab_size_divisible_by,
        }
        if any(EXPERTS in key.name for key in self.plan):
            arguments["moe_grouped_gemm"] = self._grouped
        if embedding := self.plan.get(Key(WEIGHT, self._embedding)):
            arguments["padded_vocab_size"] = embedding.shape[0]
        return Namespace(**arguments)

    def write(self, key: Key, tensor: Tensor) -> None:
        self.check_once(key, tensor)
        for shard in self._shards[key]:
            pieces = shard.pieces(tensor, self._sizes.tp)
            for rank, number in shard.slots.items():
                self._files[rank].append(number, pieces)

    def finish(self) -> None:
        if self._missing:
            raise CheckpointError(
                f"{next(iter(self._missing))} and {len(self._missing) - 1} others were planned but not written."
            )
        for file in self._files.values():
            file.finish()


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for pair in value.items() for each in pair)
    if isinstance(value, (list, tuple)):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))
