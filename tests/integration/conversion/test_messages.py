"""Tests of error messages for unexpected files and invalid arguments of a conversion."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    MegatronBertConfig,
    MegatronBertForPreTraining,
)
from typer.testing import CliRunner

from hf_megatron import CheckpointError
from hf_megatron.cli import app
from hf_megatron.conversion import compare, convert
from tests.integration.conversion.test_third_party_files import copy_with_config, llama


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("messages") / "hf"
    llama().save_pretrained(folder)
    return folder


def get_error(source: Path, target: Path, to: str = "hf", **wanted) -> str:
    """Returns the one-line error of a rejected conversion."""
    with pytest.raises(CheckpointError) as raised:
        convert(source, target, to, **wanted)
    assert not target.exists() and "\n" not in str(raised.value)
    return str(raised.value)


CONFIGS = {
    "NaN": ({"rms_norm_eps": float("nan")}, "config.json: rms_norm_eps is NaN"),
    "NaN inside": ({"rope_parameters": {"rope_theta": float("nan")}}, "rope_parameters.rope_theta is NaN"),
    "text": ({"hidden_size": "64"}, "'hidden_size': TypeError"),
    "a number as type": ({"dtype": 5}, "dtype is 5: expected a torch dtype"),
    "no type": ({"dtype": "x"}, "dtype is x: expected a torch dtype"),
    "no kind of positions": ({"rope_parameters": {"rope_type": "text", "rope_theta": 1e4}}, "rope_type is text: exp"),
    "negative": ({"vocab_size": -3}, "vocab_size is -3: expected a size"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_invalid_config_value_is_reported(hf, tmp_path, case):
    changes, message = CONFIGS[case]
    assert message in get_error(copy_with_config(hf, tmp_path / "source", **changes), tmp_path / "out")


def test_invalid_file_name_is_rejected(hf, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    (source / "model.safetensors").rename(source / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(("lm_head.weight",), "model\ud800.safetensors")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    assert "the name is invalid" in get_error(source, tmp_path / "out")


def test_store_format_in_error_is_truncated(hf, tmp_path):
    source = tmp_path / "source"
    convert(hf, source, "torch_dist")
    [file] = source.rglob("metadata.json")
    file.write_text(json.dumps({"sharded_backend": "t" + "[" * 5000, "sharded_backend_version": 1}), "utf-8")
    assert len(get_error(source, tmp_path / "out")) < 1000


OTHER_KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe": (os.mkfifo, "is a named pipe: expected a file"),
    "folder": (os.mkdir, "is a folder: expected a file"),
    "link": (lambda path: path.symlink_to(path.with_name("nowhere")), "is a link to nothing: expected a file"),
    "pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "utf-8"),
        "is a git-lfs pointer",
    ),
}


PLACES = [("model.safetensors", kind) for kind in OTHER_KINDS] + [("config.json", kind) for kind in ("pipe", "folder")]


@pytest.mark.parametrize(("name", "kind"), PLACES)
def test_unexpected_file_kinds_are_reported(hf, tmp_path, name, kind):
    source, (make, message) = tmp_path / "source", OTHER_KINDS[kind]
    shutil.copytree(hf, source)
    (source / name).unlink()
    make(source / name)
    error = get_error(source, tmp_path / "out")
    assert name in error and message in error


def test_tensor_without_name_rule_is_reported(tmp_path):
    LlamaForSequenceClassification(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            pad_token_id=0,
        )
    ).save_pretrained(tmp_path / "source")
    error = get_error(tmp_path / "source", tmp_path / "out", "megatron_core")
    assert error.startswith(f"{tmp_path / 'source'}: no rule maps score.weight to Megatron")


def run(*arguments: str | Path) -> tuple[int, list[str]]:
    result = CliRunner().invoke(app, [*map(str, arguments)])
    return result.exit_code, result.stderr.splitlines()


def test_invalid_arguments_report_one_line(hf, tmp_path):
    target = tmp_path / "there"
    target.mkdir()
    cases = (
        (("convert", hf, "", "--to", "hf"), 2, "target='': expected a folder."),
        (("convert", "", target, "--to", "hf"), 2, "source='': expected a folder."),
        (("convert", hf, target, "--to", "torch_dist", "--layout", "tp0"), 2, "MegatronConfig.tp_size = 0"),
        (("convert", hf, target, "--to", "torch_dist", "--layout", "tp3"), 1, "num_attention_heads 8 is not divisible"),
        (("convert", tmp_path / "nowhere", target, "--to", "hf"), 1, "nowhere does not exist."),
        (("convert", hf, target, "--to", "hf"), 1, "there already exists. Choose a folder that does not exist."),
        (("show", hf, "--layout", "tp0"), 2, "MegatronConfig.tp_size = 0: expected an integer of 1 or more."),
    )
    for arguments, code, message in cases:
        exit_code, lines = run(*arguments)
        assert (exit_code, len(lines)) == (code, 1), (arguments, lines)
        assert message in lines[0]


def test_different_models_do_not_compare_equal(hf, tmp_path):
    other = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    other.save_pretrained(tmp_path / "gpt2")
    comparison = compare(hf, tmp_path / "gpt2")
    assert not comparison.equal and comparison.summary().startswith("different models: no tensor is in both; ")
    assert compare(hf, hf).summary() == "21 tensors compared, 0 different"


def test_old_gpt2_buffers_are_not_weights(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=2, n_positions=16))
    model.save_pretrained(tmp_path / "gpt2")
    file = tmp_path / "gpt2" / "model.safetensors"
    weights = safetensors.torch.load_file(file)
    older = {"h.0.attn.masked_bias": torch.tensor(-1e4), "h.0.attn.bias": torch.ones(1, 1, 16, 16)}
    weights = {name.removeprefix("transformer."): weight for name, weight in weights.items()} | older
    safetensors.torch.save_file(weights, file, {"format": "pt"})
    convert(tmp_path / "gpt2", tmp_path / "out", "hf", verify=True)
    written = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert written and not any("masked_bias" in name for name in written)
    assert json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["n_layer"] == 1


def test_compared_logits_include_every_output(tmp_path):
    """Megatron's BERT has two heads, and neither output is named `logits`."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = MegatronBertForPreTraining(MegatronBertConfig(**sizes, intermediate_size=16, max_position_embeddings=32))
    model.save_pretrained(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "legacy", "megatron_legacy", verify=True, logits=True)
    assert report.comparison.logits == 0.0 and compare(tmp_path / "hf", tmp_path / "hf", logits=True).logits == 0.0
    with torch.no_grad():
        model.cls.seq_relationship.bias += 1
    model.save_pretrained(tmp_path / "other")
    assert compare(tmp_path / "hf", tmp_path / "other", logits=True).logits == pytest.approx(1.0)
    tuples = copy_with_config(tmp_path / "other", tmp_path / "tuples", return_dict=False)
    assert compare(tuples, tuples, logits=True).logits == 0.0
    headless = model.bert
    headless.save_pretrained(tmp_path / "headless")
    assert compare(tmp_path / "headless", tmp_path / "headless", logits=True).logits == 0.0


