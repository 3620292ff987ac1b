"""PEFT's own calls on split models: what one process has after each, and ordinary files."""

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
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.check import parse_layouts
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


def layout_of(text):
    [layout] = parse_layouts(text)
    return ConfigUnderTest(**layout.to_dict())


def on_layout(function, text, *args):
    """Returns what a function of a layout and more returns on each of its ranks."""
    layout = layout_of(text)
    return run_ranks(function, layout.ranks_per_replica * (layout.dp_size or 1), layout, *args)


def loaded(source, layout):
    return AutoModelForCausalLM.from_pretrained(source, **({} if layout is None else {"megatron_config": layout}))


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits.detach().clone()


def lora(**settings):
    return LoraConfig(**{"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | settings)


# Adapters that are put in, changed and taken out


def surface(layout, source, folder):
    """Walks through PEFT's surface; returns what is seen on the way."""
    model = loaded(source, layout)
    # Ranks draw alike whatever they were seeded with: as rank 0.
    torch.manual_seed(5 if layout is None else 5 + torch.distributed.get_rank())
    wrapped = get_peft_model(model, lora(init_lora_weights=False, lora_dropout=0.1))
    seen = {"counts": wrapped.get_nb_trainable_parameters(), "first": logits(wrapped)}
    seen["drawn"] = torch.rand(3)
    weights = get_peft_model_state_dict(wrapped)
    seen["weights"] = {name: weight.detach().clone() for name, weight in weights.items()}
    wrapped.add_adapter("second", lora(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    seen["still first"] = logits(wrapped)
    wrapped.set_adapter("second")
    seen["second"] = logits(wrapped)
    with wrapped.disable_adapter():
        seen["none"] = logits(wrapped)
    wrapped.add_weighted_adapter(["default", "second"], [0.7, 0.4], "both", combination_type="cat")
    wrapped.set_adapter("both")
    seen["both"] = logits(wrapped)
    wrapped.save_pretrained(folder, selected_adapters=["default", "second"])
    wrapped.load_adapter(folder / "second", "read")
    wrapped.set_adapter("read")
    seen["read"] = logits(wrapped)
    wrapped.delete_adapter("both")
    wrapped.set_adapter("default")
    if layout is not None and layout.zero_stage == 3:
        for merge in (wrapped.merge_adapter, wrapped.merge_and_unload):
            with pytest.raises(UnsupportedError, match="Merging a PEFT adapter with zero_stage = 3"):
                merge()
        return seen
    wrapped.merge_adapter()
    seen["merged"] = logits(wrapped)
    wrapped.unmerge_adapter()
    seen["unmerged"] = logits(wrapped)
    merged = wrapped.merge_and_unload()
    seen["unloaded"] = logits(merged)
    merged.save_pretrained(folder / "merged")
    return seen


@pytest.fixture(scope="module")
def expected(source, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    return surface(None, source, folder), folder


def close(found, expected, tolerance=2e-5):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            close(found[name], value, tolerance)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    else:
        assert found == expected


@pytest.mark.parametrize("text", LAYOUTS)
def test_surface(source, expected, tmp_path, text):
    one, folder = expected
    assert not torch.allclose(one["first"], one["none"]) and not torch.allclose(one["first"], one["second"])
    for seen in on_layout(surface, text, source, tmp_path):
        for name, value in seen.items():
            close(value, one[name])
        assert seen.keys() == one.keys() or "zero3" in text
    for part in ("", "second"):
        close(
            load_file(tmp_path / part / "adapter_model.safetensors"),
            load_file(folder / part / "adapter_model.safetensors"),
            0,
        )
        read, wanted = (json.loads((f / part / "adapter_config.json").read_text()) for f in (tmp_path, folder))
        assert sorted(read.pop("target_modules")) == sorted(wanted.pop("target_modules"))
        assert read == wanted
    if "zero3" not in text:
        assert sorted(file.name for file in tmp_path.iterdir()) == sorted(file.name for file in folder.iterdir())
        close(load_file(tmp_path / "merged/model.safetensors"), load_file(folder / "merged/model.safetensors"))
    close(logits(PeftModel.from_pretrained(loaded(source, None), tmp_path)), one["first"])


def one_after_the_other(layout, source):
    """An adapter that comes when the optimizer is there, and takes turns with the first."""
    torch.manual_seed(0)
    model = get_peft_model(loaded(source, layout), lora()).train()
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
def test_adapters_take_turns(source, text):
    one = one_after_the_other(None, source)
    for losses in on_layout(one_after_the_other, text, source):
        assert losses == pytest.approx(one, abs=2e-5)


def samples_of(layout):
    """The rows that this rank is given."""
    ranks = 1 if layout is None else layout.dp_size or 1
    return IDS.chunk(ranks)[torch.distributed.get_rank()] if ranks > 1 else IDS


def with_a_reference(layout, source, kind):
    """Between a forward and its backward parameters are frozen, in another forward, and thawed."""
    torch.manual_seed(0)
    model = get_peft_model(loaded(source, layout), lora(init_lora_weights=False)).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, ids = prepare_optimizer(torch.optim.SGD(trained, lr=0.1)), samples_of(layout)
    losses = []
    for _ in range(3):
        loss = reference = model(input_ids=ids, labels=ids).loss
        if kind == "disabled":
            with model.disable_adapter():
                reference = model(input_ids=ids, labels=ids).loss
        else:
            model.requires_grad_(False)
            model(input_ids=ids, labels=ids)
            for parameter in trained:
                parameter.requires_grad_(True)
        (loss - 0 * reference.detach()).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2+zero0", "dp2+zero2", "dp2+zero3", "cp2"])
@pytest.mark.parametrize("kind", ["disabled", "frozen"])
def test_a_reference_between_forward_and_backward(source, kind, text):
    one = with_a_reference(None, source, kind)
    for losses in on_layout(with_a_reference, text, source, kind):
        assert losses == pytest.approx(one, abs=2e-5)


def conv1d(layout, source, settings):
    """A GPT-2, whose linears hold their weights the other way round: trained, merged, taken apart again."""
    torch.manual_seed(0)
    targets = ["c_attn", "c_proj", "c_fc"]
    model = get_peft_model(loaded(source, layout), lora(target_modules=targets, **settings)).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    seen = {"trained": logits(model)}
    model.merge_adapter()
    seen["merged"] = logits(model)
    model.unmerge_adapter()
    return seen | {"unmerged": logits(model)}


@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "pp2"])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"init_lora_weights": "pissa"}], ids=str)
def test_weights_that_lie_the_other_way(sources, settings, text):
    one = conv1d(None, sources["gpt2"], settings)
    close(one["merged"], one["trained"], 1e-4)
    for seen in on_layout(conv1d, text, sources["gpt2"], settings):
        close(seen, one, 1e-4)


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2+zero2"])
def test_merged_vectors(source, text):
    def merged(layout):
        torch.manual_seed(0)
        config = IA3Config(
            target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False
        )
        return logits(get_peft_model(loaded(source, layout), config).merge_and_unload())

    one = run_ranks(merged, 1, None)[0]
    for found in on_layout(merged, text):
        close(found, one)


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "dp2+zero2", "dp2+zero3"])
def test_groups_of_lora_plus(source, text):
    from peft.optimizers import create_loraplus_optimizer

    def losses(layout):
        torch.manual_seed(0)
        model = get_peft_model(
            loaded(source, layout), lora(target_modules=["q_proj", "down_proj", "embed_tokens"])
        ).train()
        optimizer = create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=1e-2, loraplus_lr_ratio=16, eps=1e-4, fused=True
        )
        optimizer = optimizer if layout is None else prepare_optimizer(optimizer)
        ranks, rank = (1, 0) if layout is None else (layout.dp_size or 1, torch.distributed.get_rank())
        rows, seen = IDS.tensor_split(ranks)[rank % ranks], []
        for _ in range(3):
            loss = model(input_ids=rows, labels=rows).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return len({group["lr"] for group in optimizer.param_groups}), seen[-1]

    rates, last = run_ranks(losses, 1, None)[0]
    assert rates > 1
    for found in on_layout(losses, text):
        assert found == (rates, pytest.approx(last, rel=1e-5))


