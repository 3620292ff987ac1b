"""Derives one sharding per parameter over tp from a spec, on the meta model and without a process group.

A sharding is a parameter's placement and the rule for its gradient. All errors of a plan (a rule that matches nothing,
heads that do not split, tied parameters that disagree) raise here, before any weights are read.
"""

from collections.abc import Mapping
from dataclasses import replace
from operator import attrgetter

from torch import nn

from ..core.placement import GradientRule, ParameterSharding, Placement
from ..errors import ConfigError, PlanError
from ..models.spec import ModelSpec, generic, lookup
from .structure import Structure
from .styles import AXIS, style


def expand_plan(model: nn.Module, spec: ModelSpec) -> dict[str, str]:
    """Maps concrete module and parameter names to style names; a rule that matches nothing raises."""
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    styles = {name: style_name for name in names if (style_name := lookup(name, spec.tp.plan)) is not None}
    unmatched = spec.tp.plan.keys() - set(styles) - {generic(name) for name in styles}
    if unmatched:
        raise PlanError(
            f"model type {spec.model_type!r}: rules {sorted(unmatched)} match nothing in {type(model).__name__}."
        )
    for name in styles.values():
        style(name)
    modules = {name for name, _ in model.named_modules()} | {generic(name) for name, _ in model.named_modules()}
    of_modules = (
        spec.tp.local_attributes,
        spec.tp.local_arguments,
        spec.tp.multi_input_blocks,
        spec.sp.per_token_inputs,
    )
    for patterns in (*of_modules, spec.sp.pointwise_containers, spec.sp.layer_stacks):
        if not modules.issuperset(patterns):
            missing = sorted(set(patterns) - modules)
            raise PlanError(
                f"model type {spec.model_type!r}: patterns {missing} match nothing in {type(model).__name__}."
            )
    return styles


def matching(model: nn.Module, patterns: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name for name, _ in model.named_modules() if name in patterns or generic(name) in patterns)


def expand_regions(model: nn.Module, spec: ModelSpec) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for block_pattern, row_pattern in spec.tp.regions.items():
        blocks = sorted(matching(model, (block_pattern,)))
        rows = sorted(matching(model, (row_pattern,)))
        if not blocks or len(blocks) != len(rows):
            raise PlanError(
                f"model type {spec.model_type!r}: region {block_pattern} -> {row_pattern} needs as many row-parallel "
                "linears as blocks."
            )
        pairs.update(zip(blocks, rows, strict=True))
    return pairs


def shared_heads(model: nn.Module, styles: Mapping[str, str], tp_size: int) -> dict[str, int]:
    """Returns how many ranks share a shard, for linears with fewer heads than ranks; raises if heads do not split."""
    copies: dict[str, int] = {}
    for name, module in model.named_modules():
        parent_name, _, leaf = name.rpartition(".")
        if styles.get(name) == "fused_qkv":
            _require_all_heads(name, module, model.get_submodule(parent_name), tp_size)
        if styles.get(name) != "colwise" or leaf not in ("q_proj", "k_proj", "v_proj"):
            continue
        parent = model.get_submodule(parent_name)
        head_dim = vars(parent).get("head_dim")
        # The number of v_proj's heads equals k_proj's, whatever its width.
        key = parent._modules.get("k_proj") if leaf == "v_proj" else module
        if not isinstance(head_dim, int) or not isinstance(key, nn.Linear) or key.out_features % head_dim:
            continue
        heads = key.out_features // head_dim
        if heads % tp_size == 0:
            continue
        kind = "attention" if leaf == "q_proj" else "key/value"
        if leaf == "q_proj" or tp_size % heads:
            valid = [size for size in range(1, heads + 1) if heads % size == 0]
            raise ConfigError(
                f"MegatronConfig.tp_size = {tp_size}: {name} has {heads} {kind} heads, which cannot be split; valid "
                f"tp sizes divide them{'' if leaf == 'q_proj' else ' or are a multiple of them'}: {valid}."
            )
        # Fewer key/value heads than ranks: `copies` neighboring ranks hold the same head.
        copies[name] = tp_size // heads
    return copies


