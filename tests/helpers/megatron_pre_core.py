"""Checkpoints in Megatron-LM's formats before Megatron-Core, written with plain torch from tiny transformers models.

Released files are not available in tests, so each format follows the history of Megatron-LM and not the reader:

    2019   one flat table: `megatron/model/gpt2_modeling.py`, commit b886b7bb
    2020   `language_model` -> `embedding`, `transformer`; layers have `attention`: `gpt2_model.py`, commit 197c132e
    2021   `transformer` became `encoder`, `attention` `self_attention`: `bert_model.py`, commit 02fffd29, and
           `language_model.py`, commit 01e9ce60
    2023   `layernorm` became `norm`: `megatron/legacy/model`, commit 00caa53a

The row order of the packed query, key and value depends on the checkpoint version (`megatron/checkpointing.py`, commit
0229a695, `_transpose_first_dim`) and matches the split in the forward of `megatron/model/transformer.py`. With np heads
of hn channels on a tensor-parallel rank, it is [3, np, hn] in version 0, [np, hn, 3] in 1.0 and [np, 3, hn] from 2.0.
"""

from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FILE = "model_optim_rng.pt"
# Weight, and bias if there is one.
Module = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Era:
    """Module names of a format; `nested` dicts were introduced with `language_model`."""

    block: str
    attention: str
    norm: str
    nested: bool = True


ERAS = {
    "2019": Era("transformer", "attention", "layernorm", nested=False),
    "2020": Era("transformer", "attention", "layernorm"),
    "2021": Era("encoder", "self_attention", "layernorm"),
    "2023": Era("encoder", "self_attention", "norm"),
}


@dataclass
class Layer:
    """Modules of a layer; weights are `[out, in]`, query is `[heads * channels, hidden]`."""

    input_norm: Module
    query: Module
    key: Module
    value: Module
    dense: Module
    post_attention_norm: Module
    up: list[Module]
    down: Module


@dataclass
class ModelWeights:
    """Weights of a full model; `up` of a layer is one linear, or the gate and up of a gated activation."""

    heads: int
    groups: int
    embeddings: dict[str, Tensor]
    layers: list[Layer]
    final_norm: Module
    output: Tensor | None = None
    lm_head: dict[str, Module] = field(default_factory=dict)
    lm_bias: Tensor | None = None
    pooler: Module | None = None
    binary_head: Module | None = None


def _module(module: Any) -> Module:
    return module.weight.detach(), getattr(module, "bias", None) if module.bias is None else module.bias.detach()


def extract_gpt2_weights(model: Any) -> ModelWeights:
    """Extracts the weights of a GPT2LMHeadModel, whose Conv1D weights are `[in, out]`."""

    def transpose(module: Any) -> Module:
        return module.weight.detach().T, module.bias.detach()

    layers = []
    for block in model.transformer.h:
        weight, bias = transpose(block.attn.c_attn)
        packed = list(zip(weight.chunk(3), bias.chunk(3), strict=True))
        up, down = [transpose(block.mlp.c_fc)], transpose(block.mlp.c_proj)
        layers.append(Layer(_module(block.ln_1), *packed, transpose(block.attn.c_proj), _module(block.ln_2), up, down))
    words, places = model.transformer.wte.weight.detach(), model.transformer.wpe.weight.detach()
    heads = model.config.n_head
    return ModelWeights(heads, heads, {"word": words, "position": places}, layers, _module(model.transformer.ln_f))


def extract_bert_weights(model: Any) -> ModelWeights:
    """Extracts the weights of a MegatronBertForPreTraining."""
    layers = []
    for block in model.bert.encoder.layer:
        attention, out = block.attention.self, block.attention.output
        packed = [_module(linear) for linear in (attention.query, attention.key, attention.value)]
        up, down = [_module(block.intermediate.dense)], _module(block.output.dense)
        layers.append(Layer(_module(block.attention.ln), *packed, _module(out.dense), _module(block.ln), up, down))
    tables, head = model.bert.embeddings, model.cls.predictions
    embeddings = {
        "word": tables.word_embeddings.weight.detach(),
        "position": tables.position_embeddings.weight.detach(),
        "tokentype": tables.token_type_embeddings.weight.detach(),
    }
    return ModelWeights(
        model.config.num_attention_heads,
        model.config.num_attention_heads,
        embeddings,
        layers,
        _module(model.bert.encoder.ln),
        lm_head={"dense": _module(head.transform.dense), "norm": _module(head.transform.LayerNorm)},
        lm_bias=head.bias.detach(),
        pooler=_module(model.bert.pooler.dense),
        binary_head=_module(model.cls.seq_relationship),
    )