def test_rows_that_choose_adapters(source):
    def chosen(layout):
        torch.manual_seed(0)
        model = get_peft_model(loaded(source, layout), lora(init_lora_weights=False)).eval()
        with torch.no_grad():
            return model(input_ids=IDS, adapter_names=["default", "__base__"] * 2).logits

    one = run_ranks(chosen, 1, None)[0]
    close(on_layout(chosen, "tp2+sp")[0], one)
    with pytest.raises(RankError, match="adapter_names= with pp_size > 1"):
        on_layout(chosen, "pp2")


def test_half_precision_in_stage_3(source):
    def on_rank(layout):
        model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, megatron_config=layout)
        model = get_peft_model(model, lora()).train()
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}
        optimizer = prepare_optimizer(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5))
        losses = []
        for _ in range(3):
            losses.append(model(input_ids=samples_of(layout), labels=samples_of(layout)).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return [loss.item() for loss in losses]

    losses = on_layout(on_rank, "dp2+zero3")
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]


def test_targets_of_a_type_that_peft_knows(source):
    def on_rank(layout):
        wrapped = get_peft_model(loaded(source, layout), LNTuningConfig())
        return sorted(name for name, parameter in wrapped.named_parameters() if parameter.requires_grad)

    one = sorted(
        name
        for name, parameter in get_peft_model(loaded(source, None), LNTuningConfig()).named_parameters()
        if parameter.requires_grad
    )
    assert on_layout(on_rank, "tp2") == [one, one]


