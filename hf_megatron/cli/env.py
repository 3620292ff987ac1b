"""Environment report for bug reports (`hf-megatron env`)."""

import importlib
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from typing import Annotated, Any

import typer

from ..compat.patch_registry import PATCH_REGISTRY, PatchedTarget
from ..compat.versions import CHECKED, installed_version, is_checked_version
from ..config import MegatronConfig
from ..errors import ConfigError, MegatronError

# Libraries without a tested range follow those of `CHECKED`.
_LIBRARIES = (
    *CHECKED,
    *("safetensors", "huggingface_hub", "tokenizers", "datasets", "liger_kernel", "bitsandbytes", "torchao", "triton"),
    *("flash_attn", "megatron_core"),
)
# Modules of Python's that decorated functions name as their own.
_PYTHON = ("builtins", "contextlib", "functools")
# Variables that launch or configure a job. Others are not printed: they may hold secrets.
_VARIABLES = re.compile(
    r"(HF_MEGATRON|MEGATRON_LM|PARALLELISM_CONFIG|ACCELERATE|FSDP|NCCL|TORCH_NCCL|GLOO|TORCHDYNAMO|PYTORCH)_.*"
    r"|(LOCAL_)?(WORLD_SIZE|RANK)|GROUP_RANK|CUDA_VISIBLE_DEVICES|OMP_NUM_THREADS|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE"
)


def env(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    patches: Annotated[
        bool, typer.Option(help="Import every library, apply every patch, and list those that do not apply.")
    ] = False,
) -> None:
    """Print versions and their tested ranges, devices, layout variables and patches, for a bug report."""
    report = collect_environment(check_patches=patches)
    typer.echo(json.dumps(report, indent=2) if as_json else render_environment(report))


def collect_environment(*, check_patches: bool = False) -> dict[str, Any]:
    """Returns the environment of this process.

    Args:
        check_patches (`bool`, defaults to `False`): whether to import all libraries and apply all patches, which takes
            seconds.
    """
    libraries: dict[str, dict[str, Any]] = {}
    for name in ("hf_megatron", *_LIBRARIES):
        try:
            version = installed_version(name)
        except metadata.PackageNotFoundError:
            libraries[name] = {"installed": None}
            continue
        libraries[name] = {"installed": version}
        if name in CHECKED:
            libraries[name] |= {"tested": " to ".join(CHECKED[name]), "is_tested": is_checked_version(name, version)}
    variables = {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)}
    return {
        "platform": platform.platform(),
        "python": platform.python_version(),
        "libraries": libraries,
        "devices": _describe_devices(),
        "variables": variables,
        "layout": _describe_layout(),
        "patches": _check_patches() if check_patches else _count_patches(),
    }


def _describe_devices() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    backends = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available(), "xccl": dist.is_xccl_available()}
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = "cpu" if accelerator is None else accelerator.type
    devices: dict[str, Any] = {"type": kind, "backends": [name for name, available in backends.items() if available]}
    if kind == "cuda":
        properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        devices["names"] = [f"{one.name}, {one.total_memory / 2**30:.0f} GiB" for one in properties]
        devices["runtime"] = torch.version.cuda or f"ROCm {torch.version.hip}"
    elif accelerator is not None:
        devices["names"] = [kind] * torch.accelerator.device_count()
    else:
        devices["cores"] = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return devices


def _describe_layout() -> str:
    from ..integrations.accelerate.environment import config_from_environment

    try:
        layout = config_from_environment()
    except ConfigError as error:
        return f"not valid: {error}"
    changed = {
        name: value for name, value in layout.to_dict().items() if value != getattr(MegatronConfig(), name, None)
    }
    return ", ".join(f"{name}={value}" for name, value in changed.items()) or "none"


def _count_patches() -> dict[str, Any]:
    targets = PATCH_REGISTRY.targets.values()
    entry_points = [target for target in targets if any(patch.is_entry_point for patch in target.patches)]
    return {
        "enabled": PATCH_REGISTRY.enabled,
        "entry points": len(entry_points),
        "with the first model": len(targets) - len(entry_points),
        "in force": sum(bool(target.applied) for target in targets),
    }


def _check_patches() -> dict[str, Any]:
    """Applies every patch whose library is installed, and returns those that are not in force, by reason."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    PATCH_REGISTRY.enable()
    targets = list(PATCH_REGISTRY.targets.values())
    problems: dict[str, dict[str, str]] = {"not in force": {}, "replaced by another library": {}}
    for target in targets:
        if reason := _find_obstacle(target):
            problems["not in force"][target.target] = reason
            continue
        owner = str(getattr(target.original, "__module__", None) or "").partition(".")[0]
        if owner not in ("", *CHECKED, *_PYTHON):
            problems["replaced by another library"][target.target] = owner
    return _count_patches() | {reason: names for reason, names in problems.items() if names}


def _find_obstacle(target: PatchedTarget) -> str:
    """Applies the patches of a target; returns why none is in force, or an empty text."""
    try:
        importlib.import_module(target.module_name)
        target.apply()
    except (ImportError, MegatronError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if target.applied else "not in this version of the library, which does not need it"


def render_environment(report: Mapping[str, Any]) -> str:
    """Renders the environment as text."""
    lines = [f"platform: {report['platform']}", f"python: {report['python']}"]
    for name, library in report["libraries"].items():
        tested = f" (tested: {library['tested']})" if "tested" in library else ""
        marker = "" if library.get("is_tested", True) else "  <- not tested"
        lines.append(f"{name}: {library['installed'] or 'not installed'}{tested}{marker}")
    for section in ("devices", "variables", "patches"):
        lines += ["", f"{section}:"]
        for name, value in report[section].items():
            if isinstance(value, Mapping):
                lines += [f"  {name}:", *(f"    {key}: {text}" for key, text in value.items())]
            else:
                lines.append(f"  {name}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
        if not report[section]:
            lines.append("  none")
    return "\n".join([*lines, "", f"layout of the environment: {report['layout']}"])
