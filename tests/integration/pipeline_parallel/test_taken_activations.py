"""Tests of losses on activations that a hook takes out of a pipeline stage: rejected, since gradients stay there."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.pipeline_parallel import executor
from tests.helpers.training import make_batch, parse_layout, save_tiny

CURE = "Compute the loss from the model's outputs, or load the model with pp_size=1."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, num_hidden_layers=4)
    return path


def load(folder, text=None):
    config = None if text is None else parse_layout(text)
    return AutoModelForCausalLM.from_pretrained(folder, megatron_config=config).train()


def keep_activations(model, index, *, is_input):
    """Returns a list that a hook on a layer fills, on the rank that has the layer."""
    kept, layer = [], model.model.layers[index]
    if is_input:
        layer.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    else:
        layer.register_forward_hook(
            lambda module, args, output: kept.append(output if isinstance(output, torch.Tensor) else output[0])
        )
    return kept


@pytest.mark.parametrize("text", ["pp2", "pp2+split"])
def test_losses_on_taken_activations_are_rejected(folder, text):
    def on_rank():
        problems = []
        for index in range(4):
            for is_input in (True, False):
                for has_labels in (True, False):
                    model = load(folder, text)
                    kept = keep_activations(model, index, is_input=is_input)
                    batch = make_batch(0)
                    outputs = model(**batch if has_labels else {"input_ids": batch["input_ids"]})
                    # The other rank has no activations of the layer, and would run the model's backward alone.
                    if not any(value.requires_grad for value in kept):
                        continue
                    loss = sum(value.float().pow(2).mean() for value in kept)
                    if has_labels:
                        loss = loss + outputs.loss
                    elif index < 2:
                        # On the first stage gradients reach every layer before this one.
                        continue
                    try:
                        loss.backward()
                        problems.append((index, is_input, has_labels))
                    except UnsupportedError as error:
                        assert str(error).endswith(CURE)
        return problems

    assert run_ranks(on_rank, 2) == [[], []]


def forget_inputs():
    executor.watch_inputs = lambda execution, cell, inputs: None


def test_unwatched_inputs_of_a_stage_are_detected(folder):
    """Without the check, a loss on the input of a later stage has no error and no gradient."""

    def on_rank():
        forget_inputs()
        model = load(folder, "pp2")
        kept = keep_activations(model, 2, is_input=True)
        model(**make_batch(0))
        if kept:
            sum(value.pow(2).mean() for value in kept).backward()
        return True

    assert run_ranks(on_rank, 2) == [True, True]


def test_loss_on_outputs_is_the_cure(folder):
    """A loss of several terms on the model's outputs, with a pipeline and without one."""

    def compute_loss(model):
        logits = model(input_ids=make_batch(0)["input_ids"]).logits
        loss = logits.logsumexp(-1).mean() + logits.pow(2).mean()
        loss.backward()
        return loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()

    def on_rank(text):
        return compute_loss(load(folder, text))

    expected = compute_loss(load(folder))
    for text in ("pp2", "tp2"):
        assert run_ranks(on_rank, 2, text) == [pytest.approx(expected, rel=1e-4)] * 2
