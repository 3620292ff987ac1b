"""Norms of a part of a pipelined model's gradients: those of one process, or refused on every rank."""

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError, local_named_parameters, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import parse_layout
from tests.helpers.training import make_batch, save_tiny


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Models of 4 layers, 2 a stage, and of 2."""
    found = {}
    for layers in (4, 2):
        found[layers] = tmp_path_factory.mktemp("tiny")
        save_tiny(found[layers], num_hidden_layers=layers, tie_word_embeddings=False)
    return found


def load(path, text):
    config = {} if text is None else {"megatron_config": parse_layout(text)}
    model = AutoModelForCausalLM.from_pretrained(path, **config).train()
    model(**make_batch(1)).loss.backward()
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
    model(**make_batch(2)).loss.backward()
    found.append(clip_grad_norm_(model.parameters(), 0.1))
    # All that a stage trains, and a part of what the other does.
    found.append(clip_grad_norm_(chosen(model, "layers"), 0.02))
    optimizer.step()
    return torch.stack([*(torch.as_tensor(norm).float() for norm in found), model(**make_batch(3)).loss.detach()])


@pytest.mark.parametrize("text", ["pp2", "pp2+dp2"])
def test_lists_of_the_same_weights_of_every_layer(folders, text):
    expected = norms(folders[4])
    for found in run_ranks(lambda: norms(folders[4], text), 4 if "dp" in text else 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def each_weight(model, word="mlp"):
    return [clip_grad_norm_([parameter], 0.05) for parameter in chosen(model, word)]


def each_weight_of_the_model(model):
    return each_weight(model, "")


def each_layer(model):
    return [clip_grad_norm_(layer.parameters(), 0.05) for layer in model.model.layers]


def groups_by_name(model):
    groups = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(name.split(".")[2] if "layers" in name else "rest", []).append(parameter)
    return [get_total_norm([parameter.grad for parameter in group]) for group in groups.values()]


def by_place(model):
    parameters = list(model.parameters())
    return [clip_grad_norm_(parameters[:9], 0.1), clip_grad_norm_(parameters[5::2], 0.1, norm_type=1.0)]


def layers_of_one_stage(model):
    return [clip_grad_norm_(chosen(model, "layers.0.", "embed"), 0.05)]


def of_an_optimizers_groups(model):
    groups = [{"params": chosen(model, "mlp", "norm")}, {"params": chosen(model, "lm_head")}]
    optimizer = prepare_optimizer(torch.optim.SGD(groups, lr=0.1))
    found = [clip_grad_norm_(group["params"], 0.05) for group in optimizer.param_groups]
    optimizer.step()
    return found


LOOP_PATTERNS = (
    each_weight,
    each_weight_of_the_model,
    each_layer,
    groups_by_name,
    by_place,
    layers_of_one_stage,
    of_an_optimizers_groups,
)


def after_patterns(path, text=None):
    """Every norm, and a loss after the step that follows."""
    found = []
    for loop_pattern in LOOP_PATTERNS:
        model = load(path, text)
        found += loop_pattern(model)
        if loop_pattern is not of_an_optimizers_groups:
            prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()
        found.append(model(**make_batch(3)).loss)
    return torch.stack([torch.as_tensor(norm).detach().float() for norm in found])


@pytest.mark.parametrize("text", ["pp2", "pp2+dp2"])
def test_lists_of_any_weights(folders, text):
    expected = after_patterns(folders[4])
    for found in run_ranks(lambda: after_patterns(folders[4], text), 4 if "dp" in text else 2):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layers", [4, 2])
def test_lists_that_leave_out_what_lies_on_other_stages(folders, layers):
    def on_rank():
        model = load(folders[layers], "pp2")
        own = [parameter for _, parameter in local_named_parameters(model)]
        before = [parameter.detach().clone() for parameter in own]
        for part in (own[:3], own[-1:], [p for name, p in local_named_parameters(model) if "mlp" in name]):
            with pytest.raises(UnsupportedError, match="the same list on every rank"):
                clip_grad_norm_(part, 0.05)
        # All of each stage are all of the model.
        norm = clip_grad_norm_(own, 1e9)
        assert torch.equal(norm, clip_grad_norm_(model.parameters(), 0.1))
        assert all(torch.equal(p, old) for p, old in zip(own, before, strict=True))

    run_ranks(on_rank, 2)