def weighted(layout, source, kind):
    torch.manual_seed(0)
    wrapped = get_peft_model(loaded(source, layout), lora(init_lora_weights=False))
    wrapped.add_adapter("second", lora(init_lora_weights=False))
    torch.manual_seed(7)
    options = {"density": 0.5} if kind not in ("linear", "svd", "cat") else {}
    wrapped.add_weighted_adapter(["default", "second"], [0.7, 0.4], "both", combination_type=kind, **options)
    wrapped.set_adapter("both")
    return logits(wrapped)


def with_a_vocabulary(layout, source, folder):
    """An adapter with an embedding and a head of its own: trained, saved, read, left out, merged."""
    torch.manual_seed(0)
    wrapped = get_peft_model(loaded(source, layout), lora(modules_to_save=["embed_tokens", "lm_head"]))
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=0.5)
    wrapped.train()(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    seen = {"first": logits(wrapped)}
    with wrapped.disable_adapter():
        seen["none"] = logits(wrapped)
    wrapped.save_pretrained(folder)
    seen["read"] = logits(PeftModel.from_pretrained(loaded(source, layout), folder))
    merged = wrapped.merge_and_unload()
    seen["merged"] = logits(merged)
    merged.save_pretrained(folder / "merged")
    return seen


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "tp2+pp2"])
def test_a_vocabulary_of_its_own(source, tmp_path, text):
    one = with_a_vocabulary(None, source, tmp_path / "one")
    assert not torch.allclose(one["first"], one["none"])
    for seen in on_layout(with_a_vocabulary, text, source, tmp_path / "two"):
        close(seen, one)
    for name in ("adapter_model.safetensors", "merged/model.safetensors"):
        close(load_file(tmp_path / "two" / name), load_file(tmp_path / "one" / name))


@pytest.mark.parametrize("text", ["tp2", "tp2+pp2"])
@pytest.mark.parametrize("kind", ["linear", "svd", "ties", "dare_linear", "magnitude_prune"])
def test_weighted_adapters(source, kind, text):
    one = weighted(None, source, kind)
    for found in on_layout(weighted, text, source, kind):
        close(found, one)


# Mixtures: `all-linear` asks for the parameters of experts, and routers


def moe_block(layout, source, folder):
    torch.manual_seed(5)
    wrapped = get_peft_model(loaded(source, layout), lora(init_lora_weights=False, r=2, lora_alpha=2))
    seen = {"first": logits(wrapped), "weights": dict(get_peft_model_state_dict(wrapped))}
    wrapped.save_pretrained(folder)
    wrapped.load_adapter(folder, "read")
    wrapped.set_adapter("read")
    seen["read"] = logits(wrapped)
    wrapped.set_adapter("default")
    with wrapped.disable_adapter():
        seen["none"] = logits(wrapped)
    seen["merged"] = logits(wrapped.merge_and_unload())
    return seen


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "dp2+ep2", "tp2+sp+ep2", "dp2+tp2+etp2+ep2"])
def test_all_linear_of_a_moe_block(sources, tmp_path, text):
    one = moe_block(None, sources["qwen3_moe"], tmp_path / "one")
    assert any("experts" in name for name in one["weights"]) and not torch.allclose(one["first"], one["none"])
    for seen in on_layout(moe_block, text, sources["qwen3_moe"], tmp_path):
        close(seen, one, 1e-4)


# Loops


ROWS = [{"input_ids": (ids := [(i * 7 + j * 3) % 60 + 1 for j in range(10)]), "labels": ids} for i in range(16)]


