"""Inference of a `ModelSpec` from the module structure, for types without a family file or a transformers plan.

An inferred spec is a proposal: a layout is rejected until `hf-megatron check` has compared it with a single process.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import PlanError, UnsupportedError
from .block_patterns import find_blocks
from .derive import derive_spec, has_layer_plan
from .spec import ModelSpec, generic, module_name

# Reason why a config with chunked MLPs does not support sequence parallelism.
CHUNKS = "chunk_size_feed_forward > 0 chunks the local sequence shard of each rank."


def stated_or_inferred_spec(model: Any, *, may_be_ends: bool = False) -> ModelSpec:
    """Returns the spec from transformers' plan if that covers the layers, else from the structure.

    Args:
        may_be_ends (`bool`): accept a plan of embeddings and head alone if no block is recognized.

    Raises:
        PlanError: there is neither.
    """
    if has_layer_plan(model):
        return derive_spec(model)
    try:
        return inferred_spec(model)
    except PlanError:
        if may_be_ends:
            return ModelSpec.from_fields(model.config.model_type, plan=_ends(model))
        # transformers' plan may cover the head alone, which is accepted; `derive_spec` raises if there is none.
        return derive_spec(model)


def inferred_spec(model: Any) -> ModelSpec:
    """Infers the spec of a model on any device, including meta.

    Raises:
        PlanError: neither attention nor MLPs are recognized.
    """
    structure, modules = find_blocks(model), dict(model.named_modules())
    if not structure.plan:
        raise PlanError(f"model type {model.config.model_type!r}: its attention and MLPs have no known structure.")
    containers = {parent for block in structure.blocks for parent in _parents(block, modules)} - structure.blocks
    excluded = structure.around_several | {name for name in containers if _chooses_among_parts(modules[name])}
    containers = {name for name in containers if not any(f"{name}.".startswith(f"{other}.") for other in excluded)}
    return ModelSpec.from_fields(
        model.config.model_type,
        plan=_generic({**_ends(model), **structure.plan}),
        local_attributes=_generic(structure.local_attributes),
        local_arguments=_generic(structure.local_arguments),
        regions={generic(block): generic(row) for block, row in structure.regions.items()},
        multi_input_blocks=tuple(dict.fromkeys(map(generic, structure.multi_input_blocks))),
        pointwise_containers=tuple(sorted({generic(name) for name in containers})),
        no_sequence_parallel=_no_sequence_parallel(model, structure.blocks),
    )


def _chooses_among_parts(module: nn.Module) -> bool:
    """Returns whether a child is a module dict that routes tokens to its entries, which needs the full sequence."""
    # A plain `nn.ModuleDict` has no forward: the enclosing module calls its entries.
    return any(isinstance(child, nn.ModuleDict) and type(child) is not nn.ModuleDict for child in module.children())


def _no_sequence_parallel(model: Any, blocks: set[str]) -> str | None:
    if getattr(model.config, "chunk_size_feed_forward", 0):
        return CHUNKS
    # Several lists under one parent: the loop interleaves them, so a layer is not one module.
    lists = {block[: match.start()] for block in blocks if (match := re.search(r"\.\d+(?=\.|$)", block)) is not None}
    for parent in {name.rpartition(".")[0] for name in lists}:
        if len(alongside := [name for name in sorted(lists) if name.rpartition(".")[0] == parent]) > 1:
            return f"the sublayers of its layers are in separate module lists: {', '.join(alongside)}."
    return None


def _generic(table: Mapping[str, Any]) -> dict[str, Any]:
    return {generic(name): value for name, value in table.items()}


def _parents(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields the names of the modules that enclose a block inside its layer, an item of the outermost list."""
    path = name.split(".")
    outer = [".".join(path[:depth]) for depth in range(1, len(path))]
    lists = [depth for depth, parent in enumerate(outer) if isinstance(modules[parent], nn.ModuleList)]
    # The path after a list starts with the layer itself, which is skipped too.
    for parent in outer[lists[0] + 2 :] if lists else ():
        if not isinstance(modules[parent], nn.ModuleList):
            yield parent


def _get_input_embeddings(model: Any) -> Any:
    try:
        return model.get_input_embeddings()
    except NotImplementedError as error:
        raise UnsupportedError(
            f"{type(model).__name__} is not supported: it has no single input embedding (`get_input_embeddings` is not "
            "implemented), such as models with separate text and image encoders. Load it without megatron_config."
        ) from error


def _ends(model: Any) -> dict[str, str]:
    """Returns the plan of the output head and the embeddings; empty if the head is not a plain `nn.Linear`."""
    head, embedding = model.get_output_embeddings(), _get_input_embeddings(model)
    if type(head) is not nn.Linear:
        return {}
    head_name = module_name(model, head)
    plan = {head_name: "vocab_parallel_head"}
    tied = model.all_tied_weights_keys
    rows = {head.weight.shape[0]}
    # Parameters tied to the head's weight or bias need the same vocabulary shard.
    group = _one_parameter_with({f"{head_name}.weight", f"{head_name}.bias"}, tied)
    modules = dict(model.named_modules())
    for name in sorted(group):
        owner, _, param_name = name.rpartition(".")
        if owner == head_name or owner not in modules:
            continue
        if isinstance(modules[owner], nn.Embedding):
            plan[owner] = "embedding_rowwise"
        else:
            plan[name] = "shard_dim_-2"
    if embedding is not None and type(embedding).__mro__.count(nn.Embedding) and embedding.weight.shape[0] in rows:
        name = module_name(model, embedding)
        plan.setdefault(name, "embedding_rowwise")
        # Encoder and decoder embeddings may be tied to each other but not to the head.
        owners = {weight.rpartition(".")[0] for weight in _one_parameter_with({f"{name}.weight"}, tied)}
        for owner in sorted(owners & modules.keys()):
            if isinstance(modules[owner], nn.Embedding):
                plan.setdefault(owner, "embedding_rowwise")
    return plan


def _one_parameter_with(names: set[str], tied: Mapping[str, str]) -> set[str]:
    """Returns the given parameter names and all names that are tied to one of them."""
    group = set(names)
    for _ in tied:
        group |= {target for target, source in tied.items() if source in group} | {
            source for target, source in tied.items() if target in group
        }
    return group
