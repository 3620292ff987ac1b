"""Tests that follow the cures in errors of layouts: each named layout trains like a single process."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPModel,
    XLMConfig,
    XLMWithLMHeadModel,
)

import hf_megatron
from hf_megatron import ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layout
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

ROOT = Path(__file__).parents[3]


@functools.lru_cache(maxsize=3)
def get_tiny_model(model_type="llama", **changes):
    return make_tiny_model(CONFIG_MAPPING[model_type](), changes=changes, microbatches=2, batch_size=4)


def check_layout(tiny_model, **fields):
    comparison = check_tiny_model(tiny_model, ConfigUnderTest(**fields))
    assert comparison.passed, comparison.report()


def get_load_error(tiny_model, **fields):
    """Returns the error of loading a tiny model on a layout, the same on all ranks."""

    def on_rank():
        with pytest.raises((ConfigError, UnsupportedError)) as error:
            tiny_model.load(megatron_config=ConfigUnderTest(**fields))
        return str(error.value)

    dp_size = fields.get("dp_size", 1)
    [message] = set(run_ranks(on_rank, dp_size * fields.get("tp_size", 1) * fields.get("cp_size", 1)))
    return message


def test_mlp_chunks_without_sequence_parallelism():
    with pytest.raises(ConfigError, match=r"Set only one of them, or shard tokens with cp_size instead\."):
        MegatronConfig(tp_size=2, sequence_parallel=True, mlp_chunk_size=7)
    check_layout(get_tiny_model(), tp_size=2, sequence_parallel=True)
    check_layout(get_tiny_model(), cp_size=2, mlp_chunk_size=7)


def test_dp_size_is_left_out_or_ranks_are_added():
    tiny_model = get_tiny_model()

    def load(**fields):
        model = tiny_model.load(megatron_config=MegatronConfig(tp_size=2, **fields))
        with torch.no_grad():
            return model(**tiny_model.batches[0]).loss.item()

    def on_rank():
        with pytest.raises(ConfigError, match=r"Leave dp_size out, or start 4 ranks\."):
            load(dp_size=2)
        return load()

    [expected] = run_ranks(lambda: tiny_model.load()(**tiny_model.batches[0]).loss.item(), 1)
    assert run_ranks(on_rank, 2) == pytest.approx([expected] * 2, rel=1e-5)
    check_layout(tiny_model, tp_size=2, dp_size=2)


def test_experts_over_all_ranks_or_one():
    tiny_model = get_tiny_model("qwen3_moe", num_experts=4)
    message = get_load_error(tiny_model, dp_size=4, ep_size=3)
    assert "Use a divisor or a multiple of each in turn, such as 4 (all ranks) or 1." in message
    check_layout(tiny_model, dp_size=4, ep_size=4)
    check_layout(tiny_model, dp_size=4, ep_size=1)


def test_layout_words_are_joined_by_plus():
    with pytest.raises(ConfigError, match=r"'tp2-sp' is not one of .*Join them by \+, such as tp2\+sp\+pp2\."):
        parse_layout("tp2-sp")
    check_layout(get_tiny_model(), **parse_layout("tp2+sp").to_dict())
    check_layout(get_tiny_model(), **parse_layout("tp2+sp+pp2").to_dict())


def test_replicas_or_sharded_weights_with_context_parallelism():
    fields = {"dp_size": 2, "cp_size": 2, "dp_replicate_size": 2, "zero_stage": 3}
    message = get_load_error(get_tiny_model(), **fields)
    assert "Set dp_replicate_size=1 or zero_stage=2." in message
    check_layout(get_tiny_model(), **fields | {"dp_replicate_size": 1})
    check_layout(get_tiny_model(), **fields | {"zero_stage": 2})


def test_pre_norm_model_on_one_stage(tmp_path):
    """Uses XLM, since the pre-norm forward of Flaubert fails in stock transformers."""
    config = XLMConfig(vocab_size=64, emb_dim=32, n_layers=2, n_heads=2, dropout=0.0, attention_dropout=0.0)
    config.pre_norm = True
    torch.manual_seed(0)
    XLMWithLMHeadModel(config).save_pretrained(tmp_path)
    ids = torch.arange(24).view(4, 6) + 3

    def compute_gradients(**arguments):
        model = XLMWithLMHeadModel.from_pretrained(tmp_path, **arguments).train()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item(), torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"after its last sublayer\. Load it with pp_size=1\."):
            XLMWithLMHeadModel.from_pretrained(tmp_path, megatron_config=ConfigUnderTest(pp_size=2))
        return compute_gradients(megatron_config=ConfigUnderTest(tp_size=2, pp_size=1))

    expected = compute_gradients()
    for result in run_ranks(on_rank, 2):
        assert result == pytest.approx(expected, rel=1e-5)


def test_models_with_several_layer_lists_on_one_stage(tmp_path):
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = CLIPConfig(
        text_config=small | {"vocab_size": 64, "eos_token_id": 2},
        vision_config=small | {"image_size": 8, "patch_size": 4},
        projection_dim=16,
    )
    torch.manual_seed(0)
    CLIPModel(config).save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "input_ids": torch.randint(3, 64, (2, 6), generator=generator),
        "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
    }

    def compute_logits(**arguments):
        model = CLIPModel.from_pretrained(tmp_path, **arguments).eval()
        with torch.no_grad():
            return model(**inputs).logits_per_text

    def on_rank():
        with pytest.raises(
            UnsupportedError, match=r"exactly one list.*Load it with pp_size=1, or register a spec with"
        ):
            CLIPModel.from_pretrained(tmp_path, megatron_config=ConfigUnderTest(pp_size=2))
        return compute_logits(megatron_config=ConfigUnderTest(dp_size=2, pp_size=1))

    expected = compute_logits()
    for logits in run_ranks(on_rank, 2):
        torch.testing.assert_close(logits, expected)


def test_disabled_patches_are_enabled_or_the_model_is_loaded_without(tmp_path):
    tiny_model = get_tiny_model()
    batch = tiny_model.batches[0]

    def on_rank():
        model = tiny_model.load(megatron_config=MegatronConfig(tp_size=2))
        hf_megatron.disable()
        message = r"Call hf_megatron\.enable\(\) first, or load the model without megatron_config\."
        with pytest.raises(ConfigError, match=message):
            model(**batch)
        stock = tiny_model.load()(**batch).loss
        stock.backward()
        hf_megatron.enable()
        loss = model(**batch).loss
        loss.backward()
        return stock.item(), loss.item()

    [expected] = run_ranks(lambda: tiny_model.load()(**batch).loss.item(), 1)
    for losses in run_ranks(on_rank, 2):
        assert losses == pytest.approx((expected, expected), rel=1e-5)


SCRIPT = """
import os
import torch
import hf_megatron
from transformers import AutoModelForCausalLM
ids = torch.arange(3, 27).view(2, 12)
lines = []
for config in ({"tp_size": 2}, hf_megatron.config_from_environment()):
    model = AutoModelForCausalLM.from_pretrained("model", megatron_config=config)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    lines.append(f"{loss.item()} {model.lm_head.weight.to_local().shape[0]}")
