"""What a stranger's folder may try on whoever converts it: links out of it, code of its own, endless work, raw text."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_megatron.conversion import convert, plan_conversion
from hf_megatron.errors import CheckpointError
from tests.integration.test_conversion_messages import refused
from tests.integration.test_conversion_strangers import llama


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "hf"
    llama().save_pretrained(folder)
    return folder


def sparse(path: Path) -> None:
    """Makes a file that takes no space and would fill the memory."""
    with open(path, "wb") as file:
        file.truncate(6 << 30)


SMALL = ("README.md", "loss.png", "tokenizer.json", "generation_config.json", "chat_template.jinja")
INSTEAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link out of it": (lambda path: path.symlink_to("/etc/hostname"), "leads out of the checkpoint, to /etc"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "is a link to nothing"),
    "a pipe": (os.mkfifo, "is a named pipe"),
    "a folder": (os.mkdir, "is a folder"),
    "endless": (sparse, "README.md has 6442450944 bytes: no more than"),
}


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("name", SMALL)
def test_small_files_are_files_of_the_folder(hf, tmp_path, name, instead):
    """A card that was a link came along with what it led to, and a pipe in a tokenizer's place was left out unsaid."""
    source, (make, message) = tmp_path / "source", INSTEAD[instead]
    shutil.copytree(hf, source)
    (source / name).unlink(missing_ok=True)
    make(source / name)
    if name not in ("README.md", "loss.png") and instead == "endless":
        message = "is neither weights nor a small file"
    for to in ("hf", "torch_dist"):
        said = refused(source, tmp_path / "out", to)
        assert name in said and message.replace("README.md", name) in said
    with pytest.raises(CheckpointError, match=name):
        plan_conversion(source, tmp_path / "out", "hf")


def test_links_of_the_cache_of_the_hub_are_followed(hf, tmp_path):
    """Its folders hold nothing but links into `blobs`."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate([*sorted(hf.iterdir()), None]):
        (blobs / str(number)).write_bytes(b"# Theirs\n" if path is None else path.read_bytes())
        (snapshot / ("README.md" if path is None else path.name)).symlink_to(f"../../blobs/{number}")
    convert(snapshot, tmp_path / "out", "hf")
    assert (tmp_path / "out" / "README.md").read_text("utf-8") == "# Theirs\n"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text("utf-8"))
