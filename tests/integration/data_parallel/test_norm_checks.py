"""Tests of gradient norms over subsets of a pipelined model: equal to a single process, or rejected on every rank."""

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
    """Folders of models with 4 layers, 2 per stage, and with 2 layers."""
    paths = {}
    for layers in (4, 2):
        paths[layers] = tmp_path_factory.mktemp("tiny")
        save_tiny(paths[layers], num_hidden_layers=layers, tie_word_embeddings=False)
    return paths


def load(path, text):
    config = {} if text is None else {"megatron_config": parse_layout(text)}
    model = AutoModelForCausalLM.from_pretrained(path, **config).train()
    model(**make_batch(1)).loss.backward()
    return model


def select_parameters(model, *words):
    return [p for name, p in model.named_parameters() if any(word in name for word in words)]


def measure_norms(path, text=None):
    """Returns the norms of successive clippings, each of the gradients that the previous one left, and a final loss."""
    model, other = load(path, text), load(path, text)
    values = [
        clip_grad_norm_(select_parameters(model, "mlp"), 0.3),
        clip_grad_norm_(select_parameters(model, "norm"), 0.01),
        clip_grad_norm_(select_parameters(model, "gate_proj"), 0.1),
        clip_grad_norm_(select_parameters(model, "embed_tokens"), 0.2, norm_type=1.0),
        clip_grad_norm_(select_parameters(model, "lm_head"), 0.2, norm_type=float("inf")),
        clip_grad_norm_([p for p in model.parameters() if p.dim() > 1], 0.5),
        get_total_norm([p.grad for p in select_parameters(model, "lm_head", "self_attn")]),
        get_total_norm([p.grad for p in model.parameters()]),
        clip_grad_norm_([*model.parameters(), *other.parameters()], 0.5),
        clip_grad_norm_(select_parameters(other, "mlp"), 0.1),
    ]
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in select_parameters(model, "embed", "layers.0.", "layers.1.self_attn"):
        parameter.requires_grad_(False)
    optimizer.zero_grad()
    model(**make_batch(2)).loss.backward()
    values.append(clip_grad_norm_(model.parameters(), 0.1))
    # One stage has all of its trained parameters in the list, the other one only some.
    values.append(clip_grad_norm_(select_parameters(model, "layers"), 0.02))
    optimizer.step()
    return torch.stack([*(torch.as_tensor(norm).float() for norm in values), model(**make_batch(3)).loss.detach()])


@pytest.mark.parametrize("text", ["pp2", "pp2+dp2"])
def test_norms_over_matching_layer_weights(folders, text):
    expected = measure_norms(folders[4])
    for values in run_ranks(lambda: measure_norms(folders[4], text), 4 if "dp" in text else 2):
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)


def clip_each_weight(model, word="mlp"):
    return [clip_grad_norm_([parameter], 0.05) for parameter in select_parameters(model, word)]


def clip_every_parameter(model):
    return clip_each_weight(model, "")


def clip_each_layer(model):
    return [clip_grad_norm_(layer.parameters(), 0.05) for layer in model.model.layers]


def measure_groups_by_name(model):
    groups = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(name.split(".")[2] if "layers" in name else "rest", []).append(parameter)
    return [get_total_norm([parameter.grad for parameter in group]) for group in groups.values()]


def clip_by_index(model):
    parameters = list(model.parameters())
    return [clip_grad_norm_(parameters[:9], 0.1), clip_grad_norm_(parameters[5::2], 0.1, norm_type=1.0)]


def clip_one_stage(model):
    return [clip_grad_norm_(select_parameters(model, "layers.0.", "embed"), 0.05)]


def clip_optimizer_groups(model):
    groups = [{"params": select_parameters(model, "mlp", "norm")}, {"params": select_parameters(model, "lm_head")}]
    optimizer = prepare_optimizer(torch.optim.SGD(groups, lr=0.1))
    values = [clip_grad_norm_(group["params"], 0.05) for group in optimizer.param_groups]
    optimizer.step()
    return values


LOOP_PATTERNS = (
    clip_each_weight,
    clip_every_parameter,
    clip_each_layer,
    measure_groups_by_name,
    clip_by_index,
    clip_one_stage,
    clip_optimizer_groups,
)


def run_patterns(path, text=None):
    """Returns the norms of every pattern, each followed by the loss after a step."""
    values = []
    for loop_pattern in LOOP_PATTERNS:
        model = load(path, text)
        values += loop_pattern(model)
        if loop_pattern is not clip_optimizer_groups:
            prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)).step()
        values.append(model(**make_batch(3)).loss)
    return torch.stack([torch.as_tensor(norm).detach().float() for norm in values])


@pytest.mark.parametrize("text", ["pp2", "pp2+dp2"])
def test_norms_over_arbitrary_lists(folders, text):
    expected = run_patterns(folders[4])
    for values in run_ranks(lambda: run_patterns(folders[4], text), 4 if "dp" in text else 2):
        torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layers", [4, 2])
def test_incomplete_local_lists_are_rejected(folders, layers):
    def on_rank():
        model = load(folders[layers], "pp2")
        local_parameters = [parameter for _, parameter in local_named_parameters(model)]
        before = [parameter.detach().clone() for parameter in local_parameters]
        for part in (
            local_parameters[:3],
            local_parameters[-1:],
            [p for name, p in local_named_parameters(model) if "mlp" in name],
        ):
            with pytest.raises(UnsupportedError, match="the same list on every rank"):
                clip_grad_norm_(part, 0.05)
        # The full local lists of all stages cover the model.
        norm = clip_grad_norm_(local_parameters, 1e9)
        assert torch.equal(norm, clip_grad_norm_(model.parameters(), 0.1))
        assert all(torch.equal(p, old) for p, old in zip(local_parameters, before, strict=True))

    run_ranks(on_rank, 2)
