"""Mapping of low-rank adapter factors between a transformers model and Megatron.

A linear `W [out, in]` with an adapter computes `W + s B A`, with `A [rank, in]` and `B [out, rank]`. Megatron packs
query, key and value, and gate and up, into one linear. Megatron-Bridge has two kinds of adapters for packed linears:

    canonical   a separate adapter for each packed projection, as in PEFT
    fused       one `A` for all of them, and a `B` with the rows of the packed linear. Separate PEFT adapters are fused
                into one with the sum of their ranks, whose `B` is block diagonal; its output is the same, but it trains
                differently

All adapters of Megatron-Bridge share one rank (`dim`) and one `alpha`: lower ranks are padded with zeros, and
differences in scale are folded into `B`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ...errors import CheckpointError, UnsupportedError
from ..megatron.rules import GroupedQKV, Joined, Operation, Rule, Same

_LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# Megatron-Bridge's `ADAPTER_NAME_MAP` (models/conversion/peft_bridge.py), and its targets.
PARTS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "q_proj": ("adapter_q", "linear_q"),
        "k_proj": ("adapter_k", "linear_k"),
        "v_proj": ("adapter_v", "linear_v"),
        "gate_proj": ("adapter_gate", "linear_fc1_gate"),
        "up_proj": ("adapter_up", "linear_fc1_up"),
    }
)


@dataclass(frozen=True)
class LowRank:
    """The factors of one linear, and the scale of their product."""

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def filled(self, rank: int, scale: float) -> "LowRank":
        """Returns the same adapter padded to a higher rank, with another scale."""
        missing = rank - self.rank
        a = torch.cat([self.a, self.a.new_zeros(missing, self.a.shape[1])])
        b = torch.cat([self.b * (self.scale / scale), self.b.new_zeros(self.b.shape[0], missing)], 1)
        return LowRank(a, b, scale)


@dataclass(frozen=True)
class Target:
    """A Megatron linear, the model's linears it consists of, and the operation that maps them."""

    megatron: str
    modules: tuple[str, ...]
    operation: Operation

    @property
    def kind(self) -> str:
        return self.megatron.rpartition(".")[2]


def bridge_targets(rules: Iterable[Rule]) -> Iterator[Target]:
    """Yields the linears that Megatron-Bridge adapts and whose rows are only reordered by conversion."""
    for rule in rules:
        if len(rule.megatron) != 1 or not rule.megatron[0].endswith(".weight"):
            continue
        name = rule.megatron[0].removesuffix(".weight")
        is_plain = type(rule.operation) is Same or isinstance(rule.operation, GroupedQKV | Joined)
        if name.rpartition(".")[2] in _LINEARS and "experts" not in name and is_plain:
            modules = tuple(module.removesuffix(".weight") for module in rule.transformers)
            yield Target(name, modules, rule.operation)


def to_bridge(
    adapters: Mapping[str, LowRank], targets: Sequence[Target], *, fused: bool
) -> tuple[dict[str, Tensor], int, float]:
    """Returns Megatron-Bridge's tensors by name, their rank and their `alpha`.

    Raises:
        UnsupportedError: naming adapters of modules that Megatron-Bridge does not adapt.
    """
    known = {module for target in targets for module in target.modules}
    if unsupported := sorted(adapters.keys() - known):
        raise UnsupportedError(
            f"Megatron-Bridge has no adapters for {', '.join(unsupported[:5])}; it supports query, key, value and "
            "output projections and dense MLPs. Merge the adapter into the base model and convert the merged model."
        )
    megatron_adapters: dict[str, LowRank] = {}
    for target in targets:
        parts = [adapters.get(module) for module in target.modules]
        if not any(parts):
            continue
        if len(parts) == 1 and parts[0] is not None:
            megatron_adapters[target.megatron] = parts[0]
        elif fused:
            megatron_adapters[target.megatron] = _fused(target, parts)
        else:
            for module, part in zip(target.modules, parts, strict=True):
                if part is not None:
                    megatron_adapters[f"{target.megatron}\0{PARTS[module.rpartition('.')[2]][0]}"] = part
    rank = max(adapter.rank for adapter in megatron_adapters.values())
    scale = next(iter(adapters.values())).scale
    tensors = {}
    for name, adapter in megatron_adapters.items():
        filled, prefix = adapter.filled(rank, scale), name.replace("\0", ".adapter.")
        prefix = prefix if "\0" in name else f"{prefix}.adapter"
        tensors[f"{prefix}.linear_in.weight"] = filled.a
        tensors[f"{prefix}.linear_out.weight"] = filled.b
    return tensors, rank, scale * rank


def _fused(target: Target, parts: Sequence[LowRank | None]) -> LowRank:
    present_parts = [part for part in parts if part is not None]
    scale, rank, start, rows = present_parts[0].scale, sum(part.rank for part in present_parts), 0, []
    for part, size in zip(parts, _rows(target.operation), strict=True):
        block = present_parts[0].b.new_zeros(size, rank)
        if part is not None:
            block[:, start : start + part.rank] = part.b * (part.scale / scale)
            start += part.rank
        rows.append(block)
    [b] = target.operation.to_megatron(rows)
    return LowRank(torch.cat([part.a for part in present_parts]), b, scale)


def _rows(operation: Operation) -> Sequence[int]:
    if isinstance(operation, GroupedQKV):
        return [heads * operation.head_dim for heads in (operation.heads, operation.groups, operation.groups)]
    assert isinstance(operation, Joined)
    return operation.sizes


def to_peft(tensors: Mapping[str, Tensor], targets: Sequence[Target], scale: float) -> dict[str, LowRank]:
    """Returns the factors of the model's linears from canonical or fused adapters of Megatron-Bridge.

    Raises:
        CheckpointError: naming tensors that belong to no adapter of this model, or factors with mismatched shapes.
    """
    adapters, used = {}, set()
    for target in targets:
        for module, prefix in _places(target, tensors):
            names = [f"{prefix}.{factor}.weight" for factor in ("linear_in", "linear_out")]
            if not all(name in tensors for name in names):
                continue
            used.update(names)
            a, b = (tensors[name] for name in names)
            if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1]:
                raise CheckpointError(
                    f"{prefix}: the factors have incompatible shapes {list(a.shape)} and {list(b.shape)}."
                )
            if module is not None:
                adapters[module] = LowRank(a, b, scale)
                continue
            for part, rows in zip(target.modules, target.operation.to_transformers([b]), strict=True):
                adapters[part] = LowRank(a, rows, scale)
    if unknown := sorted(tensors.keys() - used):
        raise CheckpointError(
            f"{len(unknown)} tensors do not belong to an adapter of this model: {', '.join(unknown[:5])}. Check that "
            "the config is the base model's."
        )
    return adapters


def _places(target: Target, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str | None, str]]:
    """Yields the adapter prefixes a linear may have, with the module they adapt; `None` for all of its modules."""
    prefix = f"{target.megatron}.adapter"
    if len(target.modules) == 1:
        yield target.modules[0], prefix
        return
    yield None, prefix
    for module in target.modules:
        yield module, f"{prefix}.{PARTS[module.rpartition('.')[2]][0]}"
