"""Tests of training loops that use all parameters of a pipelined model, off-stage ones included, by name or index."""

import copy

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_megatron import UnsupportedError, local_named_parameters, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.off_stage import OffStageTensor
from hf_megatron.pipeline_parallel import axis
from tests.helpers.dp_training import count_ranks
from tests.helpers.training import make_batch, parse_layout, save_tiny, shard_batch

LAYOUTS = ["pp2", "pp2+split", "tp2+pp2", "pp2+dp2", "pp2+dp2+zero3"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, num_hidden_layers=4, tie_word_embeddings=request.param)
    return path


def load(path, text):
    config = {} if text is None else {"megatron_config": parse_layout(text)}
    return AutoModelForCausalLM.from_pretrained(path, **config).train()


def run_steps(model, optimizer, term=None, count=2):
    """Yields the loss before each step and one after the last; `term(model)` is added to the loss that is trained."""
    for seed in range(count):
        loss = model(**shard_batch(model, make_batch(seed))).loss
        yield loss.detach().clone()
        (loss if term is None else loss + term(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model(**shard_batch(model, make_batch(9))).loss.detach()


def read_counts(model):
    yield from (len(list(model.parameters())), sum(p.numel() for p in model.parameters()))
    for parameter in list(model.parameters())[:10]:
        parameter.requires_grad_(False)
    yield sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield from map(float, sorted(len(name) for name, _ in model.named_parameters()))


def freeze_first_parameters(model):
    for parameter in list(model.parameters())[:14]:
        parameter.requires_grad = False
    yield from run_steps(model, prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


def freeze_all_but_last(model):
    model.requires_grad_(False)
    for parameter in list(model.parameters())[-4:]:
        parameter.requires_grad_()
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    yield from run_steps(model, prepare_optimizer(torch.optim.AdamW(trainable, lr=0.01)))


def set_lr_per_parameter(model):
    groups = [{"params": [p], "lr": 0.02 * (i + 1)} for i, p in enumerate(model.parameters())]
    yield from run_steps(model, prepare_optimizer(torch.optim.SGD(groups, lr=0.1)))


def freeze_between_steps(model):
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for chosen in (slice(0, 12), slice(7, 20), slice(20, None)):
        for place, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(place in range(40)[chosen])
        yield from run_steps(model, optimizer, count=1)


def edit_gradients_by_index(model):
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        loss = model(**shard_batch(model, make_batch(seed))).loss
        loss.backward()
        for place, parameter in enumerate(model.parameters()):
            parameter.grad.mul_(0.1 * place)
            parameter.grad = parameter.grad * 0.5 if place % 3 == 0 else parameter.grad
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        for parameter in list(model.parameters())[5:9]:
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


def penalize_in_place(model):
    total = 0
    for parameter in model.parameters():
        total += parameter.float().pow(2).sum()
    return 0.01 * total


def penalize_by_sum(model):
    return sum((p**2).sum() * 2 for p in model.parameters() if p.dim() > 1) / 100 - 1.0


def penalize_one_stage(model):
    return -0.003 * sum(p.abs().sum() for name, p in model.named_parameters() if "layers.0." in name)


def add_penalties(model):
    for parameter in list(model.parameters())[:3]:
        parameter.requires_grad_(False)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for term in (penalize_in_place, penalize_by_sum, penalize_one_stage):
        yield from run_steps(model, optimizer, term)


def add_scaled_penalties(model):
    """Penalties that are scaled, accumulated in place and differentiated by `torch.autograd` functions."""
    parameters = list(model.parameters())
    optimizer = prepare_optimizer(torch.optim.SGD(parameters, lr=0.1))
    for seed in range(2):
        loss = model(**shard_batch(model, make_batch(seed))).loss
        yield loss.detach().clone()
        total = loss * 2
        for parameter in parameters:
            total += 0.01 * parameter.pow(2).sum()
        if seed:
            torch.autograd.backward(total / 3)
        else:
            gradients = torch.autograd.grad(total / 3, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    yield model(**shard_batch(model, make_batch(9))).loss.detach()


def average_weights(model):
    mean = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for loss in run_steps(model, optimizer):
        yield loss
        torch._foreach_lerp_(mean, [p.detach() for p in model.parameters()], 0.3)
    with torch.no_grad():
        for place, (parameter, average) in enumerate(zip(model.parameters(), mean, strict=True)):
            parameter.copy_(average) if place % 2 else parameter.mul_(0.9)
    yield from run_steps(model, optimizer)


def use_unprepared_optimizer(model):
    """An optimizer without `prepare_optimizer`, which only layouts without data parallelism support."""
    optimizer = torch.optim.Adagrad(list(model.parameters())[3:], lr=0.05)
    yield from run_steps(model, optimizer)
    yield float(len(optimizer.param_groups[0]["params"]))


def cast_to_double(model):
    parameters = list(model.parameters())
    model.double()
    assert all(parameter is other for parameter, other in zip(parameters, model.parameters(), strict=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert {parameter.element_size() for parameter in model.parameters()} == {8}
    yield from run_steps(model, prepare_optimizer(torch.optim.SGD(parameters, lr=0.1)))


def add_random_noise(model):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
            nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else None
    yield torch.rand(())
    yield model(**shard_batch(model, make_batch(9))).loss.detach()


def step_without_optimizer(model):
    for seed in range(3):
        loss = model(**shard_batch(model, make_batch(seed))).loss
        yield loss.detach().clone()
        loss.backward()
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * parameter.grad.data)
            parameter.grad = None


def mask_gradients(model):
    torch.manual_seed(3)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        loss = model(**shard_batch(model, make_batch(seed))).loss
        yield loss.detach().clone()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.mul_(torch.bernoulli(torch.full_like(parameter.grad, 0.4)))
        optimizer.step()
        optimizer.zero_grad()


def clip_in_step_pre_hook(model):
    """Clips in a step pre-hook that is registered after `prepare_optimizer`."""
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    norms = []

    def clip(optimizer, args, kwargs):
        norms.append(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3))
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5 + 0.01 * parameter.shape[0])

    optimizer.register_step_pre_hook(clip)
    yield from run_steps(model, optimizer)
    yield from norms


def train_head_module(model):
    """Trains, freezes and clips the head through its module; a tied head shares the embedding's weight."""
    head = model.get_output_embeddings()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed, trains in enumerate((True, False, True)):
        head.requires_grad_(trains)
        loss = model(**shard_batch(model, make_batch(seed))).loss
        yield loss.detach().clone()
        loss.backward()
        if trains:
            head.weight.grad.mul_(0.7)
            yield nn.utils.clip_grad_norm_(head.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        head.weight.mul_(0.9)
    yield from run_steps(model, optimizer, count=1)


def select_weights_by_module_type(model):
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    yield from (float(len(linears)), sum(module.out_features for module in linears))
    yield len([module for module in model.modules() if type(module).__name__ == "LlamaMLP"])
    yield sum(module.variance_epsilon for module in model.modules() if isinstance(module, LlamaRMSNorm))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)
    yield from run_steps(model, optimizer)
    with torch.no_grad():
        for module in linears:
            module.weight.mul_(0.9)
            if module.bias is not None:
                module.bias.zero_()
    yield from run_steps(model, optimizer)


def init_weights_by_module_type(model):
    torch.manual_seed(4)
    model.apply(lambda module: nn.init.normal_(module.weight, std=0.1) if isinstance(module, nn.Linear) else None)
    yield torch.rand(())
    yield model(**shard_batch(model, make_batch(9))).loss.detach()
    model.apply(model._init_weights)
    yield torch.rand(())
    yield from run_steps(model, prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


LOOP_PATTERNS = (
    read_counts,
    freeze_first_parameters,
    freeze_all_but_last,
    set_lr_per_parameter,
    freeze_between_steps,
    edit_gradients_by_index,
    add_penalties,
    add_scaled_penalties,
    average_weights,
    use_unprepared_optimizer,
    cast_to_double,
    add_random_noise,
    step_without_optimizer,
    mask_gradients,
    clip_in_step_pre_hook,
    train_head_module,
    select_weights_by_module_type,
    init_weights_by_module_type,
)


def is_possible(loop_pattern, text):
    """Returns whether a layout supports the pattern.

    FSDP2 fixes which weights are frozen, and their dtypes, in the first forward; see the table in docs/surface.md.
    """
    if text is not None and "dp2" in text and loop_pattern is use_unprepared_optimizer:
        return False
    if (
        text is not None
        and "dp2" in text
        and loop_pattern in (step_without_optimizer, mask_gradients, add_scaled_penalties)
    ):
        return False
    if text == "tp2+pp2":
        return loop_pattern in (
            read_counts,
            add_penalties,
            add_random_noise,
            train_head_module,
            select_weights_by_module_type,
        )
    return text != "pp2+dp2+zero3" or loop_pattern in (
        read_counts,
        freeze_first_parameters,
        set_lr_per_parameter,
        add_penalties,
    )


def run_patterns(path, text, loop_patterns=LOOP_PATTERNS):
    results = {}
    for loop_pattern in loop_patterns:
        if is_possible(loop_pattern, text):
            values = [float(value) for value in loop_pattern(load(path, text))]
            results[loop_pattern.__name__] = torch.tensor(values, dtype=torch.float64)
    return results


def run_patterns_on_ranks(path, text, loop_patterns=LOOP_PATTERNS):
    """Returns the mean of each value over all ranks: a dp rank's loss covers only its local samples."""
    ranks = run_ranks(lambda: run_patterns(path, text, loop_patterns), count_ranks(parse_layout(text)))
    return {name: torch.stack([results[name] for results in ranks]).mean(dim=0) for name in ranks[0]}


@pytest.mark.parametrize("text", LAYOUTS)
def test_patterns_match_single_process(folder, text):
    expected = run_patterns(folder, None)
    for name, values in run_patterns_on_ranks(folder, text).items():
        torch.testing.assert_close(
            values, expected[name], rtol=2e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_local_only_parameter_lists_are_detected(folder, monkeypatch):
    loop_patterns = (
        read_counts,
        freeze_first_parameters,
        freeze_all_but_last,
        set_lr_per_parameter,
        edit_gradients_by_index,
    )
    expected = run_patterns(folder, None, loop_patterns)
    monkeypatch.setattr(axis, "register_off_stage_weights", lambda model, names: None)
    for results in run_ranks(lambda: run_patterns(folder, "pp2", loop_patterns), 2):
        for name, values in results.items():
            same = values.shape == expected[name].shape
            assert not same or not torch.allclose(values, expected[name], rtol=2e-5), name


def test_cross_stage_values_are_rejected(folder):
    def on_rank():
        model = load(folder, "pp2")
        loss = model(**make_batch(0)).loss
        loss.backward()
        off_stage = next(p for p in model.parameters() if isinstance(p, OffStageTensor))
        local = next(p for _, p in local_named_parameters(model) if p.dim() > 1)
        assert isinstance(off_stage, nn.Parameter) and isinstance(off_stage.grad, OffStageTensor)
        square = local.pow(2).sum() + off_stage.pow(2).sum()
        for read in (
            lambda: off_stage.grad.norm().item(),
            lambda: float(sum(p.grad.norm() ** 2 for p in model.parameters())),
            lambda: bool(torch.isnan(off_stage).any()),
            lambda: torch.stack([p.norm() for p in model.parameters()]).sum(),
            lambda: torch.cat([p.flatten() for p in model.parameters()]),
            lambda: nn.utils.parameters_to_vector(model.parameters()),
            lambda: loss * off_stage.norm(),
            lambda: square.sqrt(),
            lambda: loss * square,
            lambda: (loss + 0.1 * square).item(),
            lambda: f"{loss + square:.3f}",
            lambda: bool(torch.isnan((loss + square).detach())),
            lambda: torch.stack([loss, square]),
            lambda: (0 + off_stage.pow(2).sum()).add_(local.pow(2).sum()) * off_stage.norm(),
            lambda: torch.sqrt(0 + off_stage.pow(2).sum().add_(local.pow(2).sum())),
            lambda: torch._foreach_lerp_([torch.zeros(off_stage.shape)], [off_stage.detach()], 0.5),
            lambda: local.data.copy_(off_stage) if local.shape == off_stage.shape else off_stage.tolist(),
        ):
            with pytest.raises(UnsupportedError, match="stage"):
                read()
        assert isinstance(square, OffStageTensor)
        total = torch.zeros(())
        total.add_(off_stage.grad.norm())
        assert total.isnan()
        duplicate = copy.deepcopy(model)
        assert [(n, p.shape, p.requires_grad) for n, p in duplicate.named_parameters()] == [
            (n, p.shape, p.requires_grad) for n, p in model.named_parameters()
        ]
        model.zero_grad()
        assert off_stage.grad is None

    run_ranks(on_rank, 2)


def test_vector_without_values_is_not_assigned(folder):
    """Torch would accept the assignment and crash in the next forward; vectors of one stage follow the error's cure."""

    def halve(parameters):
        with torch.no_grad():
            nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) * 0.5, parameters)

    def on_rank():
        model = load(folder, "pp2")
        local = [parameter for _, parameter in local_named_parameters(model)]
        before = [parameter.detach().clone() for parameter in local]
        with pytest.raises(UnsupportedError, match="got a tensor without values on this rank, because its source"):
            halve(list(model.parameters()))
        assert all(map(torch.equal, local, before))
        halve(local)
        return model(**make_batch(0)).loss.item()

    stock = load(folder, None)
    halve(list(stock.parameters()))
    expected = stock(**make_batch(0)).loss.item()
    assert run_ranks(on_rank, 2) == pytest.approx([expected] * 2, abs=1e-5)
