"""Tests of multi-token prediction (MTP) layers: from and to Hugging Face files, and omitted if unsupported."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from typer.testing import CliRunner

from hf_megatron import CheckpointError
from hf_megatron.cli import app
from hf_megatron.conversion import TargetOptions, compare, convert, plan_conversion
from hf_megatron.conversion.families import get_family
from hf_megatron.conversion.interfaces import EXP_AVG, EXP_AVG_SQ, MAIN_WEIGHT, WEIGHT, Key, OptimizerState
from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader
from hf_megatron.conversion.megatron_core.writer import MegatronCoreWriter
from hf_megatron.conversion.megatron_legacy.reader import MegatronLegacyReader
from hf_megatron.conversion.megatron_legacy.writer import MegatronLegacyWriter
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.io.safetensors import TensorMeta
from tests.helpers.tiny_models import build_tiny_model, make_config
from tests.integration.conversion.megatron_core.test_megatron_core import PADDED, run_peer

CASE = "deepseek_v3"
MEGATRON = ("megatron_core", "megatron_legacy")


def add_megatron_mtp_layer(tensors: dict[Key, torch.Tensor], layers: int) -> dict[Key, torch.Tensor]:
    """Adds one MTP layer: a modified copy of the last layer, two norms, a projection and a final norm."""
    last, prefix = f"decoder.layers.{layers - 1}.", "mtp.layers.0."
    added = {
        key._replace(name=f"{prefix}transformer_layer.{key.name.removeprefix(last)}"): tensor + 1
        for key, tensor in tensors.items()
        if key.name.startswith(last)
    }
    hidden = tensors[Key(WEIGHT, "decoder.final_layernorm.weight")]
    for kind in {key.kind for key in tensors}:
        added |= {Key(kind, f"{prefix}{name}.weight"): hidden + 2 for name in ("enorm", "hnorm", "final_layernorm")}
        added[Key(kind, f"{prefix}eh_proj.weight")] = torch.randn(len(hidden), 2 * len(hidden)).to(hidden.dtype)
    return tensors | added


def write(folder: Path, tensors: dict[Key, torch.Tensor], config, to: str, optimizer: OptimizerState | None) -> None:
    model = get_family(config).model(config)
    model = replace(model, arguments={**model.arguments, "mtp_num_layers": 1})
    plan = {key: TensorMeta.of(tensor) for key, tensor in tensors.items()}
    with Output(folder) as output:
        if to == "megatron_core":
            writer = MegatronCoreWriter(output, plan, model, None, optimizer)
        else:
            writer = MegatronLegacyWriter(output, plan, model, TargetOptions(tp_size=2))
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        writer.finish()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Folders `hf`, `plain/FORMAT` without MTP layers, `FORMAT` with one, and `trained` with moments in addition."""
    root, config = tmp_path_factory.mktemp("mtp"), make_config(CASE)
    build_tiny_model(CASE).save_pretrained(root / "hf")
    for to in MEGATRON:
        convert(root / "hf", root / "plain" / to, to, options=TargetOptions(tp_size=2))
    with MegatronCoreReader(root / "plain" / "megatron_core") as reader:
        tensors = add_megatron_mtp_layer({key: reader.read(key) for key in reader.entries}, config.num_hidden_layers)
    for to in MEGATRON:
        write(root / to, tensors, config, to, None)
    for kind in (MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ):
        tensors |= {Key(kind, key.name): tensor * 2 for key, tensor in tensors.items() if key.kind == WEIGHT}
    write(root / "trained", tensors, config, "megatron_core", OptimizerState(7))
    return root


def count_mtp_tensors(root: Path, to: str) -> int:
    if to == "megatron_core":
        reader = MegatronCoreReader(root / to)
    else:
        config = make_config(CASE)
        reader = MegatronLegacyReader(root / to, get_family(config).model(config))
    with reader:
        return sum(key.kind == WEIGHT and key.name.startswith("mtp.") for key in reader.entries)


@pytest.mark.parametrize("source", MEGATRON)
@pytest.mark.parametrize("to", ["sharded", "dcp"])
def test_mtp_layers_are_rejected_by_unsupported_formats(root, tmp_path, source, to):
    with pytest.raises(
        CheckpointError,
        match=r"of multi-token prediction.*DeepseekV3ForCausalLM.*Use `hf-megatron convert --without-mtp`",
    ) as error_info:
        convert(root / source, tmp_path / "out", to, config=str(root / "hf"))
    assert len(str(error_info.value).splitlines()) == 1 and f"{count_mtp_tensors(root, source)} tensors" in str(
        error_info.value
    )
    with pytest.raises(CheckpointError, match="--without-mtp"):
        plan_conversion(root / source, tmp_path / "out", to, config=str(root / "hf"))
    convert(root / "hf", tmp_path / "other", to)
    with pytest.raises(CheckpointError, match="--without-mtp"):
        compare(root / source, tmp_path / "other")
    assert not (tmp_path / "out").exists()
    convert(root / source, tmp_path / "out", to, config=str(root / "hf"), without_mtp=True)
    assert compare(tmp_path / "out", tmp_path / "other").equal


