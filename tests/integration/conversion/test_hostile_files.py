"""Tests of hostile folders: links out of the folder, custom code, unbounded files and control characters."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import SwitchTransformersConfig

from hf_megatron.conversion import convert, plan_conversion
from hf_megatron.errors import CheckpointError
from tests.integration.conversion.test_messages import get_error, run
from tests.integration.conversion.test_third_party_files import copy_with_config, llama


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "hf"
    llama().save_pretrained(folder)
    return folder


def make_sparse_file(path: Path) -> None:
    """Creates a file that takes no disk space, but would fill the memory."""
    with open(path, "wb") as file:
        file.truncate(6 << 30)


SMALL = ("README.md", "loss.png", "tokenizer.json", "generation_config.json", "chat_template.jinja")
INSTEAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a link out of it": (lambda path: path.symlink_to("/etc/hostname"), "leads out of the checkpoint, to /etc"),
    "a link to itself": (lambda path: path.symlink_to(path.name), "is a link to nothing"),
    "a pipe": (os.mkfifo, "is a named pipe"),
    "a folder": (os.mkdir, "is a folder"),
    "endless": (make_sparse_file, "README.md has 6442450944 bytes; the limit is"),
}


@pytest.mark.parametrize("instead", INSTEAD)
@pytest.mark.parametrize("name", SMALL)
def test_auxiliary_files_must_be_regular_files_in_folder(hf, tmp_path, name, instead):
    """Regression: the target of a linked model card was copied, and a pipe named as a tokenizer was skipped."""
    source, (make, message) = tmp_path / "source", INSTEAD[instead]
    shutil.copytree(hf, source)
    (source / name).unlink(missing_ok=True)
    make(source / name)
    if is_too_large := name not in ("README.md", "loss.png") and instead == "endless":
        message = "is not a weight file and too large to copy. Move it out of the folder."
    for to in ("hf", "torch_dist"):
        error = get_error(source, tmp_path / "out", to)
        assert name in error and message.replace("README.md", name) in error
    with pytest.raises(CheckpointError, match=name):
        plan_conversion(source, tmp_path / "out", "hf")
    if is_too_large:
        (source / name).rename(tmp_path / name)
        convert(source, tmp_path / "out", "hf", verify=True)


def test_hub_cache_links_are_followed(hf, tmp_path):
    """Snapshots in the Hub cache contain only links into `blobs`."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate([*sorted(hf.iterdir()), None]):
        (blobs / str(number)).write_bytes(b"# Theirs\n" if path is None else path.read_bytes())
        (snapshot / ("README.md" if path is None else path.name)).symlink_to(f"../../blobs/{number}")
    convert(snapshot, tmp_path / "out", "hf")
    assert (tmp_path / "out" / "README.md").read_text("utf-8") == "# Theirs\n"
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text("utf-8"))


OWN_CODE = {"model_type": "zz", "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}}
# Config changes and the one-line error of each.
CONFIGS: dict[str, tuple[dict, str]] = {
    "code": (OWN_CODE, "config.json: auto_map specifies custom code for model_type zz, which is not executed"),
    "a kernel": (
        {"attn_implementation": "a/b"},
        "attn_implementation is a/b, code from the Hub, which is not executed",
    ),
    "another file": ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files lists replacement configs"),
    "long": (
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "long_factor": [1.0] * 10**6}},
        "rope_parameters.long_factor has 1000000 entries; the limit is 10000",
    ),
    "layers": ({"num_layers": 10**9}, "config.json: num_layers is 1000000000, more than 2000"),
    "no width": ({"hidden_size": 0}, "config.json: hidden_size is 0: expected 1 or more"),
    "no words": ({"vocab_size": 0}, "config.json: vocab_size is 0: expected 1 or more"),
    "no inner width": ({"intermediate_size": 0}, "config.json: intermediate_size is 0: expected 1 or more"),
    "escapes": (
        {"rope_parameters": {"rope_type": "\x1b]0;a\x07\x1b[31m\r\nb", "rope_theta": 1e4}},
        "rope_parameters.rope_type is \\x1b]0;a",
    ),
    "text": ({"rope_parameters": {"rope_type": "x" * 15_000, "rope_theta": 1e4}}, "rope_parameters.rope_type is xxx"),
    "keys": (
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": "\x1b[31m" * 3000,
                "\x1b[31mq" * 999: 1,
            }
        },
        "config.json",
    ),
    "a list": (
        {"rope_parameters": {"rope_type": [], "rope_theta": 1e4}},
        "rope_parameters.rope_type is []: expected default",
    ),
    "a window": (
        {"sliding_window": "\x1b[31m"},
        "config.json of model type llama: sliding_window is the string \\x1b[31m: expected a number",
    ),
    "attribute": ({"use_return_dict": "\x1b[31m" * 3000}, "config.json"),
}
CALL = """
import sys
from hf_megatron.conversion import convert
from hf_megatron.errors import CheckpointError
for folder in sys.argv[2:]:
    try:
        convert(folder, sys.argv[1], "torch_dist")
    except CheckpointError as error:
        print(error, file=sys.stderr)
"""


