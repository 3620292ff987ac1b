"""Checkpoints of every readable format with unique entries, and readers by other libraries.

Every entry of a model and of its moments has a unique value. The values that another library reads from a damaged
checkpoint therefore identify the weights, in any order (`Made.wanted`).
"""

import contextlib
import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hf_megatron.checkpoint.manifest import MANIFEST, ChunkEntry, Manifest, TensorEntry
from hf_megatron.checkpoint.tensor_chunks import TensorChunk
from hf_megatron.conversion import convert
from hf_megatron.conversion.dcp.store_writer import StoreWriter
from hf_megatron.conversion.interfaces import TargetOptions
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.io.checksums import hash_file
from tests.helpers.megatron_pre_core import extract_gpt2_weights, write_checkpoint

Tensors = Mapping[str, Tensor]
FIRST, STEPS = 1000, 7
CARD = """---
license: apache-2.0
language:
- en
tags:
- text-generation
base_model: some/model
---

# A model

| loss | 1.5 |
"""


@dataclass(frozen=True)
class SourceCheckpoint:
    """Undamaged checkpoint.

    Attributes:
        peer: Reads every stored chunk of a tensor with other libraries, under a unique name.
        content: Result of `peer` for this checkpoint.
        expected: Tensors written by a conversion, by target format.
    """

    folder: Path
    peer: Callable[[Path], Tensors]
    content: Tensors
    expected: Mapping[str, Tensors]

    def wanted(self, content: Tensors, to: str) -> Tensors | None:
        """Returns the tensors to write for changed `content`; `None` if its shapes differ or copies conflict."""
        if _describe_tensors(content) != _describe_tensors(self.content):
            return None
        before, after = _flatten_fp32(self.content), _flatten_fp32(content).view(torch.int32)
        values, order = before.sort(stable=True)
        tensors = {}
        for name, tensor in self.expected[to].items():
            low, high = torch.searchsorted(values, tensor), torch.searchsorted(values, tensor, right=True)
            entries = after[order[low]]
            for copy in range(1, int((high - low).max())):
                if not torch.equal(after[order[torch.minimum(low + copy, high - 1)]], entries):
                    return None
            tensors[name] = entries.view(torch.float32)
        return tensors


def _describe_tensors(content: Tensors) -> dict[str, Any]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in content.items()}


def _flatten_fp32(content: Tensors) -> Tensor:
    return torch.cat([content[name].flatten() for name in sorted(content) if content[name].dtype == torch.float32])


def tensors_equal(found: Tensors, expected: Tensors) -> bool:
    """Returns whether names, shapes, dtypes and bytes are equal."""
    return found.keys() == expected.keys() and all(
        (found[name].shape, found[name].dtype) == (tensor.shape, tensor.dtype)
        and torch.equal(
            found[name].contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8)
        )
        for name, tensor in expected.items()
    )


def fill_with_integers(tensors: Tensors, first: int = FIRST) -> int:
    """Fills tensors with consecutive integers, exact in fp32; returns the next integer."""
    for tensor in tensors.values():
        tensor.copy_(torch.arange(first, first + tensor.numel()).view(tensor.shape))
        first += tensor.numel()
    return first


# Readers by other libraries


def read_hf(path: Path) -> Tensors:
    """Reads a Hugging Face folder by its index."""
    kind = "model.safetensors" if any(path.glob("model*.safetensors*")) else "pytorch_model.bin"
    index = path / f"{kind}.index.json"
    named = json.loads(index.read_text("utf-8"))["weight_map"] if index.exists() else None
    files = {kind} if named is None else set(named.values())
    load = load_file if kind.endswith("s") else torch.load
    tensors = {file: load(path / file) for file in files}
    if named is None:
        return tensors[kind]
    return {name: tensors[file][name] for name, file in named.items()}


def read_store(path: Path) -> Tensors:
    reader = dcp.FileSystemReader(path)
    items = reader.read_metadata().state_dict_metadata
    # NaN marks entries that are not stored.
    tensors = {
        name: torch.full(item.size, torch.nan).to(item.properties.dtype)
        for name, item in items.items()
        if hasattr(item, "size")
    }
    try:
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    except dcp.api.CheckpointException:
        # Tensors that a conversion does not read may be unreadable.
        tensors = {
            name: _read_store_tensor(path, name, torch.full_like(tensor, torch.nan)) for name, tensor in tensors.items()
        }
    return tensors


def _read_store_tensor(path: Path, name: str, tensor: Tensor) -> Tensor:
    with contextlib.suppress(dcp.api.CheckpointException):
        dcp.load({name: tensor}, storage_reader=dcp.FileSystemReader(path), no_dist=True)
    return tensor


