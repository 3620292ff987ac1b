"""The gate in front of layouts that nobody has compared with one process yet."""

import subprocess
import sys
import tempfile
from typing import Any

import torch.distributed as dist

from ..config import MegatronConfig
from ..errors import UnverifiedLayoutError
from ..registry.recorded import is_verified, layout_kind


class ConfigUnderTest(MegatronConfig):
    """The layout a parity check is judging: the gate is open for it."""


def require_verified(model: Any, config: MegatronConfig) -> None:
    """Raises `UnverifiedLayoutError`, with the command of the check, unless the type passed it on this kind of layout.

    With `allow_unverified=True` the check of the tiny twin runs here, on CPU ranks of its own, and a failure raises.
    """
    model_type = model.config.model_type
    if isinstance(config, ConfigUnderTest) or is_verified(type(model).__name__, model_type, config):
        return
    kind = layout_kind(config)
    options = f"--class {type(model).__name__} {' '.join(_options(config))}"
    command = f"hf-megatron check {model_type} {options}"
    if not config.allow_unverified:
        raise UnverifiedLayoutError(
            f"{type(model).__name__} (model type {model_type!r}) has no recorded parity result for {kind}. Run\n"
            f"    {command}\nor pass MegatronConfig(allow_unverified=True), which runs it and goes on if it passes."
        )
    verdict: list[Any] = [None]
    if dist.get_rank() == 0:
        verdict = [_check(model, config)]
    dist.broadcast_object_list(verdict, src=0)
    code, report = verdict[0]
    if code:
        raise UnverifiedLayoutError(f"The parity check of {model_type!r} on {kind} failed (`{command}`):\n{report}")


def _options(config: MegatronConfig) -> list[str]:
    options = ["--tp", str(config.tp_size)] + ["--sp"] * config.sequence_parallel
    return options + (["--pp", str(config.pp_size)] if config.pp_size > 1 else [])


def _check(model: Any, config: MegatronConfig) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        arguments = ["check", directory, *_options(config), "--class", type(model).__name__]
        # A process of its own: forking this one would copy its process group and device context.
        result = subprocess.run(
            [sys.executable, "-m", "hf_megatron.cli", *arguments], capture_output=True, text=True, check=False
        )
    return result.returncode, (result.stdout + result.stderr)[-4000:]
