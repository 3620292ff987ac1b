"""Tests of PEFT's API on parallelized models: results match a single process, and files are ordinary PEFT files."""

import functools
import json
import subprocess
import sys

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import (
    IA3Config,
    LNTuningConfig,
    LoraConfig,
    PeftModel,
    PeftType,
    PromptTuningConfig,
    get_peft_model,
    get_peft_model_state_dict,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3MoeConfig, Trainer, TrainingArguments

from hf_megatron import CheckpointError, RankError, UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.tiny_model import draw_parameters

LAYOUTS = ("tp2", "tp2+sp", "cp2", "pp2", "dp2+zero2", "dp2+zero3", "tp2+sp+pp2")
IDS = torch.arange(3, 51).view(4, 12)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "pad_token_id": 0,
    }
    configs = {
        "llama": LlamaConfig(intermediate_size=48, **common),
        "qwen3_moe": Qwen3MoeConfig(
            intermediate_size=48, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2, head_dim=8, **common
        ),
    }
    configs["gpt2"] = GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    folders = {}
    for name, config in configs.items():
        model = AutoModelForCausalLM.from_config(config).float()
        draw_parameters(model, 0)
        folders[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(folders[name])
    return folders


@pytest.fixture(scope="module")
def source(sources):
    return sources["llama"]


def parse_layout(text):
    [layout] = parse_layouts(text)
    return ConfigUnderTest(**layout.to_dict())


def run_on_layout(function, text, *args):
    """Runs `function(layout, *args)` on all ranks of the layout and returns the results by rank."""
    layout = parse_layout(text)
    return run_ranks(function, layout.ranks_per_replica * (layout.dp_size or 1), layout, *args)


def load_model(source, layout):
    return AutoModelForCausalLM.from_pretrained(source, **({} if layout is None else {"megatron_config": layout}))


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.detach().clone()


def lora(**settings):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | settings)


# Adapters that are injected, modified and removed


def exercise_peft_api(layout, source, folder):
    """Calls the main functions of PEFT in sequence and returns the result of each step."""
    model = load_model(source, layout)
    # Adapters are initialized with the RNG state of rank 0, although the seeds differ.
    torch.manual_seed(5 if layout is None else 5 + torch.distributed.get_rank())
    wrapped = get_peft_model(model, lora(init_lora_weights=False, lora_dropout=0.1))
    results = {"counts": wrapped.get_nb_trainable_parameters(), "first": compute_logits(wrapped)}
    results["drawn"] = torch.rand(3)
    weights = get_peft_model_state_dict(wrapped)
    results["weights"] = {name: weight.detach().clone() for name, weight in weights.items()}
    wrapped.add_adapter("second", lora(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    results["still first"] = compute_logits(wrapped)
    wrapped.set_adapter("second")
    results["second"] = compute_logits(wrapped)
    with wrapped.disable_adapter():
        results["none"] = compute_logits(wrapped)
    wrapped.add_weighted_adapter(["default", "second"], [0.7, 0.4], "both", combination_type="cat")
    wrapped.set_adapter("both")
    results["both"] = compute_logits(wrapped)
    wrapped.save_pretrained(folder, selected_adapters=["default", "second"])
    wrapped.load_adapter(folder / "second", "read")
    wrapped.set_adapter("read")
    results["read"] = compute_logits(wrapped)
    wrapped.delete_adapter("both")
    wrapped.set_adapter("default")
    if layout is not None and layout.zero_stage == 3:
        for merge in (wrapped.merge_adapter, wrapped.merge_and_unload):
            with pytest.raises(UnsupportedError, match="Merging a PEFT adapter with zero_stage = 3"):
                merge()
        return results
    wrapped.merge_adapter()
    results["merged"] = compute_logits(wrapped)
    wrapped.unmerge_adapter()
    results["unmerged"] = compute_logits(wrapped)
    merged = wrapped.merge_and_unload()
    results["unloaded"] = compute_logits(merged)
    merged.save_pretrained(folder / "merged")
    return results


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return exercise_peft_api(None, source, folder), folder


def assert_all_close(found, expected, tolerance=2e-5):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_all_close(found[name], value, tolerance)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    else:
        assert found == expected


@pytest.mark.parametrize("text", LAYOUTS)
def test_peft_api_matches_single_process(source, expected, tmp_path, text):
    one, folder = expected
    assert not torch.allclose(one["first"], one["none"]) and not torch.allclose(one["first"], one["second"])
    for results in run_on_layout(exercise_peft_api, text, source, tmp_path):
        for name, value in results.items():
            assert_all_close(value, one[name])
        assert results.keys() == one.keys() or "zero3" in text
    for subfolder in ("", "second"):
        assert_all_close(
            load_file(tmp_path / subfolder / "adapter_model.safetensors"),
            load_file(folder / subfolder / "adapter_model.safetensors"),
            0,
        )
        read, reference = (json.loads((f / subfolder / "adapter_config.json").read_text()) for f in (tmp_path, folder))
        assert sorted(read.pop("target_modules")) == sorted(reference.pop("target_modules"))
        assert read == reference
    if "zero3" not in text:
        assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in folder.iterdir())
        assert_all_close(
            load_file(tmp_path / "merged/model.safetensors"), load_file(folder / "merged/model.safetensors")
        )
    assert_all_close(compute_logits(PeftModel.from_pretrained(load_model(source, None), tmp_path)), one["first"])


def train_alternating_adapters(layout, source):
    """Alternates between two adapters; the second is added after the optimizer is created."""
    torch.manual_seed(0)
    model = get_peft_model(load_model(source, layout), lora()).train()
    optimizer = prepare_optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))
    losses = []
    for name in ("default", "second", "default", "second"):
        if name not in model.peft_config:
            model.add_adapter(name, lora(r=2, init_lora_weights=False))
            model.set_adapter(name)
            optimizer.add_param_group({"params": [p for n, p in model.named_parameters() if ".second." in n]})
        model.set_adapter(name)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "dp2+zero2", "dp2+zero3"])
