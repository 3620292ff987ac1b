"""A `ModelSpec` by structure, of types that have neither a family's file nor a plan in transformers.

What is found is proposed and never trusted: a layout is refused until the check has compared it with one process.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ..errors import PlanError
from .block_patterns import find_blocks
from .derive import derive_spec, has_plan_of_layers
from .spec import ModelSpec, generic, module_name

# Why some configs have no sequence parallelism.
CHUNKS = "chunk_size_feed_forward > 0 cuts this rank's piece of the sequence into chunks of its own."


def stated_or_inferred_spec(model: Any, *, may_be_ends: bool = False) -> ModelSpec:
    """Takes a spec from transformers' plan where it says something of layers, else from the structure.

    Args:
        may_be_ends (`bool`): a plan of embeddings and head alone will do, where nothing else is recognised.

    Raises:
        PlanError: there is neither.
    """
    if has_plan_of_layers(model):
        return derive_spec(model)
    try:
        return inferred_spec(model)
    except PlanError:
        if may_be_ends:
            return ModelSpec.from_fields(model.config.model_type, plan=_ends(model))
        # A plan of the head alone is one, too; without any this says so.
        return derive_spec(model)


def inferred_spec(model: Any) -> ModelSpec:
    """Proposes a spec of a model on any device, also meta.

    Raises:
        PlanError: neither attention nor MLPs were recognised.
    """
    found, modules = find_blocks(model), dict(model.named_modules())
    if not found.plan:
        raise PlanError(
            f"model type {model.config.model_type!r}: its attention and its MLPs are of no structure that is known."
        )
    containers = {parent for block in found.blocks for parent in _parents(block, modules)} - found.blocks
    unsharded = found.around_several | {name for name in containers if _chooses_among_parts(modules[name])}
    containers = {name for name in containers if not any(f"{name}.".startswith(f"{other}.") for other in unsharded)}
    return ModelSpec.from_fields(
        model.config.model_type,
        plan=_generic({**_ends(model), **found.plan}),
        local_attributes=_generic(found.local_attributes),
        local_arguments=_generic(found.local_arguments),
        regions={generic(block): generic(row) for block, row in found.regions.items()},
        multi_input_blocks=tuple(dict.fromkeys(map(generic, found.multi_input_blocks))),
        pointwise_containers=tuple(sorted({generic(name) for name in containers})),
        no_sequence_parallel=_no_sequence_parallel(model, found.blocks),
    )


def _chooses_among_parts(module: nn.Module) -> bool:
    """Tells whether a module has a dict that hands tokens to its parts, which it does not see a piece of."""
    # Parts of a plain dict are called by the module around it.
    return any(isinstance(child, nn.ModuleDict) and type(child) is not nn.ModuleDict for child in module.children())


def _no_sequence_parallel(model: Any, blocks: set[str]) -> str | None:
    if getattr(model.config, "chunk_size_feed_forward", 0):
        return CHUNKS
    # Under one parent a loop goes through several lists side by side.
    lists = {block[: match.start()] for block in blocks if (match := re.search(r"\.\d+(?=\.|$)", block)) is not None}
    for parent in {name.rpartition(".")[0] for name in lists}:
        if len(alongside := [name for name in sorted(lists) if name.rpartition(".")[0] == parent]) > 1:
            return f"the parts of a layer lie in lists side by side: {', '.join(alongside)}."
    return None


def _generic(table: Mapping[str, Any]) -> dict[str, Any]:
    return {generic(name): value for name, value in table.items()}


def _parents(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yields what a block stands in inside of its layer, an item of the outermost list."""
    path = name.split(".")
    outer = [".".join(path[:depth]) for depth in range(1, len(path))]
    lists = [depth for depth, parent in enumerate(outer) if isinstance(modules[parent], nn.ModuleList)]
    # Behind a list comes its item.
    for parent in outer[lists[0] + 2 :] if lists else ():
        if not isinstance(modules[parent], nn.ModuleList):
            yield parent


def _ends(model: Any) -> dict[str, str]:
    """Plans embeddings and an output embedding, where both are plain and the head has a bias of its own or none."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if type(head) is not nn.Linear:
        return {}
    head_name = module_name(model, head)
    plan = {head_name: "vocab_parallel_head"}
    tied = model.all_tied_weights_keys
    rows = {head.weight.shape[0]}
    # Everything that is one parameter with the head's weight or bias has its rows.
    group = _one_parameter_with({f"{head_name}.weight", f"{head_name}.bias"}, tied)
    modules = dict(model.named_modules())
    for name in sorted(group):
        owner, _, own = name.rpartition(".")
        if owner == head_name or owner not in modules:
            continue
        if isinstance(modules[owner], nn.Embedding):
            plan[owner] = "embedding_rowwise"
        else:
            plan[name] = "shard_dim_-2"
    if embedding is not None and type(embedding).__mro__.count(nn.Embedding) and embedding.weight.shape[0] in rows:
        name = module_name(model, embedding)
        plan.setdefault(name, "embedding_rowwise")
        # An encoder's and a decoder's table may be one beside a head of its own.
        owners = {weight.rpartition(".")[0] for weight in _one_parameter_with({f"{name}.weight"}, tied)}
        for owner in sorted(owners & modules.keys()):
            if isinstance(modules[owner], nn.Embedding):
                plan.setdefault(owner, "embedding_rowwise")
    return plan


def _one_parameter_with(names: set[str], tied: Mapping[str, str]) -> set[str]:
    """Names what is one parameter with one of the names, these among it."""
    group = set(names)
    for _ in tied:
        group |= {target for target, source in tied.items() if source in group} | {
            source for target, source in tied.items() if target in group
        }
    return group
