"""What loops do to all of a pipelined model's parameters, by name or by place: the list is one process's."""

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
from tests.helpers.training import local_samples, make_batch, parse_layout, save_tiny

LAYOUTS = ["pp2", "pp2+split", "tp2+pp2", "pp2+dp2", "pp2+dp2+zero3"]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, num_hidden_layers=4, tie_word_embeddings=request.param)
    return path


def load(path, text):
    config = {} if text is None else {"megatron_config": parse_layout(text)}
    return AutoModelForCausalLM.from_pretrained(path, **config).train()


def steps(model, optimizer, term=None, count=2):
    """Losses before each step, with `term` added, and one after."""
    for seed in range(count):
        loss = model(**local_samples(model, make_batch(seed))).loss
        yield loss.detach().clone()
        (loss if term is None else loss + term(model)).backward()
        optimizer.step()
        optimizer.zero_grad()
    yield model(**local_samples(model, make_batch(9))).loss.detach()


def counts(model):
    yield from (len(list(model.parameters())), sum(p.numel() for p in model.parameters()))
    for parameter in list(model.parameters())[:10]:
        parameter.requires_grad_(False)
    yield sum(p.numel() for p in model.parameters() if p.requires_grad)
    yield from map(float, sorted(len(name) for name, _ in model.named_parameters()))


def freezing_the_first(model):
    for parameter in list(model.parameters())[:14]:
        parameter.requires_grad = False
    yield from steps(model, prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


def freezing_all_but_the_last(model):
    model.requires_grad_(False)
    for parameter in list(model.parameters())[-4:]:
        parameter.requires_grad_()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    yield from steps(model, prepare_optimizer(torch.optim.AdamW(trained, lr=0.01)))


def a_rate_for_each_place(model):
    groups = [{"params": [p], "lr": 0.02 * (i + 1)} for i, p in enumerate(model.parameters())]
    yield from steps(model, prepare_optimizer(torch.optim.SGD(groups, lr=0.1)))


def frozen_between_steps(model):
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for chosen in (slice(0, 12), slice(7, 20), slice(20, None)):
        for place, parameter in enumerate(model.parameters()):
            parameter.requires_grad_(place in range(40)[chosen])
        yield from steps(model, optimizer, count=1)


def gradients_by_place(model):
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        loss = model(**local_samples(model, make_batch(seed))).loss
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


def penalty_in_place(model):
    total = 0
    for parameter in model.parameters():
        total += parameter.float().pow(2).sum()
    return 0.01 * total


def penalty_of_a_sum(model):
    return sum((p**2).sum() * 2 for p in model.parameters() if p.dim() > 1) / 100 - 1.0


def penalty_of_a_stage(model):
    return -0.003 * sum(p.abs().sum() for name, p in model.named_parameters() if "layers.0." in name)


def penalties(model):
    for parameter in list(model.parameters())[:3]:
        parameter.requires_grad_(False)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for term in (penalty_in_place, penalty_of_a_sum, penalty_of_a_stage):
        yield from steps(model, optimizer, term)


def penalties_otherwise(model):
    """Sums that are scaled, accumulated in place, and differentiated by functions."""
    trained = list(model.parameters())
    optimizer = prepare_optimizer(torch.optim.SGD(trained, lr=0.1))
    for seed in range(2):
        loss = model(**local_samples(model, make_batch(seed))).loss
        yield loss.detach().clone()
        total = loss * 2
        for parameter in trained:
            total += 0.01 * parameter.pow(2).sum()
        if seed:
            torch.autograd.backward(total / 3)
        else:
            gradients = torch.autograd.grad(total / 3, trained)
            for parameter, gradient in zip(trained, gradients, strict=True):
                parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    yield model(**local_samples(model, make_batch(9))).loss.detach()


def average_by_place(model):
    mean = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for loss in steps(model, optimizer):
        yield loss
        torch._foreach_lerp_(mean, [p.detach() for p in model.parameters()], 0.3)
    with torch.no_grad():
        for place, (parameter, other) in enumerate(zip(model.parameters(), mean, strict=True)):
            parameter.copy_(other) if place % 2 else parameter.mul_(0.9)
    yield from steps(model, optimizer)


def an_optimizer_as_it_is(model):
    """Not prepared, where no dp ranks are."""
    optimizer = torch.optim.Adagrad(list(model.parameters())[3:], lr=0.05)
    yield from steps(model, optimizer)
    yield float(len(optimizer.param_groups[0]["params"]))


def casts(model):
    kept = list(model.parameters())
    model.double()
    assert all(parameter is other for parameter, other in zip(kept, model.parameters(), strict=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    assert {parameter.element_size() for parameter in model.parameters()} == {8}
    yield from steps(model, prepare_optimizer(torch.optim.SGD(kept, lr=0.1)))


def random_numbers(model):
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
            nn.init.normal_(parameter, std=0.1) if parameter.dim() > 1 else None
    yield torch.rand(())
    yield model(**local_samples(model, make_batch(9))).loss.detach()


def steps_without_an_optimizer(model):
    for seed in range(3):
        loss = model(**local_samples(model, make_batch(seed))).loss
        yield loss.detach().clone()
        loss.backward()
        for parameter in model.parameters():
            parameter.data.sub_(0.1 * parameter.grad.data)
            parameter.grad = None


def drawn_masks(model):
    torch.manual_seed(3)
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed in range(2):
        loss = model(**local_samples(model, make_batch(seed))).loss
        yield loss.detach().clone()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.mul_(torch.bernoulli(torch.full_like(parameter.grad, 0.4)))
        optimizer.step()
        optimizer.zero_grad()


def norms_in_hooks_before_steps(model):
    """Registered after the optimizer was prepared."""
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    found = []

    def clip(optimizer, args, kwargs):
        found.append(nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.3))
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5 + 0.01 * parameter.shape[0])

    optimizer.register_step_pre_hook(clip)
    yield from steps(model, optimizer)
    yield from found


def head_by_its_module(model):
    """Which has the embedding's weight where they are tied."""
    head = model.get_output_embeddings()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for seed, trains in enumerate((True, False, True)):
        head.requires_grad_(trains)
        loss = model(**local_samples(model, make_batch(seed))).loss
        yield loss.detach().clone()
        loss.backward()
        if trains:
            head.weight.grad.mul_(0.7)
            yield nn.utils.clip_grad_norm_(head.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        head.weight.mul_(0.9)
    yield from steps(model, optimizer, count=1)


def weights_by_the_type_of_their_module(model):
    found = [module for module in model.modules() if isinstance(module, nn.Linear)]
    yield from (float(len(found)), sum(module.out_features for module in found))
    yield len([module for module in model.modules() if type(module).__name__ == "LlamaMLP"])
    yield sum(module.variance_epsilon for module in model.modules() if isinstance(module, LlamaRMSNorm))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            module.requires_grad_(False)
    yield from steps(model, optimizer)
    with torch.no_grad():
        for module in found:
            module.weight.mul_(0.9)
            if module.bias is not None:
                module.bias.zero_()
    yield from steps(model, optimizer)


def weights_drawn_by_the_type_of_their_module(model):
    torch.manual_seed(4)
    model.apply(lambda module: nn.init.normal_(module.weight, std=0.1) if isinstance(module, nn.Linear) else None)
    yield torch.rand(())
    yield model(**local_samples(model, make_batch(9))).loss.detach()
    model.apply(model._init_weights)
    yield torch.rand(())
    yield from steps(model, prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1)))


