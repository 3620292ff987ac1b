"""LoRA on an expert parameter `[experts, out, in]` that is sharded by experts or within each expert.

PEFT keeps `A [experts x r, in]`, ordered by expert, and `B [out, r x experts]`, whose columns interleave the experts.
During a forward, `B A` of each expert is added to the parameter.

| parameter is split | `A` | its gradient | `B` | its gradient |
|---|---|---|---|---|
| by experts | the local experts' rows | as the parameter's | the local experts' columns | as the parameter's |
| along `out` over tp | replicated | sum over tp | local rows | as the parameter's |
| along `in` over tp | local columns | as the parameter's | replicated | sum over tp |
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from torch import Tensor, einsum, nn
from torch.distributed.tensor import DTensor

from ...compat.torch_dtensor import dtensor_from_local, local_tensor
from ...core.placement import Placement, Split
from ...tensor_parallel.local_parameters import LocalParameters, read_locally
from ...tensor_parallel.styles import AXIS
from .site import Site


def shard_parameter(wrapper: Any, site: Site) -> None:
    """Shards new adapters of a parameter."""
    base, inner = wrapper.base_layer, f"{site.base_name}."
    while base is not wrapper.get_base_layer():
        # Each adapted parameter of a module has its own wrapper, nested around the others.
        base, inner = base.base_layer, f"{inner}base_layer."
    sharding = site.state.shardings[f"{inner}{wrapper.parameter_name}"]
    for adapter, rank in wrapper.r.items():
        if site.has_sharding(f"lora_A.{adapter}.weight"):
            continue
        for which, dims in zip(("lora_A", "lora_B"), _dims(wrapper, len(sharding.shape), rank), strict=True):
            splits = tuple(_taken_over(sharding.placement.splits, dims))
            # Without the parameter's split, a factor is replicated over tp and its gradient is partial: sum it.
            lacks = {split.axis for split in sharding.placement.splits} - {split.axis for split in splits}
            rule = replace(sharding.gradient, sum=AXIS, copies=None) if AXIS in lacks else sharding.gradient
            linear = getattr(wrapper, which)[adapter]
            site.place(linear, "weight", f"{which}.{adapter}.weight", Placement(splits), rule, keeps_average=True)
            if isinstance(base, LocalParameters) and not site.is_off_stage:
                summed = frozenset({"weight"} if rule.sum is not None else ())
                read_locally(linear, base.mesh, base.forwards, summed)
                linear.gradient_factor = base.gradient_factor
    if isinstance(base, LocalParameters):
        wrapper.__class__ = _on_parts(type(wrapper))  # type: ignore[arg-type]


def _dims(wrapper: Any, dims: int, rank: int) -> list[dict[int, tuple[int, int]]]:
    """Maps split dims of the parameter to (dim, number of blocks per block) in `A` and in `B`."""
    if dims == 2:
        return [{1: (1, 1)}, {0: (0, 1)}]
    out, width = (1, 2) if wrapper._did_swap_in_out_features else (2, 1)
    return [{0: (0, 1), width: (1, 1)}, {0: (1, rank), out: (0, 1)}]


def _taken_over(splits: tuple[Split, ...], dims: Mapping[int, tuple[int, int]]) -> Iterator[Split]:
    for split in splits:
        if split.dim in dims:
            dim, blocks = dims[split.dim]
            yield replace(split, dim=dim, groups=split.groups * blocks)


class ShardedLora(nn.Module):
    """Replaces PEFT's `ParamWrapper` for a parameter that is sharded over ranks."""

    parameter_name: str
    lora_A: Any  # noqa: N815 - PEFT's names
    lora_B: Any  # noqa: N815
    r: dict[str, int]
    scaling: dict[str, float]
    _did_swap_in_out_features: bool

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> Tensor:
        """Returns an adapter's update of the parameter, of any shape, with the parameter's sharding."""
        parameter = getattr(self.get_base_layer(), self.parameter_name)  # type: ignore[operator]
        delta = self._delta(adapter_name, local_tensor(parameter))
        return dtensor_from_local(delta, parameter) if isinstance(parameter, DTensor) else delta

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Registers the adapters' updates, which the wrapped module adds to the parameter whenever it reads it."""
        adapters = [adapter for adapter in active_adapters if adapter in self.lora_A]
        base: Any = self.get_base_layer()  # type: ignore[operator]
        before = base.changed
        cache: list[Tensor] = []

        def changed(value: Tensor) -> Tensor:
            # Compute the sum once: modules that loop over experts read the parameter for each of them.
            if not cache:
                cache.append(sum((self._delta(adapter, value) for adapter in adapters), value))
            return cache[0]

        if adapters:
            base.changed = {**before, self.parameter_name: changed}
        try:
            yield
        finally:
            base.changed = before

    def _delta(self, adapter: str, like: Tensor) -> Tensor:
        a, b = (local_tensor(factors[adapter].weight) for factors in (self.lora_A, self.lora_B))
        if like.dim() == 2:
            delta = b @ a
        else:
            experts = len(like)
            # `A [experts x r, in]` to `[experts, r, in]` and `B [out, r x experts]` to `[out, r, experts]`, all local.
            a, b = a.view(experts, -1, a.shape[-1]), b.view(len(b), -1, experts)
            delta = einsum("ore,eri->eoi" if self._did_swap_in_out_features else "ore,eri->eio", b, a)
        return (delta * self.scaling[adapter]).to(like.dtype)


@cache
def _on_parts(base: type) -> Any:
    return base if issubclass(base, ShardedLora) else type(base.__name__, (ShardedLora, base), {})
