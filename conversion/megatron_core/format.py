"""Format entry of Megatron-Core's `torch_dist` checkpoints (see the package)."""

from collections.abc import Mapping
from dataclasses import replace

from ...core.io.safetensors import TensorMeta
from ..dcp.store_reader import METADATA
from ..interfaces import Key, MegatronModel, OptimizerState, TargetOptions
from ..megatron.name_view import megatron_format
from ..megatron.sizes import check_sizes
from ..output_folder import Output
from .reader import CONFIG, MegatronCoreReader
from .writer import MegatronCoreWriter


def _writer(
    output: Output,
    plan: Mapping[Key, TensorMeta],
    model: MegatronModel,
    options: TargetOptions,
    iteration: int | None,
    optimizer: OptimizerState | None,
) -> MegatronCoreWriter:
    """Returns the writer; the parallel sizes are the ones of the ranks that will load the checkpoint."""
    check_sizes(model, options, plan)
    # Experts have a separate optimizer under expert parallelism.
    model = replace(model, arguments={**model.arguments, "expert_model_parallel_size": options.ep_size})
    return MegatronCoreWriter(output, plan, model, iteration, optimizer)


FORMAT = megatron_format(
    lambda path, architecture: MegatronCoreReader(path, architecture.most_stored),
    _writer,
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
