"""What lies beside the weights of a checkpoint and goes along: config, tokenizer and the like."""

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

# Tokenizers have tens of megabytes.
LARGEST_SMALL_FILE = 256 << 20
# Of training runs, of formats that are not read, of adapters, what is written anew, and what is hidden.
_OTHERS = (
    r"\..*|adapter_.*|conversion\.json|trainer_state\..*|training_args\..*|README\.md|loss\.png|optimizer.*|scheduler.*|scaler.*"
    r"|rng_state.*|.*\.(pt|pth|pkl|ckpt|h5|msgpack|gguf|onnx|tmp)"
)

# What nobody calls anything but a file of text.
_TEXT = re.compile(r".*\.(json|jinja|md|model|tiktoken|txt)")
_TOKENIZER = re.compile(r"tokenizer.*|vocab.*|merges\.txt|.*\.(model|tiktoken)")


def list_small(source: Path) -> Iterator[Path]:
    """Yields every plain file of a folder that holds no weights of any format and belongs to no training run."""
    for path in _small_or_other(source):
        if path.is_file():
            yield path


def _small_or_other(source: Path) -> Iterator[Path]:
    """Yields what `list_small` does, and what else has such a name."""
    others = re.compile("|".join((_OTHERS, *(format.files for format in FORMATS.values()))))
    yield from (path for path in sorted(source.iterdir()) if not others.fullmatch(path.name))


def check_small_files(source: Path) -> None:
    """Checks that what goes along can, before anything is written.

    Raises:
        CheckpointError: a link leads out of the folder, something that is no file has the name of one, or a file is
            large.
    """
    for name in (CARD, PICTURE):
        stored_file(source, name)
    for path in _small_or_other(source):
        if _TEXT.fullmatch(path.name) and not path.is_file():
            is_file(path)
        elif path.is_file() and inside(source, path.name).stat().st_size > LARGEST_SMALL_FILE:
            raise CheckpointError(f"{path} is neither weights nor a small file: move it out of the folder.")


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
    which = (
        f"{safe_repr(', '.join(here))} of the source"
        if here
        else f"the source names {safe_repr(os.path.basename(named))}"
    )
    return [f"no tokenizer goes along ({which}): there is none beside the config.json that was read"]


def note_of_adapter(*folders: Path) -> list[str]:
    """Returns what a user has to know of an adapter beside the weights or the config, which does not go along."""
    there = sorted({path.name for folder in folders for path in folder.glob("adapter_*") if path.is_file()})
    return (
        [f"an adapter is left out ({safe_repr(', '.join(there))}): merge it into the weights, or copy it"]
        if there
        else []
    )


def copy_small_files(source: Path, output: Output, plan: Mapping[Key, TensorMeta]) -> list[str]:
    """Copies what `list_small` yields.

    Args:
        plan: the weights that go along: a config that names another type would have them rounded as they are loaded.

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
    """Returns the one floating point type of the weights, `None` where they have several or one of eight bits."""
    found = _dtypes(plan)
    return next(iter(found)) if len(found) == 1 and min(found.values()) > 1 else None


def widest_dtype(plan: Iterable[tuple[Key, TensorMeta]]) -> torch.dtype | None:
    """Returns the widest floating point type of the weights, `None` where none has more than eight bits."""
    found = _dtypes(plan)
    widest = max(found, key=found.__getitem__, default=None)
    return widest if widest is not None and found[widest] > 1 else None


def _dtypes(plan: Iterable[tuple[Key, TensorMeta]]) -> dict[torch.dtype, int]:
    """Returns the floating point types of the weights, each with its size."""
    dtypes = (entry.dtype for key, entry in plan if key.kind == WEIGHT)
    return {dtype: dtype.itemsize for dtype in dtypes if dtype.is_floating_point}


def _with_dtype(content: bytes, plan: Mapping[Key, TensorMeta]) -> bytes:
    """Returns a config whose type rounds no weight of one type; of several, its own counts, or the widest."""
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
    """Tells whether a config, or one inside of it, named another type; now it does not."""
    wrong = [key for key in ("dtype", "torch_dtype") if config.get(key, name) not in (name, f"torch.{name}", None)]
    config |= dict.fromkeys(wrong, name)
    inner = [_rename_dtype(value, name) for value in config.values() if isinstance(value, dict)]
    return bool(wrong) or any(inner)
