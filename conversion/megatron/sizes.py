"""Divisibility checks of a model's dimensions over the ranks that a Megatron checkpoint is written for."""

from collections.abc import Iterable
from types import MappingProxyType

from ...errors import CheckpointError
from ..interfaces import Key, MegatronModel, TargetOptions
from .names import EXPERTS, is_encoder_weight, is_mtp_name

# Always split over tensor-parallel ranks. Experts are not checked: their split is chosen at load time.
_WIDTHS = MappingProxyType(
    {"ffn_hidden_size": ".mlp.linear_fc1.", "moe_shared_expert_intermediate_size": ".mlp.shared_experts.linear_fc1."}
)
_MOST_RANKS = 1024


def check_sizes(model: MegatronModel, options: TargetOptions, plan: Iterable[Key]) -> None:
    """Checks that layers, heads, groups and experts divide over ranks, as Megatron requires to build the model.

    Args:
        plan: tensors to be written, under Megatron's names.

    Raises:
        CheckpointError: naming the dimension, the parallel size that does not fit, and sizes that do.
    """
    arguments, names = model.arguments, [key.name for key in plan]
    tp, pp, ep = options.tp_size, options.pp_size, options.ep_size
    layers, heads = arguments.get("num_layers"), arguments.get("num_attention_heads")
    if layers is not None and layers % pp:
        raise _unfit(f"num_layers {layers} is not divisible by", "pp_size", pp, _divisors(layers))
    if pp > 1 and model.extra_blocks:
        raise CheckpointError(
            f"pp_size {pp}: {' and '.join(model.num_layers_per_block)} must be on one pipeline stage. Use pp_size 1."
        )
    groups: int = arguments.get("num_query_groups") or heads or 0
    if heads is not None:
        # transformer_config.py: the number of groups is a multiple of tp, or tp is a multiple of it.
        fit = [size for size in _divisors(heads) if groups % size == 0 or size % groups == 0]
        if heads % tp:
            raise _unfit(f"num_attention_heads {heads} is not divisible by", "tp_size", tp, fit)
        if tp not in fit:
            raise _unfit(f"num_query_groups {groups} is neither a divisor nor a multiple of", "tp_size", tp, fit)
    for field, module in _WIDTHS.items():
        width = arguments.get(field)
        if width is not None and width % tp and any(module in name and not is_encoder_weight(name) for name in names):
            raise _unfit(f"{field} {width} is not divisible by", "tp_size", tp, _divisors(width))
    for what, size in model.sizes.items():
        if size % tp:
            raise _unfit(f"{what} {size} is not divisible by", "tp_size", tp, _divisors(size))
    if pp > 1 and any(map(is_mtp_name, names)):
        raise CheckpointError(
            f"pp_size {pp}: multi-token prediction layers (mtp) must be on one pipeline stage. Use pp_size 1."
        )
    if ep > 1 and not any(EXPERTS in name for name in names):
        raise CheckpointError(f"ep_size {ep}: the model has no experts. Use ep_size 1.")
    experts = arguments.get("num_experts")
    if experts and experts % ep:
        raise _unfit(f"num_experts {experts} is not divisible by", "ep_size", ep, _divisors(experts))


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, min(number, _MOST_RANKS) + 1) if number % size == 0]


def _unfit(what: str, field: str, size: int, fit: list[int]) -> CheckpointError:
    listing = ", ".join(map(str, fit[:16])) + (", ..." if len(fit) > 16 else "")
    return CheckpointError(f"{what} {field} {size}. Valid sizes: {listing}.")