def test_alternating_adapters(source, text):
    one = train_alternating_adapters(None, source)
    for losses in run_on_layout(train_alternating_adapters, text, source):
        assert losses == pytest.approx(one, abs=2e-5)


def get_local_ids(layout):
    """Returns the samples of this data-parallel rank."""
    ranks = 1 if layout is None else layout.dp_size or 1
    return IDS.chunk(ranks)[torch.distributed.get_rank()] if ranks > 1 else IDS


def train_with_reference_forward(layout, source, kind):
    """Runs a reference forward, with adapters disabled or frozen, between each forward and its backward."""
    torch.manual_seed(0)
    model = get_peft_model(load_model(source, layout), lora(init_lora_weights=False)).train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer, ids = prepare_optimizer(torch.optim.SGD(trainable, lr=0.1)), get_local_ids(layout)
    losses = []
    for _ in range(3):
        loss = reference = model(input_ids=ids, labels=ids).loss
        if kind == "disabled":
            with model.disable_adapter():
                reference = model(input_ids=ids, labels=ids).loss
        else:
            model.requires_grad_(False)
            model(input_ids=ids, labels=ids)
            for parameter in trainable:
                parameter.requires_grad_(True)
        (loss - 0 * reference.detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2+zero0", "dp2+zero2", "dp2+zero3", "cp2"])
@pytest.mark.parametrize("kind", ["disabled", "frozen"])
def test_reference_forward_between_forward_and_backward(source, kind, text):
    one = train_with_reference_forward(None, source, kind)
    for losses in run_on_layout(train_with_reference_forward, text, source, kind):
        assert losses == pytest.approx(one, abs=2e-5)


def train_conv1d_model(layout, source, settings):
    """Trains, merges and unmerges adapters of a GPT-2, whose Conv1D weights are transposed."""
    torch.manual_seed(0)
    targets = ["c_attn", "c_proj", "c_fc"]
    model = get_peft_model(load_model(source, layout), lora(target_modules=targets, **settings)).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    outputs = {"train_lora": compute_logits(model)}
    model.merge_adapter()
    outputs["merged"] = compute_logits(model)
    model.unmerge_adapter()
    return outputs | {"unmerged": compute_logits(model)}


@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "pp2"])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_transposed_conv1d_weights(sources, settings, text):
    one = train_conv1d_model(None, sources["gpt2"], settings)
    assert_all_close(one["merged"], one["train_lora"], 1e-4)
    for outputs in run_on_layout(train_conv1d_model, text, sources["gpt2"], settings):
        assert_all_close(outputs, one, 1e-4)


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2+zero2"])
def test_merged_ia3_vectors(source, text):
    def merge_vectors(layout):
        torch.manual_seed(0)
        config = IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
        )
        return compute_logits(get_peft_model(load_model(source, layout), config).merge_and_unload())

    one = run_ranks(merge_vectors, 1, None)[0]
    for logits_on_rank in run_on_layout(merge_vectors, text):
        assert_all_close(logits_on_rank, one)


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "dp2+zero2", "dp2+zero3"])
def test_lora_plus_param_groups(source, text):
    from peft.optimizers import create_loraplus_optimizer

    def train(layout):
        torch.manual_seed(0)
        model = get_peft_model(
            load_model(source, layout), lora(target_modules=["q_proj", "down_proj", "embed_tokens"])
        ).train()
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16, eps=1e-4, fused=True
        )
        optimizer = optimizer if layout is None else prepare_optimizer(optimizer)
        ranks, rank = (1, 0) if layout is None else (layout.dp_size or 1, torch.distributed.get_rank())
        rows, losses = IDS.tensor_split(ranks)[rank % ranks], []
        for _ in range(3):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return len({group["lr"] for group in optimizer.param_groups}), losses[-1]

    rates, last = run_ranks(train, 1, None)[0]
    assert rates > 1
    for result in run_on_layout(train, text):
        assert result == (rates, pytest.approx(last, rel=1e-5))