@pytest.mark.parametrize("to", MEGATRON)
def test_without_mtp_omits_mtp_layers(root, tmp_path, to):
    arguments = [str(root / to), str(tmp_path / "out"), "--to", "hf", "--config", str(root / "hf"), "--without-mtp"]
    result = CliRunner().invoke(app, ["convert", *arguments, "--verify", "--logits"])
    assert result.exit_code == 0, result.output
    note = f"{count_mtp_tensors(root, to)} tensors of the source (multi-token prediction) are left out"
    compared = f"{count_mtp_tensors(root, to)} tensors of the first were not compared"
    assert note in result.output and compared in result.output
    assert note in (tmp_path / "out" / "README.md").read_text("utf-8")
    assert note in json.dumps(json.loads((tmp_path / "out" / "conversion.json").read_text("utf-8"))["notes"])
    assert compare(tmp_path / "out", root / "hf").equal
    result = CliRunner().invoke(app, ["compare", str(root / to), str(tmp_path / "out"), "--without-mtp"])
    assert result.exit_code == 0 and compared in result.output
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "out"), str(root / to)])
    assert result.exit_code == 1 and "only in the second: model.layers.3" in result.output


def test_compare_reports_omitted_tensors_on_both_sides(root):
    comparison = compare(root / MEGATRON[0], root / MEGATRON[1], config=str(root / "hf"), without_mtp=True)
    assert comparison.equal and comparison.left_out == (count_mtp_tensors(root, MEGATRON[0]),) * 2
    assert comparison.summary().count("were not compared") == 2
    assert compare(root / "hf", root / "hf", without_mtp=True).left_out == (0, 0)


def test_remaining_moments_are_converted(root, tmp_path):
    report = convert(root / "trained", tmp_path / "out", "sharded", config=str(root / "hf"), without_mtp=True)
    assert any("left out" in note for note in report.notes)
    kinds = {name.partition(" of ")[0] for name, _, _ in report.rows if " of " in name}
    assert kinds == {EXP_AVG, EXP_AVG_SQ} and not any("mtp" in other for _, other, _ in report.rows)
    comparison = compare(tmp_path / "out", root / "trained", without_mtp=True)
    assert comparison.equal, comparison.summary()


@pytest.mark.parametrize("to", MEGATRON)
def test_written_arguments_have_no_mtp_layers(root, to):
    """`num_nextn_predict_layers` is 1 by default in the config, but the files contain no MTP layer."""
    config = make_config(CASE)
    assert config.num_nextn_predict_layers == 1
    reader = (
        MegatronCoreReader(root / "plain" / to)
        if to == "megatron_core"
        else MegatronLegacyReader(root / "plain" / to, get_family(config).model(config))
    )
    with reader:
        assert reader.arguments["num_layers"] == config.num_hidden_layers
        assert not reader.arguments.get("mtp_num_layers")
        assert not any(key.name.startswith("mtp.") for key in reader.entries)


