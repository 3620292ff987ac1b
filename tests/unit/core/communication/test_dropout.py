"""Tests of dropout masks: equal on replicated activations, different on sharded ones, identical in recompute."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from transformers import AutoModelForCausalLM, GPT2Config, set_seed

from hf_megatron import MegatronConfig, shard_safe
from hf_megatron.core.communication.rng import StreamOfPart
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest

# Dropout calls of two layers: embedding first, then attention map, attention output and MLP output per layer.
FORWARD = ["embedding", "map 0", "attention 0", "mlp 0", "map 1", "attention 1", "mlp 1"]
RECOMPUTED = ["map 1", "attention 1", "mlp 1", "map 0", "attention 0", "mlp 0"]


def collect_dropout_masks(path, sequence_parallel, checkpointing, seed_by_rank):
    """Returns the zeroed entries of every dropout output, in call order."""
    model = AutoModelForCausalLM.from_pretrained(
        path,
        megatron_config=ConfigUnderTest(tp_size=2, sequence_parallel=sequence_parallel),
        attn_implementation="eager",
    ).train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    zero_masks, dropout = [], nn.functional.dropout

    @shard_safe
    def record_mask(x, *args, **kwargs):
        output = dropout(torch.ones_like(x), *args, **kwargs)
        zero_masks.append(output == 0)
        return x * output

    nn.functional.dropout = record_mask
    set_seed(torch.distributed.get_rank() if seed_by_rank else 0)
    ids = torch.arange(2 * 8).view(2, 8)
    with set_checkpoint_early_stop(False):
        model(input_ids=ids, labels=ids).loss.backward()
    names = FORWARD + (RECOMPUTED if checkpointing else [])
    assert len(zero_masks) == len(names)
    return list(zip(names, zero_masks, strict=True))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    path = tmp_path_factory.mktemp("gpt2")
    rate = {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attn_pdrop": 0.4}
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, **rate)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("seed_by_rank", [False, True])
def test_tensor_parallel(gpt2, seed_by_rank):
    first, second = run_ranks(collect_dropout_masks, 2, gpt2, False, False, seed_by_rank)
    for (name, mask), (_, other) in zip(first, second, strict=True):
        assert mask.any() and not mask.all()
        # Attention maps are split by heads; all other activations are replicated.
        assert torch.equal(mask, other) == ("map" not in name), name


def test_sequence_parallel(gpt2):
    first, second = run_ranks(collect_dropout_masks, 2, gpt2, True, False, False)
    for (name, mask), (_, other) in zip(first, second, strict=True):
        assert torch.equal(mask, other) == (name == "embedding"), name


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recompute_draws_the_same_masks(gpt2, sequence_parallel):
    for named_masks in run_ranks(collect_dropout_masks, 2, gpt2, sequence_parallel, True, False):
        forward = dict(named_masks[: len(FORWARD)])
        for name, mask in named_masks[len(FORWARD) :]:
            assert torch.equal(mask, forward[name]), name


def test_masks_differ_without_rng_state_restore():
    """Without a restored RNG state the recomputed mask differs, so the comparison above can fail."""
    dropout, zero_masks = nn.Dropout(0.5), []
    dropout.register_forward_hook(lambda m, a, output: zero_masks.append(output == 0))
    x = torch.ones(64, requires_grad=True)
    with set_checkpoint_early_stop(False):
        checkpoint(dropout, x, use_reentrant=False, preserve_rng_state=False).sum().backward()
    assert not torch.equal(*zero_masks)


def test_model_without_dropout_leaves_rng_unchanged(stories):
    def draw():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=MegatronConfig(tp_size=2)).train()
        torch.manual_seed(7)
        ids = torch.arange(8).view(1, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        return torch.rand(1).item()

    torch.manual_seed(7)
    assert run_ranks(draw, 2) == [torch.rand(1).item()] * 2


def test_rank_local_rng_restores_shared_state():
    """Each rank draws local masks for its tokens, then continues from the shared RNG state."""
    results = []
    for rank, draws in ((0, True), (1, True), (0, False)):
        torch.manual_seed(5)
        before = torch.get_rng_state()
        stream = StreamOfPart(torch.device("cpu"), rank)
        stream.enter()
        values = torch.rand(8) if draws else None
        stream.leave()
        stream.leave()
        results.append((values, torch.get_rng_state(), before))
    (first, after, _), (second, other, _), (_, unmoved, before) = results
    assert not torch.equal(first, second)
    assert torch.equal(after, other) and not torch.equal(after, before)
    assert torch.equal(unmoved, before)
