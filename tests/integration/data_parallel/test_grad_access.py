"""Tests of sharded tensors read as Python values, text, arrays and files, and of loops that branch on them."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from hf_megatron import CheckpointError, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.training import PatternRuns, make_batch, make_parameters, parse_layout, shard_batch

LAYOUTS = ["tp2", "tp2+sp", "dp2", "dp2+zero2", "dp2+zero3", "tp2+dp2+zero3"]
LOOP_PATTERNS = {}


def loop_pattern(function):
    LOOP_PATTERNS[function.__name__] = function
    return function


@loop_pattern
def clip_by_item_norms(loop):
    for seed in range(3):
        loop.backward(seed)
        total = sum(p.grad.data.norm(2).item() ** 2 for p in loop.model.parameters()) ** 0.5
        loop.see(f"norm {seed}", total)
        for parameter in loop.model.parameters():
            parameter.grad.data.mul_(min(1.0, 0.3 / (total + 1e-6)))
            if parameter.grad.norm() > 0.05:
                parameter.grad.data.div_(float(parameter.grad.norm()) / 0.05)
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def skip_step_by_largest_entry(loop):
    for seed in range(4):
        loop.backward(seed)
        # Only one rank holds the largest entry.
        largest = max(p.grad.abs().max().item() for p in loop.model.parameters())
        row = loop.model.lm_head.weight.grad[-1].abs().max().item()
        loop.see(f"largest {seed}", torch.tensor([largest, row]))
        if seed == 1:
            loop.model.lm_head.weight.grad[66] = float("nan")
        if not any(bool(torch.isnan(p.grad).any()) for p in loop.model.parameters()) and row < 0.9 * largest:
            loop.optimizer.step()
        loop.optimizer.zero_grad()


def compute_penalty(loop):
    return sum(parameter.pow(2).sum() for name, parameter in loop.model.named_parameters() if "proj" in name)


def backward_and_step(loop, loss):
    loss.backward()
    loop.optimizer.step()
    loop.optimizer.zero_grad()


@loop_pattern
def accumulate_penalized_losses(loop):
    total, added, history = torch.tensor(0.0), torch.zeros(1, dtype=torch.float64), torch.zeros(3)
    for seed in range(3):
        loss = loop.loss(seed) + 1e-2 * compute_penalty(loop)
        backward_and_step(loop, loss)
        total += loss.detach()
        added.add_(loss.detach())
        history[seed] = loss.detach()
    loop.see("total", total)
    loop.see("added", added)
    loop.see("history", history)


@loop_pattern
def weight_losses_by_tensor(loop):
    for seed in range(3):
        square = loop.model.model.layers[0].self_attn.q_proj.weight
        orthogonal = ((square @ square.T - torch.eye(len(square))) ** 2).sum()
        losses = torch.stack([loop.loss(seed) + 0 * compute_penalty(loop), compute_penalty(loop), orthogonal])
        backward_and_step(loop, (losses * torch.tensor([0.7, 0.01, 1e-3])).sum())


@loop_pattern
def add_mean_penalties(loop):
    """Adds torch losses that divide by the number of entries, which must not be the size of a local shard."""
    losses = (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss, F.soft_margin_loss)
    for seed in range(3):
        terms = [
            losses[place % len(losses)](parameter, torch.ones_like(parameter))
            for place, parameter in enumerate(loop.model.parameters())
        ]
        backward_and_step(loop, loop.loss(seed) + sum(terms))


@loop_pattern
def clip_gradients_by_row_norms(loop):
    for seed in range(3):
        loop.backward(seed)
        for parameter in loop.model.parameters():
            if parameter.dim() > 1:
                largest = parameter.detach().norm(dim=1, keepdim=True).clamp_(min=1e-3).mul_(0.05)
                norms = parameter.grad.norm(dim=1, keepdim=True).clamp_(min=1e-6)
                parameter.grad.mul_((largest / norms).clamp_(max=1.0))
        loop.optimizer.step()
        loop.optimizer.zero_grad()


READINGS = {
    "norms": lambda t: [float(t.norm()), t.norm(1).item(), t.norm(math.inf).item(), torch.linalg.norm(t).item()],
    "sums": lambda t: [t.sum().item(), t.mean().item(), t.abs().max().item(), t.min().item(), t.std().item()],
    "roots": lambda t: [math.sqrt(t.pow(2).sum()), t[-1].sum().item(), t.logsumexp(0).sum().item()],
    "counts": lambda t: [t.count_nonzero().item(), int((t > 0.01).sum()), (t > 0.01).float().mean().item()],
    "text": lambda t: [float(f"{t.norm():.5f}"), float(f"{t.sum():8.4f}")],
    "lists": lambda t: t.tolist()[-1][:3] if t.dim() > 1 else t.tolist()[-3:],
    "arrays": lambda t: t.detach().cpu().numpy().reshape(-1)[-3:].tolist(),
    "histograms": lambda t: torch.histc(t, 5).tolist() + torch.histogram(t.flatten(), 4)[0].tolist(),
    "distances": lambda t: [F.mse_loss(t, 2 * t).item(), F.normalize(t, dim=None).sum().item()],
}


@loop_pattern
def log_statistics(loop):
    loop.backward(0)
    for name, parameter in loop.model.named_parameters():
        for what, read in READINGS.items():
            with torch.no_grad():
                loop.see(f"{what} of {name}", torch.tensor(read(parameter.data)))
                loop.see(f"{what} of the gradient of {name}", torch.tensor(read(parameter.grad)))
    loop.optimizer.step()


def make_weight_loop(edit):
    def train(loop):
        for seed in range(3):
            loop.step(seed)
            with torch.no_grad():
                edit(loop)

    train.__name__ = edit.__name__
    return loop_pattern(train)


@make_weight_loop
def fill_through_out_argument(loop):
    for layer in loop.model.model.layers:
        nn.init.eye_(layer.self_attn.q_proj.weight)
        torch.arange(32, out=layer.input_layernorm.weight.data)
        layer.input_layernorm.weight.data.div_(32)


@make_weight_loop
def scatter_into_weights(loop):
    weight = loop.model.lm_head.weight
    rows = torch.tensor([[1], [40], [66]]).expand(3, 32)
    weight.data.scatter_(0, rows, torch.full((3, 32), 0.1))
    weight.data.scatter_add_(0, rows, torch.arange(96.0).view(3, 32) / 500)
    weight.data.copy_(torch.renorm(weight.data, 2, 0, 0.7))


@make_weight_loop
def prune_columns_without_large_entries(loop):
    matrices = [parameter for parameter in loop.model.parameters() if parameter.dim() == 2]
    loop.see("counted", sum((weight.data > 0.05).any() for weight in matrices).float())
    loop.see("cast", (matrices[0].data > 0.05).any().int())
    for weight in matrices:
        # The columns that are kept are large on both shards.
        weight.mul_((weight.abs() > 0.05).any(dim=0).float())


@make_weight_loop
def add_leaky_noise(loop):
    torch.manual_seed(5)
    for parameter in loop.model.parameters():
        loop.see("leaky", F.rrelu(parameter.data, training=True).sum())
        F.rrelu_(parameter.data, 0.9, 1.1, training=True)
    loop.see("next", torch.rand(()))


BROADCASTS = {
    "row": lambda gradient: gradient.copy_(gradient[:1].expand_as(gradient)),
    "row by index": lambda gradient: gradient.copy_(gradient[0].expand(len(gradient), -1)),
    "column": lambda gradient: gradient.copy_(gradient[:, :1].expand_as(gradient)),
    "assigned row": lambda gradient: gradient.__setitem__(slice(None), gradient[0]),
    "data": lambda gradient: gradient.data.copy_(gradient.data[:1].expand_as(gradient)),
    "reshaped": lambda gradient: gradient.copy_(gradient[:1].expand_as(gradient).reshape(-1).view_as(gradient)),
    "transposed": lambda gradient: gradient.copy_(gradient.t().contiguous().t()),
}


@loop_pattern
def broadcast_entries_of_gradients(loop):
    for edit in BROADCASTS.values():
        loop.backward(0)
        for parameter in loop.model.parameters():
            if parameter.dim() == 2:
                edit(parameter.grad)
        loop.see("norm", torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0))
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@loop_pattern
def remove_parameters_from_group(loop):
    """A parameter outside the groups keeps its gradient, which is used when the parameter returns to its group."""
    group = loop.optimizer.param_groups[0]
    everything = list(group["params"])
    for seed in range(3):
        group["params"] = everything[: len(everything) // 2] if seed == 1 else everything
        loop.step(seed)


def list_group_parameters(loop):
    return [parameter for group in loop.optimizer.param_groups for parameter in group["params"]]


@loop_pattern
def use_parameters_through_groups(loop):
    for seed in range(4):
        loop.backward(seed)
        assert all(a is b for a, b in zip(list_group_parameters(loop), loop.parameters(), strict=True))
        if seed == 1:
            loop.see("norm", torch.nn.utils.clip_grad_norm_(list_group_parameters(loop), 0.1))
            loop.see("square", sum(parameter.grad.pow(2).sum().item() for parameter in list_group_parameters(loop)))
        elif seed == 2:
            torch.nn.utils.clip_grad_value_(list_group_parameters(loop), 1e-3)
            list_group_parameters(loop)[0].grad.mul_(0.5)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        with torch.no_grad():
            for parameter in list_group_parameters(loop):
                parameter.mul_(0.95)


@loop_pattern
def evaluate_in_inference_mode(loop):
    for seed in range(2):
        with torch.inference_mode():
            loop.see(f"loss {seed}", loop.model(**make_batch(seed + 20)).loss)
            loop.model.eval().generate(
                make_batch(0)["input_ids"][:, :4], max_new_tokens=2, do_sample=False, pad_token_id=0
            )
        loop.model.train()
        loop.step(seed)


# Patterns that read weights of other pipeline stages are not supported.
IMPOSSIBLE = {"pp2": LOOP_PATTERNS.keys() - {"evaluate_in_inference_mode", "remove_parameters_from_group"}}


@pytest.fixture(scope="module")
def runs(tiny_uneven):
    return PatternRuns(tiny_uneven, LOOP_PATTERNS, IMPOSSIBLE)


@pytest.mark.parametrize(("name", "text"), make_parameters(LOOP_PATTERNS, [*LAYOUTS, "pp2"], IMPOSSIBLE))
def test_matches_single_process(runs, name, text):
    runs.compare(text, name)


def save_and_load(path, text, folder):
    """Returns the loss of the saved weights, and the loss after these weights are changed and loaded again."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=parse_layout(text)).train()
    rows = shard_batch(model, make_batch(0))
    file = folder / str(dist.get_rank())
    torch.save(model.state_dict(), file)
    dist.barrier()
    if dist.get_rank() == 1:
        with pytest.raises(
            CheckpointError, match=r"by rank 0, and rank 1 holds another one.*or write one file per rank"
        ):
            torch.load(folder / "0")
    before = model(**rows).loss
    before.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(torch.load(file))
    return before.item(), model(**rows).loss.item()


