"""LoRA: sharding of the two factors next to a linear or an embedding."""

from functools import cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...core.communication.rng import TensorParallelRng
from ...core.placement import GradientRule, Placement
from ...tensor_parallel.local_parameters import ActiveForwards, local_view, swap_class
from .dora import shard_dora
from .factors import Factor, FullFactor
from .site import Site

_FACTORS = ("lora_A", "lora_B")
_OF_EMBEDDINGS = ("lora_embedding_A", "lora_embedding_B")


def shard_lora(tuner: Any, site: Site) -> None:
    """Shards new adapters of a LoRA layer."""
    if len(tuner.lora_embedding_A):
        _shard_embedding(tuner, site)
        return
    factors = site.factors()
    pair = (None, None) if factors is None else (factors.a, factors.b)
    for adapter in tuner.lora_A:
        if site.has_sharding(f"lora_A.{adapter}.weight"):
            continue
        for which, factor in zip(_FACTORS, pair, strict=True):
            _place(getattr(tuner, which)[adapter], f"{which}.{adapter}", factor, site)
        if factors is not None:
            draw_in_turn(tuner.lora_dropout[adapter], site.rng, is_replicated=factors.input_is_full)
        shard_dora(tuner, adapter, factors, site)


def _shard_embedding(tuner: Any, site: Site) -> None:
    """Replicates the factors of an embedding: every rank looks up all tokens, in `rank` columns."""
    for which in _OF_EMBEDDINGS:
        parameters = getattr(tuner, which)
        for adapter in list(parameters.keys()):
            if not site.has_sharding(f"{which}.{adapter}"):
                site.replicate_value(parameters, adapter, f"{which}.{adapter}")
        if len(parameters) and site.splits and not site.is_off_stage:
            parameters.__class__ = LocalDict
            parameters.forwards, parameters.group = site.forwards, None
    if site.is_off_stage and not isinstance(tuner, _PassedBy):
        tuner.__class__ = _passed_by(type(tuner))  # type: ignore[arg-type]


class _PassedBy(nn.Module):
    """Placeholder for an adapter of another stage: its forward only calls the base embedding, which returns zeros."""

    base_layer: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_layer(*args, **kwargs)


@cache
def _passed_by(base: Any) -> Any:
    return type(base.__name__, (_PassedBy, base), {})


def _place(linear: nn.Module, inner: str, factor: Factor | None, site: Site) -> None:
    """Converts PEFT's linear to a parallel linear with this rank's shard."""
    for param_name in list(linear._parameters):
        if linear._parameters[param_name] is not None:
            placement = Placement() if factor is None else factor.placement(param_name)
            site.place(
                linear,
                param_name,
                f"{inner}.{param_name}",
                placement,
                GradientRule() if factor is None else factor.rule,
            )
    if factor is None or site.is_off_stage:
        return
    swap_class(linear, factor.kind)
    linear.mesh, linear.forwards = site.state.mesh, site.forwards  # type: ignore[assignment]
    linear.rng, linear.region = site.rng, factor.region  # type: ignore[assignment]
    linear.copies = factor.rule.copies or 1  # type: ignore[assignment]
    # The name marks linears with sharded inputs or outputs or partial gradients: calls outside the model's forward
    # raise.
    if factor.kind is not FullFactor or factor.rule.sum is not None:
        linear.shard_name = f"{site.name}.{inner}"  # type: ignore[assignment]
    for switch, value in factor.switches:
        setattr(linear, switch, value)


class _Dropout(nn.Dropout):
    rng: TensorParallelRng
    is_replicated: bool

    def forward(self, x: Tensor) -> Tensor:
        # A replicated input needs identical dropout masks on all tp ranks, a sharded one different masks.
        with self.rng.replicated() if self.is_replicated else self.rng.own():
            return super().forward(x)


def draw_in_turn(dropout: nn.Module, rng: TensorParallelRng, *, is_replicated: bool) -> None:
    """Configures an adapter's dropout to draw from the shared or local RNG, whichever fits its input."""
    if isinstance(dropout, nn.Dropout):
        dropout.__class__ = _Dropout
        dropout.rng, dropout.is_replicated = rng, is_replicated  # type: ignore[assignment]


class LocalDict(nn.ParameterDict):
    """Parameters of any shape that are local tensors in forwards, with gradients summed over a group of ranks."""

    forwards: ActiveForwards
    group: dist.ProcessGroup | None

    def __getitem__(self, key: str) -> Tensor | None:
        parameter = super().__getitem__(key)
        return local_view(parameter, self.group) if self.forwards else parameter