def extract_llama_weights(model: Any) -> ModelWeights:
    """Extracts the weights of a LlamaForCausalLM, whose norms and linears have no biases."""

    def weight(module: Any) -> Module:
        return module.weight.detach(), None

    layers = []
    for block in model.model.layers:
        attention, mlp = block.self_attn, block.mlp
        packed = [weight(linear) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)]
        up, down = [weight(mlp.gate_proj), weight(mlp.up_proj)], weight(mlp.down_proj)
        norms = weight(block.input_layernorm), weight(block.post_attention_layernorm)
        layers.append(Layer(norms[0], *packed, weight(attention.o_proj), norms[1], up, down))
    words, config = {"word": model.model.embed_tokens.weight.detach()}, model.config
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    return ModelWeights(heads, groups, words, layers, weight(model.model.norm), output=model.lm_head.weight.detach())


def pack_qkv(query: Tensor, key: Tensor, value: Tensor, heads: int, groups: int, version: float) -> Tensor:
    """Packs the local query, key and value `[heads * channels, ...]` of a tensor-parallel rank."""
    if version == 0:
        return torch.cat([query, key, value])
    if version == 1:
        # Interleaves single rows: one row each of query, key and value.
        return torch.stack([row for rows in zip(query, key, value, strict=True) for row in rows])
    packed = []
    for queries, one_key, one_value in zip(query.chunk(groups), key.chunk(groups), value.chunk(groups), strict=True):
        packed += [queries, one_key, one_value]
    return torch.cat(packed)