def add_hf_mtp_layers(folder: Path, depth: int, repeated: bool = False) -> None:
    """Adds MTP layers to a transformers folder as in released files: they differ from the last layer and each other."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text("utf-8"))
    config["num_nextn_predict_layers"] = depth
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    layers, hidden, added = config["num_hidden_layers"], config["hidden_size"], {}
    torch.manual_seed(1)
    for number in range(layers, layers + depth):
        last_prefix, prefix = f"model.layers.{layers - 1}.", f"model.layers.{number}."
        block = {
            name.replace(last_prefix, prefix): value for name, value in tensors.items() if name.startswith(last_prefix)
        }
        added |= {name: value + 0.05 * torch.randn_like(value) for name, value in block.items()}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            added[f"{prefix}{name}.weight"] = 1 + 0.1 * torch.randn(hidden)
        added[f"{prefix}eh_proj.weight"] = 0.1 * torch.randn(hidden, 2 * hidden)
        if repeated:
            added[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
            added[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors | added, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("to", MEGATRON)
def test_hf_mtp_layers_round_trip(tmp_path, to):
    """Covers two MTP layers as in released files, with copies of embedding and head."""
    build_tiny_model(CASE).save_pretrained(tmp_path / "hf")
    add_hf_mtp_layers(tmp_path / "hf", 2, repeated=True)
    report = convert(tmp_path / "hf", tmp_path / to, to, verify=True)
    assert any("shared_head.head.weight are left out" in note for note in report.notes)
    assert not any("of the source" in note for note in report.notes)
    back = convert(tmp_path / to, tmp_path / "back", "hf", verify=True)
    assert sum("mtp.layers.1." in row[1] for row in back.rows) > 10
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert {name.split(".", 3)[-1] for name in one.keys() - other} == {"embed_tokens.weight", "shared_head.head.weight"}
    assert all(torch.equal(one[name], tensor) for name, tensor in other.items())
    with pytest.raises(CheckpointError, match=r"2 layers of multi-token prediction.*num_nextn_predict_layers is 1"):
        convert(tmp_path / to, tmp_path / "no", "hf", config=str(_save_without_mtp(tmp_path / "plain")))


def _save_without_mtp(folder: Path) -> Path:
    build_tiny_model(CASE).save_pretrained(folder)
    return folder


def test_hf_to_hf_keeps_mtp_layers(tmp_path):
    build_tiny_model(CASE).save_pretrained(tmp_path / "hf")
    add_hf_mtp_layers(tmp_path / "hf", 1)
    report = convert(
        tmp_path / "hf", tmp_path / "small", "hf", options=TargetOptions(max_shard_size="20KB"), verify=True
    )
    assert report.notes == []
    index = json.loads((tmp_path / "small" / "model.safetensors.index.json").read_text("utf-8"))
    assert index["weight_map"].keys() == load_file(tmp_path / "hf" / "model.safetensors").keys()
    assert compare(tmp_path / "hf", tmp_path / "small", logits=True).logits == 0


def test_mismatched_embedding_copy_is_rejected(tmp_path):
    build_tiny_model(CASE).save_pretrained(tmp_path / "hf")
    add_hf_mtp_layers(tmp_path / "hf", 1, repeated=True)
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    tensors["model.layers.3.embed_tokens.weight"][5] += 1
    save_file(tensors, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.3\.embed_tokens\.weight differs from model\.embed_tokens"):
        convert(tmp_path / "hf", tmp_path / "core", "megatron_core")
    assert not (tmp_path / "core").exists()
    assert convert(tmp_path / "hf", tmp_path / "core", "megatron_core", without_mtp=True, verify=True).comparison.equal


def test_nonconsecutive_layer_is_rejected(tmp_path):
    build_tiny_model(CASE).save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    added = {"model.layers.61.enorm.weight": torch.ones(64), "model.layers.61.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors | added, tmp_path / "hf" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"indices \[58\], expected 1 from 0 on\. Use --without-mtp"):
        convert(tmp_path / "hf", tmp_path / "core", "megatron_core")
    report = convert(tmp_path / "hf", tmp_path / "core", "megatron_core", without_mtp=True, verify=True)
    assert any("2 tensors of the source (multi-token prediction) are left out" in note for note in report.notes)
    assert report.comparison is not None and report.comparison.left_out == (2, 0)


def test_mtp_logits_match_megatron_core(tmp_path, monkeypatch):
    depth, layers = 2, make_config(CASE).num_hidden_layers
    build_tiny_model(CASE).save_pretrained(tmp_path / "hf")
    add_hf_mtp_layers(tmp_path / "hf", depth)
    convert(tmp_path / "hf", tmp_path / "core", "megatron_core", options=TargetOptions(make_vocab_size_divisible_by=16))
    ids = torch.randint(0, make_config(CASE).vocab_size, (2, 12), generator=torch.Generator().manual_seed(0))
    padded = -(-make_config(CASE).vocab_size // 16) * 16
    task = {
        "task": "load_logits",
        "name": "logits",
        "hf": str(tmp_path / "hf"),
        "load": str(tmp_path / "core" / "release"),
    }
    task |= {"padded_vocab": padded, "mtp_layers": depth, "ids": ids.tolist()}
    run_peer(tmp_path / "out", [{"name": "one", "layout": {}, "tasks": [task]}])
    megatron_logits = load_file(tmp_path / "out" / "one" / "logits.safetensors")["logits"]

    # The class ignores the MTP layers by index, and only for released models.
    patterns = [rf"model\.layers\.{layers + number}\..*" for number in range(depth)]
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", patterns)
    model = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "hf").eval()
    drafting = MtpModel.from_pretrained(model).eval()
    cache = MtpCache(config=model.config.get_mtp_config())
    with torch.no_grad():
        hidden = model.model(ids).last_hidden_state
        expected_logits = [model.lm_head(hidden)]
        for number in range(depth):
            # Megatron shifts in a padding token at the end.
            shifted = torch.nn.functional.pad(ids, (0, number + 1))[:, number + 1 :]
            positions = torch.arange(12)[None].expand(2, -1) + number + 1
            hidden = drafting.forward_layer(number, hidden, positions, cache, input_ids=shifted)
            expected_logits.append(model.lm_head(hidden))
    for number, logits in enumerate(expected_logits):
        torch.testing.assert_close(
            megatron_logits[number][:, : 12 - number], logits[:, : 12 - number], rtol=1e-4, atol=1e-5
        )
    assert (expected_logits[1] - expected_logits[2]).abs().max() > 0.01


def test_megatron_core_mtp_checkpoints_convert(root, tmp_path):
    tasks = [
        {
            "task": "save",
            "name": name,
            "hf": str(root / "hf"),
            "padded_vocab": PADDED,
            "dir": str(tmp_path / name),
            "format": form,
            "mtp_layers": 1,
        }
        for name, form in (("core", "torch_dist"), ("legacy", "legacy"))
    ]
    run_peer(tmp_path / "out", [{"name": "one", "layout": {}, "tasks": tasks}])
    for task in tasks:
        report = convert(task["dir"], tmp_path / f"hf_{task['name']}", "hf", config=str(root / "hf"), verify=True)
        assert any("mtp.layers.0.eh_proj.weight" in row for row in report.rows)
    assert compare(tmp_path / "hf_core", tmp_path / "hf_legacy").equal