open("rank" + os.environ["RANK"], "w").write("\\n".join(lines))
"""
ACCELERATE = """
distributed_type: MEGATRON_LM
num_processes: 2
use_cpu: true
megatron_lm_config:
  megatron_lm_tp_degree: 2
"""


def test_launch_commands_in_errors(tmp_path):
    """Follows the launch commands in the errors of a single process and of an Accelerate config file."""
    (tmp_path / "model").symlink_to(get_tiny_model().directory)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "megatron.yaml").write_text(ACCELERATE)
    with pytest.raises(ConfigError, match=r"Start it with\n    torchrun .*\nor `accelerate launch --config_file"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", megatron_config={"tp_size": 2})
    message = (
        r"Pass it to accelerate launch --config_file, and leave megatron_config out or use hf_megatron\.config_from"
    )
    with pytest.raises(ConfigError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", megatron_config=str(tmp_path / "megatron.yaml"))
    ids = torch.arange(3, 27).view(2, 12)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = model(input_ids=ids, labels=ids).loss.item()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    # Both errors name this command; here as a module, with any free port.
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", "megatron.yaml", "train.py"]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in range(2):
        for line in (tmp_path / f"rank{rank}").read_text().splitlines():
            loss, rows = line.split()
            assert float(loss) == pytest.approx(expected, rel=1e-5)
            assert int(rows) < model.lm_head.weight.shape[0]
