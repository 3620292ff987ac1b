"""Tests of weight edits in training loops, compared with the single-process run."""

import copy
import operator

import pytest
import torch
from torch.distributed.tensor import Replicate
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import gather_weights, parse_layout
from tests.helpers.tiny_models import build_tiny_model
from tests.helpers.training import LAYOUTS, PIPELINES, Loop, PatternRuns, count_ranks, make_parameters

LOOP_PATTERNS, HALF = {}, {}
IMPOSSIBLE = {
    # Logs the norm of a gradient, which only one stage has.
    "pp": {"edits_parameters_through_modules"},
    # FSDP2 does not recover from an error in a pipeline's backward, and each edit raises.
    "pp2+dp2+zero3": {"edits_between_forward_and_backward"},
    # FSDP2 reduces in the dtype the model was loaded in and copies parameters from `DTensor`s only.
    "zero3": {"casts_in_half_precision", "loads_full_tensors"},
}


def loop_pattern(function):
    LOOP_PATTERNS[function.__name__] = function
    return function


def in_half_precision(function):
    HALF[function.__name__] = function
    return function


@pytest.fixture(scope="module")
def runs(tiny):
    return PatternRuns(tiny, LOOP_PATTERNS, IMPOSSIBLE)


@pytest.fixture(scope="module")
def half_runs(tiny):
    return PatternRuns(tiny, HALF, IMPOSSIBLE, dtype=torch.bfloat16)


# Edits


@torch.no_grad()
def edit(model):
    """Edits the parameters in several ways, each applied to a subset."""
    for name, parameter in model.named_parameters():
        if len(name) % 3 == 0:
            parameter.mul_(0.9)
        elif len(name) % 3 == 1:
            parameter.data.copy_(parameter.data * 1.05)
        else:
            parameter.data.add_(0.01)
    for name, module in model.named_modules():
        if name.endswith("layers.0.mlp.up_proj"):
            module.load_state_dict({name: value * 1.25 for name, value in module.state_dict().items()})


@loop_pattern
def edits_between_backward_and_step(loop):
    for seed in range(2):
        loop.backward(seed)
        edit(loop.model)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def edits_after_evaluation(loop):
    for seed in range(2):
        loop.step(seed)
        with torch.no_grad():
            loop.losses.append(float(loop.model(input_ids=torch.arange(8).view(1, 8)).logits.sum()))
        edit(loop.model)


@loop_pattern
def loads_parts(loop):
    loop.step(0)
    state = {name: value.clone() for name, value in loop.model.state_dict().items()}
    loop.step(1)
    loop.model.load_state_dict({n: v for n, v in state.items() if "layers.0" in n}, strict=False)
    loop.step(2)
    loop.model.load_state_dict(state)
    loop.step(3)


@loop_pattern
def loads_full_tensors(loop):
    loop.step(0)
    unsharded = AutoModelForCausalLM.from_pretrained(loop.path).state_dict()
    subset = {name: tensor * 0.9 for name, tensor in unsharded.items() if "mlp" in name}
    result = loop.model.load_state_dict(subset, strict=False)
    assert set(result.missing_keys) == unsharded.keys() - subset.keys() and not result.unexpected_keys


# In-place edits that keep the values but bump the version counter, which backward checks.
EDITS = {
    "in place": lambda weight: weight.mul_(1.0),
    "copied": lambda weight: weight.copy_(weight.clone()),
    "by an operator": lambda weight: operator.imul(weight, 1.0),
    "a row": lambda weight: weight[0].mul_(1.0),
    "lists": lambda weight: torch._foreach_mul_([weight], 1.0),
}


@loop_pattern
def edits_between_forward_and_backward(loop):
    """Each edit raises in backward."""
    weight = next(p for name, p in loop.model.named_parameters() if name.endswith("layers.1.mlp.up_proj.weight"))
    for name, edit in EDITS.items():
        loss = loop.loss(0)
        with torch.no_grad():
            edit(weight)
        try:
            loss.backward()
        except RuntimeError as error:
            loop.see(name, torch.tensor(float("modified" in str(error))))
        loop.model.zero_grad()
    weight.requires_grad_(False)
    loss = loop.loss(0)
    with torch.no_grad():
        weight.mul_(1.0)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    weight.requires_grad_(True)
    loop.model.zero_grad()
    loss = loop.loss(1)
    loop.step(0)
    with pytest.raises(RuntimeError, match="modified"):
        loss.backward()
    loop.model.zero_grad()
    loop.step(2)


# Averages


@loop_pattern
def averages_state_dict(loop):
    average = {name: value.clone() for name, value in loop.model.state_dict().items()}
    for seed in range(2):
        loop.step(seed)
        for name, value in loop.model.state_dict().items():
            average[name].mul_(0.7).add_(value, alpha=0.3)
    loop.model.load_state_dict(average)
    loop.step(3)