LOOP_PATTERNS = (
    counts,
    freezing_the_first,
    freezing_all_but_the_last,
    a_rate_for_each_place,
    frozen_between_steps,
    gradients_by_place,
    penalties,
    penalties_otherwise,
    average_by_place,
    an_optimizer_as_it_is,
    casts,
    random_numbers,
    steps_without_an_optimizer,
    drawn_masks,
    norms_in_hooks_before_steps,
    head_by_its_module,
    weights_by_the_type_of_their_module,
    weights_drawn_by_the_type_of_their_module,
)


def is_possible(loop_pattern, text):
    """FSDP2 takes frozen and cast weights as they are in the first forward; see the table of docs/surface.md."""
    if text is not None and "dp2" in text and loop_pattern is an_optimizer_as_it_is:
        return False
    if (
        text is not None
        and "dp2" in text
        and loop_pattern in (steps_without_an_optimizer, drawn_masks, penalties_otherwise)
    ):
        return False
    if text == "tp2+pp2":
        return loop_pattern in (
            counts,
            penalties,
            random_numbers,
            head_by_its_module,
            weights_by_the_type_of_their_module,
        )
    return text != "pp2+dp2+zero3" or loop_pattern in (counts, freezing_the_first, a_rate_for_each_place, penalties)


def found_by(path, text, loop_patterns=LOOP_PATTERNS):
    found = {}
    for loop_pattern in loop_patterns:
        if is_possible(loop_pattern, text):
            numbers = [float(value) for value in loop_pattern(load(path, text))]
            found[loop_pattern.__name__] = torch.tensor(numbers, dtype=torch.float64)
    return found


def on_all_ranks(path, text, loop_patterns=LOOP_PATTERNS):
    """Every number's mean over dp ranks, whose losses are those of their rows."""
    ranks = run_ranks(lambda: found_by(path, text, loop_patterns), count_ranks(parse_layout(text)))
    return {name: torch.stack([found[name] for found in ranks]).mean(dim=0) for name in ranks[0]}


@pytest.mark.parametrize("text", LAYOUTS)
def test_patterns_are_equal_to_one_process(folder, text):
    expected = found_by(folder, None)
    for name, found in on_all_ranks(folder, text).items():
        torch.testing.assert_close(
            found, expected[name], rtol=2e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_a_list_of_this_ranks_weights_alone_is_seen(folder, monkeypatch):
    loop_patterns = (counts, freezing_the_first, freezing_all_but_the_last, a_rate_for_each_place, gradients_by_place)
    expected = found_by(folder, None, loop_patterns)
    monkeypatch.setattr(axis, "register_off_stage_weights", lambda model, names: None)
    for found in run_ranks(lambda: found_by(folder, "pp2", loop_patterns), 2):
        for name, numbers in found.items():
            same = numbers.shape == expected[name].shape
            assert not same or not torch.allclose(numbers, expected[name], rtol=2e-5), name


def test_what_needs_values_of_several_stages_is_refused(folder):
    def on_rank():
        model = load(folder, "pp2")
        loss = model(**make_batch(0)).loss
        loss.backward()
        off_stage = next(p for p in model.parameters() if isinstance(p, OffStageTensor))
        own = next(p for _, p in local_named_parameters(model) if p.dim() > 1)
        assert isinstance(off_stage, nn.Parameter) and isinstance(off_stage.grad, OffStageTensor)
        square = own.pow(2).sum() + off_stage.pow(2).sum()
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
            lambda: (0 + off_stage.pow(2).sum()).add_(own.pow(2).sum()) * off_stage.norm(),
            lambda: torch.sqrt(0 + off_stage.pow(2).sum().add_(own.pow(2).sum())),
            lambda: torch._foreach_lerp_([torch.zeros(off_stage.shape)], [off_stage.detach()], 0.5),
            lambda: own.data.copy_(off_stage) if own.shape == off_stage.shape else off_stage.tolist(),
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
