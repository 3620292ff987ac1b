"""Tests of trained tokens, LoRA's `trainable_token_indices` and `TrainableTokensConfig`, against the single process."""

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, TrainableTokensConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

from hf_megatron import UnsupportedError, local_named_parameters, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.peft import tokens
from tests.helpers.training import (
    count_ranks,
    gather_full_tensors,
    make_batch,
    parse_layout,
    save_tiny,
    shard_batch,
)

# Entries of both vocabulary shards of tp2, not in order.
TOKENS = [9, 63, 5]
LORA = {"r": 2, "target_modules": ["q_proj"]}
CONFIGS = {
    "tied": LoraConfig(**LORA, trainable_token_indices=TOKENS),
    "untied": LoraConfig(**LORA, trainable_token_indices=TOKENS),
    "both tables": LoraConfig(**LORA, trainable_token_indices={"embed_tokens": TOKENS, "lm_head": [3, 40]}),
    "tied, alone": TrainableTokensConfig(token_indices=TOKENS),
}
CASES = [
    *(("tied", text) for text in ("tp2", "tp2+sp", "pp2", "cp2", "dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3")),
    *(("untied", text) for text in ("tp2", "tp2+sp", "pp2", "cp2", "dp2", "dp2+zero3")),
    *(("both tables", text) for text in ("tp2+sp", "pp2", "dp2+zero3")),
    *(("tied, alone", text) for text in ("tp2", "pp2", "dp2+zero3")),
    *(("tied", text) for text in ("tp2+pp2", "tp2+dp2+zero3")),
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Returns the folders of a model with tied and of one with untied embeddings."""
    folders = {tied: tmp_path_factory.mktemp(f"tied-{tied}") for tied in (True, False)}
    for tied, folder in folders.items():
        save_tiny(folder, tie_word_embeddings=tied)
    return {name: folders[name.startswith("tied")] for name in CONFIGS}


def load(path, text):
    layout = {} if text is None else {"megatron_config": parse_layout(text)}
    return AutoModelForCausalLM.from_pretrained(path, **layout)


def wrap(path, name, text):
    torch.manual_seed(0)
    return get_peft_model(load(path, text), CONFIGS[name]).train()


def make_optimizer(model):
    return prepare_optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))


def step(model, optimizer, seed):
    loss = model(**shard_batch(model.get_base_model(), make_batch(seed))).loss
    loss.backward()
    named = {name: p.grad for name, p in local_named_parameters(model.get_base_model()) if p.requires_grad}
    gradients = gather_full_tensors(model.get_base_model(), named)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), {name: gradient for name, gradient in gradients.items() if gradient is not None}


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=make_batch(7)["input_ids"]).logits.clone()


def train_and_save(path, name, text, folder):
    """Returns losses, the first step's gradients and the logits after training, and saves the adapter."""
    model = wrap(path, name, text)
    optimizer = make_optimizer(model)
    results = [step(model, optimizer, seed) for seed in range(3)]
    model.save_pretrained(folder)
    return [loss for loss, _ in results], results[0][1], compute_logits(model)


def assert_equal_files(folder, expected):
    saved, right = (load_file(path / "adapter_model.safetensors") for path in (folder, expected))
    assert saved.keys() == right.keys() and any("token" in name for name in right)
    for name, weight in right.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-4, atol=2e-5, msg=name)


def compare(path, name, text, tmp_path):
    [(losses, gradients, logits)] = run_ranks(train_and_save, 1, path, name, None, tmp_path / "alone")
    ranks = count_ranks(parse_layout(text))
    results = run_ranks(train_and_save, ranks, path, name, text, tmp_path / "ranks")
    names = set()
    for rank_losses, rank_gradients, rank_logits in results:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        torch.testing.assert_close(rank_logits, logits, rtol=1e-4, atol=1e-4)
        for key, gradient in rank_gradients.items():
            torch.testing.assert_close(gradient, gradients[key], rtol=1e-4, atol=1e-6, msg=key)
        names |= rank_gradients.keys()
    assert names == gradients.keys() and any("trainable_tokens" in key for key in names)
    assert_equal_files(tmp_path / "ranks", tmp_path / "alone")


@pytest.mark.parametrize(("name", "text"), CASES)
def test_trained_tokens_match_the_single_process(checkpoints, tmp_path, name, text):
    compare(checkpoints[name], name, text, tmp_path)


@pytest.mark.parametrize("fault", ["partial gradients", "a stale head", "a stale embedding"])
def test_seeded_faults_are_detected(checkpoints, tmp_path, monkeypatch, fault):
    if fault == "partial gradients":
        monkeypatch.setattr(tokens, "local_view", lambda parameter, group=None: parameter.to_local())
    elif fault == "a stale head":
        monkeypatch.setattr(tokens.ShardedTokens, "updated", lambda self, weight, local: local)
    else:
        monkeypatch.setattr(tokens.ShardedTokens, "_embed", lambda self, ids, output, adapter: output)
    with pytest.raises(AssertionError):
        compare(checkpoints["tied"], "tied", "tp2", tmp_path)


