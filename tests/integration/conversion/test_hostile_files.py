"""What a stranger's folder may try on whoever converts it: links out of it, code of its own, endless work, raw text."""

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
from tests.integration.conversion.test_messages import refused, run
from tests.integration.conversion.test_third_party_files import llama, with_config


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
    "endless": (sparse, "README.md has 6442450944 bytes; the limit is"),
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
        message = "is not a weight file and too large to copy"
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


OWN_CODE = {"model_type": "zz", "auto_map": {"AutoConfig": "m.C", "AutoModelForCausalLM": "m.M"}}
# What each says, in one line.
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
        "config.json of model type llama: sliding_window is the text \\x1b[31m: expected a number",
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


def test_configs_run_nothing_and_say_one_line(hf, tmp_path):
    """transformers asks on the terminal whether to run the code of a folder, and logs what configs say as it is."""
    for name, (changes, _) in CONFIGS.items():
        source = with_config(hf, tmp_path / name, **changes)
        (source / "m.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n", "utf-8")
    folders = [str(tmp_path / name) for name in CONFIGS]
    command = [sys.executable, "-c", CALL, str(tmp_path / "out"), *folders]
    done = subprocess.run(command, capture_output=True, input=b"y\n" * 99, check=False, timeout=200)
    # What torchao and bitsandbytes say while transformers imports them.
    said = done.stderr.decode().split("\n")[:-1]
    lines = [line for line in said if not line.startswith("Failed to load ") and "_pytree.py" not in line]
    assert done.stdout == b"" and not (tmp_path / "ran").exists() and not (tmp_path / "out").exists()
    assert len(lines) == len(CONFIGS), lines
    for line, (_, message) in zip(lines, CONFIGS.values(), strict=True):
        assert message in line and line.isprintable() and len(line) < 700, line


def test_code_with_a_type_of_transformers_is_not_run(hf, tmp_path):
    """DeepSeek-V3 and Phi-3 have such files, and need none of them."""
    source = with_config(hf, tmp_path / "source", auto_map=OWN_CODE["auto_map"])
    (source / "m.py").write_text("raise SystemExit('ran')\n", "utf-8")
    convert(source, tmp_path / "out", "hf", verify=True, logits=True)


@pytest.mark.parametrize("command", ["plan", "check"])
def test_checks_of_a_folder_run_none_of_its_code(hf, tmp_path, command):
    source = with_config(hf, tmp_path / "source", **OWN_CODE)
    (source / "m.py").write_text("raise SystemExit('ran')\n", "utf-8")
    code, lines = run(command, source)
    assert code == 2 and len(lines) == 1 and "auto_map specifies custom code" in lines[0]


def test_configs_of_gigabytes_are_not_read(hf, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    (source / "config.json").unlink()
    sparse(source / "config.json")
    assert "config.json has 6442450944 bytes; the limit is" in refused(source, tmp_path / "out")
    (source / "config.json").unlink()
    (source / "config.json").symlink_to("/etc/hostname")
    assert "config.json leads out of the checkpoint" in refused(source, tmp_path / "out")


def test_a_model_of_more_modules_than_any_is_not_made(hf, tmp_path, monkeypatch):
    """Each expert is four modules here, and a config names as many as it likes."""
    monkeypatch.setattr("hf_megatron.checkpoint.meta_model.MOST_TENSORS", 1000)
    config = SwitchTransformersConfig(num_experts=400, num_layers=1, num_decoder_layers=1, d_model=8, d_ff=8, d_kv=4)
    config.architectures = ["SwitchTransformersForConditionalGeneration"]
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    config.num_sparse_encoder_layers = config.encoder_sparse_step = 1
    config.save_pretrained(source)
    assert "does not define a valid SwitchTransformersForConditionalGeneration" in (
        said := refused(source, tmp_path / "out")
    )
    assert "it has more than 1000 modules" in said