@loop_pattern
def swaps_averages_through_data(loop):
    """Tensors saved from `.data` keep the weights from before the swap."""
    parameters = list(loop.model.parameters())
    average = [parameter.data.clone() for parameter in parameters]
    for seed in range(2):
        loop.step(seed)
        for mean, parameter in zip(average, parameters, strict=True):
            mean.mul_(0.7).add_(parameter.data, alpha=0.3)
        originals = [parameter.data for parameter in parameters]
        for mean, parameter in zip(average, parameters, strict=True):
            parameter.data = mean
        with torch.no_grad():
            loop.losses.append(float(loop.model(input_ids=torch.arange(8).view(1, 8)).logits.sum()))
        for weight, parameter in zip(originals, parameters, strict=True):
            parameter.data = weight
    loop.step(2)


# Parameters accessed as module attributes


@loop_pattern
def edits_parameters_through_modules(loop):
    norm = loop.model.model.layers[0].input_layernorm
    for seed in range(2):
        loop.backward(seed)
        assert norm.weight.grad is not None
        loop.see(f"norm {seed}", _unsharded(norm.weight.grad.norm()))
        norm.weight.grad.mul_(0.5)
        loop.model.model.norm.weight.grad = None
        with torch.no_grad():
            norm.weight.mul_(1.1)
        norm.weight.data.add_(0.01)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.model.model.norm.weight.requires_grad_(False)
    loop.step(2)
    assert norm.weight is dict(loop.model.named_parameters())["model.layers.0.input_layernorm.weight"]
    loop.model.requires_grad_(True)