def test_nonfinite_logits_do_not_compare_equal(hf, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(hf, source)
    weights = safetensors.torch.load_file(source / "model.safetensors")
    weights["model.norm.weight"] *= float("nan")
    safetensors.torch.save_file(weights, source / "model.safetensors", {"format": "pt"})
    comparison = compare(source, source, logits=True)
    assert not comparison.different and "logits are NaN or infinite and could not be compared" in comparison.summary()
    assert run("compare", source, source, "--logits")[0] == 1 and run("compare", source, source)[0] == 0
    error = get_error(source, tmp_path / "out", logits=True)
    assert "could not be verified against its source and is removed: " in error and "logits are NaN" in error


def test_unverified_conversion_leaves_nothing(hf, tmp_path, monkeypatch):
    target = tmp_path / "out"
    for error in (CheckpointError("cannot compute logits"), KeyboardInterrupt(), RuntimeError("memory")):
        monkeypatch.setattr("hf_megatron.conversion.open_pair.compare_logits", make_failing_function(error))
        with pytest.raises(type(error)):
            convert(hf, target, "hf", verify=True, logits=True)
        assert os.listdir(tmp_path) == []


def make_failing_function(error: BaseException) -> Callable[..., None]:
    def fail(*arguments: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int32])
def test_integer_weights_are_rejected(hf, tmp_path, dtype):
    """Regression: integers were copied unchanged, under a config with dtype float32."""
    source, legacy, name = tmp_path / "source", tmp_path / "legacy", "model.layers.0.mlp.down_proj.weight"
    shutil.copytree(hf, source)
    convert(source, legacy, "megatron_legacy")
    weights = safetensors.torch.load_file(source / "model.safetensors")
    integers = weights[name].view(dtype) if dtype == torch.int32 else weights[name].to(dtype)
    safetensors.torch.save_file(weights | {name: integers}, source / "model.safetensors", {"format": "pt"})
    [file] = legacy.rglob("*.pt")
    content = torch.load(file, weights_only=False)
    content["model"]["decoder.layers.0.mlp.linear_fc2.weight"] = integers
    torch.save(content, file)
    (legacy / "conversion.json").unlink()
    for folder in (source, legacy):
        for to in ("hf", "megatron_core"):
            error = get_error(folder, tmp_path / "out", to)
            assert f"{name} has dtype {dtype}, but is floating point in LlamaForCausalLM" in error


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "\x1b[31m"])
@pytest.mark.parametrize("to", ["hf", "megatron_core", "dcp"])
def test_quantized_checkpoints_are_rejected(hf, tmp_path, to, method):
    """Regression: Megatron's formats dropped the quantization config, others kept it for plain weights."""
    source = copy_with_config(
        hf, tmp_path / "source", quantization_config={"quant_method": method, "load_in_4bit": True}
    )
    error = get_error(source, tmp_path / "out", to)
    shown = method.replace("\x1b", "\\x1b")
    assert f"config.json: quantization_config has quant_method {shown}; quantized weights cannot be converted" in error
    with pytest.raises(CheckpointError, match="quantization_config"):
        compare(source, hf)
