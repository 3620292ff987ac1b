"""Parity check of a model while it is loaded: once per job, in a subprocess, with passed results cached per user."""

import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from huggingface_hub import constants
from torch import nn

from ..compat.torch_distributed import default_store
from ..core.io.safe_paths import replace_file
from .fingerprint import Description, Features, is_stock_class
from .verified import tested_versions

# The module that runs in the subprocess; packages above this one are not imported from here.
_RUNNER = "hf_megatron.testing.automatic_check"
# Seconds for each layout, and for the imports and the single-process reference.
_SECONDS_PER_LAYOUT, _SECONDS_FOR_REFERENCE = 240, 600
# Ranks without a result wait for rank 0 longer than its subprocess can take.
_WAIT = timedelta(hours=6)
# Environment variables of a launched rank, which would parallelize or distribute the subprocess.
_LAUNCH_VARIABLES = ("HF_MEGATRON_", "MEGATRON_LM_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_")
_RANK_VARIABLES = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}


@dataclass(frozen=True)
class AutomaticCheck:
    """Result of an automatic parity check.

    Attributes:
        passed (`bool`): whether every layout matched the single process.
        report (`str`): output of the check.
        seconds (`float`): duration.
    """

    passed: bool
    report: str
    seconds: float


def check_once_per_job(model: Any, description: Description, layouts: str, features: Iterable[Features]) -> str | None:
    """Compares a tiny model of a model's class and config with a single process; called on every rank.

    Rank 0 runs the check on its own CPU ranks. The other ranks wait at the job's store, where no timeout of a
    collective applies.

    Args:
        model: a model on any device.
        description (`Description`): its structure before the pipeline removed modules.
        layouts (`str`): the layouts to check, separated by commas.
        features (`Iterable[Features]`): the model's features on each kind of layout.

    Returns:
        `str`, *optional*: the report of a failed check, `None` if the check passed.
    """
    checked = _describe_check(model, layouts, features)
    store, name, rank = default_store("hf_megatron/automatic_check"), _hash(checked), dist.get_rank()
    # A notebook may check the same name again, after edits of the class.
    key = f"{name}/{store.add(f'{name}/rank{rank}', 1)}"
    if rank == 0:
        try:
            result = _check_or_read(model, description, layouts, _cache_path(model, checked))
        except Exception as error:  # noqa: BLE001 - the other ranks wait for a result, and raise the error too
            result = AutomaticCheck(False, f"The check could not run: {type(error).__name__}: {error}", 0.0)
        store.set(key, json.dumps(asdict(result)))
    store.wait([key], _WAIT)
    result = AutomaticCheck(**json.loads(store.get(key)))
    return None if result.passed else result.report


def cache_folder() -> Path:
    """Returns the folder of this user's passed checks, `hf_megatron/checks` in Hugging Face's cache (`HF_HOME`)."""
    return Path(constants.HF_HOME) / "hf_megatron" / "checks"


def _cache_path(model: Any, checked: dict[str, Any]) -> Path | None:
    """Returns the file of a passed check, or `None` if the source of a class is not in a file, as in notebooks."""
    sources = _hash_sources(model)
    if sources is None:
        return None
    read_by_check = {"sources": sources, "versions": tested_versions(), "package": _hash_package()}
    return cache_folder() / f"{_hash(checked | read_by_check)}.json"


def _check_or_read(model: Any, description: Description, layouts: str, path: Path | None) -> AutomaticCheck:
    if path is not None and path.is_file():
        return AutomaticCheck(**json.loads(path.read_text("utf-8"))["result"])
    name = type(model).__name__
    _print(f"{name} on {layouts}: no parity result is recorded. Comparing a tiny model with a single process ...")
    start = time.monotonic()
    passed, report = _run(model, description, layouts)
    result = AutomaticCheck(passed, report, round(time.monotonic() - start, 1))
    if passed and path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"class": name, "layouts": layouts, "versions": tested_versions(), "result": asdict(result)}
        replace_file(path, lambda partial: partial.write_text(json.dumps(content, indent=1), "utf-8"))
    judgment = "equal to a single process" if passed else "not shown to equal a single process"
    _print(f"{name} on {layouts}: {judgment}, checked in {result.seconds} s.")
    return result


def _run(model: Any, description: Description, layouts: str) -> tuple[bool, str]:
    """Runs the check in a subprocess; a fork would copy this process's groups and device context."""
    import cloudpickle

    request = {
        "class": type(model),
        "config_class": type(model.config),
        "config": model.config.to_dict(),
        "layouts": layouts,
        "parts": sorted(part.digest for part in description.features({}).parts),
    }
    with tempfile.TemporaryDirectory(prefix="hf_megatron_check_") as folder:
        path = Path(folder) / "request.pkl"
        # Classes of the script itself are pickled with their code; others are imported along the same path.
        path.write_bytes(cloudpickle.dumps(request))
        try:
            process = subprocess.run(
                [sys.executable, "-m", _RUNNER, str(path)],
                capture_output=True,
                text=True,
                check=False,
                env=_environment(),
                timeout=_SECONDS_FOR_REFERENCE + _SECONDS_PER_LAYOUT * len(layouts.split(",")),
            )
        except subprocess.TimeoutExpired as error:
            return False, f"The check did not finish within {error.timeout:.0f} seconds."
    return process.returncode == 0, (process.stdout + process.stderr)[-4000:]


def _environment() -> dict[str, str]:
    """Returns this process's environment without its launcher's variables and GPUs, with its import path."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCH_VARIABLES) and name not in _RANK_VARIABLES
    }
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return kept | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def _describe_check(model: Any, layouts: str, features: Iterable[Features]) -> dict[str, Any]:
    """Returns the class, layouts and features that a check compares, equal on all ranks."""
    return {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "model type": model.config.model_type,
        "layouts": layouts,
        "features": [(sorted(part.digest for part in one.parts), sorted(one.draws)) for one in features],
    }


def _hash(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash_sources(model: nn.Module) -> str | None:
    """Returns a hash of the files that define a model's classes outside of torch and transformers.

    Includes the imported files of the same folders, whose functions the classes may call. Returns `None` if the source
    of a class is not in a file.
    """
    classes = {type(module) for module in model.modules()} | {type(model.config)}
    files = set()
    for cls in classes:
        if is_stock_class(cls):
            continue
        try:
            file = Path(inspect.getfile(cls))
        except (TypeError, OSError):
            return None
        if not file.is_file():
            return None
        files.add(file)
    folders = {file.parent for file in files}
    imported = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    files |= {file for file in map(Path, filter(None, imported)) if file.parent in folders and file.is_file()}
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _hash_package() -> str:
    """Returns a hash of the times at which the files of this package were written: edits invalidate results."""
    root = Path(__file__).parents[1]
    stats = sorted((str(file.relative_to(root)), file.stat().st_mtime_ns) for file in root.rglob("*.py"))
    return _hash(stats)


def _print(text: str) -> None:
    print(f"hf_megatron: {text}", file=sys.stderr, flush=True)
