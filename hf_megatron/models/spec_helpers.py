"""Spec builders for the files in `families/`: patterns are relative to the base model, for a class with any head."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .composite import composite_spec
from .derive import derive_spec
from .infer import stated_or_inferred_spec
from .spec import HeadBlock, ModelSpec, generic, module_name


def base_prefix(model: Any) -> str:
    """Returns the prefix of the base model's parameter names in this class, empty for a base model."""
    return f"{model.base_model_prefix}." if model.base_model_prefix in model._modules else ""


def corrected_spec(
    model: Any,
    corrections: Mapping[str, str] | None = None,
    *,
    pointwise_containers: tuple[str, ...] = (),
    head_sharded_blocks: Mapping[str, HeadBlock] | None = None,
    full_sequence_blocks: tuple[str, ...] = (),
    experts: Mapping[str, str] | None = None,
    identity_experts: Mapping[str, str] | None = None,
    before_layers: tuple[str, ...] = (),
    after_layers: tuple[str, ...] = (),
    after_encoder: tuple[str, ...] = (),
    local_arguments: Mapping[str, tuple[str, ...]] | None = None,
    replicated_modules: tuple[str, ...] = (),
    **changes: Any,
) -> ModelSpec:
    """Returns the spec from transformers' plan or the module structure, with corrections.

    Args:
        corrections (`Mapping[str, str]`, *optional*): pattern inside the base model -> style, added or replaced;
            patterns that match nothing in this config are dropped.
        pointwise_containers, full_sequence_blocks, before_layers, after_layers, after_encoder (`tuple[str, ...]`),
            head_sharded_blocks, experts, identity_experts, local_arguments (`Mapping`, *optional*): fields of
            `ModelSpec` with patterns inside the base model.
        replicated_modules (`tuple[str, ...]`): modules inside the base model that are replicated on every rank.
        changes: further fields of `ModelSpec`, with patterns from the model's root.
    """
    prefix = base_prefix(model)
    spec = _without(
        stated_or_inferred_spec(model, may_be_ends=bool(head_sharded_blocks)),
        [prefix + pattern for pattern in replicated_modules],
    )
    names = [name for name, _ in model.named_modules()] + [n for n, _ in model.named_parameters(remove_duplicate=False)]
    known = set(names) | {generic(name) for name in names}
    added = {prefix + pattern: style for pattern, style in (corrections or {}).items() if prefix + pattern in known}
    return spec.updated(
        plan={**spec.tp.plan, **added},
        pointwise_containers=(*spec.sp.pointwise_containers, *(prefix + pattern for pattern in pointwise_containers)),
        local_arguments={
            **spec.tp.local_arguments,
            **{prefix + pattern: names for pattern, names in (local_arguments or {}).items()},
        },
        full_sequence_blocks=tuple(prefix + pattern for pattern in full_sequence_blocks),
        before_layers=(*spec.pp.before_layers, *(prefix + pattern for pattern in before_layers)),
        after_layers=tuple(prefix + pattern for pattern in after_layers),
        after_encoder=tuple(prefix + pattern for pattern in after_encoder),
        head_sharded_blocks={prefix + pattern: heads for pattern, heads in (head_sharded_blocks or {}).items()},
        experts={prefix + pattern: attribute for pattern, attribute in (experts or {}).items()},
        identity_experts={prefix + pattern: attribute for pattern, attribute in (identity_experts or {}).items()},
        **changes,
    )


def _without(spec: ModelSpec, module_names: list[str]) -> ModelSpec:
    """Removes a spec's tensor and sequence parallel entries for the given modules and everything inside them."""

    def is_left(pattern: str) -> bool:
        return not any(f"{pattern}.".startswith(f"{module}.") for module in module_names)

    return spec.updated(
        plan={pattern: style for pattern, style in spec.tp.plan.items() if is_left(pattern)},
        local_attributes={pattern: names for pattern, names in spec.tp.local_attributes.items() if is_left(pattern)},
        local_arguments={pattern: names for pattern, names in spec.tp.local_arguments.items() if is_left(pattern)},
        regions={block: row for block, row in spec.tp.regions.items() if is_left(block)},
        multi_input_blocks=tuple(filter(is_left, spec.tp.multi_input_blocks)),
        pointwise_containers=tuple(filter(is_left, spec.sp.pointwise_containers)),
    )