def test_adapter_names_per_sample(source):
    def run_mixed_adapters(layout):
        torch.manual_seed(0)
        model = get_peft_model(load_model(source, layout), lora(init_lora_weights=False)).eval()
        with torch.no_grad():
            return model(input_ids=IDS, adapter_names=["default", "__base__"] * 2).logits

    one = run_ranks(run_mixed_adapters, 1, None)[0]
    assert_all_close(run_on_layout(run_mixed_adapters, "tp2+sp")[0], one)
    with pytest.raises(RankError, match="adapter_names= with pp_size > 1"):
        run_on_layout(run_mixed_adapters, "pp2")


def test_half_precision_with_zero3(source):
    def on_rank(layout):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, megatron_config=layout)
        model = get_peft_model(model, lora()).train()
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        optimizer = prepare_optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))
        losses = []
        for _ in range(3):
            losses.append(model(input_ids=get_local_ids(layout), labels=get_local_ids(layout)).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses]

    losses = run_on_layout(on_rank, "dp2+zero3")
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_default_target_modules(source):
    def on_rank(layout):
        wrapped = get_peft_model(load_model(source, layout), LNTuningConfig())
        return sorted(name for name, parameter in wrapped.named_parameters() if parameter.requires_grad)

    one = sorted(
        name
        for name, parameter in get_peft_model(load_model(source, None), LNTuningConfig()).named_parameters()
        if parameter.requires_grad
    )
    assert run_on_layout(on_rank, "tp2") == [one, one]


def combine_weighted_adapters(layout, source, kind):
    torch.manual_seed(0)
    wrapped = get_peft_model(load_model(source, layout), lora(init_lora_weights=False))
    wrapped.add_adapter("second", lora(init_lora_weights=False))
    torch.manual_seed(7)
    options = {"density": 0.5} if kind not in ("linear", "svd", "cat") else {}
    wrapped.add_weighted_adapter(["default", "second"], [0.7, 0.4], "both", combination_type=kind, **options)
    wrapped.set_adapter("both")
    return compute_logits(wrapped)


