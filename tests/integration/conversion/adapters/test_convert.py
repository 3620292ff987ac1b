"""Tests of PEFT LoRA adapters in Megatron-Bridge's format: both add the same deltas to the weights."""

import json

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from typer.testing import CliRunner

from hf_megatron import CheckpointError, ConfigError, UnsupportedError
from hf_megatron.cli import app
from hf_megatron.conversion import convert
from hf_megatron.conversion.adapters import convert_adapter
from hf_megatron.conversion.adapters import factors as factors_module
from hf_megatron.conversion.interfaces import WEIGHT, Key
from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader
from hf_megatron.testing.tiny_model import draw_parameters

IDS = torch.arange(3, 51).view(4, 12)
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SETTINGS = {
    "all": {"target_modules": "all-linear"},
    "some": {"target_modules": ["q_proj", "v_proj", "down_proj"], "layers_to_transform": [0, 2]},
    "scales": {
        "target_modules": "all-linear",
        "use_rslora": True,
        "rank_pattern": {"k_proj": 2},
        "alpha_pattern": {"up_proj": 3},
    },
}


@pytest.fixture(scope="module", params=[LlamaConfig, Qwen3Config], ids=["llama", "qwen3"])
def base(request, tmp_path_factory):
    model = AutoModelForCausalLM.from_config(request.param(**SIZES, **HEADS, tie_word_embeddings=False)).float()
    draw_parameters(model, 0)
    folder = tmp_path_factory.mktemp("base")
    model.save_pretrained(folder)
    return folder


def make_adapter(base, folder, name="all"):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=6, **SETTINGS[name]))
    draw_parameters(model, 1, trained_only=True)
    model.save_pretrained(folder)
    return folder


def logits(base, adapter, dtype=torch.float32):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).to(dtype)
    with torch.no_grad():
        return model(input_ids=IDS).logits


def stored(folder):
    """Returns the stored tensors by name, layers stacked, as torch's own reader loads them."""
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in FileSystemReader(folder / "release").read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    torch.distributed.checkpoint.load(state, storage_reader=FileSystemReader(folder / "release"), no_dist=True)
    return state


def compute_deltas(folder):
    """Returns the deltas of a Megatron-Bridge adapter for Megatron's linears, computed by Megatron-Bridge's formula."""
    settings = yaml.safe_load((folder / "release/run_config.yaml").read_text())["peft"]
    scale, deltas = settings["alpha"] / settings["dim"], {}
    for name, a in stored(folder).items():
        if not name.endswith(".linear_in.weight"):
            continue
        b = stored(folder)[name.replace("linear_in", "linear_out")]
        linear, _, part = name.removesuffix(".linear_in.weight").partition(".adapter")
        deltas.setdefault(linear, {})[part.removeprefix(".")] = scale * (b @ a)
    return deltas


def pack_deltas(parts):
    """Packs canonical adapters' deltas into Megatron's fused linears (`LoRALinearSplitQKV._interleave_qkv`)."""
    if "" in parts:
        return parts[""]
    if "adapter_gate" in parts:
        return torch.cat([parts["adapter_gate"], parts["adapter_up"]], -2)
    q, k, v = (parts[f"adapter_{name}"] for name in "qkv")
    groups, width = HEADS["num_key_value_heads"], SIZES["head_dim"]
    rows = []
    for group in range(groups):
        heads = HEADS["num_attention_heads"] // groups * width
        rows += [q[..., group * heads : (group + 1) * heads, :]]
        rows += [part[..., group * width : (group + 1) * width, :] for part in (k, v)]
    return torch.cat(rows, -2)


def measure_errors(base, adapter, tmp_path):
    """Returns the largest error of base weights plus deltas against the merged model, both in Megatron's format."""
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload().save_pretrained(
        tmp_path / "merged"
    )
    convert(base, tmp_path / "base", "megatron_core")
    convert(tmp_path / "merged", tmp_path / "whole", "megatron_core")
    errors = {}
    with MegatronCoreReader(tmp_path / "base") as before, MegatronCoreReader(tmp_path / "whole") as after:
        for kind in ("bridge", "bridge_canonical"):
            convert_adapter(adapter, tmp_path / kind, kind, base)
            worst = 0.0
            for linear, parts in compute_deltas(tmp_path / kind).items():
                for layer, delta in enumerate(pack_deltas(parts)):
                    key = Key(WEIGHT, linear.replace("layers.", f"layers.{layer}.") + ".weight")
                    worst = max(worst, (before.read(key) + delta - after.read(key)).abs().max().item())
            errors[kind] = worst
    return errors