def family_spec(
    model: Any,
    plan: Mapping[str, str],
    *,
    local_attributes: Mapping[str, tuple[str, ...]] | None = None,
    local_arguments: Mapping[str, tuple[str, ...]] | None = None,
    regions: Mapping[str, str] | None = None,
    multi_input_blocks: tuple[str, ...] = (),
    pointwise_containers: tuple[str, ...] = (),
    head_plan: Mapping[str, str] | None = None,
    after_layers: tuple[str, ...] = (),
    full_sequence_blocks: tuple[str, ...] = (),
    **changes: Any,
) -> ModelSpec:
    """Builds a `ModelSpec` from patterns inside the base model; the arguments are fields of `ModelSpec`.

    The output embedding, if the class has one, becomes a vocab-parallel head. `head_plan` has names outside the base
    model; names that the class does not have are dropped. `changes` has patterns from the model's root.
    """
    prefix = base_prefix(model)
    model_plan = {prefix + pattern: style for pattern, style in plan.items()}
    names = {name for name, _ in model.named_modules()} | {n for n, _ in model.named_parameters(remove_duplicate=False)}
    model_plan |= {name: style for name, style in (head_plan or {}).items() if name in names}
    head = model.get_output_embeddings()
    if isinstance(head, nn.Linear):
        model_plan[module_name(model, head)] = "vocab_parallel_head"
    return ModelSpec.from_fields(
        model.config.model_type,
        plan=model_plan,
        local_attributes={prefix + pattern: names for pattern, names in (local_attributes or {}).items()},
        local_arguments={prefix + pattern: names for pattern, names in (local_arguments or {}).items()},
        regions={prefix + block: prefix + row for block, row in (regions or {}).items()},
        multi_input_blocks=tuple(prefix + pattern for pattern in multi_input_blocks),
        pointwise_containers=tuple(prefix + pattern for pattern in pointwise_containers),
        after_layers=tuple(prefix + pattern for pattern in after_layers),
        full_sequence_blocks=tuple(prefix + pattern for pattern in full_sequence_blocks),
        **changes,
    )


def gated_decoder_plan(
    *, output: str = "o_proj", norms: tuple[str, ...] = (), mlp: tuple[str, str, str] | None = None, block: str = "mlp"
) -> dict[str, str]:
    """Returns the plan of decoder layers that consist of an attention `self_attn` and a gated MLP.

    Args:
        output (`str`): name of the attention's output linear.
        norms (`tuple[str, ...]`): names of the attention's per-head norms.
        mlp (`tuple[str, str, str]`, *optional*): names of the gate, up and down linears of the MLP; by default
            `gate_proj`, `up_proj` and `down_proj`.
        block (`str`): name of the MLP.
    """
    gate, up, down = mlp or ("gate_proj", "up_proj", "down_proj")
    columns = [f"self_attn.{name}_proj" for name in "qkv"] + [f"{block}.{gate}", f"{block}.{up}"]
    styles = dict.fromkeys(columns, "colwise") | {f"self_attn.{output}": "rowwise", f"{block}.{down}": "rowwise"}
    # Per-head norms: all heads share one weight and each rank has some of the heads, so gradients are all-reduced.
    styles |= {f"self_attn.{norm}": "replicated_with_grad_allreduce" for norm in norms}
    return {"embed_tokens": "embedding_rowwise", **{f"layers.*.{name}": style for name, style in styles.items()}}


def composite_family_spec(
    model: Any,
    builders: Mapping[str, Callable[[Any], ModelSpec]],
    plan: Mapping[str, str],
    *,
    local_attributes: Mapping[str, tuple[str, ...]] | None = None,
    **changes: Any,
) -> ModelSpec:
    """Returns the spec of a model's language model, plus a plan of the modules around it; see `composite_spec`.

    Args:
        builders (`Mapping`): model type of the language model -> its spec builder.
        plan, local_attributes (`Mapping`): patterns from the model's root; patterns that match nothing in this config
            are dropped.
    """
    spec = composite_spec(model, builders) or derive_spec(model)
    known = {generic(name) for name, _ in model.named_modules()} | {
        generic(name) for name, _ in model.named_parameters()
    }
    around = {pattern: style for pattern, style in plan.items() if pattern in known}
    sizes = {pattern: names for pattern, names in (local_attributes or {}).items() if pattern in known}
    return spec.updated(
        plan={**around, **spec.tp.plan}, local_attributes={**sizes, **spec.tp.local_attributes}, **changes
    )