def trained(layout, source, folder, resume=None, steps=4, base_scale=1.0, **options):
    """Trains with Trainer; returns its losses and the adapter."""
    model = loaded(source, layout)
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
    return run_ranks(trained, 1, None, source, tmp_path_factory.mktemp("trained"))[0]


@pytest.mark.parametrize(("text", "other"), [("tp2+sp+pp2", "dp2+zero2"), ("dp2+zero2", "tp2"), ("pp2", "cp2")])
def test_a_run_that_ends_goes_on_on_another_layout(source, trained_once, tmp_path, text, other):
    for losses, adapter in on_layout(trained, text, source, tmp_path, None, 4):
        assert losses == pytest.approx(trained_once[0], abs=2e-5)
        close(adapter, trained_once[1], 1e-4)
    checkpoint = tmp_path / "checkpoint-2"
    written = {file.name for file in checkpoint.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "manifest.json", "README.md"} <= written
    assert not {"config.json", "model.safetensors"} & written
    assert max(file.stat().st_size for file in checkpoint.iterdir()) < 64 * 2**10, "the base is not there"
    for losses, adapter in on_layout(trained, other, source, tmp_path / "other", checkpoint, 4):
        assert losses == pytest.approx(trained_once[0], abs=2e-5)
        close(adapter, trained_once[1], 1e-4)
    close(
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


def test_one_process_goes_on_and_stock_says_why_not(source, trained_once, tmp_path):
    on_layout(trained, "pp2", source, tmp_path, None, 4)
    losses, adapter = run_ranks(trained, 1, None, source, tmp_path / "one", tmp_path / "checkpoint-2")[0]
    assert losses == pytest.approx(trained_once[0], abs=2e-5)
    close(adapter, trained_once[1], 1e-4)
    with pytest.raises(RankError, match="adapters of another base model: weights of"):
        run_ranks(trained, 1, None, source, tmp_path / "other", tmp_path / "checkpoint-2", 4, 1.5)
    command = [sys.executable, "-c", STOCK, str(source), str(tmp_path / "stock"), str(tmp_path / "checkpoint-2")]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0 and "Weights only load failed" in result.stderr
    assert "import hf_megatron" in (tmp_path / "checkpoint-2" / "optimizer.pt").read_text()


def prompted(layout, source, folder, resume=None):
    """Trains prompts with Trainer; returns its losses."""
    model = loaded(source, layout)
    torch.manual_seed(3)
    model = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
    settings = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2, "report_to": []}
    arguments = TrainingArguments(str(folder), per_device_train_batch_size=4, use_cpu=True, **settings)
    trainer = Trainer(model, arguments, train_dataset=Dataset.from_list(ROWS))
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_prompts_go_on_on_another_layout(source, tmp_path):
    expected = run_ranks(prompted, 1, None, source, tmp_path / "one")[0]
    for text, before in (("tp2+sp", None), ("pp2", "tp2+sp"), ("tp1", "tp2+sp")):
        resume = None if before is None else str(tmp_path / before / "checkpoint-2")
        run = functools.partial(prompted, source=source, folder=tmp_path / text, resume=resume)
        losses = run_ranks(run, 1, None)[0] if text == "tp1" else on_layout(run, text)[0]
        assert losses == pytest.approx(expected, abs=2e-5), text
    saved = load_file(tmp_path / "pp2/checkpoint-4/adapter_model.safetensors")
    close(saved, load_file(tmp_path / "tp2+sp/checkpoint-4/adapter_model.safetensors"), 1e-4)


@pytest.mark.parametrize("text", ["tp2", "pp2", "cp2", "dp2+zero2"])
def test_prompts_take_turns_under_gradient_checkpoints(source, text):
    def turns(layout):
        model = loaded(source, layout)
        model.gradient_checkpointing_enable({"use_reentrant": True})
        torch.manual_seed(0)
        config = functools.partial(PromptTuningConfig, task_type="CAUSAL_LM")
        wrapped = get_peft_model(model, config(num_virtual_tokens=4)).train()
        wrapped.add_adapter("second", config(num_virtual_tokens=3))
        seen = [sorted(name for name, parameter in wrapped.named_parameters() if parameter.requires_grad)]
        ranks, rank = (1, 0) if layout is None else (layout.dp_size or 1, torch.distributed.get_rank())
        rows = IDS.tensor_split(ranks)[rank % ranks]
        for name in ("default", "second", "default"):
            wrapped.set_adapter(name)
            wrapped(input_ids=rows, labels=rows).loss.backward()
            trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
            seen.append(float(torch.nn.utils.clip_grad_norm_(trained, 1e9)))
            wrapped.zero_grad()
        return seen

    names, *norms = run_ranks(turns, 1, None)[0]
    assert names == ["prompt_encoder.default.embedding.weight", "prompt_encoder.second.embedding.weight"]
    for found in on_layout(turns, text):
        assert found[0] == names and found[1:] == pytest.approx(norms, rel=1e-5)