def train_embedding_and_head(layout, source, folder):
    """Trains an adapter with its own embedding and head, then disables, saves, loads and merges it."""
    torch.manual_seed(0)
    wrapped = get_peft_model(load_model(source, layout), lora(modules_to_save=["embed_tokens", "lm_head"]))
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5)
    wrapped.train()(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    outputs = {"first": compute_logits(wrapped)}
    with wrapped.disable_adapter():
        outputs["none"] = compute_logits(wrapped)
    wrapped.save_pretrained(folder)
    outputs["read"] = compute_logits(PeftModel.from_pretrained(load_model(source, layout), folder))
    merged = wrapped.merge_and_unload()
    outputs["merged"] = compute_logits(merged)
    merged.save_pretrained(folder / "merged")
    return outputs


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "tp2+pp2"])
def test_trainable_embedding_and_head(source, tmp_path, text):
    one = train_embedding_and_head(None, source, tmp_path / "one")
    assert not torch.allclose(one["first"], one["none"])
    for outputs in run_on_layout(train_embedding_and_head, text, source, tmp_path / "two"):
        assert_all_close(outputs, one)
    for name in ("adapter_model.safetensors", "merged/model.safetensors"):
        assert_all_close(load_file(tmp_path / "two" / name), load_file(tmp_path / "one" / name))


@pytest.mark.parametrize("text", ["tp2", "tp2+pp2"])
@pytest.mark.parametrize("kind", ["linear", "svd", "ties", "dare_linear", "magnitude_prune"])
def test_weighted_adapters(source, kind, text):
    one = combine_weighted_adapters(None, source, kind)
    for logits_on_rank in run_on_layout(combine_weighted_adapters, text, source, kind):
        assert_all_close(logits_on_rank, one)


# MoE blocks: `all-linear` includes expert parameters and routers


def run_moe_adapter(layout, source, folder):
    torch.manual_seed(5)
    wrapped = get_peft_model(load_model(source, layout), lora(init_lora_weights=False, r=2, lora_alpha=2))
    results = {"first": compute_logits(wrapped), "weights": dict(get_peft_model_state_dict(wrapped))}
    wrapped.save_pretrained(folder)
    wrapped.load_adapter(folder, "read")
    wrapped.set_adapter("read")
    results["read"] = compute_logits(wrapped)
    wrapped.set_adapter("default")
    with wrapped.disable_adapter():
        results["none"] = compute_logits(wrapped)
    results["merged"] = compute_logits(wrapped.merge_and_unload())
    return results


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "dp2+ep2", "tp2+sp+ep2", "dp2+tp2+etp2+ep2"])
def test_all_linear_in_moe_blocks(sources, tmp_path, text):
    one = run_moe_adapter(None, sources["qwen3_moe"], tmp_path / "one")
    assert any("experts" in name for name in one["weights"]) and not torch.allclose(one["first"], one["none"])
    for results in run_on_layout(run_moe_adapter, text, sources["qwen3_moe"], tmp_path):
        assert_all_close(results, one, 1e-4)


# Training loops


ROWS = [{"input_ids": (ids := [(i * 7 + j * 3) % 60 + 1 for j in range(10)]), "labels": ids} for i in range(16)]


def train_lora(layout, source, folder, resume=None, steps=4, base_scale=1.0, **options):
    """Trains with Trainer; returns its losses and the adapter."""
    model = load_model(source, layout)
    if base_scale != 1:
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(base_scale)
    saved = None if layout is not None and layout.zero_stage == 3 else ["norm"]
    model = get_peft_model(model, lora(target_modules=["q_proj", "down_proj"], modules_to_save=saved))
    rows = 4 // (1 if layout is None else layout.dp_size or 1)
    arguments = TrainingArguments(
        str(folder),
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        max_steps=steps,
        save_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        learning_rate=1e-2,
        **options,
    )
    data = Dataset.from_list(ROWS)
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    trainer.save_model()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, dict(get_peft_model_state_dict(trainer.model))


@pytest.fixture(scope="module")
def trained_once(source, tmp_path_factory):
    return run_ranks(train_lora, 1, None, source, tmp_path_factory.mktemp("train_lora"))[0]