@pytest.mark.parametrize("text", ["tp2", "dp2+zero3"])
def test_pickled_shard_loads_on_its_own_rank(tiny_uneven, tmp_path, text):
    for before, after in run_ranks(save_and_load, 2, tiny_uneven, text, tmp_path):
        assert after == before


def test_inplace_transpose_error_suggests_copy(tiny_uneven):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny_uneven, megatron_config=parse_layout("tp2"))
        weight = model.model.layers[0].mlp.down_proj.weight
        assert isinstance(weight, DTensor)
        with pytest.raises(Exception, match="weight.copy_"):
            nn.init.orthogonal_(weight)

    run_ranks(on_rank, 2)


SHAPE_EDITS = {
    "t_": lambda gradient: gradient.t_(),
    "transpose_": lambda gradient: gradient.data.transpose_(0, 1),
    "unsqueeze_": lambda gradient: gradient[:2].unsqueeze_(0),
}


@pytest.mark.parametrize("layout", ["dp2", "tp2+dp2"])
def test_edits_of_a_gradients_shape_are_rejected(stories, layout):
    """A proxy has no memory to reshape: its entries would be read in another order."""
    config = parse_layout(layout)

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config).train()
        ids = torch.arange(12).view(2, 6)
        model(input_ids=ids, labels=ids).loss.backward()
        weight = model.model.layers[0].self_attn.k_proj.weight
        before = weight.grad.clone()
        for name, edit in SHAPE_EDITS.items():
            with pytest.raises(UnsupportedError, match=name):
                edit(weight.grad)
        assert weight.grad.t().shape == before.t().shape
        weight.grad.detach_()
        assert bool((weight.grad == before).all())

    run_ranks(on_rank, config.ranks_per_replica * config.dp_size)