class Writer:
    """Content of the file of one tensor- and pipeline-parallel rank.

    Args:
        rows: Padded vocabulary size; the padding is nonzero, as after training.
    """

    def __init__(
        self, parts: ModelWeights, era: Era, version: float, tp: tuple[int, int], pp: tuple[int, int], rows: int
    ):
        self.parts, self.era, self.version, self.rows = parts, era, version, rows
        (self.rank, self.size), (self.stage, self.stages) = tp, pp

    def _shard(self, weight: Tensor) -> Tensor:
        """Returns the local shard of a ColumnParallelLinear's weight or bias (`megatron/mpu/layers.py`)."""
        return weight.chunk(self.size)[self.rank]

    def _shard_vocabulary(self, tensor: Tensor) -> Tensor:
        padding = torch.full((self.rows - len(tensor), *tensor.shape[1:]), 7.0, dtype=tensor.dtype)
        return self._shard(torch.cat([tensor, padding])).clone()

    @staticmethod
    def _put(table: dict[str, Any], name: str, module: Module, cut: Callable[[Tensor], Tensor] = torch.clone) -> None:
        for kind, tensor in zip(("weight", "bias"), module, strict=True):
            if tensor is not None:
                table[f"{name}.{kind}"] = cut(tensor).contiguous().clone()

    def _put_row_parallel(self, table: dict[str, Any], name: str, module: Module) -> None:
        """Stores a RowParallelLinear: the weight is sharded along dim 1, the bias is replicated."""
        self._put(table, name, (module[0].chunk(self.size, 1)[self.rank], module[1]))

    def _put_layer(self, table: dict[str, Any], number: int, layer: Layer) -> None:
        norm, name = self.era.norm, f"layers.{number}"
        attention = f"{name}.{self.era.attention}"
        heads, groups = self.parts.heads // self.size, self.parts.groups // self.size
        self._put(table, f"{name}.input_{norm}", layer.input_norm)
        for index, kind in enumerate(("weight", "bias")):
            qkv = [module[index] for module in (layer.query, layer.key, layer.value)]
            if qkv[0] is not None:
                packed = pack_qkv(*map(self._shard, qkv), heads, groups, self.version)
                table[f"{attention}.query_key_value.{kind}"] = packed
        self._put_row_parallel(table, f"{attention}.dense", layer.dense)
        self._put(table, f"{name}.post_attention_{norm}", layer.post_attention_norm)
        for index, kind in enumerate(("weight", "bias")):
            if layer.up[0][index] is not None:
                table[f"{name}.mlp.dense_h_to_4h.{kind}"] = torch.cat([self._shard(up[index]) for up in layer.up])
        self._put_row_parallel(table, f"{name}.mlp.dense_4h_to_h", layer.down)

    def model(self) -> dict[str, Any]:
        """Returns the content of the `model` entry of the file."""
        parts, era = self.parts, self.era
        first, last = self.stage == 0, self.stage == self.stages - 1
        block: dict[str, Any] = OrderedDict()
        stage_layers = len(parts.layers) // self.stages
        # Layer indices are local to a stage.
        for number, layer in enumerate(parts.layers[self.stage * stage_layers : (self.stage + 1) * stage_layers]):
            self._put_layer(block, number, layer)
        if last:
            self._put(block, f"final_{era.norm}", parts.final_norm)
        tables = {
            f"{kind}_embeddings": OrderedDict(weight=self._shard_vocabulary(table) if kind == "word" else table.clone())
            for kind, table in parts.embeddings.items()
        }
        if not era.nested:
            flat = {f"{name}.weight": table["weight"] for name, table in tables.items()}
            return {**flat, **{f"{era.block}.{name}": tensor for name, tensor in block.items()}}
        language_model: dict[str, Any] = {"embedding": tables} if first else {}
        language_model[era.block] = block
        model: dict[str, Any] = {"language_model": language_model}
        if last:
            self._put_heads(model)
        if last and not first and parts.output is None:
            model["word_embeddings_for_head"] = OrderedDict(tables["word_embeddings"])
        return model

    def _put_heads(self, model: dict[str, Any]) -> None:
        parts, language_model = self.parts, model["language_model"]
        if parts.output is not None:
            language_model["output_layer"] = OrderedDict(weight=self._shard_vocabulary(parts.output))
        if parts.pooler is not None:
            language_model["pooler"] = OrderedDict()
            self._put(language_model["pooler"], "dense", parts.pooler)
        if parts.lm_bias is not None:
            model["lm_head"] = OrderedDict(bias=self._shard_vocabulary(parts.lm_bias))
            self._put(model["lm_head"], "dense", parts.lm_head["dense"])
            self._put(model["lm_head"], self.era.norm, parts.lm_head["norm"])
        if parts.binary_head is not None:
            weight, bias = parts.binary_head
            model["binary_head"] = OrderedDict(weight=weight.clone(), bias=bias.clone())


def write_checkpoint(
    folder: Path,
    parts: ModelWeights,
    era: str,
    version: float,
    *,
    stated: float | None = None,
    tp: int = 1,
    pp: int = 1,
    rows: int = 256,
    args: Mapping[str, Any] | None = None,
    archive: bool = False,
) -> Path:
    """Writes the files of all ranks as a release.

    Args:
        version: Checkpoint version that sets the row order of query, key and value.
        stated: Checkpoint version in the files, equal to `version` by default; version 0 was never written.
        rows: Padded vocabulary size.
        args: Megatron-LM's arguments; the first releases have none.
        archive: Whether to use the zip format of torch 1.6 instead of the older one.
    """
    (folder / "release").mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("release")
    checkpoint_version = version if stated is None else stated
    for rank in range(tp):
        for stage in range(pp):
            model = Writer(parts, ERAS[era], version, (rank, tp), (stage, pp), rows).model()
            content: dict[str, Any] = {"iteration": 0, "model": model}
            if checkpoint_version:
                content["checkpoint_version"] = checkpoint_version
            if args is not None:
                content["args"] = Namespace(**args)
            path = folder / "release" / (f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if pp > 1 else "")) / FILE
            path.parent.mkdir()
            torch.save(content, path, _use_new_zipfile_serialization=archive)
    return folder