def test_another_base_is_refused(source, tmp_path):
    def on_rank(folder):
        layout = layout_of("tp2")
        trained(layout, source, folder, None, 2)
        with pytest.raises(CheckpointError, match="adapters of another base model: weights of"):
            trained(layout, source, folder / "other", folder / "checkpoint-2", base_scale=1.5)
        with pytest.raises(CheckpointError, match="holds adapters, but this run trains a model without any"):
            model = loaded(source, layout)
            trainer = Trainer(
                model, TrainingArguments(str(folder), report_to=[], use_cpu=True), train_dataset=Dataset.from_list(ROWS)
            )
            trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))

    run_ranks(on_rank, 2, tmp_path)


def test_the_best_adapter_is_loaded_at_the_end(source, tmp_path):
    best = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
    }
    one = run_ranks(trained, 1, None, source, tmp_path / "one", None, 4, 1.0)[0]
    for _, adapter in on_layout(functools.partial(trained, **best), "tp2+pp2", source, tmp_path / "two"):
        differs = [name for name, weight in one[1].items() if not torch.allclose(adapter[name], weight, atol=1e-4)]
        assert differs, "the first checkpoint is the worst, which the run was told to take for the best"
    close(
        load_file(tmp_path / "two/adapter_model.safetensors"),
        load_file(tmp_path / "two/checkpoint-2/adapter_model.safetensors"),
    )


def test_accelerate_saves_and_goes_on(source, tmp_path):
    def steps(layout, folder, resumes):
        model = get_peft_model(loaded(source, layout), lora())
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

    expected = run_ranks(steps, 1, None, tmp_path / "one", False)[0]
    first = on_layout(steps, "tp2", tmp_path, False)
    second = on_layout(steps, "pp2", tmp_path, True)
    assert first[0][0] == pytest.approx(expected[0], abs=2e-5)
    assert second[0][0] == pytest.approx(expected[0][2:], abs=2e-5)
    close(first[0][1], expected[1], 1e-4)
    close(second[0][1], expected[1], 1e-4)
    for folder in (tmp_path, tmp_path / "one"):
        weights = load_file(folder / "given/adapter_model.safetensors")
        close(weights, {name.replace(".default", ""): weight for name, weight in expected[1].items()}, 1e-4)


# What is refused, and what is seen


