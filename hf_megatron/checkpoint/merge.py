"""Hugging Face files from a sharded checkpoint, on one machine with little memory: one tensor at a time."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..upstream import conversion_groups, revert_conversion, untied_state_dict
from .hugging_face import write_weights
from .manifest import MANIFEST
from .pieces import Box
from .reader import Checkpoint

# Files of a training run that mean nothing beside merged weights.
_OF_TRAINING = ("shard-", "random-", "data-", "loop.", "trainer_state.", "training_args.", MANIFEST)


def merge(source: str | Path, target: str | Path, *, max_shard_size: int | str = "50GB", verify: bool = True) -> Path:
    """Writes the weights of a sharded checkpoint, its config and its tokenizer as `from_pretrained` reads them.

    Args:
        source (`str` or `Path`): a folder of Trainer or `Accelerator.save_state`.
        target (`str` or `Path`): a folder that does not exist yet; it appears complete.
        max_shard_size (`int` or `str`): as in `save_pretrained`.
        verify (`bool`, defaults to `True`): compare all checksums first.

    Raises:
        CheckpointError: the source is damaged or has no config.json, or the target exists.
    """
    checkpoint, target = Checkpoint(source), Path(os.path.abspath(target))
    if os.path.lexists(target):
        raise CheckpointError(f"{target} exists; give a folder that does not.")
    if not (checkpoint.path / "config.json").is_file():
        raise CheckpointError(f"{checkpoint.path} has no config.json, so its architecture is not known.")
    if verify:
        checkpoint.verify()
    model = _model_on_meta(checkpoint.path)
    first_names = {id(tensor): name for name, tensor in _reversed_tensors(model)}
    tensors = {name: first_names.get(id(tensor), name) for name, tensor in untied_state_dict(model).items()}
    for name, stored in tensors.items():
        if stored not in checkpoint.manifest.tensors:
            raise CheckpointError(f"{checkpoint.path} has no weight {stored!r} ({name}) of {type(model).__name__}.")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".tmp-{target.name}-", dir=target.parent))
    try:
        meta = {
            name: torch.empty(checkpoint.shape(stored), dtype=checkpoint.dtype(stored), device="meta")
            for name, stored in tensors.items()
        }
        streamed = _read(checkpoint, model, tensors)
        write_weights(os.fspath(temporary), revert_conversion(model, meta), streamed, max_shard_size=max_shard_size)
        for path in checkpoint.path.iterdir():
            if path.is_file() and not path.name.startswith(_OF_TRAINING):
                shutil.copyfile(path, temporary / path.name)
        temporary.chmod(0o755)
        os.rename(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _reversed_tensors(model: Any) -> list[tuple[str, Tensor]]:
    """Name and parameter, so that the first name of a tied one wins in a dict."""
    state = model.state_dict(keep_vars=True)
    return list(reversed(state.items()))


def _model_on_meta(path: Path) -> Any:
    import transformers
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    names = config.architectures or []
    if len(names) != 1 or not isinstance(getattr(transformers, names[0], None), type):
        raise CheckpointError(
            f"{path}/config.json names the architectures {names}: expected one class of transformers."
        )
    with torch.device("meta"):
        return getattr(transformers, names[0])._from_config(config)


def _read(checkpoint: Checkpoint, model: Any, tensors: Mapping[str, str]) -> Iterator[dict[str, Tensor]]:
    for group in conversion_groups(model, list(tensors)):
        full = {}
        for name in group:
            stored = tensors[name]
            shape = checkpoint.shape(stored)
            out = torch.empty(torch.Size(shape).numel(), dtype=checkpoint.dtype(stored))
            checkpoint.read(stored, [Box((0,) * len(shape), shape)], out)
            full[name] = out.view(shape)
        yield revert_conversion(model, full)
