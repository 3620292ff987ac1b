"""Tests of a non-finite gradient on one rank: all ranks skip the step and keep the optimizer state unchanged."""

import types
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_megatron import MegatronConfig, NonFiniteGradientError, prepare_optimizer
from hf_megatron.compat.graph_leaves import read_local
from hf_megatron.compat.torch_autograd import accumulator
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.compat.torch_memory import LateCopy
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import finite_verdict, grad_scaler
from hf_megatron.data_parallel.output_checks import skip_comparison
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import (
    backward,
    clone_parameters,
    count_ranks,
    load_model,
    make_batch,
    measure_error,
    parameters_unchanged,
    parse_layout,
    shard_batch,
    train,
)

LIMIT = 2e-4
LAYOUTS = ["dp2", "dp2+zero0", "tp2+dp2+zero2", "dp2+zero3", "tp2"]


def make_adamw(model, **kwargs):
    return prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, **kwargs))


class SpoilHandle:
    """Hook on a gradient accumulator, which it keeps alive: autograd recreates a node without references."""

    def __init__(self, node, hook):
        self.node, self.handle = node, node.register_prehook(hook)

    def remove(self):
        self.handle.remove()


def spoil_gradient_entry(model, rank, value=float("inf")):
    """Sets an entry of a gradient to `value` on one rank until the returned handle is removed."""
    layer = model.model.layers[1].mlp.up_proj

    def spoil(gradient):
        gradient = gradient.clone()
        if dist.get_rank() == rank:
            local_tensor(gradient)[0, 0] = value
        return gradient

    class SpoiledGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            return output.view_as(output)

        @staticmethod
        def backward(ctx, gradient):
            return spoil(gradient)

    def spoil_output(module, args, output):
        return SpoiledGradient.apply(output)

    if parallel_state(model).shards_weights:
        # FSDP2 computes with unsharded tensors, not with the parameters themselves.
        return layer.register_forward_hook(spoil_output)
    # Forwards differentiate a plain leaf that shares the memory of a sharded weight.
    leaf = read_local(layer.weight) if isinstance(layer.weight, DTensor) else layer.weight
    model.spoiled = SpoilHandle(accumulator(leaf), lambda gradients: (spoil(gradients[0]),))
    return model.spoiled


def copy_optimizer_state(optimizer):
    """Copies the full optimizer state, in parameter order."""
    return [
        (name, key, value.clone() if isinstance(value, torch.Tensor) else value)
        for name, state in optimizer.state_dict()["state"].items()
        for key, value in state.items()
    ]


def are_states_equal(one, other):
    def equal(a, b):
        return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b

    return len(one) == len(other) and all(a[:2] == b[:2] and equal(a[2], b[2]) for a, b in zip(one, other, strict=True))


@contextmanager
def without_reading():
    """Rejects reads of a verdict inside that the device is computing; the one on an earlier step is known."""
    init, read, made = LateCopy.__init__, LateCopy.read, []

    def record(copy, tensor):
        made.append(copy)
        init(copy, tensor)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(LateCopy, "__init__", record)
        patches.setattr(LateCopy, "read", lambda copy: pytest.fail("the host waits") if copy in made else read(copy))
        yield


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_all_ranks_skip_and_training_resumes(stories, text, value, fused):
    """The run matches a single-process run without the bad batch."""

    def run(model):
        optimizer = make_adamw(model, fused=fused)
        train(model, optimizer, 2)
        if parallel_state(model) is not None:
            engine, weights, state = (
                parallel_state(model).data_parallel,
                clone_parameters(model),
                copy_optimizer_state(optimizer),
            )
            optimizer.zero_grad()
            loss = model(**shard_batch(model, make_batch(99))).loss
            (loss * value if dist.get_rank() == 1 else loss).backward()
            with without_reading() if fused else nullcontext():
                optimizer.step()
            assert not hasattr(optimizer, "found_inf")
            assert optimizer._hf_megatron.step_was_skipped and engine.step_status.skipped_steps == 1
            assert parameters_unchanged(model, weights)
            assert are_states_equal(state, copy_optimizer_state(optimizer))
        train(model, optimizer, 1, first=2)
        if parallel_state(model) is not None:
            assert not optimizer._hf_megatron.step_was_skipped and engine.step_status.skipped_steps == 1
            assert not are_states_equal(state, copy_optimizer_state(optimizer)), "the comparison sees a step"

    assert measure_error(stories, run, parse_layout(text)) < LIMIT