def read_megatron_core(path: Path) -> Tensors:
    tensors = read_store(path / f"iter_{int((path / TRACKER).read_text()):07d}")
    # Excludes the fp32 copies: they duplicate the weights.
    return {name: tensor for name, tensor in tensors.items() if ".fp32_param." not in name and ".param." not in name}


def read_accelerate(path: Path) -> Tensors:
    return read_store(path / "pytorch_model_fsdp_0")


def read_megatron_legacy(path: Path) -> Tensors:
    """Reads Megatron's legacy format: the local tensors of every rank."""
    iteration = (path / TRACKER).read_text().strip()
    folder = path / (iteration if iteration == "release" else f"iter_{int(iteration):07d}")
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("mp_rank_*/model_optim_rng.pt")):
        _collect(file.parent.name, torch.load(file, weights_only=False)["model"], tensors)
    return tensors


def _collect(name: str, value: Any, found: dict[str, Tensor]) -> None:
    for key, inner in value.items():
        if isinstance(inner, Tensor):
            found[f"{name}/{key}"] = inner
        elif isinstance(inner, dict):
            _collect(f"{name}/{key}", inner, found)


def read_shards(path: Path) -> Tensors:
    tensors: dict[str, Tensor] = {}
    for file in sorted(path.glob("shard-*.safetensors")):
        with safe_open(file, "pt") as opened:
            places = json.loads((opened.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in opened.keys():  # noqa: SIM118 - it is no table
                offsets = places.get(name, {}).get("saved_offsets", [0] * len(opened.get_slice(name).get_shape()))
                _add_unique(tensors, f"{name}@{offsets}", opened.get_tensor(name))
    return tensors


def read_manifest(path: Path) -> Tensors:
    tensors: dict[str, Tensor] = {}
    for name, entry in json.loads((path / MANIFEST).read_text("utf-8"))["tensors"].items():
        for chunk in entry["pieces"]:
            tensor = load_file(path / chunk["file"])[chunk["key"]]
            assert str(tensor.dtype) == f"torch.{entry['dtype']}"
            _add_unique(
                tensors, f"{name} {entry['shape']} {json.dumps(chunk['boxes'], sort_keys=True)}", tensor.flatten()
            )
    return tensors


def _add_unique(found: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    while name in found:
        name += "'"
    found[name] = tensor


def read_converted(path: Path, to: str) -> Tensors:
    """Reads the result of a conversion, without step counts."""
    if to == "dcp":
        return {name: tensor for name, tensor in read_store(path).items() if not name.endswith(".step")}
    tensors: dict[str, Tensor] = {}
    for file in path.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


# Checkpoints

TRACKER = "latest_checkpointed_iteration.txt"
PEERS: Mapping[str, Callable[[Path], Tensors]] = {
    **dict.fromkeys(("hf", "hf_one", "bin", "old_bin"), read_hf),
    "dcp": read_store,
    "fsdp": read_accelerate,
    "megatron_core": read_megatron_core,
    "megatron_legacy": read_megatron_legacy,
    "before_core": read_megatron_legacy,
    "shards": read_shards,
    "sharded": read_manifest,
}
WITH_MOMENTS = ("dcp", "sharded", "megatron_core")


@torch.no_grad()
def make_checkpoints(folder: Path) -> dict[str, SourceCheckpoint]:
    """Writes a tiny Llama in every format, and a GPT-2 in a pre-Megatron-Core format."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    weights = dict(model.named_parameters())
    next_value = fill_with_integers(weights)
    moments = {
        f"optimizer.state.{name}.{kind}": torch.empty_like(tensor)
        for kind in ("exp_avg", "exp_avg_sq")
        for name, tensor in weights.items()
    }
    fill_with_integers(moments, next_value)
    model.save_pretrained(folder / "hf", max_shard_size="20KB")
    model.save_pretrained(folder / "hf_one")
    (folder / "hf" / "README.md").write_text(CARD)
    for name in ("hf", "hf_one"):
        (folder / name / "tokenizer_config.json").write_text('{"model_max_length": 64}')
    _write_bin(folder, dict(weights))
    steps = {f"optimizer.state.{name}.step": torch.tensor(float(STEPS)) for name in weights}
    for name, tensors in (("dcp", {**weights, **moments, **steps}), ("fsdp/pytorch_model_fsdp_0", weights)):
        _write_store(folder / name, {f"{'model.' * ('fsdp' in name)}{key}": value for key, value in tensors.items()})
    _write_shards(folder / "shards", weights)
    for name in ("dcp", "fsdp", "shards"):
        shutil.copy(folder / "hf" / "config.json", folder / name)
    convert(folder / "dcp", folder / "sharded", "sharded")
    _split_chunks(folder / "sharded")
    convert(folder / "dcp", folder / "megatron_core", "megatron_core")
    convert(folder / "hf", folder / "megatron_legacy", "megatron_legacy", options=TargetOptions(tp_size=2, pp_size=2))
    _write_pre_core(folder)
    return {name: _make_source(folder / name, name) for name in PEERS}


def _make_source(folder: Path, name: str) -> SourceCheckpoint:
    expected = {}
    for to in ("hf", "dcp") if name in WITH_MOMENTS else ("hf",):
        convert(folder, folder.parent / "written", to)
        expected[to] = read_converted(folder.parent / "written", to)
        shutil.rmtree(folder.parent / "written")
    source = SourceCheckpoint(folder, PEERS[name], PEERS[name](folder), expected)
    for to in expected:
        entries = torch.cat([tensor.flatten() for tensor in expected[to].values()])
        assert entries.unique().numel() == entries.numel() and entries.min() >= FIRST
        tensors = source.wanted(source.content, to)
        assert tensors is not None and tensors_equal(tensors, expected[to]), name
    return source


def _write_bin(folder: Path, weights: dict[str, Tensor]) -> None:
    for name in ("bin", "old_bin"):
        (folder / name).mkdir()
        shutil.copy(folder / "hf" / "config.json", folder / name)
    weights = {name: tensor.detach().clone() for name, tensor in weights.items()}
    torch.save(weights, folder / "old_bin" / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    names, weight_map = list(weights), {}
    for index, part in enumerate((names[::2], names[1::2])):
        file = f"pytorch_model-{index + 1:05d}-of-00002.bin"
        torch.save({name: weights[name] for name in part}, folder / "bin" / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "bin" / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _write_store(folder: Path, tensors: Tensors) -> None:
    """Writes a store of two chunks per tensor, as two ranks would."""
    with Output(folder) as output:
        store = StoreWriter(output)
        for name, tensor in tensors.items():
            for start, part in enumerate(tensor.detach().chunk(2) if tensor.dim() else [tensor]):
                offsets = [start * part.shape[0], *[0] * (part.dim() - 1)] if part.dim() else []
                store.write_chunk(name, tensor.shape, offsets, part.contiguous())
        store.finish({name: tuple(name.split(".")) if "optimizer" in name else (name,) for name in tensors})


def _write_shards(folder: Path, weights: Tensors) -> None:
    """Writes two files with matrices split along alternating dims and 1-dim tensors replicated."""
    folder.mkdir()
    for rank in range(2):
        parts, places = {}, {}
        for index, (name, tensor) in enumerate(weights.items()):
            dim = index % 2
            parts[name] = tensor.detach()
            if tensor.dim() > 1:
                parts[name] = parts[name].chunk(2, dim)[rank].contiguous()
                offsets = [0, 0]
                offsets[dim] = rank * parts[name].shape[dim]
                places[name] = {"saved_offsets": offsets}
        file = folder / f"shard-{rank + 1:05d}-model-{rank + 1:05d}-of-00002.safetensors"
        save_file(parts, file, {"format": "pt", "DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0"})


def _split_chunks(folder: Path) -> None:
    """Moves every other row to the file of a second rank, which gives strided chunks."""
    manifest = Manifest.load(folder)
    tensors, files = {}, dict(manifest.files)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, entry in manifest.tensors.items():
        (chunk,) = entry.pieces
        tensor = load_file(folder / chunk.file)[chunk.key].view(entry.shape)
        chunk_entries = []
        for rank in range(2):
            rows = range(rank, entry.shape[0], 2)
            chunks = tuple(TensorChunk((row, *[0] * (tensor.dim() - 1)), (1, *entry.shape[1:])) for row in rows)
            file = f"rank{rank}-{chunk.file}"
            parts.setdefault(file, {})[chunk.key] = tensor[rank::2].flatten().clone()
            chunk_entries.append(ChunkEntry(file, chunk.key, chunks))
        tensors[name] = TensorEntry(entry.shape, entry.dtype, tuple(chunk_entries))
    for file in {chunk.file for entry in manifest.tensors.values() for chunk in entry.pieces}:
        (folder / file).unlink()
        del files[file]
    for file, content in parts.items():
        save_file(content, folder / file)
        files[file] = hash_file(folder / file)
    changed = Manifest(2, manifest.metadata, files, tensors)
    (folder / MANIFEST).write_text(json.dumps(changed.to_dict()))
    (folder / "conversion.json").unlink()


def _write_pre_core(folder: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=16))
    fill_with_integers(dict(model.named_parameters()))
    model.save_pretrained(folder / "gpt2")
    weights = extract_gpt2_weights(model)
    megatron_args = vars(Namespace(num_layers=2, hidden_size=32, num_attention_heads=4, max_position_embeddings=16))
    write_checkpoint(folder / "before_core", weights, "2021", 2.0, tp=2, args=megatron_args)
    shutil.copy(folder / "gpt2" / "config.json", folder / "before_core")