@pytest.mark.parametrize(("text", "other"), [("tp2+sp+pp2", "dp2+zero2"), ("dp2+zero2", "tp2"), ("pp2", "cp2")])
def test_training_resumes_on_another_layout(source, trained_once, tmp_path, text, other):
    for losses, adapter in run_on_layout(train_lora, text, source, tmp_path, None, 4):
        assert losses == pytest.approx(trained_once[0], abs=2e-5)
        assert_all_close(adapter, trained_once[1], 1e-4)
    checkpoint = tmp_path / "checkpoint-2"
    written = {file.name for file in checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "manifest.json", "README.md"} <= written
    assert not {"config.json", "model.safetensors"} & written
    assert max(file.stat().st_size for file in checkpoint.iterdir()) < 64 * 2**10, "the base is not there"
    for losses, adapter in run_on_layout(train_lora, other, source, tmp_path / "other", checkpoint, 4):
        assert losses == pytest.approx(trained_once[0], abs=2e-5)
        assert_all_close(adapter, trained_once[1], 1e-4)
    assert_all_close(
        load_file(tmp_path / "adapter_model.safetensors"), load_file(tmp_path / "other/adapter_model.safetensors"), 1e-4
    )


STOCK = """
import sys
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
source, folder, checkpoint = sys.argv[1:]
model = get_peft_model(AutoModelForCausalLM.from_pretrained(source), LoraConfig(r=4, target_modules=["q_proj"]))
arguments = TrainingArguments(folder, report_to=[], use_cpu=True, max_steps=4)
data = Dataset.from_list([{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 16)
Trainer(model, arguments, train_dataset=data).train(resume_from_checkpoint=checkpoint)
"""


def test_single_process_resumes_and_stock_raises(source, trained_once, tmp_path):
    run_on_layout(train_lora, "pp2", source, tmp_path, None, 4)
    losses, adapter = run_ranks(train_lora, 1, None, source, tmp_path / "one", tmp_path / "checkpoint-2")[0]
    assert losses == pytest.approx(trained_once[0], abs=2e-5)
    assert_all_close(adapter, trained_once[1], 1e-4)
    with pytest.raises(RankError, match="weights of .* Load the base model that the adapters were trained on"):
        run_ranks(train_lora, 1, None, source, tmp_path / "other", tmp_path / "checkpoint-2", 4, 1.5)
    command = [sys.executable, "-c", STOCK, str(source), str(tmp_path / "stock"), str(tmp_path / "checkpoint-2")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "Weights only load failed" in result.stderr
    assert (
        "Run `import hf_megatron` before you create the Trainer."
        in (tmp_path / "checkpoint-2" / "optimizer.pt").read_text()
    )


def train_prompts(layout, source, folder, resume=None):
    """Trains prompts with Trainer; returns its losses."""
    model = load_model(source, layout)
    torch.manual_seed(3)
    model = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    settings = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "report_to": []}
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=4, use_cpu=True, **settings)
    trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(ROWS))
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_prompt_tuning_resumes_on_another_layout(source, tmp_path):
    expected = run_ranks(train_prompts, 1, None, source, tmp_path / "one")[0]
    for text, before in (("tp2+sp", None), ("pp2", "tp2+sp"), ("tp1", "tp2+sp")):
        resume = None if before is None else str(tmp_path / before / "checkpoint-2")
        run = functools.partial(train_prompts, source=source, folder=tmp_path / text, resume=resume)
        losses = run_ranks(run, 1, None)[0] if text == "tp1" else run_on_layout(run, text)[0]
        assert losses == pytest.approx(expected, abs=2e-5), text
    saved = load_file(tmp_path / "pp2/checkpoint-4/adapter_model.safetensors")
    assert_all_close(saved, load_file(tmp_path / "tp2+sp/checkpoint-4/adapter_model.safetensors"), 1e-4)