@pytest.mark.parametrize(("name", "text"), [("tied", "tp2"), ("tied", "pp2"), ("both tables", "tp2"), ("tied", "cp2")])
def test_adapters_are_loaded_and_merged(checkpoints, tmp_path, name, text):
    """Loads an adapter of another layout, merges, unmerges, disables and unloads it, and saves the merged model."""

    def on_rank(text):
        model = PeftModel.from_pretrained(load(checkpoints[name], text), tmp_path / "adapter")
        logits = [compute_logits(model)]
        with model.disable_adapter():
            logits.append(compute_logits(model))
        model.merge_adapter()
        logits.append(compute_logits(model))
        model.unmerge_adapter()
        logits.append(compute_logits(model))
        merged = model.merge_and_unload()
        logits.append(compute_logits(merged))
        merged.save_pretrained(tmp_path / str(text))
        return logits

    run_ranks(train_and_save, 2, checkpoints[name], name, "dp2", tmp_path / "adapter")
    [expected] = run_ranks(on_rank, 1, None)
    for logits in run_ranks(on_rank, 2, text):
        for found, right in zip(logits, expected, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(expected[0], expected[1], atol=1e-2)
    saved, right = (load_file(tmp_path / folder / "model.safetensors") for folder in (text, "None"))
    assert saved.keys() == right.keys()
    for key, weight in right.items():
        torch.testing.assert_close(saved[key], weight, rtol=1e-4, atol=2e-5, msg=key)


def train_with_state(path, text, folder, saves):
    """Returns the losses of two steps, after one that is saved or after the saved state is loaded."""
    adapted = wrap(path, "tied", text)
    accelerator = Accelerator(cpu=True)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(adapted, torch.optim.AdamW(trained, lr=0.01))

    def compute_loss_and_step(seed):
        loss = model(**shard_batch(adapted.get_base_model(), make_batch(seed))).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    if saves:
        compute_loss_and_step(0)
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return [compute_loss_and_step(seed) for seed in (1, 2)]


@pytest.mark.parametrize(("text", "other"), [("tp2", "pp2"), ("pp2", "dp2+zero3")])
def test_training_state_is_resumed_on_another_layout(checkpoints, tmp_path, text, other):
    [expected] = run_ranks(train_with_state, 1, checkpoints["tied"], None, tmp_path / "alone", True)
    for layout, saves in ((text, True), (other, False)):
        results = run_ranks(train_with_state, 2, checkpoints["tied"], layout, tmp_path / "state", saves)
        assert results == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_an_adapter_is_deleted_and_replaced(checkpoints, text):
    def on_rank(text):
        model = wrap(checkpoints["tied"], "tied", text)
        model.add_adapter("second", LoraConfig(r=3, target_modules=["q_proj"], trainable_token_indices=[1, 2]))
        model.set_adapter("second")
        first = step(model, make_optimizer(model), 0)[0]
        model.delete_adapter("default")
        # Of another rank, and with other tokens, under the name of the deleted one.
        torch.manual_seed(3)
        model.add_adapter("default", LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=[6]))
        model.set_adapter("default")
        optimizer = make_optimizer(model)
        return [first, *(step(model, optimizer, seed)[0] for seed in (1, 2))]

    [expected] = run_ranks(on_rank, 1, None)
    assert run_ranks(on_rank, 2, text) == [pytest.approx(expected, rel=1e-5)] * 2


def test_one_adapter_per_batch(checkpoints):
    def on_rank(text):
        model = wrap(checkpoints["tied"], "tied", text)
        model.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=[1, 2]))
        if text is not None:
            names = ["default", "second"] * 2
            with pytest.raises(UnsupportedError, match=r"Select one adapter for the batch with set_adapter\(\)"):
                model.eval()(input_ids=make_batch(7)["input_ids"], adapter_names=names)
        model.set_adapter("second")
        step(model.train(), make_optimizer(model), 0)
        return compute_logits(model)

    [expected] = run_ranks(on_rank, 1, None)
    for logits in run_ranks(on_rank, 2, "tp2"):
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_other_tables_are_rejected():
    def on_rank():
        config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
        config.is_decoder = False
        model = BertForMaskedLM._from_config(config, megatron_config=parse_layout("tp2"))
        before = [name for name, _ in model.named_parameters()]
        for indices, message in (
            ({"position_embeddings": [1]}, "only the input embedding and the head are supported"),
            ([1, 2], "PEFT's forward leaves the bias out"),
        ):
            config = LoraConfig(r=2, target_modules=["query"], trainable_token_indices=indices)
            with pytest.raises(UnsupportedError, match=message):
                get_peft_model(model, config)
        assert [name for name, _ in model.named_parameters()] == before

    run_ranks(on_rank, 2)
