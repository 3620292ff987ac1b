"""Tests of `resize_token_embeddings` of parallelized models against the single-process run."""

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer
from trl import clone_chat_template

from hf_megatron import ConfigError, UnsupportedError, local_named_parameters, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import model_parameters
from hf_megatron.integrations.transformers import resizing
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.training import count_ranks, gather_full_tensors, make_batch, parse_layout, save_tiny, shard_batch

LAYOUTS = ["dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3", "cp2", "tp2", "tp2+sp", "pp2"]
COMBINED = ["tp2+pp2", "tp2+dp2+zero3", "pp2+dp2+zero3", "pp2+dp2+zero2", "pp2+split", "dp2+cp2+zero3"]
# The tiny model has 80 tokens; make_batch reads the first 64.
TOKENS = 80


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Returns the folders of a model with tied and of one with untied embeddings."""
    folders = {tied: tmp_path_factory.mktemp(f"tied-{tied}") for tied in (True, False)}
    for tied, folder in folders.items():
        save_tiny(folder, tie_word_embeddings=tied, vocab_size=TOKENS)
    return folders


def load(path, text=None):
    return AutoModelForCausalLM.from_pretrained(
        path, megatron_config=None if text is None else parse_layout(text)
    ).train()


def make_optimizer(model, kind=torch.optim.AdamW):
    return prepare_optimizer(kind([p for p in model.parameters() if p.requires_grad], lr=0.01))


def step(model, optimizer, seed):
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    loss = model(**shard_batch(inner, make_batch(seed))).loss
    loss.backward()
    named = {name: p.grad for name, p in local_named_parameters(inner) if p.requires_grad}
    gradients = gather_full_tensors(inner, named)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), gradients


def train(model, kind=torch.optim.AdamW, steps=2):
    """Returns the losses, the gradients of the first step and the weights after the last one, by name."""
    optimizer = make_optimizer(model, kind)
    results = [step(model, optimizer, seed) for seed in range(1, steps + 1)]
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    weights = gather_full_tensors(inner, dict(local_named_parameters(inner)))
    return [loss for loss, _ in results], drop_missing(results[0][1]), drop_missing(weights)


def drop_missing(tensors):
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def average_added(model, count):
    """Initializes the last `count` tokens as Alpaca's `smart_tokenizer_and_embedding_resize` does."""
    input_embeddings = model.get_input_embeddings().weight.data
    output_embeddings = model.get_output_embeddings().weight.data
    input_embeddings_avg = input_embeddings[:-count].mean(dim=0, keepdim=True)
    output_embeddings_avg = output_embeddings[:-count].mean(dim=0, keepdim=True)
    input_embeddings[-count:] = input_embeddings_avg
    output_embeddings[-count:] = output_embeddings_avg


def grow(model):
    """Adds tokens before the first step, by the mean, as Alpaca's script does."""
    assert model.resize_token_embeddings(TOKENS + 3) is model.get_input_embeddings()
    average_added(model, 3)


def draw_between(model):
    """Adds tokens between steps, drawn from a normal distribution, in a size that tp does not divide."""
    step(model, make_optimizer(model), 0)
    model.resize_token_embeddings(TOKENS + 5, pad_to_multiple_of=11, mean_resizing=False)


def shrink(model):
    """Removes tokens after a forward in evaluation."""
    with torch.no_grad():
        model(**shard_batch(model, make_batch(0)))
    model.resize_token_embeddings(TOKENS - 9)


def resize_and_train(path, text, resize):
    torch.manual_seed(5)
    model = load(path, text)
    resize(model)
    sizes = model.config.vocab_size, model.vocab_size, model.num_parameters()
    draws = torch.rand(2).tolist()
    return *train(model), sizes, draws