def _require_all_heads(name: str, linear: nn.Module, attention: nn.Module, tp_size: int) -> None:
    """Raises `ConfigError` if tp would cut a third of a fused query, key and value linear within a head."""
    head_dim, width = vars(attention).get("head_dim"), vars(linear).get("out_features", 0) // 3
    if isinstance(head_dim, int) and width % head_dim == 0 and (heads := width // head_dim) % tp_size:
        valid = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ConfigError(
            f"MegatronConfig.tp_size = {tp_size}: {name} has {heads} attention heads, which cannot be split; valid tp "
            f"sizes divide them: {valid}."
        )


def assign_shardings(
    model: nn.Module,
    styles: Mapping[str, str],
    structure: Structure,
    copies: Mapping[str, int],
    sequence_parallel: bool,
    tied: Mapping[str, str],
    of_layers: frozenset[str] = frozenset(),
) -> dict[str, ParameterSharding]:
    """Assigns a sharding to every parameter, by its style.

    Args:
        of_layers (`frozenset[str]`): parameters of blocks that the layer around them adds to hidden states itself.
        tied (`Mapping[str, str]`): parameter -> the one it is tied to. By name: on the loader's meta model the two are
            separate tensors until the weights are read.
    """
    shardings: dict[str, ParameterSharding] = {}
    for module_name, module in model.named_modules():
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{module_name}.{parameter_name}" if module_name else parameter_name
            style_name = styles.get(name) or styles.get(module_name) or "replicated"
            rules = style(style_name)
            placement = rules.placement(parameter_name, parameter, module)
            if module_name in copies:
                placement = Placement(tuple(replace(split, copies=copies[module_name]) for split in placement.splits))
            for split in placement.splits:
                if parameter.shape[split.dim] % split.groups:
                    raise PlanError(
                        f"{name}: dim {split.dim} of {tuple(parameter.shape)} does not divide into {split.groups} "
                        "equal blocks."
                    )
            gradient = rules.gradient(placement)
            is_pointwise = name in of_layers or structure.is_pointwise_parameter(name)
            # A replicated parameter that sees the local tokens only has a partial gradient: sum it over tp.
            if sequence_parallel and not placement.is_split and is_pointwise:
                gradient = GradientRule(sum=AXIS)
            sharding = ParameterSharding(name, tuple(parameter.shape), style_name, placement, gradient)
            shardings[name] = sharding
    # Tied parameters are one tensor: they need the same placement and gradient rule.
    for name, other in tied.items():
        one, two = shardings[name], shardings[other]
        if (one.placement, one.gradient) != (two.placement, two.gradient):
            raise PlanError(
                f"{name} is tied to {other}, but their shardings differ: {one.placement} and {two.placement}."
            )
    return shardings


def local_sizes(
    model: nn.Module, spec: ModelSpec, styles: Mapping[str, str], copies: Mapping[str, int], tp_size: int
) -> dict[str, dict[str, int]]:
    """Maps modules to local values of attributes that count heads or widths; raises if tp_size does not divide one."""
    sizes: dict[str, dict[str, int]] = {}
    for name, module in model.named_modules():
        for attribute in lookup(name, spec.tp.local_attributes) or ():
            # Key/value heads may be replicated over some ranks, so they divide by fewer shards.
            shards = tp_size // (copies.get(f"{name}.k_proj", 1) if "key_value" in attribute else 1)
            value = attrgetter(attribute)(module)
            if value % shards:
                raise ConfigError(
                    f"MegatronConfig.tp_size = {tp_size} does not divide {name}.{attribute} = {value}. Use a divisor."
                )
            sizes.setdefault(name, {})[attribute] = value // shards
        groups = vars(module).get("num_key_value_groups")
        if groups is not None and styles.get(f"{name}.q_proj") == "colwise":
            sizes.setdefault(name, {})["num_key_value_groups"] = groups // _count_key_copies(
                name, module, copies, tp_size
            )
    return sizes


def _count_key_copies(name: str, attention: nn.Module, copies: Mapping[str, int], tp_size: int) -> int:
    """Returns how many ranks share a key/value head, each with some of the query heads of its group."""
    if "k_proj" in attention._modules:
        return copies.get(f"{name}.k_proj", 1)
    head_dim = vars(attention).get("head_dim")
    if head_dim is None:
        # Multi-head latent attention makes a key for every query head.
        return 1
    # Attention without k_proj that reads the keys and values of an earlier layer.
    heads = int(vars(attention)["_modules"]["q_proj"].out_features) // int(head_dim)
    return max(1, tp_size * int(vars(attention)["num_key_value_groups"]) // heads)
