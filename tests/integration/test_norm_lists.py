"""Norms of a part of a pipelined model's gradients: those of one process, or refused on every rank."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.verify.ranks import run_ranks

from .dp_training import layout
from .habits import batch, save_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of 4 layers, 2 a stage, and of 2."""
    found = {}
    for layers in (4, 2):
        found[layers] = tmp_path_factory.mktemp("tiny")
        save_tiny(found[layers], num_hidden_layers=layers, tie_word_embeddings=False)
    return found


def load(path, text):
    config = {} if text is None else {"megatron_config": layout(text)}
    model = AutoModelForCausalLM.from_pretrained(path, **config).train()
    model(**batch(1)).loss.backward()
    return model


def chosen(model, *words):
    return [p for name, p in model.named_parameters() if any(word in name for word in words)]


def norms(path, text=None):
    """Norms before clipping, the next of what the one before has left."""
    model, other = load(path, text), load(path, text)
    found = [
        clip_grad_norm_(chosen(model, "mlp"), 0.3),
        clip_grad_norm_(chosen(model, "norm"), 0.01),
        clip_grad_norm_(chosen(model, "gate_proj"), 0.1),
        clip_grad_norm_(chosen(model, "embed_tokens"), 0.2, norm_type=1.0),
        clip_grad_norm_(chosen(model, "lm_head"), 0.2, norm_type=float("inf")),
        clip_grad_norm_([p for p in model.parameters() if p.dim() > 1], 0.5),
        get_total_norm([p.grad for p in chosen(model, "lm_head", "self_attn")]),
        get_total_norm([p.grad for p in model.parameters()]),
        clip_grad_norm_([*model.parameters(), *other.parameters()], 0.5),
        clip_grad_norm_(chosen(other, "mlp"), 0.1),
    ]
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in chosen(model, "embed", "layers.0.", "layers.1.self_attn"):
        parameter.requires_grad_(False)
    optimizer.zero_grad()
    model(**batch(2)).loss.backward()
    found.append(clip_grad_norm_(model.parameters(), 0.1))
    # All that a stage trains, and a part of what the other does.
    found.append(clip_grad_norm_(chosen(model, "layers"), 0.02))
    optimizer.step()
    return torch.stack([*(torch.as_tensor(norm).float() for norm in found), model(**batch(3)).loss.detach()])


@pytest.mark.parametrize("text", ["pp2", "pp2+dp2"])
def test_lists_of_the_same_weights_of_every_layer(folders, text):
    expected = norms(folders[4])
    for found in run_ranks(lambda: norms(folders[4], text), 4 if "dp" in text else 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def each_weight(model, word="mlp"):
    for parameter in chosen(model, word):
        clip_grad_norm_([parameter], 0.05)


def each_weight_of_the_model(model):
    each_weight(model, "")


def each_norm(model):
    each_weight(model, "norm")


def each_layer(model):
    for layer in model.model.layers:
        clip_grad_norm_(layer.parameters(), 0.05)


def groups_by_name(model):
    groups = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(name.split(".")[2] if "layers" in name else "rest", []).append(parameter)
    for group in groups.values():
        get_total_norm([parameter.grad for parameter in group])


def ends_one_by_one(model):
    for parameter in [p for name, p in model.named_parameters() if "layers" not in name]:
        clip_grad_norm_([parameter], 0.05)


def layers_of_one_stage(model):
    clip_grad_norm_(chosen(model, "layers.0.", "embed"), 0.05)


def a_call_of_one_rank(model):
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for part in (chosen(model, "mlp", "norm"), chosen(model, "lm_head")):
        if part:
            clip_grad_norm_(part, 0.05)
    optimizer.step()


REFUSED = (
    each_weight,
    each_weight_of_the_model,
    each_norm,
    each_layer,
    groups_by_name,
    ends_one_by_one,
    layers_of_one_stage,
    a_call_of_one_rank,
)


@pytest.mark.parametrize("layers", [4, 2])
def test_lists_that_may_belong_to_several_calls(folders, layers):
    def on_rank():
        model = load(folders[layers], "pp2")
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for habit in REFUSED:
            with pytest.raises(UnsupportedError, match="which parameters of other stages"):
                habit(model)
        clip_grad_norm_(model.parameters(), 0.1)
        assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))

    run_ranks(on_rank, 2)