def assign_flat_gradients(model):
    parameters = list(model.parameters())
    flat = torch.zeros(sum(parameter.numel() for parameter in parameters))
    start = 0
    for parameter in parameters:
        parameter.grad = flat[start : start + parameter.numel()].view(parameter.shape)
        start += parameter.numel()
    return flat


def assign_held_gradients(model):
    buffers = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for parameter, buffer in zip(model.parameters(), buffers, strict=True):
        parameter.grad = buffer
    return buffers


@pytest.mark.parametrize("assign", [assign_flat_gradients, assign_held_gradients])
@pytest.mark.parametrize("layout", ["dp2+zero0", "dp2", "dp2+zero2"])
def test_gradient_buffers_of_a_loop_are_rejected_before_backward(stories, layout, assign):
    """A backward would not add to them: a norm that is read from a flat buffer would be 0."""
    config = parse_layout(layout)

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config).train()
        ids = torch.arange(12).view(2, 6)
        buffer = assign(model)
        with pytest.raises(UnsupportedError, match="still holds"):
            model(input_ids=ids, labels=ids).loss.backward()
        assert not any(map(torch.count_nonzero, buffer))
        for parameter in model.parameters():
            parameter.grad = None
        model(input_ids=ids, labels=ids).loss.backward()
        # Gradients that nothing else refers to are taken over.
        ones = [torch.ones_like(parameter) for parameter in model.parameters()]
        for parameter, one in zip(model.parameters(), ones, strict=True):
            parameter.grad = one.clone()
        model(input_ids=ids, labels=ids).loss.backward()
        return float(model.lm_head.weight.grad.mean())

    for mean in run_ranks(on_rank, 2):
        assert mean == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("layout", ["tp2", "dp2+zero3"])
def test_views_of_flat_weights_are_rejected(stories, layout):
    """A sharded weight would be a copy, and the flat buffer would stop following it."""
    config = parse_layout(layout)

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
        weights = list(model.parameters())
        flat = torch.cat([weight.data.reshape(-1) for weight in weights])
        with pytest.raises(UnsupportedError, match="view of a larger tensor"):
            weights[0].data = flat[: weights[0].numel()].view_as(weights[0])
        linear = nn.Linear(4, 4)
        with pytest.raises(UnsupportedError, match="plain parameter"):
            linear.weight.data = model.model.layers[0].mlp.up_proj.weight.data
        copied = flat[: weights[0].numel()].view_as(weights[0]).clone()
        weights[0].data = copied
        # The shard is a copy, as docs/surface.md says.
        with torch.no_grad():
            weights[0].zero_()
        assert copied.any()
        weights[0].data = copied
        linear.weight.data = model.model.layers[0].mlp.up_proj.weight.full_tensor()
        return float(linear.weight.detach().norm()), float(weights[0].detach().norm())

    norms = run_ranks(on_rank, 2)
    assert norms[0] == norms[1] and all(norms[0])
