"""Tests of checks before a conversion (tensor counts, sizes, targets, disk space), progress bars and interrupts."""

import contextlib
import gc
import json
import pickle
import shutil
import signal
import subprocess
import sys
from copy import copy
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from typer.testing import CliRunner

from hf_megatron import CheckpointError, ConfigError
from hf_megatron.cli import app
from hf_megatron.cli import conversion as commands
from hf_megatron.conversion import TargetOptions, convert, plan_conversion
from hf_megatron.conversion.torch_files.safe_pickle import Named, unpickle
from hf_megatron.core.io.atomic_folder import StagedFolder
from tests.helpers.tiny_models import build_tiny_model
from tests.integration.conversion.test_third_party_files import llama


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    """Llama with eight attention heads in two groups."""
    folder = tmp_path_factory.mktemp("limits") / "hf"
    llama().save_pretrained(folder)
    return folder


def count_lines(error: pytest.ExceptionInfo) -> int:
    return len(str(error.value).splitlines())


MANY = 300_000


def test_header_with_too_many_tensors_is_rejected(hf, tmp_path):
    """Regression: every tensor was compared with the names of the model, which took half a minute."""
    shutil.copytree(hf, tmp_path / "source")
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    spelled = json.dumps({f"t{number}": entry for number in range(MANY)}).encode()
    for header in (spelled, spelled.replace(b'"data_offsets"', b'"d\\u0061ta_offsets"')):
        (tmp_path / "source" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(
            CheckpointError, match=rf"model.safetensors: {MANY} tensors in one file exceed the limit of \d+"
        ) as error_info:
            convert(tmp_path / "source", tmp_path / "out", "sharded")
        assert len(str(error_info.value).splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("source", ["megatron_legacy", "hf"])
def test_pickle_with_too_many_tensors_is_rejected(hf, tmp_path, source):
    if source == "hf":
        shutil.copytree(hf, tmp_path / "source")
    else:
        convert(hf, tmp_path / "source", source)
    one = torch.zeros(1)
    many = {f"decoder.layers.0.x{number}norm.weight": one for number in range(MANY)}
    if source == "hf":
        (tmp_path / "source" / "model.safetensors").unlink()
        file = tmp_path / "source" / "pytorch_model.bin"
    else:
        (tmp_path / "source" / "conversion.json").unlink()
        file = next((tmp_path / "source").rglob("model_optim_rng.pt"))
        many = torch.load(file, weights_only=False) | {"model": many}
    torch.save(many, file)
    with pytest.raises(CheckpointError, match=rf"{file.name}: {MANY} tensors in one file exceed the limit of \d+"):
        convert(tmp_path / "source", tmp_path / "out", "sharded")


@pytest.mark.parametrize("source", ["megatron_core", "dcp"])
def test_store_with_too_many_tensors_is_rejected(hf, tmp_path, source):
    """Regression: hundreds of thousands of tensors were read in ten seconds before any comparison with the model."""
    convert(hf, tmp_path / "source", source)
    (tmp_path / "source" / "conversion.json").unlink()
    file = next((tmp_path / "source").rglob(".metadata"))
    metadata = pickle.loads(file.read_bytes())
    index, place = next((index, place) for index, place in metadata.storage_data.items() if index.offset is not None)
    item = metadata.state_dict_metadata[index.fqn]
    for number in range(12_000):
        metadata.state_dict_metadata[f"further{number}"] = item
        metadata.storage_data[replace(index, fqn=f"further{number}")] = place
    # Each tensor has its own metadata, as in real files: shared objects are read only once.
    metadata.state_dict_metadata = {name: copy(one) for name, one in metadata.state_dict_metadata.items()}
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CheckpointError, match=r"\.metadata is rejected: it has more than 10\d\d\d tensors\."
    ) as error_info:
        convert(tmp_path / "source", tmp_path / "out", "sharded")
    assert count_lines(error_info) == 1 and not (tmp_path / "out").exists()


def test_garbage_collection_is_paused_while_unpickling():
    gc_states = []
    names = {"here.look": Named("here.look", lambda arguments: gc_states.append(gc.isenabled()))}
    for data in (b"\x80\x02chere\nlook\n)R.", b"\x80\x02chere\nlook\n)R"):
        with contextlib.suppress(CheckpointError):
            unpickle(data, "here", names)
        assert gc.isenabled()
    gc.disable()
    try:
        unpickle(b"\x80\x02N.", "here", names)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert gc_states == [False, False]


# Options and the expected error with the valid sizes.
UNFIT = {
    "heads": ({"tp_size": 3}, "num_attention_heads 8 is not divisible by tp_size 3. Valid sizes: 1, 2, 4, 8"),
    "more_than_heads": ({"tp_size": 16}, "num_attention_heads 8 .* tp_size 16"),
    "no_experts": ({"ep_size": 2}, "ep_size 2: the model has no experts. Use ep_size 1"),
}


@pytest.mark.parametrize("to", ["megatron_core", "megatron_legacy"])
@pytest.mark.parametrize("case", UNFIT)
def test_indivisible_sizes_are_rejected_before_conversion(hf, tmp_path, to, case):
    sizes, message = UNFIT[case]
    for action in (convert, plan_conversion):
        with pytest.raises(CheckpointError, match=message) as error_info:
            action(hf, tmp_path / "parent" / "out", to, options=TargetOptions(**sizes))
        assert count_lines(error_info) == 1 and not (tmp_path / "parent").exists()
    options = TargetOptions(**dict.fromkeys(sizes, 1))
    assert convert(hf, tmp_path / "out", to, options=options, verify=True).comparison.equal


def test_indivisible_groups_widths_and_experts_are_rejected(tmp_path):
    llama(hidden_size=96, num_attention_heads=12, num_key_value_heads=4).save_pretrained(tmp_path / "groups")
    llama(intermediate_size=50).save_pretrained(tmp_path / "width")
    build_tiny_model("deepseek_v3").save_pretrained(tmp_path / "experts")
    cases = (
        ("groups", {"tp_size": 6}, "num_query_groups 4 is neither a divisor nor a multiple of tp_size 6"),
        ("width", {"tp_size": 4}, "ffn_hidden_size 50 is not divisible by tp_size 4. Valid sizes: 1, 2"),
        ("experts", {"ep_size": 3}, "num_experts 8 is not divisible by ep_size 3. Valid sizes: 1, 2, 4, 8"),
    )
    for source, sizes, message in cases:
        for to in ("megatron_core", "megatron_legacy"):
            with pytest.raises(CheckpointError, match=message):
                convert(tmp_path / source, tmp_path / "out", to, options=TargetOptions(**sizes))
    convert(tmp_path / "groups", tmp_path / "out", "megatron_core", options=TargetOptions(tp_size=12))


def test_targets_inside_source_are_rejected(hf, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    (tmp_path / "link").symlink_to(source)
    before = sorted(source.rglob("*"))
    inside = (source / "out", source / "deep" / "out", tmp_path / "link" / "out")
    for target in inside:
        for action in (convert, plan_conversion):
            with pytest.raises(CheckpointError, match="is inside the source.*Choose a folder outside it") as error_info:
                action(source, target, "sharded")
            assert count_lines(error_info) == 1
    for target in (source, tmp_path, tmp_path / "link"):
        with pytest.raises(CheckpointError, match="already exists. Choose a folder that does not exist"):
            convert(source, target, "sharded")
    assert sorted(source.rglob("*")) == before
    convert(source, tmp_path / "source-2", "sharded")


def test_required_space_matches_written_bytes(hf, tmp_path, monkeypatch):
    required_bytes = []
    monkeypatch.setattr(StagedFolder, "require_space", lambda self, expected: required_bytes.append(expected))
    report = convert(hf, tmp_path / "out", "hf")
    config_bytes = sum((hf / name).stat().st_size for name in ("config.json", "generation_config.json"))
    assert required_bytes == [report.nbytes + config_bytes]
    assert required_bytes[0] <= sum(path.stat().st_size for path in (tmp_path / "out").iterdir())


class Bar:
    """Progress bar that records its updates."""

    def __init__(self, name: str | None = None):
        self.name, self.total, self.n, self.is_open = name, None, 0, False

    def __enter__(self):
        self.is_open = True
        return self

    def __exit__(self, *error):
        self.is_open = False

    def set_description(self, what, refresh=True):
        self.name = what

    def update(self, size):
        assert self.is_open
        self.n += size


def test_verification_has_separate_progress_bars(hf, tmp_path, monkeypatch):
    bars: list[Bar] = []

    def bar(*name: str) -> Bar:
        assert not any(other.is_open for other in bars)
        bars.append(Bar(*name))
        return bars[-1]

    monkeypatch.setattr(commands, "_bar", bar)
    result = CliRunner().invoke(app, ["convert", str(hf), str(tmp_path / "out"), "--to", "megatron_core", "--verify"])
    assert result.exit_code == 0, result.output
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.name != "README.md"]
    assert [bar.name for bar in bars] == ["hf -> megatron_core", "reading back", "comparing"]
    assert all(bar.n == bar.total and not bar.is_open for bar in bars)
    assert bars[1].n == sum(path.stat().st_size for path in files)


# Ctrl-C at a given moment, swallowed by the running code, as libraries do during their import.
INTERRUPTED = """
import importlib.abc, os, signal, sys

class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == moment:
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except BaseException:
                pass
        return None

moment = sys.argv[1]
sys.argv[:] = ["hf-megatron", *sys.argv[2:]]
sys.meta_path.insert(0, Interrupting())
from hf_megatron.cli import main
main()
"""
WRITING = """
import os, signal, sys, time

# Processes in the background inherit that it is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from hf_megatron.cli import main
from hf_megatron.core.io.checksums import NewFile
from tqdm.auto import tqdm

def interrupted_after(function):
    def call(*args, **named):
        function(*args, **named)
        os.kill(os.getpid(), signal.SIGINT)
    return call

def slow(*args):
    # Bars appear after a second.
    time.sleep(1.1)
    write(*args)

write = NewFile.write_tensor
if sys.argv[1] == "a bar":
    NewFile.write_tensor, tqdm.refresh = slow, interrupted_after(tqdm.refresh)
else:
    NewFile.write_tensor = interrupted_after(write)
sys.argv[:] = ["hf-megatron", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize(
    "moment",
    ["torch", "hf_megatron.conversion.compare", "transformers.models.llama.modeling_llama", "a write", "a bar"],
)
def test_interrupted_command_prints_one_line(hf, tmp_path, moment):
    script = WRITING if moment.startswith("a ") else INTERRUPTED
    command = [sys.executable, "-c", script, moment, "convert", str(hf), str(tmp_path / "out"), "--to", "sharded"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (130, ""), done.stderr
    assert done.stderr.splitlines()[-1] == "Interrupted." and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_interrupt_handler_is_unchanged_while_writing(hf, tmp_path, monkeypatch):
    """The caller's handler stays active, so that an interrupt raises an exception and temporary files are removed."""
    handlers = [signal.getsignal(signal.SIGINT)]
    open_ = StagedFolder.open
    monkeypatch.setattr(
        StagedFolder, "open", lambda self: (handlers.append(signal.getsignal(signal.SIGINT)), open_(self))
    )
    result = CliRunner().invoke(app, ["convert", str(hf), str(tmp_path / "out"), "--to", "sharded"])
    assert result.exit_code == 0, result.output
    assert handlers == [signal.getsignal(signal.SIGINT)] * 2


def test_vocabulary_padding_is_limited(hf, tmp_path, monkeypatch):
    """Regression: padding was missing in the required bytes and was written until the disk was full."""
    with pytest.raises(ConfigError, match="make_vocab_size_divisible_by=1000000000: expected 65536 or less"):
        convert(hf, tmp_path / "out", "torch_dist", options=TargetOptions(make_vocab_size_divisible_by=10**9))
    required_bytes = []
    monkeypatch.setattr(StagedFolder, "require_space", lambda self, expected: required_bytes.append(expected))
    for to in ("torch_dist", "megatron_legacy"):
        convert(hf, tmp_path / to, to, options=TargetOptions(make_vocab_size_divisible_by=4096))
    # Embedding and head have 64 columns of four bytes.
    assert min(required_bytes) > 2 * 4096 * 64 * 4


@pytest.mark.parametrize("to", ["megatron_core", "megatron_legacy"])
def test_mismatched_dtype_is_reported(hf, tmp_path, to):
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    weights = safetensors.torch.load_file(source / "model.safetensors")
    name = "model.layers.1.self_attn.q_proj.weight"
    safetensors.torch.save_file(
        weights | {name: weights[name].bfloat16()}, source / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(CheckpointError) as error_info:
        convert(source, tmp_path / "out", to)
    others = ", ".join(name.replace("q_proj", f"{part}_proj") for part in "kv")
    assert f"{name} has dtype torch.bfloat16, expected torch.float32 as for {others}: they are merged" in str(
        error_info.value
    )
    convert(source, tmp_path / "out", "hf", verify=True)