def _unsharded(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


# Parameter selection and dtypes


@loop_pattern
def trains_some_parameters(loop):
    loop.optimizer = loop.prepare(loop.parameters("mlp"))
    loop.step(0)
    loop.model.zero_grad()
    loop.optimizer.add_param_group({"params": loop.parameters("norm"), "lr": 0.01})
    loop.step(1)
    loop.model.zero_grad()


@loop_pattern
def casts_and_casts_back(loop):
    loop.model.bfloat16().float()
    loop.step(0)
    loop.backward(1)
    loop.model.double().to(torch.float32)
    loop.backward(2)
    loop.optimizer.step()
    loop.model.zero_grad()
    loop.backward(3)
    loop.model.to("cpu")
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@pytest.mark.parametrize(("name", "text"), make_parameters(LOOP_PATTERNS, LAYOUTS + PIPELINES, IMPOSSIBLE))
def test_matches_single_process(runs, text, name):
    runs.compare(text, name)


# Half precision: with a learning rate of 0 only edits change weights, bit for bit


@in_half_precision
def edits_in_half_precision(loop):
    loop.optimizer = loop.prepare(loop.parameters(), lr=0.0)
    for seed in range(2):
        loop.backward(seed)
        loop.optimizer.step()
        edit(loop.model)
    loop.backward(2)
    loop.optimizer.step()


@in_half_precision
@torch.no_grad()
def swaps_averages_in_half_precision(loop):
    loop.optimizer = loop.prepare(loop.parameters(), lr=0.0)
    with torch.enable_grad():
        loop.step(0)
    means = {parameter: (parameter * 0.7).clone() for parameter in loop.parameters()}
    originals = {parameter: parameter.detach().clone() for parameter in means}
    for parameter, mean in means.items():
        parameter.data = mean
    with torch.enable_grad():
        loop.step(1)
    for parameter, weight in originals.items():
        parameter.copy_(weight + 0.1)
    with torch.enable_grad():
        loop.step(2)


@in_half_precision
def casts_in_half_precision(loop):
    loop.optimizer = loop.prepare(loop.parameters(), lr=0.0)
    loop.step(0)
    edit(loop.model)
    loop.model.float()
    loop.step(1)
    edit(loop.model)
    loop.model.bfloat16()
    loop.step(2)
    edit(loop.model)


@pytest.mark.parametrize(("name", "text"), make_parameters(HALF, (*LAYOUTS, "pp2"), IMPOSSIBLE))
def test_edits_stay_in_half_precision(half_runs, text, name):
    expected = half_runs.of(None)[name][0].weights["the habit"]
    for result in half_runs.of(text):
        assert not isinstance(result[name][0], str), result[name][-1]
        gather_weights = result[name][0].weights["the habit"]
        assert all(torch.equal(gather_weights[n], expected[n]) for n in gather_weights), [
            n for n in gather_weights if not torch.equal(gather_weights[n], expected[n])
        ]


# Copies


def train_deep_copy(path, text=None):
    model = AutoModelForCausalLM.from_pretrained(
        path, megatron_config=None if text is None else parse_layout(text)
    ).train()
    duplicate = copy.deepcopy(model)
    before = gather_weights(model)
    losses = []
    for one in (duplicate, model):
        loop = Loop(one)
        loop.step(0)
        if one is duplicate:
            untouched = gather_weights(model)
            assert all(torch.equal(untouched[name], before[name]) for name in before)
        loop.step(1)
        losses += loop.losses
    return losses


@pytest.mark.parametrize("text", ["tp2", "tp2+sp"])
def test_deep_copy_trains_independently(tiny, text):
    expected = train_deep_copy(tiny)
    for losses in run_ranks(train_deep_copy, 2, tiny, text):
        assert losses == pytest.approx(expected, rel=1e-5)


def evaluate_averaged_model(path, text=None):
    model = AutoModelForCausalLM.from_pretrained(
        path, megatron_config=None if text is None else parse_layout(text)
    ).train()
    average = torch.optim.swa_utils.AveragedModel(model)
    loop = Loop(model)
    for seed in range(2):
        loop.step(seed)
        average.update_parameters(model)
    with torch.no_grad():
        return float(average.eval()(input_ids=torch.arange(8).view(1, 8)).logits.square().sum())


@pytest.mark.parametrize("text", ["tp2", "dp2"])
def test_averaged_model_matches_single_process(tiny, text):
    expected = evaluate_averaged_model(tiny)
    assert run_ranks(evaluate_averaged_model, 2, tiny, text) == pytest.approx([expected] * 2, rel=1e-5)


def assign_full_tensors(path):
    """Assigns replicated tensors to `.data`; returns the resulting and expected values by name."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout("tp2"))
    expected = {}
    for name, parameter in model.named_parameters():
        unsharded = parameter.data.redistribute(placements=[Replicate()] * parameter.device_mesh.ndim) * 1.5
        expected[name], before = unsharded.to_local(), parameter.placements
        parameter.data = unsharded
        assert parameter.placements == before
    with pytest.raises(UnsupportedError, match="needs a DTensor with the same placements"):
        parameter.data = torch.zeros(parameter.shape)
    return {name: (parameter.full_tensor().detach(), expected[name]) for name, parameter in model.named_parameters()}


def test_data_accepts_replicated_tensors(tiny_uneven):
    """torch 2.11 returns a replicated tensor when transformers pads the sharded bias of a tied head."""
    for parameters in run_ranks(assign_full_tensors, 2, tiny_uneven):
        for name, (value, expected) in parameters.items():
            torch.testing.assert_close(value, expected, rtol=0, atol=0, msg=name)


def mix_with_plain_parameters(path, text=None):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=None if text is None else parse_layout(text))
    other = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        for parameter, target in zip(model.parameters(), other.parameters(), strict=True):
            parameter.lerp_(target, 0.3)
        vector = torch.nn.utils.parameters_to_vector(model.parameters())
        return (vector if text is None else vector.full_tensor()).clone()


def test_lerp_with_unsharded_parameters(tmp_path):
    """The target parameters require gradients too; experts with separately split gate and up become one vector."""
    build_tiny_model("deepseek_v3").save_pretrained(tmp_path)
    expected = mix_with_plain_parameters(tmp_path)
    for vector in run_ranks(mix_with_plain_parameters, 2, tmp_path, "tp2"):
        torch.testing.assert_close(vector, expected, rtol=0, atol=0)


def backward_raises_after_edit(source, config, name, edit=lambda weight: weight.mul_(0.5)):
    """Edits a weight in place after forward; returns whether backward raises."""
    model = AutoModelForCausalLM.from_pretrained(source, megatron_config=config).train()
    ids = torch.arange(3, 27).view(4, 6)
    loss = model(input_ids=ids, labels=ids).loss
    weight = dict(model.named_parameters())[name]
    with torch.no_grad():
        edit(weight)
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified" in str(error) and "inplace" in str(error)
        return True
    return False


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
def test_edits_between_forward_and_backward_raise(tiny_uneven, name):
    """The fused head loss computes gradients in forward, so autograd does not check versions for it."""
    assert backward_raises_after_edit(tiny_uneven, None, name)
    for text in ("tp2", "tp2+sp"):
        assert run_ranks(backward_raises_after_edit, 2, tiny_uneven, parse_layout(text), name) == [True, True], text


@pytest.mark.parametrize(
    ("text", "name", "rank"),
    [
        ("tp2", "lm_head.weight", None),
        ("pp2", "model.layers.0.self_attn.q_proj.weight", 0),
        ("pp2", "lm_head.weight", 1),
        ("tp2+pp2", "model.norm.weight", 1),
    ],
)
def test_data_edits_raise_where_gradients_are_precomputed(tiny_uneven, text, name, rank):
    """A single process reads edits through `.data` in backward; these gradients are computed before the edit."""

    def edit(weight):
        weight.data.mul_(0.5)

    def add_nothing(weight):
        weight.data.mul_(1.0)

    def on_rank():
        raised = backward_raises_after_edit(tiny_uneven, parse_layout(text), name, edit)
        return raised, backward_raises_after_edit(tiny_uneven, parse_layout(text), name, add_nothing)

    results = run_ranks(on_rank, count_ranks(parse_layout(text)))
    stages = parse_layout(text).pp_size or 1
    expected = [rank is None or number * stages // len(results) == rank for number in range(len(results))]
    assert results == [(is_own, False) for is_own in expected]
