"""Tests of the plain autograd leaves that forwards read: uses of gradients that go around or beside `backward()`."""

import copy
import pickle

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_megatron import MegatronConfig
from hf_megatron.compat import graph_leaves
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.training import gather_full_tensors, make_batch

LAYOUTS = {
    "tp2": MegatronConfig(tp_size=2),
    "tp2+sp": MegatronConfig(tp_size=2, sequence_parallel=True),
}


def backward_twice(model):
    for seed in range(2):
        model(**make_batch(seed)).loss.backward()


def add_penalty(model):
    """The weights are in the graph twice: as local tensors of the forward, and as the DTensors themselves."""
    penalty = sum(parameter.pow(2).sum() for parameter in model.parameters())
    (model(**make_batch(0)).loss + 0.1 * penalty).backward()


def return_gradients(model):
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(**make_batch(0)).loss, parameters)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def return_gradients_of_penalty(model):
    parameters = list(model.parameters())
    penalty = sum(parameter.pow(2).sum() for parameter in parameters[:3])
    loss = model(**make_batch(0)).loss + penalty
    gradients = torch.autograd.grad(loss, [parameters[0], *parameters[2:]], retain_graph=True)
    for parameter, gradient in zip([parameters[0], *parameters[2:]], gradients, strict=True):
        parameter.grad = gradient
    loss.backward(inputs=[parameters[1]])


def hook_before_forward(model):
    handles = [parameter.register_hook(lambda gradient: gradient * 3) for parameter in model.parameters()]
    model(**make_batch(0)).loss.backward()
    for handle in handles:
        handle.remove()
    model(**make_batch(1)).loss.backward()


def hook_after_forward(model):
    loss = model(**make_batch(0)).loss
    handles = [parameter.register_hook(lambda gradient: gradient * 3) for parameter in model.parameters()]
    loss.backward()
    for handle in handles:
        handle.remove()
    model(**make_batch(1)).loss.backward()


def hook_after_accumulation(model):
    def halve(parameter):
        parameter.grad = parameter.grad / 2

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    backward_twice(model)


def freeze_and_thaw(model):
    frozen = [parameter for name, parameter in model.named_parameters() if "mlp" in name]
    model(**make_batch(0)).loss.backward()
    for parameter in frozen:
        parameter.requires_grad_(False)
    model(**make_batch(1)).loss.backward()
    for parameter in frozen:
        parameter.requires_grad_(True)
    model(**make_batch(0)).loss.backward()


def freeze_before_backward(model):
    """Autograd discards gradients of weights that do not require them any more."""
    frozen = [parameter for name, parameter in model.named_parameters() if "q_proj" not in name]
    model(**make_batch(0)).loss.backward()
    loss = model(**make_batch(1)).loss
    for parameter in frozen:
        parameter.requires_grad_(False)
    loss.backward()
    for parameter in frozen:
        parameter.requires_grad_(True)


def replace_memory(model):
    model(**make_batch(0)).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
    model(**make_batch(1)).loss.backward()


def cast(model):
    model(**make_batch(0)).loss.backward()
    model.zero_grad()
    model.double()
    model(**make_batch(1)).loss.backward()


def cast_beside_graph(model):
    """The loss of the last step, whose graph holds the leaves, is still referenced."""
    loss = model(**make_batch(0)).loss
    loss.backward()
    model.double()
    model.zero_grad()
    model(**make_batch(1)).loss.backward()
    assert loss.grad_fn is not None


def clamp_in_hook(model):
    """The forward computes with the clamped weight, so autograd must not take the edit for a later one."""

    def clamp(module, args):
        with torch.no_grad():
            module.weight.clamp_(-0.02, 0.02)

    for layer in model.model.layers:
        layer.mlp.down_proj.register_forward_pre_hook(clamp)
    backward_twice(model)


