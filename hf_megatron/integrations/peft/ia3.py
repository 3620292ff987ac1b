"""(IA)3: a vector that multiplies what a linear is given or returns."""

from typing import Any

from ...core.placement import GradientRule, Placement
from .local_dict import LocalDict
from .site import Site


def shard_ia3(tuner: Any, site: Site) -> None:
    """Lays out the adapters of an (IA)3 layer that are new."""
    factors, vectors = site.factors(), tuner.ia3_l
    factor = None if factors is None else factors.a if tuner.is_feedforward else factors.b
    for adapter in list(vectors.keys()):
        inner = f"ia3_l.{adapter}"
        if site.has_claim(inner):
            continue
        placement = Placement() if factor is None else factor.along(1 if tuner.is_feedforward else 0)
        site.place(vectors, adapter, inner, placement, GradientRule() if factor is None else factor.rule)
    if factor is not None and not site.is_elsewhere:
        vectors.__class__ = LocalDict
        vectors.forwards, vectors.group = site.forwards, None
        if factor.rule.sum is not None:
            copies, mesh = factor.rule.copies, site.state.mesh
            vectors.group = mesh.tp_group if copies is None else mesh.copies_group(copies)