@pytest.mark.parametrize("text", ["tp2", "pp2", "cp2", "dp2+zero2"])
def test_alternating_prompts_with_gradient_checkpointing(source, text):
    def alternate_prompts(layout):
        model = load_model(source, layout)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        torch.manual_seed(0)
        config = functools.partial(PromptTuningConfig, task_type="CAUSAL_LM")
        wrapped = get_peft_model(model, config(num_virtual_tokens=4)).train()
        wrapped.add_adapter("second", config(num_virtual_tokens=3))
        results = [sorted(name for name, parameter in wrapped.named_parameters() if parameter.requires_grad)]
        ranks, rank = (1, 0) if layout is None else (layout.dp_size or 1, torch.distributed.get_rank())
        rows = IDS.tensor_split(ranks)[rank % ranks]
        for name in ("default", "second", "default"):
            wrapped.set_adapter(name)
            wrapped(input_ids=rows, labels=rows).loss.backward()
            trainable = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
            results.append(float(torch.nn.utils.clip_grad_norm_(trainable, 1e9)))
            wrapped.zero_grad()
        return results

    names, *norms = run_ranks(alternate_prompts, 1, None)[0]
    assert names == ["prompt_encoder.default.embedding.weight", "prompt_encoder.second.embedding.weight"]
    for result in run_on_layout(alternate_prompts, text):
        assert result[0] == names and result[1:] == pytest.approx(norms, rel=1e-5)


def test_adapter_checkpoint_rejects_another_base_model(source, tmp_path):
    def on_rank(folder):
        layout = parse_layout("tp2")
        train_lora(layout, source, folder, None, 2)
        with pytest.raises(CheckpointError, match="adapters of another base model: weights of"):
            train_lora(layout, source, folder / "other", folder / "checkpoint-2", base_scale=1.5)
        with pytest.raises(CheckpointError, match="holds adapters, but this run trains a model without any"):
            model = load_model(source, layout)
            trainer = Trainer(
                model, TrainingArguments(str(folder), report_to=[], use_cpu=True), train_dataset=Dataset.from_list(ROWS)
            )
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))

    run_ranks(on_rank, 2, tmp_path)


def test_best_adapter_is_loaded_at_end(source, tmp_path):
    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    one = run_ranks(train_lora, 1, None, source, tmp_path / "one", None, 4, 1.0)[0]
    for _, adapter in run_on_layout(functools.partial(train_lora, **best), "tp2+pp2", source, tmp_path / "two"):
        differs = [name for name, weight in one[1].items() if not torch.allclose(adapter[name], weight, atol=1e-4)]
        assert differs, "the first checkpoint is the worst, which the run was told to take for the best"
    assert_all_close(
        load_file(tmp_path / "two/adapter_model.safetensors"),
        load_file(tmp_path / "two/checkpoint-2/adapter_model.safetensors"),
    )


def test_accelerate_saves_and_resumes(source, tmp_path):
    def train(layout, folder, resumes):
        model = get_peft_model(load_model(source, layout), lora())
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model.train(), torch.optim.AdamW(model.parameters(), lr=1e-2))
        if resumes:
            accelerator.load_state(str(folder / "state"))
        losses = []
        for step in range(2 if resumes else 0, 4):
            ids = torch.tensor([row["input_ids"] for row in ROWS[4 * step : 4 * step + 4]])
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step == 1:
                accelerator.save_state(str(folder / "state"))
        unsharded = accelerator.get_state_dict(model)
        inner = accelerator.unwrap_model(model)
        inner.save_pretrained(folder / "given", state_dict=unsharded, is_main_process=accelerator.is_main_process)
        return losses, {name: weight for name, weight in (unsharded or {}).items() if "lora" in name}

    expected = run_ranks(train, 1, None, tmp_path / "one", False)[0]
    first = run_on_layout(train, "tp2", tmp_path, False)
    second = run_on_layout(train, "pp2", tmp_path, True)
    assert first[0][0] == pytest.approx(expected[0], abs=2e-5)
    assert second[0][0] == pytest.approx(expected[0][2:], abs=2e-5)
    assert_all_close(first[0][1], expected[1], 1e-4)
    assert_all_close(second[0][1], expected[1], 1e-4)
    for folder in (tmp_path, tmp_path / "one"):
        weights = load_file(folder / "given/adapter_model.safetensors")
        assert_all_close(weights, {name.replace(".default", ""): weight for name, weight in expected[1].items()}, 1e-4)


