"""Tests of models whose loss is computed in chunks without tensor parallelism: generation, resizing, copies, scores."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_megatron import token_log_probs
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.tensor_parallel.vocab_parallel_head import VocabParallelHead
from tests.helpers.training import count_ranks, make_batch, parse_layout, save_tiny, shard_batch

LAYOUTS = ["dp2+zero1+chunks", "dp2+zero3+chunks", "pp2+chunks"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def tiny(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, tie_word_embeddings=request.param)
    return folder


def load(path, text):
    return AutoModelForCausalLM.from_pretrained(path, megatron_config=text and parse_layout(text)).train()


def run_on_layout(function, path, text):
    return run_ranks(function, 1 if text is None else count_ranks(parse_layout(text)), path, text)


def generate(path, text):
    model = load(path, text)
    model(**shard_batch(model, make_batch(0))).loss.backward()
    model.eval()
    ids = make_batch(1)["input_ids"][:2]
    return model.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0)


def resize(path, text):
    model = load(path, text)
    torch.manual_seed(5)
    model.resize_token_embeddings(70)
    output = model(**shard_batch(model, make_batch(0)))
    output.loss.backward()
    model.eval()
    with torch.no_grad():
        return output.loss.detach(), model(input_ids=make_batch(2)["input_ids"]).logits


def score(path, text):
    model = load(path, text)
    batch = make_batch(3)
    with torch.no_grad():
        if text is None:
            logits = model(input_ids=batch["input_ids"]).logits[:, :-1].log_softmax(-1)
            return logits.gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        return token_log_probs(model, labels=batch["input_ids"], input_ids=batch["input_ids"])


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("function", [generate, resize, score])
def test_calls_match_single_process(tiny, function, text):
    [expected] = run_on_layout(function, tiny, None)
    for result in run_on_layout(function, tiny, text):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)


def test_copy_for_evaluation_keeps_its_own_head(tiny):
    """A copy's logits follow its own weights."""

    def on_rank():
        model = load(tiny, "dp2+chunks")
        duplicate = copy.deepcopy(model)
        assert isinstance(duplicate.lm_head, VocabParallelHead)
        batch = make_batch(0)
        with torch.no_grad():
            before = duplicate(**batch)
            for parameter in model.parameters():
                parameter.mul_(0.5)
            after = duplicate(**batch)
        assert torch.equal(before.loss, after.loss)
        assert torch.equal(before.logits, after.logits)
        model(**shard_batch(model, batch)).loss.backward()

    run_ranks(on_rank, 2)
