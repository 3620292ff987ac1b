"""Auxiliary files of a checkpoint that are copied along with its weights: config, tokenizer and the like."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ..core.io.safe_paths import inside, is_file
from ..core.io.safetensors import TensorMeta
from ..core.io.untrusted_json import read_small
from ..core.text import safe_repr
from ..errors import CheckpointError
from ..model_cards.provenance import CARD, PICTURE, stored_file
from .formats import FORMATS
from .interfaces import WEIGHT, Key
from .output_folder import Output

# Tokenizer files can have tens of megabytes.
LARGEST_SMALL_FILE = 256 << 20
# Files that are not copied: of training runs, unsupported formats and adapters, hidden ones, and rewritten ones.
_OTHERS = (
    r"\..*|adapter_.*|conversion\.json|trainer_state\..*|training_args\..*|README\.md|loss\.png|optimizer.*|scheduler.*|scaler.*"
    r"|rng_state.*|.*\.(pt|pth|pkl|ckpt|h5|msgpack|gguf|onnx|tmp)"
)

# Names that only text files have; anything else under such a name is an error.
_TEXT = re.compile(r".*\.(json|jinja|md|model|tiktoken|txt)")
_TOKENIZER = re.compile(r"tokenizer.*|vocab.*|merges\.txt|.*\.(model|tiktoken)")


def list_small(source: Path) -> Iterator[Path]:
    """Yields the regular files of a folder that neither hold weights of any format nor belong to a training run."""
    for path in _small_or_other(source):
        if path.is_file():
            yield path


def _small_or_other(source: Path) -> Iterator[Path]:
    """Yields the entries of `list_small`, and entries with such names that are not regular files."""
    others = re.compile("|".join((_OTHERS, *(format.files for format in FORMATS.values()))))
    yield from (path for path in sorted(source.iterdir()) if not others.fullmatch(path.name))


def check_small_files(source: Path) -> None:
    """Checks that the auxiliary files can be copied, before anything is written.

    Raises:
        CheckpointError: a link leads out of the folder, an entry with a file's name is not a regular file, or a file
            is too large.
    """
    for name in (CARD, PICTURE):
        stored_file(source, name)
    for path in _small_or_other(source):
        if _TEXT.fullmatch(path.name) and not path.is_file():
            is_file(path)
        elif path.is_file() and inside(source, path.name).stat().st_size > LARGEST_SMALL_FILE:
            raise CheckpointError(f"{path} is not a weight file and too large to copy. Move it out of the folder.")


def get_tokenizer_notes(source: Path, carried: Path, named: Any) -> list[str]:
    """Returns a note for users if the source has or names a tokenizer that is not copied.

    Args:
        source: the folder of the weights.
        carried: the folder whose auxiliary files are copied.
        named: the source's name for its tokenizer; only the last part of a path is shown.
    """
    here, there = (
        [path.name for path in list_small(folder) if _TOKENIZER.fullmatch(path.name)] for folder in (source, carried)
    )
    if there or not (here or (named and isinstance(named, str))):
        return []
    which = (
        f"{safe_repr(', '.join(here))} of the source"
        if here
        else f"the source names {safe_repr(os.path.basename(named))}"
    )
    return [f"no tokenizer is copied ({which}): there is none next to the config.json that was read"]


def get_adapter_notes(*folders: Path) -> list[str]:
    """Returns a note for users if there is an adapter next to the weights or the config; it is not copied."""
    there = sorted({path.name for folder in folders for path in folder.glob("adapter_*") if path.is_file()})
    return (
        [f"an adapter is left out ({safe_repr(', '.join(there))}): merge it into the weights, or copy it"]
        if there
        else []
    )


def copy_small_files(source: Path, output: Output, plan: Mapping[Key, TensorMeta]) -> list[str]:
    """Copies the files of `list_small`.

    Args:
        plan: the weights that are written. The dtype in config.json is adapted to them: loading would otherwise round
            the weights.

    Raises:
        CheckpointError: as `check_small_files`.
    """
    copied = []
    check_small_files(source)
    for path in list_small(source):
        content = read_small(path, LARGEST_SMALL_FILE)
        output.add(path.name, _with_dtype(content, plan) if path.name == "config.json" else content)
        copied.append(path.name)
    return copied


def only_dtype(plan: Iterable[tuple[Key, TensorMeta]]) -> torch.dtype | None:
    """Returns the single floating-point dtype of the weights; `None` if there are several or it has only 8 bits."""
    dtypes = _dtypes(plan)
    return next(iter(dtypes)) if len(dtypes) == 1 and min(dtypes.values()) > 1 else None


def widest_dtype(plan: Iterable[tuple[Key, TensorMeta]]) -> torch.dtype | None:
    """Returns the widest floating-point dtype of the weights; `None` if none has more than 8 bits."""
    dtypes = _dtypes(plan)
    widest = max(dtypes, key=dtypes.__getitem__, default=None)
    return widest if widest is not None and dtypes[widest] > 1 else None


def _dtypes(plan: Iterable[tuple[Key, TensorMeta]]) -> dict[torch.dtype, int]:
    """Returns the floating-point dtypes of the weights and their item sizes."""
    dtypes = (entry.dtype for key, entry in plan if key.kind == WEIGHT)
    return {dtype: dtype.itemsize for dtype in dtypes if dtype.is_floating_point}


def _with_dtype(content: bytes, plan: Mapping[Key, TensorMeta]) -> bytes:
    """Returns a config whose dtype does not round the weights; for mixed dtypes it keeps its own or gets the widest."""
    config = json.loads(content)
    if not isinstance(config, dict):
        return content
    only, widest = only_dtype(plan.items()), widest_dtype(plan.items())
    if only is not None:
        changed = _rename_dtype(config, str(only).removeprefix("torch."))
    elif changed := widest is not None and not any(config.get(key) for key in ("dtype", "torch_dtype")):
        config["dtype"] = str(widest).removeprefix("torch.")
    return (json.dumps(config, indent=2) + "\n").encode() if changed else content


def _rename_dtype(config: dict[str, Any], name: str) -> bool:
    """Replaces other dtypes in a config and its nested configs; returns whether there were any."""
    wrong = [key for key in ("dtype", "torch_dtype") if config.get(key, name) not in (name, f"torch.{name}", None)]
    config |= dict.fromkeys(wrong, name)
    inner = [_rename_dtype(value, name) for value in config.values() if isinstance(value, dict)]
    return bool(wrong) or any(inner)