# Rejected configurations, and hooks


def test_unsupported_configs_are_rejected(sources):
    from peft import (
        AdaLoraConfig,
        LoHaConfig,
        MultitaskPromptTuningConfig,
        OFTConfig,
        PrefixTuningConfig,
        PromptEncoderConfig,
        PromptTuningConfig,
        VeraConfig,
    )

    prompts = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    linears = {"target_modules": ["q_proj"]}
    cases = [
        (VeraConfig(**linears), "VERA of PEFT"),
        (LoHaConfig(**linears), "LOHA of PEFT"),
        (OFTConfig(**linears), "OFT of PEFT"),
        (AdaLoraConfig(total_step=10, **linears), "ADALORA of PEFT"),
        (
            MultitaskPromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, num_tasks=2),
            "MULTITASK_PROMPT_TUNING of PEFT",
        ),
        (PromptEncoderConfig(encoder_reparameterization_type="LSTM", **prompts), "encoder_reparameterization_type"),
        (PromptTuningConfig(modules_to_save=["norm"], **prompts), "PROMPT_TUNING of PEFT with a trained copy of norm"),
        (lora(target_modules=["lm_head"]), "A PEFT adapter on lm_head"),
        (lora(target_modules=["embed_tokens"], use_dora=True), "A PEFT adapter on model.embed_tokens"),
        (lora(init_lora_weights="orthogonal"), "init_lora_weights = 'orthogonal'"),
        (lora(layer_replication=[(0, 2)]), "layer_replication"),
        (lora(use_dora=True, bias="all"), "use_dora with bias"),
        (lora(target_modules=None, target_parameters=["q_proj.weight"]), "target_parameters names .*q_proj.weight"),
        (lora(megatron_config={"tensor_model_parallel_size": 2}), "megatron_config is PEFT's.*from_pretrained"),
    ]

    def on_rank():
        with pytest.raises(UnsupportedError, match="modules_to_save = .*cp_size > 1"):
            get_peft_model(load_model(sources["llama"], parse_layout("cp2")), lora(modules_to_save=["lm_head"]))
        tied = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
        tied.tie_word_embeddings = True
        model = AutoModelForCausalLM.from_config(tied, megatron_config=parse_layout("tp2"))
        with pytest.raises(UnsupportedError, match="modules_to_save = .*embed_tokens is tied"):
            get_peft_model(model, lora(modules_to_save=["embed_tokens"]))
        for layout in ("pp2", "cp2"):
            with pytest.raises(UnsupportedError, match=f"PREFIX_TUNING of PEFT with {layout[:2]}_size > 1"):
                get_peft_model(load_model(sources["llama"], parse_layout(layout)), PrefixTuningConfig(**prompts))
        with pytest.raises(UnsupportedError, match="PROMPT_TUNING of PEFT with zero_stage = 3"):
            get_peft_model(load_model(sources["llama"], parse_layout("dp2+zero3")), PromptTuningConfig(**prompts))
        model = AutoModelForCausalLM.from_config(tied, megatron_config=parse_layout("pp2"))
        with pytest.raises(UnsupportedError, match="embed_tokens with pp_size > 1.*embedding is tied"):
            get_peft_model(model, lora(target_modules=["embed_tokens"]))
        with pytest.raises(UnsupportedError, match="low_cpu_mem_usage = True"):
            get_peft_model(load_model(sources["llama"], parse_layout("tp2")), lora(), low_cpu_mem_usage=True)
        for config, text in cases:
            model = load_model(sources["llama"], parse_layout("tp2"))
            before = [name for name, _ in model.named_parameters()]
            with pytest.raises(UnsupportedError, match=text):
                get_peft_model(model, config)
            assert [name for name, _ in model.named_parameters()] == before
        for config in (lora(bias="all"), lora(modules_to_save=["norm"]), LNTuningConfig(target_modules=["norm"])):
            with pytest.raises(UnsupportedError, match="zero_stage = 3"):
                get_peft_model(load_model(sources["llama"], parse_layout("dp2+zero3")), config)
        model = get_peft_model(load_model(sources["llama"], parse_layout("dp2+zero3")), lora())
        model.get_base_model().model.norm.weight.requires_grad_(True)
        cure = "Freeze it, or load the model with zero_stage=2."
        with pytest.raises(UnsupportedError, match=f"model.norm.weight is trained together with adapters.*{cure}"):
            model(input_ids=IDS, labels=IDS)
        model.get_base_model().model.norm.weight.requires_grad_(False)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
        return loss.item()

    expected = load_model(sources["llama"], None)(input_ids=IDS, labels=IDS).loss.item()
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-5)] * 2


