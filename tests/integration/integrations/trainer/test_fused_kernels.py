"""Tests of `use_liger_kernel=True` in Trainer and TRL on sharded models, against a stock single process."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator
from trl import SFTTrainer

from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.checkpoint.gather_full import full_state_dict
from hf_megatron.compat.versions import is_for_other_version
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.integrations.trainer import fused_kernels
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallelize import parallel_state
from tests.helpers.liger_on_cpu import liger_on_cpu
from tests.helpers.references import train_single_process
from tests.integration.integrations.trainer.test_trainer import rows
from tests.integration.integrations.trl.test_base import compare, texts


@pytest.fixture(autouse=True)
def liger():
    pytest.importorskip("liger_kernel")


def make_trainer(path, output, config, adapter=False, **arguments):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    if adapter:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "gate_proj", "down_proj"]))
    defaults = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
    }
    data = {"train_dataset": rows(22, 0), "eval_dataset": rows(8, 1), "data_collator": default_data_collator}
    return Trainer(model, TrainingArguments(str(output), **(defaults | arguments)), **data)


def train(path, output, config, **arguments):
    """Trains without metrics: Trainer then asks Liger for losses without logits in evaluation."""
    trainer = make_trainer(path, output, config, **arguments)
    trainer.train()
    model = trainer.model
    weights = full_state_dict(model) if parallel_state(model) is not None else model.state_dict()
    names = ("loss", "grad_norm", "eval_loss", "train_loss")
    log = [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]
    return log, weights, type(model.get_decoder().layers[-1].mlp).__name__, applied_kernels(model)


def applied_kernels(model):
    from hf_megatron.compat.fused_kernels import liger_kernel_name

    forwards = (vars(module).get("forward") for module in model.modules())
    return {name for forward in forwards if (name := liger_kernel_name(forward)) is not None}


@pytest.mark.parametrize("text", ["tp2+sp", "pp2+mb2", "dp2", "dp2+zero3", "cp2"])
def test_trainer_with_liger_matches_stock_single_process(stories, tmp_path, text, capfd):
    expected_log, expected_weights, *_ = train_single_process(train, stories)
    [layout] = parse_layouts(text)
    # The same batches on all layouts.
    sizes = {f"per_device_{name}_batch_size": 4 // (layout.dp_size or 1) for name in ("train", "eval")}
    with liger_on_cpu():
        results = run_ranks(
            train, 2, stories, tmp_path, ConfigUnderTest(**layout.to_dict()), use_liger_kernel=True, **sizes
        )
    assert set().union(*(kernels for *_, kernels in results)) == {"LigerRMSNorm", "LigerSwiGLUMLP"}
    log, weights, *_ = results[0]
    assert len(log) == len(expected_log)
    for entry, other in zip(log, expected_log, strict=True):
        assert entry == pytest.approx(other, rel=2e-5, abs=1e-5)
    for name, weight in weights.items():
        # AdamW turns gradients that are round-off into steps of up to the rate, 1e-3: a few entries in thousands.
        difference = weight - expected_weights[name]
        assert difference.abs().max() <= 1e-3, name
        assert difference.pow(2).mean().sqrt() <= 5e-5, name
    lines = [line for line in capfd.readouterr().err.splitlines() if "fused_linear_cross_entropy is not used" in line]
    assert len(lines) == 1


def test_adapter_with_liger(stories, tmp_path):
    expected, *_ = train_single_process(train, stories, adapter=True)
    with liger_on_cpu():
        results = run_ranks(train, 2, stories, tmp_path, MegatronConfig(tp_size=2), adapter=True, use_liger_kernel=True)
    for entry, other in zip(results[0][0], expected, strict=True):
        assert entry == pytest.approx(other, rel=2e-5, abs=1e-5)


def test_default_settings_would_read_the_full_head(stories, tmp_path, monkeypatch):
    """A seeded fault: with Liger's own settings the loss is taken from the weight of the head."""
    monkeypatch.setattr(fused_kernels, "apply_liger_kernel", lambda original, model, config: original(model, config))
    with liger_on_cpu(), pytest.raises(Exception, match="calls layers of other stages"):
        run_ranks(train, 2, stories, tmp_path, MegatronConfig(pp_size=2, num_microbatches=2), use_liger_kernel=True)


def test_unsupported_kernels_are_rejected(stories, tmp_path):
    defaults = {"fake_kernel": False}

    def on_rank():
        tp = MegatronConfig(tp_size=2)
        with pytest.raises(UnsupportedError, match=r"fake_kernel': True.*Pass {'fake_kernel': False}; rms_norm"):
            make_trainer(stories, tmp_path, tp, use_liger_kernel=True, liger_kernel_config={"fake_kernel": True})
        make_trainer(stories, tmp_path, tp, use_liger_kernel=True, liger_kernel_config={"fake_kernel": False})
        tiled = MegatronConfig(tp_size=2, mlp_chunk_size=8)
        trainer = make_trainer(stories, tmp_path, tiled, use_liger_kernel=True, liger_kernel_config={})
        with pytest.raises(UnsupportedError, match=r"mlp .*cannot take Liger's LigerSwiGLUMLP.*mlp_chunk_size"):
            trainer.train()
        settings = {"swiglu": False}
        make_trainer(stories, tmp_path, tiled, use_liger_kernel=True, liger_kernel_config=settings, max_steps=1).train()
        defaults["fake_kernel"] = True
        with pytest.warns(UserWarning, match="Liger's fake_kernel is left out"):
            make_trainer(stories, tmp_path, tp, use_liger_kernel=True, max_steps=1).train()

    real = fused_kernels.liger_defaults
    with liger_on_cpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_kernels, "liger_defaults", lambda kind: {**real(kind), **defaults})
        run_ranks(on_rank, 2)


@pytest.mark.skipif(is_for_other_version("trl.trainer.sft_trainer:add_fused_lm_head"), reason="TRL 1.14")
@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_trl_with_liger(stories, tmp_path, text):
    with liger_on_cpu():
        compare(stories, tmp_path, text, SFTTrainer, texts, max_length=64, use_liger_kernel=True)
