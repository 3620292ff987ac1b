"""What lies beside the weights of a checkpoint and goes along: config, tokenizer and the like."""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError
from ..files.paths import inside
from ..files.safetensors import TensorMeta
from ..shown import shown
from .formats import FORMATS
from .output import Output
from .tensors import WEIGHT, Key

# Tokenizers have tens of megabytes.
LARGEST_SMALL_FILE = 256 << 20
# Of training runs, of formats that are not read, what is written anew, and what is hidden.
_OTHERS = (
    r"\..*|conversion\.json|trainer_state\..*|training_args\..*|README\.md|loss\.png|optimizer.*|scheduler.*|scaler.*"
    r"|rng_state.*|.*\.(pt|pth|pkl|ckpt|h5|msgpack|gguf|onnx|tmp)"
)

_TOKENIZER = re.compile(r"tokenizer.*|vocab.*|merges\.txt|.*\.(model|tiktoken)")


def list_small(source: Path) -> Iterator[Path]:
    """Yields every plain file of a folder that holds no weights of any format and belongs to no training run."""
    others = re.compile("|".join((_OTHERS, *(format.files for format in FORMATS.values()))))
    for path in sorted(source.iterdir()):
        if path.is_file() and not others.fullmatch(path.name):
            yield path


def note_of_tokenizer(source: Path, carried: Path, named: Any) -> list[str]:
    """Returns what a user has to know of a tokenizer that the source has or names and that does not go along.

    Args:
        source: the folder of the weights.
        carried: the folder whose small files go along.
        named: what the source calls its tokenizer; of that no path is shown.
    """
    here, there = (
        [path.name for path in list_small(folder) if _TOKENIZER.fullmatch(path.name)] for folder in (source, carried)
    )
    if there or not (here or (named and isinstance(named, str))):
        return []
    which = f"{', '.join(here)} of the source" if here else f"the source names {shown(os.path.basename(named))}"
    return [f"no tokenizer goes along ({which}): there is none beside the config.json that was read"]


def copy_small_files(source: Path, output: Output, dtype: torch.dtype | None = None) -> list[str]:
    """Copies what `list_small` yields.

    Args:
        dtype: of the weights that go along: a config that names another would have them rounded as they are loaded.

    Raises:
        CheckpointError: a link leads out of the folder, or a file is large.
    """
    copied = []
    for path in list_small(source):
        if inside(source, path.name).stat().st_size > LARGEST_SMALL_FILE:
            raise CheckpointError(f"{path} is neither weights nor a small file: move it out of the folder.")
        content = path.read_bytes()
        output.add(path.name, _with_dtype(content, dtype) if path.name == "config.json" and dtype else content)
        copied.append(path.name)
    return copied


def main_dtype(plan: Iterable[tuple[Key, TensorMeta]]) -> torch.dtype | None:
    """Returns the floating point type of most entries of the weights, `None` where there are none of any."""
    counts: dict[torch.dtype, int] = {}
    for key, entry in plan:
        if key.kind == WEIGHT and entry.dtype.is_floating_point:
            counts[entry.dtype] = counts.get(entry.dtype, 0) + entry.numel
    return max(counts, key=counts.__getitem__, default=None)


def _with_dtype(content: bytes, dtype: torch.dtype) -> bytes:
    config, name = json.loads(content), str(dtype).removeprefix("torch.")
    if not (isinstance(config, dict) and _rename_dtype(config, name)):
        return content
    return (json.dumps(config, indent=2) + "\n").encode()


def _rename_dtype(config: dict[str, Any], name: str) -> bool:
    """Tells whether a config, or one inside of it, named another type; now it does not."""
    wrong = [key for key in ("dtype", "torch_dtype") if config.get(key, name) not in (name, f"torch.{name}", None)]
    config |= dict.fromkeys(wrong, name)
    inner = [_rename_dtype(value, name) for value in config.values() if isinstance(value, dict)]
    return bool(wrong) or any(inner)