@pytest.mark.parametrize("name", ["all", "scales"])
def test_bridge_deltas_match_peft(base, tmp_path, name):
    errors = measure_errors(base, make_adapter(base, tmp_path / "adapter", name), tmp_path)
    assert errors.keys() == {"bridge", "bridge_canonical"} and max(errors.values()) < 1e-5


def test_wrong_row_order_is_detected(base, tmp_path, monkeypatch):
    def flip_output_rows(target, parts):
        factors = original(target, parts)
        return factors_module.LowRank(factors.a, factors.b.flip(0), factors.scale)

    original = factors_module._fused
    monkeypatch.setattr(factors_module, "_fused", flip_output_rows)
    assert measure_errors(base, make_adapter(base, tmp_path / "adapter"), tmp_path)["bridge"] > 1e-2


@pytest.mark.parametrize("kind", ["bridge", "bridge_canonical"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_round_trip_preserves_logits(base, tmp_path, name, kind):
    adapter = make_adapter(base, tmp_path / "adapter", name)
    written = convert_adapter(adapter, tmp_path / "there", kind, base)
    assert all(name.startswith("decoder.layers.") and ".adapter." in name for name in written)
    assert (tmp_path / "there/latest_checkpointed_iteration.txt").read_text() == "release"
    convert_adapter(tmp_path / "there", tmp_path / "back", "peft", base)
    expected = logits(base, adapter)
    # Scales are multiplied in another order: the tolerance is the rounding error of fp32 against fp64.
    rounding = (logits(base, adapter, torch.float64) - expected).norm()
    assert (logits(base, tmp_path / "back") - expected).norm() <= max(1e-5 * expected.norm(), 4 * rounding)
    if (name, kind) == ("all", "bridge_canonical"):
        before, after = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "back"))
        assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)


def test_convert_adapter_command(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "adapter")
    words = ["convert-adapter", str(adapter), str(tmp_path / "out"), "--to", "bridge", "--base", str(base)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0 and "24 tensors" in result.output, result.output
    settings = yaml.safe_load((tmp_path / "out/release/run_config.yaml").read_text())["peft"]
    assert settings == {
        "_target_": "megatron.bridge.peft.lora.LoRA",
        "target_modules": ["linear_fc1", "linear_fc2", "linear_proj", "linear_qkv"],
        "dim": 12,
        "alpha": 18,
        "dropout": 0.0,
    }
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 1 and "exists" in again.output


def test_unsupported_adapters_are_rejected(base, tmp_path):
    adapter = make_adapter(base, tmp_path / "adapter")
    with pytest.raises(ConfigError, match="to = 'nemo': valid are peft, bridge, bridge_canonical"):
        convert_adapter(adapter, tmp_path / "x", "nemo", base)
    with pytest.raises(
        CheckpointError, match="expected PEFT's adapter_config.json, or Megatron-Bridge's run_config.yaml"
    ):
        convert_adapter(base, tmp_path / "x", "peft", base)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"use_dora": True}))
    with pytest.raises(UnsupportedError, match="use_dora True"):
        convert_adapter(adapter, tmp_path / "x", "bridge", base)
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    tensors = load_file(adapter / "adapter_model.safetensors")
    name = "base_model.model.lm_head.lora_{}.weight"
    further = {name.format("A"): torch.zeros(4, 32), name.format("B"): torch.zeros(64, 4)}
    save_file(tensors | further, adapter / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="Megatron-Bridge has no adapters for lm_head"):
        convert_adapter(adapter, tmp_path / "x", "bridge", base)
    save_file(dict(list(tensors.items())[1:]), adapter / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="must have lora_A and lora_B"):
        convert_adapter(adapter, tmp_path / "x", "bridge", base)
    assert not (tmp_path / "x").exists()