def assert_equal_runs(results, expected):
    """Compares losses, gradients and weights of all ranks with the single-process run."""
    losses, gradients, weights, *rest = expected
    names = set()
    for rank_losses, rank_gradients, rank_weights, *rank_rest in results:
        assert rank_losses == pytest.approx(losses, rel=1e-5)
        for found, right, atol in ((rank_gradients, gradients, 1e-6), (rank_weights, weights, 2e-5)):
            for name in found:
                torch.testing.assert_close(found[name], right[name], rtol=1e-4, atol=atol, msg=name)
        assert rank_rest == rest
        names |= {*rank_gradients, *rank_weights}
    assert names == gradients.keys() | weights.keys() and gradients


def compare(checkpoints, text, tied, resize):
    [expected] = run_ranks(resize_and_train, 1, checkpoints[tied], None, resize)
    results = run_ranks(resize_and_train, count_ranks(parse_layout(text)), checkpoints[tied], text, resize)
    assert_equal_runs(results, expected)


@pytest.mark.parametrize("resize", [grow, draw_between, shrink])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("text", [*LAYOUTS, *COMBINED])
def test_resized_model_trains_as_in_one_process(checkpoints, text, tied, resize):
    compare(checkpoints, text, tied, resize)


@pytest.mark.parametrize(
    "fault", ["other draws", "shards of the old size", "a stale head"], ids=lambda name: name.replace(" ", "-")
)
def test_seeded_faults_are_detected(checkpoints, monkeypatch, fault):
    resize = grow
    if fault == "other draws":
        monkeypatch.setattr(resizing, "share_generator", lambda rank: torch.manual_seed(1))
        resize = draw_between
    elif fault == "shards of the old size":
        stock = resizing.local_part
        # The last rank keeps zeros in place of the added tokens.
        monkeypatch.setattr(resizing, "local_part", lambda full, *rest: stock(full, *rest) * (len(full) == TOKENS))
    else:
        weights = resizing.FullTables.weights
        monkeypatch.setattr(
            resizing.FullTables,
            "weights",
            lambda self: weights(self) | {"head": torch.ones_like(self.head.weight)},
        )
    with pytest.raises(AssertionError):
        compare(checkpoints, "tp2", False, resize)


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2", "dp2+zero3"])
def test_the_present_size_changes_nothing(checkpoints, text):
    def on_rank():
        model = load(checkpoints[True], text)
        before = {name: (id(p), p.shape) for name, p in model.named_parameters()}
        optimizer = make_optimizer(model)
        for arguments in ((TOKENS,), (), (None, 16), (TOKENS - 3, 8)):
            assert model.resize_token_embeddings(*arguments) is model.get_input_embeddings()
        assert before == {name: (id(p), p.shape) for name, p in model.named_parameters()}
        return step(model, optimizer, 0)[0]

    def alone():
        model = load(checkpoints[True])
        return step(model, make_optimizer(model), 0)[0]

    [expected] = run_ranks(alone, 1)
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-5)] * 2


MODELS = {
    "gpt2": ("gpt2", {}),
    "bert, bias of a tied head": ("bert", {"model_class": "BertForMaskedLM"}),
    "phi, bias of an untied head": ("phi", {}),
    "t5, three tied tables": ("t5", {"model_class": "T5ForConditionalGeneration"}),
    "bart, bias of the logits": ("bart", {"model_class": "BartForConditionalGeneration"}),
}


@pytest.mark.parametrize("text", ["tp2", "pp2"])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.partition(",")[0])
def test_model_types_match_the_single_process(case, text):
    kind, arguments = MODELS[case]
    source = make_tiny_model(CONFIG_MAPPING[kind](), **arguments)
    [batch] = source.batches

    def on_rank(config):
        torch.manual_seed(5)
        model = source.load(megatron_config=config).eval()
        model.resize_token_embeddings(len(model.get_input_embeddings().weight) + 5)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        losses = []
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {}, drop_missing(gather_full_tensors(model, dict(local_named_parameters(model))))

    [expected] = run_ranks(on_rank, 1, None)
    layout = {"tp2": {"tp_size": 2}, "pp2": {"pp_size": 2}}[text]
    results = run_ranks(on_rank, 2, ConfigUnderTest(**layout))
    names = set()
    for losses, _, weights in results:
        assert losses == pytest.approx(expected[0], rel=1e-5)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[2][name], rtol=1e-4, atol=2e-5, msg=name)
        names |= weights.keys()
    assert names == expected[2].keys()


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2", "dp2+zero3"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_resized_model_is_saved_and_resumed_on_other_layouts(checkpoints, tmp_path, text, tied):
    def first(text):
        torch.manual_seed(5)
        model = load(checkpoints[tied], text)
        grow(model)
        train(model)
        model.save_pretrained(tmp_path / str(text))
        return train(model)

    def second(path, text):
        return train(load(path, text))

    [expected] = run_ranks(first, 1, None)
    results = run_ranks(first, 2, text)
    assert_equal_runs(results, expected)
    # The saved weights are the merged full ones, in one process and on another layout.
    [alone] = run_ranks(second, 1, tmp_path / "None", None)
    for other, ranks in ((None, 1), ("tp2" if text == "pp2" else "pp2", 2)):
        assert_equal_runs(run_ranks(second, ranks, tmp_path / text, other), alone)


