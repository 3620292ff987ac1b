"""Tensor names and shapes of model families in Megatron, one module per family; a new family is a new module."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import MappingProxyType
from typing import Any

from ...checkpoint.untrusted_config import reason
from ...errors import CheckpointError, UnsupportedError
from ..architecture import Architecture
from ..interfaces import TargetOptions
from ..megatron.rules import Rule
from .family import Family
from .multimodal import MultimodalFamily
from .unsupported import REFUSED

__all__ = ["Family", "MultimodalFamily", "check_config", "get_family", "known_families", "list_rules"]


@cache
def known_families() -> Mapping[str, Family | MultimodalFamily]:
    """Collects the `FAMILY` of every module of this package that has one, by model type."""
    families: dict[str, Family | MultimodalFamily] = {}
    for module in pkgutil.iter_modules(__path__):
        family = vars(importlib.import_module(f"{__name__}.{module.name}")).get("FAMILY")
        if family is not None:
            families |= dict.fromkeys(family.model_types, family)
    return MappingProxyType(families)


def get_family(config: Any) -> Family | MultimodalFamily:
    """Returns the family of a config.

    Raises:
        UnsupportedError: naming the supported model types, or the reason why Megatron cannot express this one.
    """
    family = known_families().get(config.model_type)
    if family is None and (why := REFUSED.get(config.model_type)):
        raise UnsupportedError(f"model type {config.model_type!r} cannot be expressed in Megatron: {why}.")
    if family is None:
        known = ", ".join(sorted(known_families()))
        raise UnsupportedError(
            f"Megatron's tensor names for model type {config.model_type!r} are not known. Known model types: {known}. "
            "To add one, add a module to conversion/families."
        )
    return family


@contextmanager
def _readable(config: Any) -> Iterator[None]:
    """Turns errors from evaluating a config into ones that name the setting; transformers validates few of them."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"config.json of model type {config.model_type}: {reason(config.to_dict(), error)}"
        ) from error


def check_config(config: Any) -> None:
    """Checks that Megatron's formats can express a config.

    Raises:
        UnsupportedError: naming the unsupported setting.
        CheckpointError: naming a setting with a wrong type.
    """
    family = get_family(config)
    with _readable(config):
        reason = family.unsupported_reason(config)
        if not reason:
            family.meaning(config), family.unchecked(config), family.unstored(config)
    if reason:
        raise UnsupportedError(f"{config.model_type}: {reason}")


def list_rules(architecture: Architecture, options: TargetOptions) -> list[Rule]:
    """Lists the rules of an architecture's family, with the vocabulary padded according to the options."""
    config, multiple = architecture.config, options.make_vocab_size_divisible_by * options.tp_size
    check_config(config)
    padded = -(-config.get_text_config().vocab_size // multiple) * multiple
    with _readable(config):
        return list(get_family(config).rules(config, padded, architecture.num_mtp_layers, architecture.names))
