"""Origin of models and data as ids on the Hub, never as local paths."""

import os
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load

from ..core.io.safe_paths import inside, is_file
from ..core.io.untrusted_json import read_json_table, read_small
from ..errors import CheckpointError

_CONFIG = "config.json"


def hub_id(name: Any) -> str | None:
    """Returns the name that a model was loaded by if it is an id on the Hub, which cached files prove."""
    from huggingface_hub import try_to_load_from_cache

    return name if is_id(name) and isinstance(try_to_load_from_cache(name, _CONFIG), str) else None


def is_id(name: Any) -> bool:
    """Returns whether a name can be an id on the Hub: it has the right form, and is no local file or folder."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if not isinstance(name, str) or not name or os.path.exists(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def find_base_model(name: Any) -> str | None:
    """Returns the Hub id of the base model of a model loaded by this name.

    A name from the Hub is its own base. For a local folder, the base is the one stated in its card, or the name in its
    config if that is an id on the Hub.
    """
    if not isinstance(name, str) or not os.path.isdir(name):
        return hub_id(name)
    return _read_card_base(Path(name)) or _read_config_base(Path(name) / _CONFIG)


def _read_card_base(folder: Path) -> str | None:
    try:
        stated = (metadata_load(folder / CARD) or {}).get("base_model") if stored_card(folder) else None
    except (yaml.YAMLError, ValueError, OSError, AttributeError, CheckpointError):
        # A third-party card may contain anything.
        return None
    if isinstance(stated, list) and len(stated) == 1:
        (stated,) = stated
    return stated if is_id(stated) else None


def _read_config_base(file: Path) -> str | None:
    try:
        return hub_id(read_json_table(file).get("_name_or_path"))
    except CheckpointError:
        return None


CARD, PICTURE = "README.md", "loss.png"


# Cards have a few kilobytes, loss plots tens of kilobytes.
LARGEST = 16 << 20


def stored_file(directory: str | os.PathLike[str], name: str) -> bytes:
    """Returns the content of a folder's card or loss plot; empty if there is none.

    Raises:
        CheckpointError: it is too large for a card, no regular file, or a link that leads out of the folder.
    """
    folder = Path(directory)
    return read_small(inside(folder, name), LARGEST) if is_file(folder / name) else b""


def stored_card(directory: str | os.PathLike[str]) -> str:
    """Returns the text of a folder's card, which may have any encoding; raises the errors of `stored_file`."""
    return stored_file(directory, CARD).decode("utf-8", errors="replace")
