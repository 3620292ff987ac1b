"""Rank files of Megatron-LM from before Megatron-Core, converted to Megatron-Core's names and order.

Sources are files of Megatron-LM. Names: `megatron/model/gpt2_modeling.py` (commit b886b7bb, of 2019), `gpt2_model.py`
(197c132e), `bert_model.py` (02fffd29) and `language_model.py` (01e9ce60) in the same folder, and
`megatron/legacy/model` (00caa53a), whose `load_state_dict` maps older names. Order: `megatron/checkpointing.py`
(0229a695), `fix_query_key_value_ordering`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from ...core.io.buffer_pool import Memory
from ...core.text import safe_repr
from ...errors import CheckpointError

_VERSIONS = (0, 1, 2, 3)
# Before version 2, rows of query, key and value were not grouped by head.
_GROUPED = 2
# language_model -> embedding -> word_embeddings -> weight
_DEEPEST = 3
_OLDER = ("language_model.", "transformer.", "word_embeddings.", "position_embeddings.")
# Megatron-Core's vision-language models also have a `language_model` submodule.
_OF_CORE = re.compile(r"language_model\.decoder\.layers\.\d{1,9}\.(?:self_attention|mlp)\.linear_")

_BLOCK = r"(?:language_model\.)?(?:transformer|encoder)\."
_LAYER = _BLOCK + r"layers\.(\d{1,9})\."
_KIND = r"\.(weight|bias)"
# `layernorm` was renamed `norm` with RMSNorm, and `attention` was renamed `self_attention` with T5.
_NAMES = tuple(
    (re.compile(older), core)
    for older, core in (
        (
            r"(?:language_model\.(?:embedding\.)?)?(word|position|tokentype)_embeddings\.weight",
            r"embedding.\1_embeddings.weight",
        ),
        (_LAYER + r"input_(?:layer)?norm" + _KIND, r"{block}.layers.\1.input_layernorm.\2"),
        (_LAYER + r"(?:self_)?attention\.query_key_value" + _KIND, r"{block}.layers.\1.self_attention.linear_qkv.\2"),
        (_LAYER + r"(?:self_)?attention\.dense" + _KIND, r"{block}.layers.\1.self_attention.linear_proj.\2"),
        (_LAYER + r"post_attention_(?:layer)?norm" + _KIND, r"{block}.layers.\1.pre_mlp_layernorm.\2"),
        (_LAYER + r"mlp\.dense_h_to_4h" + _KIND, r"{block}.layers.\1.mlp.linear_fc1.\2"),
        (_LAYER + r"mlp\.dense_4h_to_h" + _KIND, r"{block}.layers.\1.mlp.linear_fc2.\2"),
        (_BLOCK + r"final_(?:layer)?norm" + _KIND, r"{block}.final_layernorm.\1"),
        (r"language_model\.output_layer\.weight", r"output_layer.weight"),
        # The last stage's copy of tied embeddings.
        (r"word_embeddings_for_head\.weight", r"output_layer.weight"),
        (r"language_model\.pooler\.dense" + _KIND, r"pooler.dense.\1"),
        (r"lm_head\.dense" + _KIND, r"lm_head.dense.\1"),
        (r"lm_head\.(?:layer)?norm" + _KIND, r"lm_head.layer_norm.\1"),
        (r"lm_head\.bias", r"output_layer.bias"),
        (r"binary_head" + _KIND, r"binary_head.\1"),
    )
)
# megatron/checkpointing.py, `check_checkpoint_args`
_ARGUMENTS: Mapping[str, str] = MappingProxyType({"model_parallel_size": "tensor_model_parallel_size"})


def flattened(path: Path, model: Any) -> dict[str, Any]:
    """Flattens a model's nested dicts to names with dots; Megatron-Core's are flat already.

    Raises:
        CheckpointError: naming the file, if it is not a dict with string keys.
    """
    flat: dict[str, Any] = {}
    for name, value in _entries(path, model, "", _DEEPEST):
        if flat.setdefault(name, value) is not value:
            raise CheckpointError(f"{path} is rejected: it has {safe_repr(name)} twice.")
    return flat


def _entries(path: Path, table: Any, prefix: str, deeper: int) -> Iterator[tuple[str, Any]]:
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table):
        raise CheckpointError(f"{path} is rejected: its weights are not a dict with string keys.")
    for key, value in table.items():
        if isinstance(value, dict) and deeper:
            yield from _entries(path, value, f"{prefix}{key}.", deeper - 1)
        else:
            yield f"{prefix}{key}", value


def is_older(names: Collection[str]) -> bool:
    """Returns whether a model's names are from Megatron-LM before Megatron-Core."""
    return any(name.startswith(_OLDER) for name in names) and not any(map(_OF_CORE.match, names))