def train_with_state(path, text, folder, saves):
    """Returns the losses of two steps, after one that is saved or after the saved state is loaded."""
    torch.manual_seed(5)
    model = load(path, text)
    model.resize_token_embeddings(TOKENS + 3)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    if saves:
        step(model, optimizer, 0)
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return [step(model, optimizer, seed)[0] for seed in (1, 2)]


@pytest.mark.parametrize("text, other", [("tp2", "pp2"), ("pp2", "dp2+zero3"), ("dp2+zero3", "tp2")])
def test_training_state_is_resumed_on_another_layout(checkpoints, tmp_path, text, other):
    [expected] = run_ranks(train_with_state, 1, checkpoints[True], None, tmp_path / "alone", True)
    for layout, saves in ((text, True), (other, False)):
        results = run_ranks(train_with_state, 2, checkpoints[True], layout, tmp_path / "state", saves)
        assert results == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.parametrize("order", ["resize first", "adapter first"])
@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "pp2", "dp2", "dp2+zero3"])
def test_lora_of_a_resized_model(checkpoints, tmp_path, text, order):
    def on_rank(text):
        torch.manual_seed(5)
        model = load(checkpoints[False], text)
        config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        if order == "resize first":
            grow(model)
        torch.manual_seed(6)
        model = get_peft_model(model, config)
        if order == "adapter first":
            model.resize_token_embeddings(TOKENS + 3)
        optimizer = make_optimizer(model)
        losses = [step(model, optimizer, seed)[0] for seed in (1, 2)]
        model.save_pretrained(tmp_path / str(text))
        return losses

    [expected] = run_ranks(on_rank, 1, None)
    assert run_ranks(on_rank, 2, text) == [pytest.approx(expected, rel=1e-5)] * 2
    alone, saved = (load_adapter_weights(tmp_path / name) for name in ("None", text))
    assert alone.keys() == saved.keys() and any("embed_tokens" in name for name in alone)
    for name, weight in alone.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-4, atol=2e-5, msg=name)


