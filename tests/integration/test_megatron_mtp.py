"""Megatron checkpoints with layers of multi-token prediction, which no model class of transformers has."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_megatron import CheckpointError
from hf_megatron.cli import app
from hf_megatron.conversion import TargetOptions, compare, convert, plan_conversion
from hf_megatron.conversion.families import family_of
from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader
from hf_megatron.conversion.megatron_core.writer import MegatronCoreWriter
from hf_megatron.conversion.megatron_legacy.reader import MegatronLegacyReader
from hf_megatron.conversion.megatron_legacy.writer import MegatronLegacyWriter
from hf_megatron.conversion.output import Output
from hf_megatron.conversion.tensors import EXP_AVG, EXP_AVG_SQ, MAIN_WEIGHT, WEIGHT, Key, OptimizerState
from hf_megatron.files.safetensors import TensorMeta
from tests.integration.test_megatron_core import PADDED, run_peer
from tests.twins import config_of, twin

CASE = "deepseek_v3"
MEGATRON = ("megatron_core", "megatron_legacy")


def with_mtp(tensors: dict[Key, torch.Tensor], layers: int) -> dict[Key, torch.Tensor]:
    """Adds one layer that predicts a further token: another copy of the last one, two norms, a projection, a norm."""
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
    model = family_of(config).model(config)
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
    """`hf`, `plain/FORMAT` without such layers, `FORMAT` with one, and `trained` with moments as well."""
    root, config = tmp_path_factory.mktemp("mtp"), config_of(CASE)
    twin(CASE).save_pretrained(root / "hf")
    for to in MEGATRON:
        convert(root / "hf", root / "plain" / to, to, options=TargetOptions(tp_size=2))
    with MegatronCoreReader(root / "plain" / "megatron_core") as reader:
        tensors = with_mtp({key: reader.read(key) for key in reader.entries}, config.num_hidden_layers)
    for to in MEGATRON:
        write(root / to, tensors, config, to, None)
    for kind in (MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ):
        tensors |= {Key(kind, key.name): tensor * 2 for key, tensor in tensors.items() if key.kind == WEIGHT}
    write(root / "trained", tensors, config, "megatron_core", OptimizerState(7))
    return root


def count(root: Path, to: str) -> int:
    if to == "megatron_core":
        reader = MegatronCoreReader(root / to)
    else:
        config = config_of(CASE)
        reader = MegatronLegacyReader(root / to, family_of(config).model(config))
    with reader:
        return sum(key.kind == WEIGHT and key.name.startswith("mtp.") for key in reader.entries)


@pytest.mark.parametrize("to", MEGATRON)
def test_it_is_refused_by_its_name(root, tmp_path, to):
    with pytest.raises(
        CheckpointError, match=r"of multi-token prediction.*DeepseekV3ForCausalLM.*--without-mtp"
    ) as seen:
        convert(root / to, tmp_path / "out", "hf", config=str(root / "hf"))
    assert len(str(seen.value).splitlines()) == 1 and f"{count(root, to)} tensors" in str(seen.value)
    with pytest.raises(CheckpointError, match="--without-mtp"):
        plan_conversion(root / to, tmp_path / "out", "hf", config=str(root / "hf"))
    with pytest.raises(CheckpointError, match="--without-mtp"):
        compare(root / to, root / "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", MEGATRON)
def test_it_is_left_out_where_that_is_wanted(root, tmp_path, to):
    arguments = [str(root / to), str(tmp_path / "out"), "--to", "hf", "--config", str(root / "hf"), "--without-mtp"]
    result = CliRunner().invoke(app, ["convert", *arguments, "--verify", "--logits"])
    assert result.exit_code == 0, result.output
    said = f"{count(root, to)} tensors of the source (multi-token prediction) are left out"
    compared = f"{count(root, to)} tensors of the first were not compared"
    assert said in result.output and compared in result.output
    assert said in (tmp_path / "out" / "README.md").read_text("utf-8")
    assert said in json.dumps(json.loads((tmp_path / "out" / "conversion.json").read_text("utf-8"))["notes"])
    assert compare(tmp_path / "out", root / "hf").equal
    result = CliRunner().invoke(app, ["verify", str(root / to), str(tmp_path / "out"), "--without-mtp"])
    assert result.exit_code == 0 and compared in result.output
    result = CliRunner().invoke(app, ["verify", str(tmp_path / "out"), str(root / to)])
    assert result.exit_code == 1 and "--without-mtp" in result.output


def test_both_sides_say_what_was_not_compared(root):
    found = compare(root / MEGATRON[0], root / MEGATRON[1], config=str(root / "hf"), without_mtp=True)
    assert found.equal and found.left_out == (count(root, MEGATRON[0]),) * 2
    assert found.summary().count("were not compared") == 2
    assert compare(root / "hf", root / "hf", without_mtp=True).left_out == (0, 0)


def test_moments_of_the_rest_come_along(root, tmp_path):
    report = convert(root / "trained", tmp_path / "out", "sharded", config=str(root / "hf"), without_mtp=True)
    assert any("left out" in note for note in report.notes)
    kinds = {name.partition(" of ")[0] for name, _, _ in report.rows if " of " in name}
    assert kinds == {EXP_AVG, EXP_AVG_SQ} and not any("mtp" in other for _, other, _ in report.rows)
    found = compare(tmp_path / "out", root / "trained", without_mtp=True)
    assert found.equal, found.summary()


@pytest.mark.parametrize("to", MEGATRON)
def test_what_is_written_says_that_there_is_none(root, to):
    """`num_nextn_predict_layers` is 1 by the default of the config, and the files hold no such layer."""
    config = config_of(CASE)
    assert config.num_nextn_predict_layers == 1
    reader = (
        MegatronCoreReader(root / "plain" / to)
        if to == "megatron_core"
        else MegatronLegacyReader(root / "plain" / to, family_of(config).model(config))
    )
    with reader:
        assert reader.arguments["num_layers"] == config.num_hidden_layers
        assert not reader.arguments.get("mtp_num_layers")
        assert not any(key.name.startswith("mtp.") for key in reader.entries)


def test_files_of_transformers_with_such_a_layer(tmp_path):
    """The class ignores the layer that released files have behind the last one; what is left out is said."""
    source = tmp_path / "source"
    twin(CASE).save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    added = {"model.layers.61.enorm.weight": torch.ones(64), "model.layers.61.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors | added, source / "model.safetensors", metadata={"format": "pt"})
    report = convert(source, tmp_path / "core", "megatron_core", verify=True)
    assert any("2 tensors of the source (multi-token prediction) are left out" in note for note in report.notes)
    assert report.comparison is not None and report.comparison.left_out == (2, 0)


def test_what_megatron_core_writes(root, tmp_path):
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
        with pytest.raises(CheckpointError, match="--without-mtp"):
            convert(task["dir"], tmp_path / "no", "hf", config=str(root / "hf"))
        report = convert(task["dir"], tmp_path / f"hf_{task['name']}", "hf", config=str(root / "hf"), without_mtp=True)
        assert any("multi-token prediction" in note for note in report.notes)
    assert compare(tmp_path / "hf_core", tmp_path / "hf_legacy").equal