def test_what_is_refused(sources):
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
        (PromptTuningConfig(modules_to_save=["norm"], **prompts), "PROMPT_TUNING of PEFT with modules_to_save"),
        (lora(target_modules=["lm_head"]), "A PEFT adapter on lm_head"),
        (lora(target_modules=["embed_tokens"], use_dora=True), "A PEFT adapter on model.embed_tokens"),
        (lora(init_lora_weights="orthogonal"), "init_lora_weights = 'orthogonal'"),
        (lora(trainable_token_indices=[1, 2]), "trainable_token_indices"),
        (lora(layer_replication=[(0, 2)]), "layer_replication"),
        (lora(use_dora=True, bias="all"), "use_dora with bias"),
        (lora(target_modules=None, target_parameters=["q_proj.weight"]), "target_parameters names .*q_proj.weight"),
        (lora(megatron_config={"tensor_model_parallel_size": 2}), "megatron_config is PEFT's.*from_pretrained"),
    ]

    def on_rank():
        with pytest.raises(UnsupportedError, match="modules_to_save = .*cp_size > 1"):
            get_peft_model(loaded(sources["llama"], layout_of("cp2")), lora(modules_to_save=["lm_head"]))
        tied = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
        tied.tie_word_embeddings = True
        model = AutoModelForCausalLM.from_config(tied, megatron_config=layout_of("tp2"))
        with pytest.raises(UnsupportedError, match="modules_to_save = .*embed_tokens is tied"):
            get_peft_model(model, lora(modules_to_save=["embed_tokens"]))
        for layout in ("pp2", "cp2"):
            with pytest.raises(UnsupportedError, match=f"PREFIX_TUNING of PEFT with {layout[:2]}_size > 1"):
                get_peft_model(loaded(sources["llama"], layout_of(layout)), PrefixTuningConfig(**prompts))
        with pytest.raises(UnsupportedError, match="PROMPT_TUNING of PEFT with zero_stage = 3"):
            get_peft_model(loaded(sources["llama"], layout_of("dp2+zero3")), PromptTuningConfig(**prompts))
        model = AutoModelForCausalLM.from_config(tied, megatron_config=layout_of("pp2"))
        with pytest.raises(UnsupportedError, match="embed_tokens with pp_size > 1.*embedding is tied"):
            get_peft_model(model, lora(target_modules=["embed_tokens"]))
        with pytest.raises(UnsupportedError, match="low_cpu_mem_usage = True"):
            get_peft_model(loaded(sources["llama"], layout_of("tp2")), lora(), low_cpu_mem_usage=True)
        for config, text in cases:
            model = loaded(sources["llama"], layout_of("tp2"))
            before = [name for name, _ in model.named_parameters()]
            with pytest.raises(UnsupportedError, match=text):
                get_peft_model(model, config)
            assert [name for name, _ in model.named_parameters()] == before
        for config in (lora(bias="all"), lora(modules_to_save=["norm"]), LNTuningConfig(target_modules=["norm"])):
            with pytest.raises(UnsupportedError, match="zero_stage = 3"):
                get_peft_model(loaded(sources["llama"], layout_of("dp2+zero3")), config)
        model = get_peft_model(loaded(sources["llama"], layout_of("dp2+zero3")), lora())
        model.get_base_model().model.norm.weight.requires_grad_(True)
        with pytest.raises(UnsupportedError, match="model.norm.weight is trained together with adapters"):
            model(input_ids=IDS, labels=IDS)

    run_ranks(on_rank, 2)


SUPPORTED = {"LORA", "IA3", "LN_TUNING", "PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"}


def test_every_method_of_peft_is_parallelized_or_refused_by_name(source):
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    methods = {getattr(name, "value", name): config for name, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    assert len(methods) > 30 and methods.keys() > SUPPORTED

    def on_rank():
        model = loaded(source, layout_of("tp2"))
        before = [name for name, _ in model.named_parameters()]
        for name, kind in methods.items():
            if name in SUPPORTED:
                continue
            # Before anything that a method would look at in its settings.
            config = kind.__new__(kind)
            config.peft_type, config.task_type, config.base_model_name_or_path = PeftType(name), None, None
            config.modules_to_save, config.target_modules = None, ["q_proj"]
            with pytest.raises(UnsupportedError, match=f"^{name} of PEFT"):
                PeftModel(model, config)
            assert [other for other, _ in model.named_parameters()] == before
        with pytest.raises(UnsupportedError, match="mixed=True"):
            get_peft_model(model, lora(), mixed=True)

    run_ranks(on_rank, 2)


def test_conversions_of_a_saved_adapter_are_refused(source, tmp_path):
    def on_rank(folder):
        model = get_peft_model(loaded(source, layout_of("tp2")), lora(init_lora_weights="pissa"))
        model.save_pretrained(folder / "initial")
        with pytest.raises(UnsupportedError, match="path_initial_model_for_weight_conversion.*in a single process"):
            model.save_pretrained(folder, path_initial_model_for_weight_conversion=str(folder / "initial"))

    run_ranks(on_rank, 2, tmp_path)


def test_hooks_see_what_they_see_in_one_process(source):
    def seen(layout):
        model = get_peft_model(loaded(source, layout), lora(init_lora_weights=False))
        block = model.get_base_model().model.layers[0]
        found = []
        for module in (block.self_attn.q_proj, block.self_attn.o_proj, block.mlp.down_proj):
            module.register_forward_hook(lambda module, args, output: found.append(output.detach().clone()))
        logits(model)
        return found

    def inside(layout):
        model = get_peft_model(loaded(source, layout), lora(init_lora_weights=False))
        factor = model.get_base_model().model.layers[0].self_attn.q_proj.lora_B.default
        factor.register_forward_hook(lambda module, args, output: output * 2)
        with pytest.raises(UnsupportedError, match="lora_B.default"):
            logits(model)

    torch.manual_seed(3)
    one = run_ranks(seen, 1, None)[0]
    for text in ("tp2", "tp2+sp"):
        for found in on_layout(seen, text):
            for tensor, expected in zip(found, one, strict=True):
                close(tensor, expected)
        on_layout(inside, text)