def load_adapter_weights(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2"])
def test_resized_tables_in_modules_to_save(checkpoints, text):
    def on_rank(text):
        torch.manual_seed(5)
        model = load(checkpoints[False], text)
        grow(model)
        torch.manual_seed(6)
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])
        return train(get_peft_model(model, config))

    [expected] = run_ranks(on_rank, 1, None)
    assert any("modules_to_save" in name for name in expected[1])
    assert_equal_runs(run_ranks(on_rank, 2, text), expected)


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2+zero3"])
def test_chat_template_is_cloned(stories, tmp_path, text):
    source = AutoTokenizer.from_pretrained(stories)
    source.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"], "eos_token": "<|end|>"})
    source.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    source.save_pretrained(tmp_path)

    def on_rank(text):
        torch.manual_seed(5)
        model, tokenizer = load(stories, text), AutoTokenizer.from_pretrained(stories)
        model, tokenizer, added = clone_chat_template(model, tokenizer, str(tmp_path), resize_to_multiple_of=24)
        # AdamW would amplify the rounding errors of this model's smallest gradients.
        return *train(model, torch.optim.SGD), added, model.vocab_size, model.config.eos_token_id

    [expected] = run_ranks(on_rank, 1, None)
    assert expected[4] % 24 == 0 and expected[3]
    assert_equal_runs(run_ranks(on_rank, 2, text), expected)


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2", "dp2+zero3"])
def test_an_optimizer_of_the_old_size_raises(checkpoints, text):
    def on_rank(prepared):
        torch.manual_seed(5)
        model = load(checkpoints[True], text)
        optimizer = make_optimizer(model) if prepared else torch.optim.SGD(model.parameters(), lr=0.1)
        model.resize_token_embeddings(TOKENS + 3)
        model(**shard_batch(model, make_batch(0))).loss.backward()
        before = {name: p.detach().clone() for name, p in local_named_parameters(model)}
        with pytest.raises(ConfigError, match="Create the optimizer after resizing"):
            optimizer.step()
        for name, parameter in local_named_parameters(model):
            assert torch.equal(parameter, before[name]), name
        model.zero_grad()
        return step(model, make_optimizer(model), 1)[0]

    def alone():
        torch.manual_seed(5)
        model = load(checkpoints[True])
        model.resize_token_embeddings(TOKENS + 3)
        return step(model, make_optimizer(model), 1)[0]

    [expected] = run_ranks(alone, 1)
    for prepared in (True, False) if text in ("tp2", "pp2") else (True,):
        assert run_ranks(on_rank, 2, prepared) == [pytest.approx(expected, rel=1e-5)] * 2
    assert model_parameters.REPLACED


def test_pending_gradients_are_rejected_and_cleared(checkpoints):
    def on_rank():
        model = load(checkpoints[True], "pp2")
        model(**make_batch(0)).loss.backward()
        with pytest.raises(ConfigError, match=r"Call zero_grad\(\) on the model or the optimizer first"):
            model.resize_token_embeddings(TOKENS + 3)
        model.zero_grad()
        return len(model.resize_token_embeddings(TOKENS + 3).weight)

    assert run_ranks(on_rank, 2) == [TOKENS + 3] * 2


def test_other_sizes_on_other_ranks_are_rejected(checkpoints):
    def on_rank():
        model = load(checkpoints[True], "dp2")
        with pytest.raises(ConfigError, match="Pass the same on every rank"):
            model.resize_token_embeddings(TOKENS + 3 + torch.distributed.get_rank())
        return len(model.resize_token_embeddings(TOKENS + 3).weight)

    assert run_ranks(on_rank, 2) == [TOKENS + 3] * 2


def test_parts_of_a_model_are_not_resized_alone(checkpoints):
    def on_rank():
        model = load(checkpoints[True], "dp2")
        with pytest.raises(UnsupportedError, match="Call it on the full model"):
            model.model.resize_token_embeddings(TOKENS + 3)
        return len(model.resize_token_embeddings(TOKENS + 3).weight)

    assert run_ranks(on_rank, 2) == [TOKENS + 3] * 2


def test_wrapped_tables_are_resized_before_the_adapter(checkpoints):
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])

    def on_rank():
        model = get_peft_model(load(checkpoints[False], "dp2"), config)
        with pytest.raises(UnsupportedError, match="Resize the model before an adapter wraps these modules"):
            model.resize_token_embeddings(TOKENS + 3)
        model = load(checkpoints[False], "dp2")
        model.resize_token_embeddings(TOKENS + 3)
        return len(get_peft_model(model, config).get_input_embeddings().weight)

    assert run_ranks(on_rank, 2) == [TOKENS + 3] * 2


def test_sizes_that_shared_heads_cannot_shard_are_padded(checkpoints):
    def on_rank():
        model = load(checkpoints[True], "tp4")
        with pytest.raises(UnsupportedError, match="Pass pad_to_multiple_of=4"):
            model.resize_token_embeddings(TOKENS + 9)
        return len(model.resize_token_embeddings(TOKENS + 9, pad_to_multiple_of=4).weight)

    assert run_ranks(on_rank, 4) == [TOKENS + 12] * 4