def copied_after_backward(model):
    """A copied parameter has no gradient, as in `nn.Parameter.__deepcopy__`."""
    model(**make_batch(0)).loss.backward()
    other = copy.deepcopy(model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    other(**make_batch(1)).loss.backward()
    for parameter, trained in zip(model.parameters(), other.parameters(), strict=True):
        parameter.grad = trained.grad


def copied(model):
    model(**make_batch(0)).loss.backward()
    model.zero_grad()
    # The copy is trained; the original keeps its empty gradients.
    other = copy.deepcopy(model)
    other(**make_batch(1)).loss.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for parameter, trained in zip(model.parameters(), other.parameters(), strict=True):
        parameter.grad = trained.grad


PATTERNS = [
    backward_twice,
    add_penalty,
    return_gradients,
    return_gradients_of_penalty,
    hook_before_forward,
    hook_after_forward,
    hook_after_accumulation,
    freeze_and_thaw,
    freeze_before_backward,
    replace_memory,
    cast,
    cast_beside_graph,
    clamp_in_hook,
    copied,
    copied_after_backward,
]


def measure(path, pattern, config):
    kwargs = {} if config is None else {"megatron_config": config}
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **kwargs).train()
    pattern(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients if config is None else gather_full_tensors(model, gradients)


def require_close(measured, expected):
    assert measured.keys() == expected.keys()
    for name, gradient in expected.items():
        difference = (measured[name] - gradient).abs().max()
        assert difference <= 1e-4 * gradient.abs().max() + 1e-6, name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern.__name__)
def test_gradients_match_single_process(tiny, pattern, layout):
    expected = run_ranks(measure, 1, tiny, pattern, None)[0]
    require_close(run_ranks(measure, 2, tiny, pattern, LAYOUTS[layout])[0], expected)


def test_fault_replaced_instead_of_added(tiny, monkeypatch):
    """A leaf that overwrites `.grad` fails the comparison."""
    original = graph_leaves._add_gradient

    def overwrite(parameter, gradient):
        parameter.grad = None
        original(parameter, gradient)

    expected = run_ranks(measure, 1, tiny, backward_twice, None)[0]
    monkeypatch.setattr(graph_leaves, "_add_gradient", overwrite)
    with pytest.raises(AssertionError):
        require_close(run_ranks(measure, 2, tiny, backward_twice, LAYOUTS["tp2"])[0], expected)


def test_fault_outdated_leaf(tiny, monkeypatch):
    """A leaf that keeps the memory of a replaced local tensor fails the comparison."""
    original = graph_leaves._make_leaf

    def keep_outdated(parameter, local):
        first = vars(parameter).get(graph_leaves._LEAF)
        return original(parameter, local) if first is None else first

    expected = run_ranks(measure, 1, tiny, replace_memory, None)[0]
    monkeypatch.setattr(graph_leaves, "_make_leaf", keep_outdated)
    with pytest.raises(AssertionError):
        require_close(run_ranks(measure, 2, tiny, replace_memory, LAYOUTS["tp2"])[0], expected)


def check_attributes(path):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=LAYOUTS["tp2"]).train()
    model(**make_batch(0)).loss.backward()
    for name, parameter in model.named_parameters():
        assert type(parameter.grad) is DTensor and parameter.grad.placements == parameter.placements, name
        # The leaf has handed its gradient over.
        leaf = graph_leaves.find_leaf(parameter)
        assert leaf.grad is None and graph_leaves.find_owner(leaf) is parameter
        # Copies and pickles leave the leaf out.
        copied = copy.deepcopy(parameter)
        assert graph_leaves.find_leaf(copied) is None
        assert len(graph_leaves.with_leaves([parameter])) == 2 and len(graph_leaves.with_leaves([copied])) == 1
        assert pickle.loads(pickle.dumps(vars(parameter)[graph_leaves._LEAF])).value is None
    unused = torch.nn.Parameter(torch.zeros(2))
    loss = model(**make_batch(0)).loss
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(loss, [*model.parameters(), unused], retain_graph=True)
    *gradients, missing = torch.autograd.grad(loss, [*model.parameters(), unused], allow_unused=True)
    assert missing is None and all(gradient is not None for gradient in gradients)


def test_leaves_are_not_copied_and_inputs_are_checked(tiny):
    run_ranks(check_attributes, 2, tiny)


def edit_between(path, config):
    kwargs = {} if config is None else {"megatron_config": config}
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs).train()
    loss = model(**make_batch(0)).loss
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("layout", [None, *LAYOUTS])
def test_edit_between_forward_and_backward_is_noticed(tiny, layout):
    run_ranks(edit_between, 1 if layout is None else 2, tiny, layout and LAYOUTS[layout])


def hook_on_node(path):
    """docs/surface.md lists that such hooks are not called."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=LAYOUTS["tp2"]).train()
    weight, calls = model.model.norm.weight, []
    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *gradients: calls.append(1))
    model(**make_batch(0)).loss.backward()
    assert not calls and weight.grad is not None


def test_hooks_on_accumulator_nodes_are_not_called(tiny):
    run_ranks(hook_on_node, 2, tiny)