@pytest.mark.parametrize("text", LAYOUTS)
def test_one_nonfinite_entry_skips_all_ranks(stories, text):
    """Only the rank that owns the non-finite entry sees it."""

    def on_rank():
        model = load_model(stories, parse_layout(text))
        optimizer, before = make_adamw(model), clone_parameters(model)
        spoil_gradient_entry(model, rank=1)
        backward(model)
        optimizer.step()
        skipped = parameters_unchanged(model, before)
        return skipped, parallel_state(model).data_parallel.step_status.skipped_steps

    assert run_ranks(on_rank, count_ranks(parse_layout(text))) == [(True, 1)] * count_ranks(parse_layout(text))


@pytest.mark.parametrize("text", ["dp2", "tp2"])
@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adagrad])
def test_fused_optimizers_skip_on_the_device(stories, text, optimizer_class):
    """Clipping leaves the verdict on the device, too."""

    def run(model):
        optimizer = prepare_optimizer(optimizer_class(model.parameters(), lr=1e-3, fused=True))
        for step in range(3):
            spoiled = parallel_state(model) is not None and step == 1
            if not spoiled and step == 1:
                continue
            optimizer.zero_grad()
            handle, before = spoil_gradient_entry(model, 1) if spoiled else None, clone_parameters(model)
            with without_reading() if parallel_state(model) is not None else nullcontext():
                backward(model, (2 * step, 2 * step + 1))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            if handle is not None:
                handle.remove()
            assert parameters_unchanged(model, before) == spoiled

    assert measure_error(stories, run, parse_layout(text)) < LIMIT


def test_momentum_is_not_left_to_the_device(stories):
    """torch's fused SGD creates it uninitialized in a step that it skips."""

    def run(model):
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True))
        if parallel_state(model) is not None:
            handle = spoil_gradient_entry(model, 1)
            backward(model)
            handle.remove()
            optimizer.step()
            assert optimizer._hf_megatron.step_was_skipped and not optimizer.state_dict()["state"]
        train(model, optimizer, 2)

    assert measure_error(stories, run, parse_layout("dp2")) < LIMIT


def test_a_step_that_is_not_skipped_by_the_device_is_detected(stories, monkeypatch):
    monkeypatch.setattr(finite_verdict.FiniteVerdict, "__init__", take_all_for_finite)

    def on_rank():
        model = load_model(stories, parse_layout("dp2"))
        optimizer, before = make_adamw(model, fused=True), clone_parameters(model)
        spoil_gradient_entry(model, rank=1)
        backward(model)
        optimizer.step()
        return parameters_unchanged(model, before)

    assert run_ranks(on_rank, 2) == [False, False]


def take_all_for_finite(verdict, total):
    verdict.found_inf = torch.zeros_like(total)
    verdict._copy = LateCopy(verdict.found_inf)


def test_too_many_steps_skipped_on_the_device_raise_in_the_next(stories):
    config = MegatronConfig(**parse_layout("dp2").to_dict() | {"max_skipped_steps": 2})

    def on_rank():
        model = load_model(stories, config)
        optimizer = make_adamw(model, fused=True)
        spoil_gradient_entry(model, 1)
        for _ in range(2):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        optimizer.zero_grad()
        backward(model)
        with pytest.raises(NonFiniteGradientError, match="2 consecutive optimizer steps"):
            optimizer.step()
        return parallel_state(model).data_parallel.step_status.skipped_steps

    assert run_ranks(on_rank, 2) == [2, 2]


@pytest.mark.parametrize("text", ["dp2", "dp2+zero3"])
def test_too_many_skipped_steps_raise(stories, text):
    config = MegatronConfig(**parse_layout(text).to_dict() | {"max_skipped_steps": 3})

    def on_rank():
        model = load_model(stories, config)
        optimizer = make_adamw(model)

        def step(spoiled):
            optimizer.zero_grad()
            handle = spoil_gradient_entry(model, 1) if spoiled else None
            backward(model)
            if handle is not None:
                handle.remove()
            optimizer.step()

        for spoiled in (True, True, False, True, True):
            step(spoiled)
        with pytest.raises(NonFiniteGradientError, match="3 consecutive optimizer steps"):
            step(True)
        return parallel_state(model).data_parallel.step_status.skipped_steps

    assert run_ranks(on_rank, 2) == [5, 5]