SUPPORTED = {"LORA", "IA3", "LN_TUNING", "TRAINABLE_TOKENS", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"}


def test_every_peft_method_is_supported_or_rejected(source):
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    methods = {getattr(name, "value", name): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    assert len(methods) > 30 and methods.keys() > SUPPORTED

    def on_rank():
        model = load_model(source, parse_layout("tp2"))
        before = [name for name, _ in model.named_parameters()]
        for name, kind in methods.items():
            if name in SUPPORTED:
                continue
            # The method is rejected before its config is read, so that an incomplete config is enough.
            config = kind.__new__(kind)
            config.peft_type, config.task_type, config.base_model_name_or_path = PeftType(name), None, None
            config.modules_to_save, config.target_modules = None, ["q_proj"]
            with pytest.raises(UnsupportedError, match=f"^{name} of PEFT"):
                PeftModel(model, config)
            assert [other for other, _ in model.named_parameters()] == before
        with pytest.raises(UnsupportedError, match="mixed=True"):
            get_peft_model(model, lora(), mixed=True)

    run_ranks(on_rank, 2)


def test_adapter_conversion_on_save_is_rejected(source, tmp_path):
    def on_rank(folder):
        model = get_peft_model(load_model(source, parse_layout("tp2")), lora(init_lora_weights="pissa"))
        model.save_pretrained(folder / "initial")
        with pytest.raises(UnsupportedError, match="path_initial_model_for_weight_conversion.*in a single process"):
            model.save_pretrained(folder, path_initial_model_for_weight_conversion=str(folder / "initial"))

    run_ranks(on_rank, 2, tmp_path)


def test_hook_outputs_match_single_process(source):
    def record_outputs(layout):
        model = get_peft_model(load_model(source, layout), lora(init_lora_weights=False))
        block = model.get_base_model().model.layers[0]
        outputs = []
        for module in (block.self_attn.q_proj, block.self_attn.o_proj, block.mlp.down_proj):
            module.register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
        compute_logits(model)
        return outputs

    def hook_adapter_factor(layout):
        model = get_peft_model(load_model(source, layout), lora(init_lora_weights=False))
        factor = model.get_base_model().model.layers[0].self_attn.q_proj.lora_B.default
        factor.register_forward_hook(lambda module, args, output: output * 2)
        with pytest.raises(UnsupportedError, match="lora_B.default"):
            compute_logits(model)

    torch.manual_seed(3)
    one = run_ranks(record_outputs, 1, None)[0]
    for text in ("tp2", "tp2+sp"):
        for outputs_on_rank in run_on_layout(record_outputs, text):
            for tensor, expected in zip(outputs_on_rank, one, strict=True):
                assert_all_close(tensor, expected)
        run_on_layout(hook_adapter_factor, text)


def save_without_task(layout, source, folder):
    model = get_peft_model(load_model(source, layout), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(folder)


def test_base_model_class_is_the_stock_one(sources, tmp_path):
    """Without a task, PEFT records the class of the base model, to which FSDP2 prepends its own."""
    run_on_layout(save_without_task, "dp2+zero3", sources["llama"], tmp_path)
    recorded = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
    assert recorded == {
        "base_model_class": "LlamaForCausalLM",
        "parent_library": "transformers.models.llama.modeling_llama",
    }
