"""The package version, read by the build and the CLI, and the supported versions of upstream libraries."""

import os
import re
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType

__version__ = "0.1.0"


# First and last supported minor version of each library; docs/versions.md lists the tests run on them.
CHECKED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "torch": ("2.11", "2.15"),
        "transformers": ("5.21", "5.24"),
        "accelerate": ("1.13", "1.15"),
        "trl": ("1.14", "1.16"),
        # These transformers require at least 0.20.
        "peft": ("0.20", "0.21"),
        "sentence_transformers": ("6.0", "6.2"),
    }
)


# Patch targets that exist only in some checked versions: library, first version with them, first version without.
_TARGETS: Mapping[str, tuple[str, str | None, str | None]] = MappingProxyType(
    {
        **{
            f"trl.trainer.{name}_trainer:add_fused_lm_head": ("trl", "1.15", None)
            for name in ("sft", "dpo", "kto", "grpo", "rloo")
        },
        "peft.utils.save_and_load:_reshard_dtensor_values_for_load": ("peft", "0.21", None),
        "sentence_transformers.base.trainer:distributed_evaluation": ("sentence_transformers", "6.2", None),
        "trl.trainer.sft_trainer:_patch_chunked_ce_lm_head": ("trl", None, "1.15"),
    }
)


def _minor(version: str) -> tuple[int, ...]:
    """Returns the first two numbers of a version, including development versions."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@cache
def installed_version(library: str) -> str:
    """Returns the version of an installed library; raises `PackageNotFoundError`."""
    return metadata.version(library)


def is_for_other_version(target: str) -> bool:
    """Returns whether a patch's target is known to be missing in the installed version."""
    if target not in _TARGETS:
        return False
    library, first, end = _TARGETS[target]
    installed = _minor(installed_version(library))
    return (first is not None and installed < _minor(first)) or (end is not None and installed >= _minor(end))


def warn_unchecked_versions() -> None:
    """Warns on the first rank, once per imported library whose version is outside the checked range."""
    for library in CHECKED:
        if library in sys.modules and os.environ.get("RANK", "0") == "0":
            _warn_unchecked_version(library, installed_version(library))


def is_checked_version(library: str, version: str) -> bool:
    """Returns whether a version of a library in `CHECKED` is in its range."""
    first, last = CHECKED[library]
    return _minor(first) <= _minor(version) <= _minor(last)


@cache
def _warn_unchecked_version(library: str, version: str) -> None:
    if not is_checked_version(library, version):
        checked = ", ".join(f"{name} {low} to {high}" for name, (low, high) in CHECKED.items())
        warnings.warn(
            f"hf_megatron was not tested with {library} {version} (tested: {checked}). Results may differ from a "
            "single-process run. Install a tested version, or compare with `hf-megatron check`.",
            stacklevel=2,
        )