def core_names(path: Path, tensors: Mapping[str, Any], block: str) -> dict[str, Any]:
    """Renames older tensors to Megatron-Core's names.

    Args:
        block: Megatron-Core's name of the module with the layers: `decoder`, or `encoder` in BERT.

    Raises:
        CheckpointError: naming the file and a tensor that is unknown or appears under two names.
    """
    core_tensors: dict[str, Any] = {}
    for name, value in tensors.items():
        core = _core_name(name, block)
        if core is None:
            raise CheckpointError(
                f"{path}: {safe_repr(name)} is not a supported tensor of a GPT or BERT from before Megatron-Core."
            )
        if core in core_tensors:
            raise CheckpointError(f"{path} is rejected: it has {core} twice, once as {safe_repr(name)}.")
        core_tensors[core] = value
    return core_tensors


def _core_name(name: str, block: str) -> str | None:
    for older, core in _NAMES:
        if match := older.fullmatch(name):
            return match.expand(core.format(block=block))
    return None


def core_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Renames older arguments of Megatron-LM to current names."""
    renamed = {_ARGUMENTS[name]: value for name, value in arguments.items() if name in _ARGUMENTS}
    return {**renamed, **arguments}


def check_version(path: Path, version: float, older: bool) -> None:
    """Checks that the order of a file's query, key and value rows is known.

    Raises:
        CheckpointError: naming the file and its version.
    """
    if older and version not in _VERSIONS:
        raise CheckpointError(f"{path}: checkpoint_version is {safe_repr(version)}, expected 0, 1.0, 2.0 or 3.0.")
    if not older and not version >= _GROUPED:
        raise CheckpointError(
            f"{path}: checkpoint_version is {safe_repr(version)}, but Megatron-Core, whose names it has, has always "
            "written 3.0: the order of query, key and value is not known."
        )


def reorder_encoder_qkv(packed: Tensor, version: float) -> Tensor:
    """Returns an encoder's query, key and value rows `[rows, ...]`, which are in the order of version 2.0.

    Raises:
        CheckpointError: the version predates modality encoders.
    """
    if version < _GROUPED:
        raise CheckpointError(f"Megatron-LM had no modality encoders when it wrote checkpoint_version {version}.")
    return packed


def grouped_by_head(packed: Tensor, version: float, arguments: Mapping[str, Any], ranks: int, memory: Memory) -> Tensor:
    """Reorders query, key and value rows `[heads * 3 * head_dim, ...]` to the order used since version 2.0.

    Version 0 has `[3, heads / ranks, head_dim]` on each tensor-parallel rank, 1.0 has `[heads, head_dim, 3]`, and 2.0
    `[heads, 3, head_dim]`.

    Args:
        packed: the rows of all ranks, in rank order.
        arguments: arguments of the config.

    Raises:
        CheckpointError: the number of heads does not fit.
    """
    if version >= _GROUPED:
        return packed
    heads = arguments["num_attention_heads"]
    groups = arguments.get("num_query_groups") or heads
    if groups != heads or heads % ranks or packed.shape[0] % (3 * heads):
        raise CheckpointError(
            f"{packed.shape[0]} rows of query, key and value on {ranks} ranks do not match {heads} heads and {groups} "
            f"groups in checkpoint_version {version}."
        )
    head_dim, rest = packed.shape[0] // (3 * heads), packed.shape[1:]
    if version == 1:
        ordered = packed.reshape(heads, head_dim, 3, *rest).transpose(1, 2)
    else:
        ordered = packed.reshape(ranks, 3, heads // ranks, head_dim, *rest).transpose(1, 2)
    return memory.contiguous(ordered).view(packed.shape)