def test_hostile_configs_run_no_code_and_report_one_line(hf, tmp_path):
    """transformers asks on the terminal whether to run a folder's code, and logs config values unescaped."""
    for name, (changes, _) in CONFIGS.items():
        source = copy_with_config(hf, tmp_path / name, **changes)
        (source / "m.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", "utf-8")
    folders = [str(tmp_path / name) for name in CONFIGS]
    command = [sys.executable, "-c", CALL, str(tmp_path / "out"), *folders]
    done = subprocess.run(command, capture_output=True, input=b"y\n" * 99, check=False, timeout=200)
    # Ignore messages that torchao and bitsandbytes print while transformers imports them.
    stderr_lines = done.stderr.decode().split("\n")[:-1]
    lines = [line for line in stderr_lines if not line.startswith("Failed to load ") and "_pytree.py" not in line]
    assert done.stdout == b"" and not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()
    assert len(lines) == len(CONFIGS), lines
    for line, (_, message) in zip(lines, CONFIGS.values(), strict=True):
        assert message in line and line.isprintable() and len(line) < 700, line


def test_custom_code_for_known_type_is_not_run(hf, tmp_path):
    """DeepSeek-V3 and Phi-3 repositories have such files, and need none of them."""
    source = copy_with_config(hf, tmp_path / "source", auto_map=OWN_CODE["auto_map"])
    (source / "m.py").write_text("raise SystemExit('ran')\n", "utf-8")
    convert(source, tmp_path / "out", "hf", verify=True, logits=True)


@pytest.mark.parametrize("command", ["plan", "show", "check"])
def test_commands_run_no_custom_code(hf, tmp_path, command):
    source = copy_with_config(hf, tmp_path / "source", **OWN_CODE)
    (source / "m.py").write_text("raise SystemExit('ran')\n", "utf-8")
    code, lines = run(command, source, *(("--num-gpus", "8") if command == "plan" else ()))
    assert code == 2 and len(lines) == 1 and "auto_map specifies custom code" in lines[0]


def test_oversized_and_linked_configs_are_not_read(hf, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    (source / "config.json").unlink()
    make_sparse_file(source / "config.json")
    assert "config.json has 6442450944 bytes; the limit is" in get_error(source, tmp_path / "out")
    (source / "config.json").unlink()
    (source / "config.json").symlink_to("/etc/hostname")
    assert "config.json leads out of the checkpoint" in get_error(source, tmp_path / "out")


def test_config_with_too_many_modules_is_rejected(hf, tmp_path, monkeypatch):
    """Each expert has four modules here, and the config sets an arbitrary number of experts."""
    monkeypatch.setattr("hf_megatron.checkpoint.meta_model.MOST_TENSORS", 1000)
    config = SwitchTransformersConfig(num_experts=400, num_layers=1, num_decoder_layers=1, d_model=8, d_ff=8, d_kv=4)
    config.architectures = ["SwitchTransformersForConditionalGeneration"]
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    config.num_sparse_encoder_layers = config.encoder_sparse_step = 1
    config.save_pretrained(source)
    assert "does not define a valid SwitchTransformersForConditionalGeneration" in (
        error := get_error(source, tmp_path / "out")
    )
    assert "it has more than 1000 modules" in error
