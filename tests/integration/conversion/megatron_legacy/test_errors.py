"""Tests of rejected legacy Megatron checkpoints: incomplete or inconsistent ones."""

import shutil
from argparse import Namespace

import pytest
import torch

from hf_megatron.conversion.interfaces import WEIGHT, Key, TargetOptions
from hf_megatron.conversion.megatron_legacy.reader import MegatronLegacyReader
from hf_megatron.conversion.megatron_legacy.writer import MegatronLegacyWriter
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.io.safetensors import TensorMeta
from hf_megatron.errors import CheckpointError
from tests.helpers.legacy_weights import (
    FILE,
    FIRST,
    NORM,
    QKV,
    check_equal,
    edit_rank_file,
    make_weights,
    model,
    read_checkpoint,
    set_value,
    write_checkpoint,
)


@pytest.fixture
def tensors():
    return make_weights()


@pytest.mark.parametrize(
    ("layout", "further", "message"),
    [
        (TargetOptions(pp_size=3), {}, "num_layers 4 is not divisible by pp_size 3"),
        (TargetOptions(tp_size=3), {}, "num_attention_heads 4 is not divisible by tp_size 3"),
        (TargetOptions(tp_size=4), {"num_query_groups": 3}, "num_query_groups 3"),
        (TargetOptions(ep_size=3), {}, "4 experts are not divisible by ep_size 3"),
        (
            TargetOptions(tp_size=16),
            {"num_attention_heads": 16},
            "embedding.word_embeddings.weight, tp_size 16: length 24",
        ),
        (TargetOptions(), {"settings": Namespace()}, "argument settings"),
    ],
)
def test_indivisible_sizes_are_rejected(tmp_path, tensors, layout, further, message):
    with pytest.raises(CheckpointError, match=message):
        write_checkpoint(tmp_path / "out", tensors, model(**further), layout)
    assert not list(tmp_path.iterdir())


def test_writer_requires_every_tensor_once(tmp_path, tensors):
    with pytest.raises(
        CheckpointError, match="exp_avg of .* without optimizer state. Leave it out, or write torch_dist"
    ):
        write_checkpoint(tmp_path / "out", tensors | {Key("exp_avg", QKV): torch.zeros(24, 16)}, model())
    with pytest.raises(CheckpointError, match=r"not_there\.weight"):
        write_checkpoint(tmp_path / "out", {Key(WEIGHT, "decoder.layers.0.not_there.weight"): torch.zeros(1)}, model())
    plan = {key: TensorMeta.of(tensor) for key, tensor in tensors.items()}
    key = Key(WEIGHT, QKV)
    with pytest.raises(CheckpointError, match="not written"), Output(tmp_path / "out") as output:
        writer = MegatronLegacyWriter(output, plan, model(), TargetOptions(), 1)
        writer.write(key, tensors[key])
        with pytest.raises(CheckpointError, match="twice"):
            writer.write(key, tensors[key])
        with pytest.raises(CheckpointError, match="planned"):
            writer.write(Key(WEIGHT, NORM), torch.zeros(3))
        writer.finish()
    assert not list(tmp_path.iterdir())
    # The cure of the first error: weights alone are written.
    write_checkpoint(tmp_path / "out", tensors, model())
    check_equal(read_checkpoint(tmp_path / "out", model()), tensors)


