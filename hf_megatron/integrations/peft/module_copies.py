"""Copies of a module that are trained in its place: `modules_to_save` and the tuning of norms."""

from typing import Any

from torch import nn

from .site import Site


def shard_copies(copies: nn.ModuleDict, within: str, site: Site) -> None:
    """Claims copies, by adapter, as the module that they were made of."""
    for adapter, copy in copies.items():
        for own, _ in copy.named_parameters():
            inner = f"{within}.{adapter}.{own}"
            if not site.has_claim(inner):
                site.claim_copy(inner, site.state.claims[f"{site.base_name}.{own}"])


def shard_norms(tuner: Any, site: Site) -> None:
    """Lays out the adapters of a layer of LN tuning."""
    shard_copies(tuner.ln_tuning_layers, "ln_tuning_layers", site)


def shard_saved(wrapper: Any, site: Site) -> None:
    """Lays out the copies of a module that is saved with an adapter."""
    shard_copies(wrapper.modules_to_save, "modules_to_save", site)
