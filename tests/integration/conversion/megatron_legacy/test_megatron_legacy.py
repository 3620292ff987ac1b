"""Tests of Megatron's legacy format: round trips over parallel sizes, files loaded by torch, memory."""

import enum
import io
import itertools
import re
import signal
import sys
import threading
import time
import types
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy
import pytest
import torch

from hf_megatron.conversion.interfaces import WEIGHT, Key, MegatronModel, TargetOptions
from hf_megatron.conversion.megatron_legacy.reader import MegatronLegacyReader
from hf_megatron.conversion.megatron_legacy.writer import MegatronLegacyWriter
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.io.safetensors import TensorMeta
from tests.helpers.legacy_weights import (
    FILE,
    FIRST,
    QKV,
    check_equal,
    edit_rank_file,
    make_weights,
    model,
    read_checkpoint,
    write_checkpoint,
)


@pytest.fixture
def tensors():
    return make_weights()


OPTIONS = [{}, {"local_names": True}, {"local_names": True, "grouped_experts": True, "expert_tp_size": 1}]


@pytest.mark.parametrize("options", OPTIONS, ids=["te", "local", "whole_experts"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("sizes", list(itertools.product((1, 2, 4), (1, 2, 4), (1, 2))), ids=str)
def test_round_trip(tmp_path, sizes, tied, options):
    expected = make_weights(tied=tied)
    layout = TargetOptions(*sizes)
    write_checkpoint(tmp_path / "out", expected, model(tied=tied), layout, **options)
    files = list((tmp_path / "out").rglob("*.pt"))
    assert len(files) == layout.tp_size * layout.pp_size * layout.ep_size
    check_equal(read_checkpoint(tmp_path / "out", model(tied=tied)), expected)
    check_equal(read_checkpoint(tmp_path / "out" / "iter_0000007", model(tied=tied)), expected)


@pytest.mark.parametrize("local_names", [False, True])
@pytest.mark.parametrize("tp_size", [1, 2, 4])
def test_latent_attention_round_trip(tmp_path, tp_size, local_names):
    expected = make_weights(latent=True)
    write_checkpoint(tmp_path / "out", expected, model(), TargetOptions(tp_size), local_names=local_names)
    rank = torch.load(tmp_path / "out" / FIRST, weights_only=False)["model"]
    rows = rank["decoder.layers.0.self_attention.linear_kv_down_proj.weight"].shape[0]
    assert rows == (12 // tp_size if local_names else 12)
    check_equal(read_checkpoint(tmp_path / "out", model()), expected)


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_loads_written_files(tmp_path, tensors, mapped):
    write_checkpoint(tmp_path / "out", tensors, model(), TargetOptions(tp_size=2, make_vocab_size_divisible_by=12))
    path = tmp_path / "out" / FIRST
    content = torch.load(path, weights_only=False, mmap=mapped)
    # Tensor records have no checksum, as torch writes them with `set_crc32_options(False)`.
    assert not any(record.CRC for record in zipfile.ZipFile(path).infolist() if "/data/" in record.filename)
    assert content["checkpoint_version"] == 3.0 and content["iteration"] == 7
    args = content["args"]
    assert isinstance(args, Namespace)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 1)
    assert (args.padded_vocab_size, args.make_vocab_size_divisible_by) == (24, 12)
    assert args.params_dtype == torch.bfloat16 and args.num_layers == 4
    held = content["model"]
    assert torch.equal(held[QKV], tensors[Key(WEIGHT, QKV)][:12])
    gate, up = tensors[Key(WEIGHT, "decoder.layers.0.mlp.linear_fc1.weight")].chunk(2)
    assert torch.equal(held["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate[:4], up[:4]]))
    assert all(tensor.data_ptr() % 64 == 0 for tensor in held.values() if tensor is not None and mapped)
    with torch.serialization.safe_globals([Namespace]):
        torch.load(path, weights_only=True)


def test_release_without_iteration(tmp_path, tensors):
    write_checkpoint(tmp_path / "out", tensors, model(), iteration=None)
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert (tmp_path / "out" / "release" / "mp_rank_00" / FILE).is_file()
    with MegatronLegacyReader(tmp_path / "out", model()) as reader:
        assert reader.iteration is None and reader.optimizer_unsupported_reason is None
    check_equal(read_checkpoint(tmp_path / "out", model()), tensors)


def test_two_index_folders_without_arguments(tmp_path, tensors):
    for name, layout in (("pp", TargetOptions(pp_size=2)), ("ep", TargetOptions(ep_size=2))):
        write_checkpoint(tmp_path / name, tensors, model(), layout)
        for path in (tmp_path / name).rglob("*.pt"):
            edit_rank_file(path, lambda content: content.pop("args"))
        check_equal(read_checkpoint(tmp_path / name, model()), tensors)


def test_virtual_pipeline_stages_are_merged(tmp_path, tensors):
    """Four layers on two stages with two virtual stages each: the first has layers 0 and 2, the second 1 and 3."""
    write_checkpoint(tmp_path / "out", tensors, model())
    content = torch.load(tmp_path / "out" / FIRST, weights_only=False)
    for stage in range(2):
        held = {key: value for key, value in content.items() if key != "model"}
        for chunk in range(2):
            prefix = f"decoder.layers.{2 * chunk + stage}."
            held[f"model{chunk}"] = {
                key.replace(prefix, "decoder.layers.0."): value
                for key, value in content["model"].items()
                if key.startswith(prefix)
                or (key.startswith("embedding.") and (stage, chunk) == (0, 0))
                or (key.startswith(("decoder.final", "output_layer")) and (stage, chunk) == (1, 1))
            }
        held["args"].pipeline_model_parallel_size = 2
        path = tmp_path / "virtual" / f"mp_rank_00_{stage:03d}" / FILE
        path.parent.mkdir(parents=True)
        torch.save(held, path)
    check_equal(read_checkpoint(tmp_path / "virtual", model()), tensors)


def test_grouped_experts_are_read(tmp_path, tensors):
    """Stores all experts in one tensor, as GroupedMLP does (moe/experts.py, sh_ten_merge_fn)."""
    write_checkpoint(tmp_path / "out", tensors, model(), TargetOptions(tp_size=2, ep_size=2), local_names=True)

    def merge_experts(content):
        held = content["model"]
        for layer in ("decoder.layers.1.mlp.experts.", "decoder.layers.3.mlp.experts."):
            for number, linear in enumerate(("linear_fc1", "linear_fc2"), 1):
                names = [f"{layer}local_experts.{expert}.{linear}." for expert in range(2)]
                stacked = torch.stack([held.pop(f"{name}weight") for name in names])
                hidden = stacked.transpose(1, 2).contiguous()
                held[f"{layer}weight{number}"] = hidden.view(16, -1) if number == 1 else hidden.view(-1, 16)
                for name in names:
                    held.pop(f"{name}bias")

    for path in (tmp_path / "out").rglob("*.pt"):
        edit_rank_file(path, merge_experts)
    without = {key: tensor for key, tensor in tensors.items() if ".experts.experts.linear" not in key.name}
    without |= {key: tensor for key, tensor in tensors.items() if re.search(r"experts\.experts.*weight", key.name)}
    restored = read_checkpoint(tmp_path / "out", model())
    check_equal({key: restored[key] for key in without}, without)
    assert restored.keys() == without.keys()


def test_non_weight_state_is_ignored(tmp_path, tensors, monkeypatch):
    """Covers enumerations in the arguments, random states and fp8 states (megatron/core/safe_globals.py)."""
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    kinds = enum.Enum("ModelType", ["encoder_or_decoder"], module="megatron.core.enums")
    sys.modules["megatron.core.enums"].ModelType = kinds
    write_checkpoint(tmp_path / "out", tensors, model())

    def add_non_weight_state(content):
        content["args"].model_type = kinds.encoder_or_decoder
        content["args"].signal = signal.SIGTERM
        content["args"].path = tmp_path
        content["rng_state"] = [
            {"np_rng_state": numpy.random.get_state(), "torch_rng_state": torch.get_rng_state(), "python": (3, (1,))}
        ]
        content["opt_param_scheduler"] = {"max_lr": numpy.float64(1e-3), "num_steps": 7}
        content["model"]["output_layer._extra_state"] = io.BytesIO(b"fp8")
        content["model"]["decoder.layers.0.self_attention.linear_qkv._extra_state"] = torch.zeros(3)

    edit_rank_file(tmp_path / "out" / FIRST, add_non_weight_state)
    check_equal(read_checkpoint(tmp_path / "out", model()), tensors)


def test_conversion_memory_is_bounded(tmp_path):
    """Rank files are read and written tensor by tensor: 192 MiB in total, 8 MiB at a time."""
    rows, hidden, layers = 1024, 2048, 24
    names = [f"decoder.layers.{number}.mlp.linear_fc1.weight" for number in range(layers)]
    plan = {Key(WEIGHT, name): TensorMeta((rows, hidden), torch.float32) for name in names}
    largest = rows * hidden * 4
    megatron_model = MegatronModel({"num_layers": layers}, gated=True)
    peak, done = 0, threading.Event()

    def track_peak():
        nonlocal peak
        while not done.is_set():
            peak = max(peak, read_anonymous_bytes())
            time.sleep(0.001)

    def convert(source, target: Path, layout: TargetOptions):
        with Output(target) as output:
            writer = MegatronLegacyWriter(output, plan, megatron_model, layout, 1)
            for key in plan:
                writer.write(key, source(key))
            writer.finish()

    convert(lambda key: torch.zeros(rows, hidden), tmp_path / "first", TargetOptions(tp_size=2))
    before = read_anonymous_bytes()
    watcher = threading.Thread(target=track_peak)
    watcher.start()
    try:
        with MegatronLegacyReader(tmp_path / "first", megatron_model) as reader:
            convert(reader.read, tmp_path / "second", TargetOptions(tp_size=4))
    finally:
        done.set()
        watcher.join()
    assert peak - before < 5 * largest


def read_anonymous_bytes() -> int:
    """Returns the resident bytes that are not mapped from files."""
    return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
