"""Megatron-Core's `torch_dist` checkpoints, read and written without Megatron."""

from dataclasses import replace

from ..dcp.store_reader import METADATA
from ..megatron.view import megatron_format
from .reader import CONFIG, MegatronCoreReader
from .writer import MegatronCoreWriter

FORMAT = megatron_format(
    lambda path, architecture: MegatronCoreReader(path),
    # Experts have an optimizer of their own under expert parallelism.
    lambda output, plan, model, options, iteration, optimizer: MegatronCoreWriter(
        output,
        plan,
        replace(model, arguments={**model.arguments, "expert_model_parallel_size": options.ep_size}),
        iteration,
        optimizer,
    ),
    name="megatron_core",
    title="Megatron-Core torch_dist",
    marks=CONFIG,
    files=r"metadata\.json|.*\.distcp|latest_checkpointed_iteration\.txt",
    recognise=lambda path, names: CONFIG in names and METADATA in names,
    alias="torch_dist",
    moments=True,
    options=frozenset({"tp_size", "ep_size", "make_vocab_size_divisible_by"}),
    main_weights="always",
)
