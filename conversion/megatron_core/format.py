"""Megatron-Core's `torch_dist` checkpoints, read and written without Megatron."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...files.safetensors import TensorMeta
from ..architecture import Architecture
from ..dcp.store_reader import METADATA
from ..families import family_of, rules_of
from ..format import Format
from ..megatron.folder import iteration_folder
from ..megatron.view import TransformersNames, TransformersView, megatron_plan
from ..output import Output
from ..tensors import Key, OptimizerState, Reader, TargetOptions, Writer
from .reader import CONFIG, MegatronCoreReader
from .writer import MegatronCoreWriter


def _open(path: Path, architecture: Architecture, verify: bool) -> Reader:
    rules = rules_of(architecture.config, TargetOptions())
    return TransformersView(MegatronCoreReader(path), rules, architecture, str(iteration_folder(path)))


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
    # Experts have an optimizer of their own under expert parallelism.
    model = replace(model, arguments={**model.arguments, "expert_model_parallel_size": options.ep_size})
    inner = megatron_plan(plan, rules, str(output.target))
    return TransformersNames(MegatronCoreWriter(output, inner, model, iteration, optimizer), plan, rules)


FORMAT = Format(
    name="megatron_core",
    title="Megatron-Core torch_dist",
    marks=CONFIG,
    recognise=lambda path, names: CONFIG in names and METADATA in names,
    open=_open,
    create=_create,
    alias="torch_dist",
    megatron=True,
    moments=True,
    options=frozenset({"tp_size", "ep_size", "make_vocab_size_divisible_by"}),
    main_weights="always",
)
