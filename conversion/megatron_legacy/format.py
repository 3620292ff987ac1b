"""Megatron's legacy `torch` format: a folder `mp_rank_*` for each rank."""

import re
from collections.abc import Mapping
from pathlib import Path

from ...files.safetensors import TensorMeta
from ..architecture import Architecture
from ..families import family_of, rules_of
from ..format import Format
from ..megatron.folder import iteration_folder
from ..megatron.view import TransformersNames, TransformersView, megatron_plan
from ..output import Output
from ..tensors import Key, OptimizerState, Reader, TargetOptions, Writer
from .reader import MegatronLegacyReader
from .writer import MegatronLegacyWriter

_RANK = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")


def _open(path: Path, architecture: Architecture, verify: bool) -> Reader:
    rules = rules_of(architecture.config, TargetOptions())
    folder = iteration_folder(path)
    reader = MegatronLegacyReader(folder, family_of(architecture.config).model(architecture.config))
    return TransformersView(reader, rules, architecture, str(folder))


def _create(
    output: Output,
    plan: Mapping[Key, TensorMeta],
    architecture: Architecture,
    options: TargetOptions,
    iteration: int | None,
    optimizer: OptimizerState | None,
) -> Writer:
    rules = rules_of(architecture.config, options)
    model = family_of(architecture.config).model(architecture.config)
    inner = megatron_plan(plan, rules, str(output.target))
    return TransformersNames(
        MegatronLegacyWriter(output, inner, model, options, iteration, options.local_names), plan, rules
    )


FORMAT = Format(
    name="megatron_legacy",
    title="Megatron legacy torch (mp_rank_XX)",
    marks="mp_rank_*",
    recognise=lambda path, names: any(map(_RANK.fullmatch, names)),
    open=_open,
    create=_create,
    alias="torch",
    megatron=True,
    options=frozenset({"tp_size", "ep_size", "make_vocab_size_divisible_by", "pp_size", "local_names"}),
)