@pytest.mark.parametrize("text", ["dp2", "tp2+dp2+zero0"])
@pytest.mark.parametrize("clipped", [False, True])
def test_accelerate_scheduler_follows_skipped_steps(stories, text, clipped):
    from accelerate import Accelerator

    def on_rank():
        model = load_model(stories, parse_layout(text))
        accelerator = Accelerator(cpu=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        history = []
        for spoiled in (False, True, False):
            handle = spoil_gradient_entry(model, 1) if spoiled else None
            accelerator.backward(model(**shard_batch(model, make_batch(3))).loss)
            if clipped:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            history.append((optimizer.step_was_skipped, scheduler.get_last_lr()[0]))
            if handle is not None:
                handle.remove()
        return history

    # Accelerate steps the scheduler once for each of the two data-parallel replicas.
    expected = [(False, 2.5e-4), (True, 2.5e-4), (False, 6.25e-5)]
    assert run_ranks(on_rank, count_ranks(parse_layout(text))) == [expected] * count_ranks(parse_layout(text))


# fp16 loss scaling


def run_scaled_step(model, optimizer, scaler, seeds, max_norm=None):
    optimizer.zero_grad()
    backward(model, seeds, scaler.scale)
    if max_norm is not None:
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        assert not torch.isfinite(norm) or norm > 2 * max_norm, "nothing was clipped"
    scaler.step(optimizer)
    scaler.update()


def make_scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)


@pytest.mark.parametrize("max_norm", [None, 0.1])
@pytest.mark.parametrize("text", ["dp2", "tp2+dp2+zero2", "dp2+zero3", "tp2"])
def test_fault_22_overflow_on_one_rank_skips_all_ranks(stories, text, max_norm):
    """The other two steps match a single-process run with the same scaler and without the overflow."""

    def run(model):
        optimizer, parallel = make_adamw(model), parallel_state(model) is not None
        scaler = make_scaler()
        for step in range(3):
            if step == 1 and not parallel:
                continue
            handle = spoil_gradient_entry(model, 1) if step == 1 else None
            before, state = clone_parameters(model), copy_optimizer_state(optimizer) if step == 1 else None
            run_scaled_step(model, optimizer, scaler, (2 * step, 2 * step + 1), max_norm)
            if handle is not None:
                handle.remove()
                assert parameters_unchanged(model, before)
                assert are_states_equal(state, copy_optimizer_state(optimizer))
        assert scaler.get_scale() == (2.0**9 if parallel else 2.0**10)
        assert not parallel or parallel_state(model).data_parallel.step_status.skipped_steps == 1

    assert measure_error(stories, run, parse_layout(text)) < LIMIT


@pytest.mark.parametrize(
    ("text", "fused", "clipping"),
    [
        ("dp2", False, None),
        ("dp2", False, 0.1),
        ("dp2", True, None),
        ("dp2", True, 0.1),
        ("tp2+dp2+zero2", False, 0.1),
        ("dp2+zero3", False, 0.1),
    ],
)
def test_fault_22_scaled_equals_unscaled(stories, text, fused, clipping):
    """Without an overflow; `gradient_clipping` of the config applies to the unscaled gradients."""

    def run(model):
        optimizer = make_adamw(model, fused=fused)
        if parallel_state(model) is None:
            for step in range(3):
                optimizer.zero_grad()
                backward(model, (2 * step, 2 * step + 1))
                if clipping is not None:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), clipping)
                optimizer.step()
            return
        scaler = make_scaler()
        for step in range(3):
            run_scaled_step(model, optimizer, scaler, (2 * step, 2 * step + 1))
        assert scaler.get_scale() == 2.0**10

    config = MegatronConfig(**parse_layout(text).to_dict() | {"gradient_clipping": clipping})
    assert measure_error(stories, run, config) < LIMIT


def test_fault_22_fused_optimizer_skips_too(stories):
    """A fused optimizer is called in any case and receives `found_inf` with the gradients."""

    def on_rank():
        model = load_model(stories, parse_layout("dp2"))
        optimizer, before, scaler = make_adamw(model, fused=True), clone_parameters(model), make_scaler()
        spoil_gradient_entry(model, 1)
        run_scaled_step(model, optimizer, scaler, (0, 1))
        skipped = parameters_unchanged(model, before)
        return skipped, scaler.get_scale(), parallel_state(model).data_parallel.step_status.skipped_steps

    assert run_ranks(on_rank, 2) == [(True, 2.0**9, 1)] * 2


def test_fault_22_ranks_diverge_without_shared_status(stories):
    """Seeded fault: each rank checks only its own shards."""

    def on_rank(seeded):
        if seeded:
            grad_scaler.dist = types.SimpleNamespace(all_reduce=lambda *args, **kwargs: None, ReduceOp=dist.ReduceOp)
        model = load_model(stories, parse_layout("tp2"))
        # Ranks that skip a step would leave the others waiting in this comparison.
        skip_comparison(parallel_state(model))
        optimizer, before, scaler = make_adamw(model), clone_parameters(model), make_scaler()
        spoil_gradient_entry(model, 1)
        run_scaled_step(model, optimizer, scaler, (0, 1))
        return parameters_unchanged(model, before), scaler.get_scale()

    assert run_ranks(on_rank, 2, False) == [(True, 2.0**9), (True, 2.0**9)]
    assert run_ranks(on_rank, 2, True) == [(False, 2.0**10), (True, 2.0**9)]
