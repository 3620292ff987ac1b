"""What loops do around the calls of a pipelined model: inputs made with its parts, arguments of `None`, outputs read."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.verify.ranks import run_ranks

from .habits import batch, layout, own_rows, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, tie_word_embeddings=False)
    return path


def load(path, text):
    config = {} if text is None else {"megatron_config": layout(text)}
    return AutoModelForCausalLM.from_pretrained(path, **config).train()


def embeddings_of_its_own(path, text, prompts):
    """Losses of steps, then of an evaluation; the embedding is frozen for the last step."""
    model, prompt = load(path, text), nn.Parameter(torch.linspace(-1, 1, 64).view(1, 2, 32))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for seed in range(3):
        own = own_rows(model, batch(seed))
        embedding = model.get_input_embeddings()
        embedding.requires_grad_(seed < 2)
        inputs = embedding(own["input_ids"]) * 1.3
        loss = model(inputs_embeds=inputs, labels=own["labels"]).loss
        if seed == 1 and prompts:
            prompted = torch.cat([prompt.expand(len(inputs), -1, -1), embedding(own["input_ids"]) + 0.1], dim=1)
            loss = loss + model(inputs_embeds=prompted).logits.float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if prompt.grad is not None:
        losses.append(prompt.grad.norm())
    with torch.no_grad():
        whole = batch(5)
        inputs = model.eval().get_input_embeddings()(whole["input_ids"]) / 2
        losses.append(model(inputs_embeds=inputs, labels=whole["labels"]).loss)
    return torch.stack(losses)


@pytest.mark.parametrize("text", ["pp2", "pp2+split", "pp2+dp2"])
def test_embeddings_of_its_own(folder, text):
    # Gradients of prompts would be those of the data parallel rank's rows.
    prompts = "dp" not in text
    expected = embeddings_of_its_own(folder, None, prompts)
    for found in run_ranks(lambda: embeddings_of_its_own(folder, text, prompts), 4 if "dp" in text else 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_values_of_embeddings_that_are_elsewhere(folder):
    def on_rank():
        model = load(folder, "pp2")
        inputs = model.get_input_embeddings()(batch(0)["input_ids"])
        if type(inputs).__name__ == "AbsentTensor":
            with pytest.raises(UnsupportedError, match="not on this rank.*stage 0"):
                float(inputs.pow(2).mean())
        return type(inputs).__name__

    assert sorted(run_ranks(on_rank, 2)) == ["AbsentTensor", "Tensor"]