BROKEN = {
    "old": (set_value(["checkpoint_version"], 1.0), "checkpoint_version is 1.0"),
    "no_version": (lambda content: content.pop("checkpoint_version"), "checkpoint_version is 0"),
    "unknown": (
        set_value(["model", "decoder.layers.0.new.weight"], torch.zeros(1)),
        r"decoder\.layers\.0\.new\.weight",
    ),
    "before_core": (
        set_value(["model", "language_model.encoder.weight"], torch.zeros(1)),
        "embedding.word_embeddings.weight is not a supported tensor of a GPT or BERT",
    ),
    "no_weights": (lambda content: content.pop("model"), "has no weights"),
    "no_table": (set_value(["model"], [1]), "not a dict with string keys"),
    "repeated": (
        set_value(["model", QKV], torch.zeros(1).expand(1 << 40, 16)),
        "linear_qkv.weight is an expanded view",
    ),
    "no_shape": (set_value(["model", QKV], torch.tensor(1.0)), "linear_qkv.weight is not a tensor"),
    "no_columns": (
        set_value(["model", "decoder.layers.1.self_attention.linear_proj.weight"], torch.zeros(4)),
        r"linear_proj\.weight in .* shape \(4,\)",
    ),
    "no_experts": (
        set_value(["model", "decoder.layers.1.mlp.experts.weight1"], torch.zeros(3)),
        "number of experts cannot be determined",
    ),
    "no_number": (set_value(["model", f"decoder.layers.{'9' * 5000}.x"], torch.zeros(1)), "is not a supported"),
    "no_tensor": (set_value(["model", QKV], "text"), "linear_qkv.weight is not a tensor"),
    "no_layer": (
        lambda content: [content["model"].pop(key) for key in list(content["model"]) if ".layers.1." in key],
        r"indices are \[0, 2, 3\]",
    ),
    "too_few_layers": (
        lambda content: [content["model"].pop(key) for key in list(content["model"]) if ".layers.3." in key],
        "num_layers is 3, but 4 in the model",
    ),
    "more_ranks": (lambda content: setattr(content["args"], "tensor_model_parallel_size", 2), "mp_rank_01 is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoint_is_rejected(tmp_path, tensors, case):
    edit, message = BROKEN[case]
    write_checkpoint(tmp_path / "out", tensors, model())
    edit_rank_file(tmp_path / "out" / FIRST, edit)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_checkpoint(tmp_path / "out", model())
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("missing", ["mp_rank_00_000_000", "mp_rank_01_001_001", "mp_rank_01_000_001"])
def test_missing_rank_is_reported(tmp_path, tensors, missing):
    write_checkpoint(tmp_path / "out", tensors, model(), TargetOptions(2, 2, 2))
    shutil.rmtree(tmp_path / "out" / "iter_0000007" / missing)
    with pytest.raises(CheckpointError, match=f"{missing} is missing"):
        read_checkpoint(tmp_path / "out", model())


def test_missing_files_and_folders_are_reported(tmp_path, tensors):
    write_checkpoint(tmp_path / "out", tensors, model(), TargetOptions(tp_size=2))
    (tmp_path / "out" / "iter_0000007" / "mp_rank_01" / FILE).unlink()
    with pytest.raises(CheckpointError, match=f"mp_rank_01/{FILE} is missing"):
        read_checkpoint(tmp_path / "out", model())
    tracker = tmp_path / "out" / "latest_checkpointed_iteration.txt"
    for text, message in (
        ("8", "refers to iter_0000008"),
        ("../../x", "expected an iteration number"),
        ("", "expected"),
    ):
        tracker.write_text(text)
        with pytest.raises(CheckpointError, match=message):
            read_checkpoint(tmp_path / "out", model())
    with pytest.raises(CheckpointError, match="is not a folder"):
        read_checkpoint(tmp_path / "nowhere", model())
    with pytest.raises(CheckpointError, match="expected mp_rank"):
        read_checkpoint(tmp_path, model())


@pytest.mark.parametrize("layout", [TargetOptions(tp_size=2), TargetOptions(ep_size=2)], ids=["tp", "ep"])
def test_mismatched_replicas_are_rejected(tmp_path, tensors, layout):
    write_checkpoint(tmp_path / "out", tensors, model(), layout)
    second = sorted((tmp_path / "out").rglob("*.pt"))[1]
    edit_rank_file(second, lambda content: content["model"][NORM].add_(1))
    with pytest.raises(CheckpointError, match="should be copies") as caught:
        read_checkpoint(tmp_path / "out", model())
    assert NORM in str(caught.value) and str(second) in str(caught.value)


def test_mismatched_tied_copy_is_rejected(tmp_path):
    megatron_model = model(tied=True)
    write_checkpoint(tmp_path / "out", make_weights(tied=True), megatron_model, TargetOptions(pp_size=2))
    edit_rank_file(
        tmp_path / "out" / "iter_0000007" / "mp_rank_00_001" / FILE,
        lambda content: content["model"]["output_layer.weight"].add_(1),
    )
    with pytest.raises(CheckpointError, match="output_layer.weight.*differ"):
        read_checkpoint(tmp_path / "out", megatron_model)


def test_inconsistent_ranks_are_rejected(tmp_path, tensors):
    write_checkpoint(tmp_path / "out", tensors, model(), TargetOptions(tp_size=2))
    second = tmp_path / "out" / "iter_0000007" / "mp_rank_01" / FILE
    saved = second.read_bytes()
    edit_rank_file(second, lambda content: content["model"].pop(NORM))
    with pytest.raises(CheckpointError, match="have different tensors"):
        read_checkpoint(tmp_path / "out", model())
    second.write_bytes(saved)
    edit_rank_file(second, set_value(["model", QKV], torch.zeros(3, 16)))
    with pytest.raises(CheckpointError, match="but another rank has"):
        read_checkpoint(tmp_path / "out", model())


def test_optimizer_state_is_rejected_with_workaround(tmp_path, tensors):
    write_checkpoint(tmp_path / "out", tensors, model())
    edit_rank_file(tmp_path / "out" / FIRST, set_value(["optimizer"], {"state": {0: torch.zeros(2)}}))
    with MegatronLegacyReader(tmp_path / "out", model()) as reader:
        assert "--dist-ckpt-optim-fully-reshardable" in reader.optimizer_unsupported_reason
    check_equal(read_checkpoint(tmp_path / "out", model()), tensors)
