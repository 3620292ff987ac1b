"""The package version, read by the build and by `hf-megatron --version`."""

import re
import sys
import warnings
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from types import MappingProxyType

__version__ = "0.1.0"


# The first and the last minor version of each library that is supported; docs/versions.md says what was run on them.
CHECKED: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "torch": ("2.11", "2.13"),
        "transformers": ("5.21", "5.23"),
        "accelerate": ("1.13", "1.15"),
        "trl": ("1.14", "1.16"),
        # transformers 5.21 to 5.23 take none before.
        "peft": ("0.20", "0.21"),
        "sentence_transformers": ("6.0", "6.2"),
    }
)


# Targets of patches that not every checked version has: the library, its first version with them and the first without.
_TARGETS: Mapping[str, tuple[str, str | None, str | None]] = MappingProxyType(
    {
        **{
            f"trl.trainer.{name}_trainer:add_fused_lm_head": ("trl", "1.15", None)
            for name in ("sft", "dpo", "kto", "grpo", "rloo")
        },
        "peft.utils.save_and_load:_reshard_dtensor_values_for_load": ("peft", "0.21", None),
        "trl.trainer.sft_trainer:_patch_chunked_ce_lm_head": ("trl", None, "1.15"),
    }
)


def _minor(version: str) -> tuple[int, ...]:
    """Returns the two numbers that a version begins with; those of development versions too."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@cache
def installed_version(library: str) -> str:
    """Returns the version of an installed library; raises `PackageNotFoundError`."""
    return metadata.version(library)


def is_of_other_versions(target: str) -> bool:
    """Tells whether the installed version is one that a patch's target is known not to be in."""
    if target not in _TARGETS:
        return False
    library, first, end = _TARGETS[target]
    installed = _minor(installed_version(library))
    return (first is not None and installed < _minor(first)) or (end is not None and installed >= _minor(end))


def warn_of_unchecked_versions() -> None:
    """Warns, once for each, of imported libraries whose version is outside of what was checked."""
    for library in CHECKED:
        if library in sys.modules:
            _warn_of_version(library, installed_version(library))


@cache
def _warn_of_version(library: str, version: str) -> None:
    first, last = CHECKED[library]
    if not _minor(first) <= _minor(version) <= _minor(last):
        checked = ", ".join(f"{name} {low} to {high}" for name, (low, high) in CHECKED.items())
        warnings.warn(
            f"hf_megatron was not checked with {library} {version}, but with {checked}. Its numbers may differ from "
            "those of one process; install a version of this range, or compare with `hf-megatron check`.",
            stacklevel=2,
        )
