"""LoRA: two linears beside a linear."""

from typing import Any

from torch import nn

from ..placement import GradientRule, Placement
from ..tensor_parallel.local_parameters import become
from .dora import lay_out_dora
from .dropout import draw_in_turn
from .factors import Factor, WholeFactor
from .site import Site

_FACTORS = ("lora_A", "lora_B")


def lay_out_lora(tuner: Any, site: Site) -> None:
    """Lays out the adapters of a LoRA layer that are new."""
    factors = site.factors()
    pair = (None, None) if factors is None else (factors.a, factors.b)
    for adapter in tuner.lora_A:
        if site.has_claim(f"lora_A.{adapter}.weight"):
            continue
        for which, factor in zip(_FACTORS, pair, strict=True):
            _place(getattr(tuner, which)[adapter], f"{which}.{adapter}", factor, site)
        if factors is not None:
            draw_in_turn(tuner.lora_dropout[adapter], site.streams, is_whole=factors.input_is_whole)
        lay_out_dora(tuner, adapter, factors, site)


def _place(linear: nn.Module, inner: str, factor: Factor | None, site: Site) -> None:
    """Turns PEFT's linear into one that computes with this rank's part of it."""
    for own in list(linear._parameters):
        if linear._parameters[own] is not None:
            placement = Placement() if factor is None else factor.placement(own)
            site.place(linear, own, f"{inner}.{own}", placement, GradientRule() if factor is None else factor.rule)
    if factor is None or site.is_elsewhere:
        return
    become(linear, factor.kind)
    linear.mesh, linear.forwards = site.state.mesh, site.forwards  # type: ignore[assignment]
    linear.streams, linear.region = site.streams, factor.region  # type: ignore[assignment]
    linear.copies = factor.rule.copies or 1  # type: ignore[assignment]
    if factor.kind is not WholeFactor or factor.rule.sum is not None:
        linear.name_of_part = f"{site.name}.{inner}"  # type: ignore[assignment]
    for switch, value in factor.switches:
        setattr(linear, switch, value)
