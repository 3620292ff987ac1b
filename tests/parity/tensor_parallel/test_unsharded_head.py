"""Parity tests of `loss_chunk_size` without tensor and context parallelism, and of the logits that it never makes."""

import functools
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM

from hf_megatron import UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layout
from hf_megatron.core.off_stage import computes_here
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel import vocab_parallel_head
from hf_megatron.tensor_parallel.vocab_parallel_head import ShardedLogits, VocabParallelHead
from hf_megatron.testing.adapters import adapted
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.training import count_ranks, save_tiny

# Neither the tokens of a batch nor those of a sample divide by it.
CHUNK = 7
DATA_PARALLEL = ("dp2+zero0", "dp2+zero1", "dp2+zero2", "dp2+zero3")
CASES = [
    # model type, changes, microbatches per step, layouts
    ("llama", {"tie_word_embeddings": False}, 1, (*DATA_PARALLEL, "pp2")),
    ("llama", {"tie_word_embeddings": True}, 3, (*DATA_PARALLEL, "pp2", "pp2+dp2+zero3")),
    # Soft-capped logits.
    ("gemma2", {}, 1, ("dp2+zero1", "dp2+zero3", "pp2")),
    # A bias, and a loss of its class.
    ("bert", {}, 1, ("dp2+zero1", "pp2")),
    # A router loss beside the token loss.
    ("qwen3_moe", {"output_router_logits": True}, 1, ("dp2+zero2", "dp2+ep2")),
]


@functools.lru_cache(maxsize=2)
def get_tiny_model(model_type, changes, microbatches):
    task = {"task": "masked"} if model_type == "bert" else {}
    return make_tiny_model(
        CONFIG_MAPPING[model_type](), changes=dict(changes), microbatches=microbatches, batch_size=5, **task
    )


def flatten_cases():
    for model_type, changes, microbatches, layouts in CASES:
        tied = {True: "-tied", False: "-untied", None: ""}[changes.get("tie_word_embeddings")]
        for text in layouts:
            arguments = model_type, tuple(changes.items()), microbatches
            yield pytest.param(arguments, text, id=f"{model_type}{tied}-{text}")


def make_layout(text):
    return replace(parse_layout(text), loss_chunk_size=CHUNK)


def require_chunks(model):
    """Precondition: the loss is computed by the head, where the head is."""
    head = model.get_output_embeddings()
    if computes_here(head):
        assert isinstance(head, VocabParallelHead)
        assert head.loss_chunk_size == CHUNK


@pytest.mark.parametrize(("arguments", "text"), flatten_cases())
def test_layouts_match_single_process(arguments, text):
    comparison = check_tiny_model(get_tiny_model(*arguments), make_layout(text), prepare=require_chunks)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("method", "text"),
    [("lora", "dp2+zero3"), ("lora", "pp2"), ("saved", "dp2+zero2"), ("tokens", "dp2+zero2"), ("vocabulary", "pp2")],
)
def test_adapters_match_single_process(method, text):
    """ "saved" trains a copy of the head, "tokens" and "vocabulary" change its weight."""
    source = make_tiny_model(CONFIG_MAPPING["llama"](), task="causal", microbatches=2, min_layers=2, batch_size=4)
    comparison = check_tiny_model(adapted(source, method), make_layout(text))
    assert comparison.passed, comparison.report()


# Seeded faults: each must make a comparison above fail.


def shift_vocabulary():
    VocabParallelHead.vocab_start = 1


def lose_hidden_gradient():
    stock = vocab_parallel_head.linear_cross_entropy
    vocab_parallel_head.linear_cross_entropy = lambda hidden, *others: stock(hidden.detach(), *others)


def forget_soft_cap():
    ShardedLogits.transform = lambda self, logits: logits


@pytest.mark.parametrize(
    ("fault", "model_type", "text"),
    [
        (shift_vocabulary, "llama", "dp2+zero1"),
        (lose_hidden_gradient, "llama", "pp2"),
        (forget_soft_cap, "gemma2", "dp2+zero3"),
    ],
)
def test_seeded_faults_are_detected(fault, model_type, text):
    arguments = next((name, tuple(changes.items()), count) for name, changes, count, _ in CASES if name == model_type)
    comparison = check_tiny_model(get_tiny_model(*arguments), make_layout(text), sabotage=fault)
    assert not comparison.passed


class Largest(TorchDispatchMode):
    """Records the largest number of entries of a result with a dim of the vocabulary."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.entries = vocabulary, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else (result,):
            # Weights and their gradients have [vocabulary, hidden]; logits have it last.
            if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == self.vocabulary:
                self.entries = max(self.entries, value.numel())
        return result


VOCABULARY, SAMPLES, TOKENS = 512, 4, 24


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    save_tiny(folder, vocab_size=VOCABULARY)
    return folder


@pytest.mark.parametrize("text", [*DATA_PARALLEL, "pp2+mb1"])
def test_full_logits_are_never_materialized(wide, text):
    """Without the setting the same measurement finds them."""

    def on_rank(layout):
        model = AutoModelForCausalLM.from_pretrained(wide, megatron_config=layout).train()
        ids = torch.arange(SAMPLES * TOKENS).view(SAMPLES, TOKENS) % VOCABULARY
        model(input_ids=ids, labels=ids).loss.backward()
        with Largest(VOCABULARY) as largest:
            model(input_ids=ids, labels=ids).loss.backward()
        return largest.entries

    chunked = max(run_ranks(on_rank, 2, make_layout(text)))
    assert 0 < chunked <= max(CHUNK, 32) * VOCABULARY
    assert max(run_ranks(on_rank, 2, parse_layout(text))) == SAMPLES * TOKENS * VOCABULARY


def test_head_with_own_forward_is_rejected(wide):
    class ScaledHead(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def on_rank():
        class Scaled(LlamaForCausalLM):
            def __init__(self, config):
                super().__init__(config)
                self.lm_head = ScaledHead(config.hidden_size, config.vocab_size, bias=False)

        with pytest.raises(UnsupportedError, match=r"= 7: lm_head is a ScaledHead.*without loss_chunk_size"):
            Scaled.from_pretrained(wide, megatron_config=make_layout("dp2"))
        Scaled.from_pretrained(wide, megatron_config=ConfigUnderTest(dp_size=2))

    run_ranks(on_rank, count_ranks(make_layout("dp2")))
