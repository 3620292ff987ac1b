"""Tests of sharded optimizers against single-process training; errors are relative to the movement of the weights."""

import copy
import functools
import pickle

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.optim.lr_scheduler import ExponentialLR

from hf_megatron import CheckpointError, ConfigError, MegatronConfig, UnsupportedError, prepare_optimizer
from hf_megatron.checkpoint.initialize import local_part
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import bucket_assignment, grad_reducer, optimizer_classes
from hf_megatron.data_parallel import distributed_optimizer as optimizers
from hf_megatron.data_parallel.buckets import Bucket
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import (
    backward,
    clone_parameters,
    count_ranks,
    gather_gradients,
    gather_weights,
    load_model,
    make_batch,
    measure_error,
    measure_movement_error,
    parameters_unchanged,
    parse_layout,
    restore_parameters,
    shard_batch,
    train,
)

LIMIT = 2e-4


def adamw(parameters, **kwargs):
    return torch.optim.AdamW(parameters, **({"lr": 1e-3, "eps": 1e-4} | kwargs))


def make_param_groups(model):
    decays = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return [{"params": others, "lr": 1e-2, "weight_decay": 0.0}, {"params": decays, "weight_decay": 0.5}]


# Arguments of each class; eps keeps round-off in gradients near zero from becoming full steps.
ARGUMENTS = {
    "ASGD": {"lr": 1e-1},
    "Adadelta": {"lr": 1.0, "eps": 1e-4},
    "Adagrad": {"lr": 1e-3, "eps": 1e-4},
    "Adam": {"lr": 1e-3, "eps": 1e-4},
    "AdamW": {"lr": 1e-3, "eps": 1e-4},
    "Adamax": {"lr": 1e-3, "eps": 1e-4},
    "NAdam": {"lr": 1e-3, "eps": 1e-4},
    "RAdam": {"lr": 1e-1, "eps": 1e-4},
    "RMSprop": {"lr": 1e-3, "eps": 1e-4},
    "Rprop": {"lr": 1e-3},
    "SGD": {"lr": 1e-1, "momentum": 0.9, "nesterov": True},
}


def _make_factories():
    makers = {
        name: lambda model, name=name: getattr(torch.optim, name)(model.parameters(), **ARGUMENTS[name])
        for name in sorted(optimizer_classes.ELEMENTWISE["torch"])
    }
    for kwargs in ({"foreach": True}, {"foreach": False}, {"fused": True}, {"amsgrad": True}):
        name = f"AdamW {kwargs}"
        makers[name] = lambda model, kwargs=kwargs: adamw(model.parameters(), **kwargs)
    makers["SGD fused"] = lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9, fused=True)
    makers["Adagrad that starts at 0.5"] = lambda model: torch.optim.Adagrad(
        model.parameters(), lr=1e-3, initial_accumulator_value=0.5
    )
    makers["AdamW with groups"] = lambda model: adamw(make_param_groups(model))
    return makers


MAKERS = _make_factories()


def train_with_each(path, config):
    """Returns the trained weights by name of the optimizer."""
    model = load_model(path, config)
    start, trained_weights = clone_parameters(model), {}
    for name, make in MAKERS.items():
        restore_parameters(model, start)
        train(model, prepare_optimizer(make(model)))
        trained_weights[name] = gather_weights(model)
    return trained_weights


@pytest.fixture(scope="module")
def by_optimizer(stories):
    @functools.cache
    def train_layout(text):
        if text is None:
            return train_with_each(stories, None)
        config = parse_layout(text)
        return [full for full in run_ranks(train_with_each, count_ranks(config), stories, config) if full["SGD"]]

    return train_layout


@pytest.mark.parametrize("text", ["dp2", "tp2+dp2"])
@pytest.mark.parametrize("name", MAKERS)
def test_elementwise_optimizers(stories, by_optimizer, name, text):
    start, expected, results = gather_weights(load_model(stories)), by_optimizer(None)[name], by_optimizer(text)
    assert len(results) == 2
    for full in results:
        assert measure_movement_error(full[name], expected, start) < LIMIT


def test_all_elementwise_torch_classes_are_covered():
    assert set(ARGUMENTS) == optimizer_classes.ELEMENTWISE["torch"]


# Seeded faults of this file's comparison


def skip_param_all_gather():
    optimizers.ShardedOptimizer.publish = lambda self, moved: None


def roll_gradients():
    """Each entry is updated with the gradient of its neighbor in the local segment."""
    original = grad_reducer.GradientReducer.list_gradients
    grad_reducer.GradientReducer.list_gradients = lambda self: {
        key: shard.roll(1) for key, shard in original(self).items()
    }


@pytest.mark.parametrize("fault", [skip_param_all_gather, roll_gradients], ids=lambda fault: fault.__name__)
def test_faults_are_detected(stories, fault):
    error = measure_error(
        stories, lambda m: train(m, prepare_optimizer(adamw(m.parameters()))), parse_layout("dp2"), fault
    )
    assert error > 100 * LIMIT


def test_wrong_learning_rate_is_detected(stories):
    def run(model):
        factor = 1.0 if parallel_state(model) is None else 1.01
        train(model, prepare_optimizer(adamw(model.parameters(), lr=1e-3 * factor)))

    assert measure_error(stories, run, parse_layout("dp2")) > 10 * LIMIT


# Schedulers and state


@pytest.mark.parametrize("text", ["dp2", "tp2+dp2"])
def test_schedulers_created_before_and_after_prepare(stories, text):
    def run(model, before=0.5):
        optimizer = adamw(make_param_groups(model))
        first = ExponentialLR(optimizer, before)
        optimizer = prepare_optimizer(optimizer)
        second = ExponentialLR(optimizer, 0.7)
        train(model, optimizer, schedulers=[first, second])
        assert second.get_last_lr() == pytest.approx([1e-2 * 0.35**3, 1e-3 * 0.35**3])

    assert measure_error(stories, run, parse_layout(text)) < LIMIT


@pytest.mark.parametrize("text", ["dp2", "tp2+dp2+zero2", "dp2+zero3"])
def test_state_dict_round_trip_is_bitwise_identical(stories, text):
    def on_rank():
        model = load_model(stories, parse_layout(text))
        optimizer = prepare_optimizer(adamw(make_param_groups(model)))
        train(model, optimizer, 2)
        state, middle = copy.deepcopy(optimizer.state_dict()), clone_parameters(model)
        names = {name for name, _ in model.named_parameters()}
        assert set(state["state"]) == names
        assert {name for group in state["param_groups"] for name in group["params"]} == names
        train(model, optimizer, 2, first=2)
        expected = clone_parameters(model)

        results = []
        for load_it in (True, False):
            restore_parameters(model, middle)
            again = prepare_optimizer(adamw(make_param_groups(model)))
            if load_it:
                again.load_state_dict(state)
            train(model, again, 2, first=2)
            results.append(parameters_unchanged(model, expected))
        return results

    # Without its state the optimizer reaches other weights.
    assert run_ranks(on_rank, count_ranks(parse_layout(text))) == [[True, False]] * count_ranks(parse_layout(text))


def test_state_with_unknown_parameters_is_rejected(stories):
    def on_rank():
        model = load_model(stories, parse_layout("dp2"))
        optimizer = prepare_optimizer(adamw(model.parameters()))
        state = optimizer.state_dict()
        state["param_groups"][0]["params"][0] = "another.weight"
        with pytest.raises(ConfigError, match="another.weight"):
            optimizer.load_state_dict(state)

    run_ranks(on_rank, 2)


def test_state_shrinks_with_dp_size(stories):
    def state_bytes(config=None):
        model = load_model(stories, config)
        optimizer = prepare_optimizer(adamw(model.parameters()))
        train(model, optimizer, 1)
        tensors = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
        return sum(t.untyped_storage().nbytes() for t in tensors)

    full_bytes = state_bytes()
    for ranks in (2, 4):
        for local_bytes in run_ranks(state_bytes, ranks, MegatronConfig(dp_size=ranks)):
            assert local_bytes == pytest.approx(full_bytes / ranks, rel=0.02)
    for local_bytes in run_ranks(state_bytes, 2, MegatronConfig(dp_size=2, zero_stage=0)):
        assert local_bytes == full_bytes


def test_deleted_optimizers_are_freed(stories):
    import gc
    import weakref

    def on_rank():
        model = load_model(stories, parse_layout("dp2"))
        optimizer = prepare_optimizer(adamw(model.parameters()))
        train(model, optimizer, 1)
        reference = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        return reference() is None

    assert run_ranks(on_rank, 2) == [True, True]


# Parameter selection


def freeze_except(model, *trainable):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trainable))


@pytest.mark.parametrize("text", ["dp2", "dp2+zero0", "tp2+sp+dp2+zero2", "dp2+zero3"])
def test_freezing_and_unfreezing(stories, text):
    """The optimizer holds all parameters from the start."""

    def run(model):
        optimizer = prepare_optimizer(adamw(model.parameters(), weight_decay=0.5))
        freeze_except(model, "q_proj")
        train(model, optimizer, 2)
        freeze_except(model, "q_proj", "layernorm", "mlp")
        train(model, optimizer, 2, first=2)
        optimizer.zero_grad()
        before = clone_parameters(model)
        freeze_except(model, "mlp")
        train(model, optimizer, 1, first=4)
        optimizer.zero_grad()
        for name, value in clone_parameters(model).items():
            assert ("mlp" in name) != torch.equal(value, before[name]), name

    assert measure_error(stories, run, parse_layout(text)) < LIMIT


@pytest.mark.parametrize("text", ["dp2", "dp2+zero0", "tp2+sp+dp2+zero2", "dp2+zero3"])
def test_unfrozen_parameters_added_as_group(stories, text):
    def run(model):
        freeze_except(model, "q_proj")
        optimizer = prepare_optimizer(adamw([p for p in model.parameters() if p.requires_grad]))
        train(model, optimizer, 2)
        freeze_except(model, "q_proj", "down_proj", "layernorm")
        added = [p for n, p in model.named_parameters() if "down_proj" in n or "layernorm" in n]
        optimizer.add_param_group({"params": added, "lr": 1e-2})
        train(model, optimizer, 2, first=2)

    assert measure_error(stories, run, parse_layout(text)) < LIMIT


@pytest.mark.parametrize("text", ["dp2", "tp2+dp2", "dp2+zero0"])
def test_two_optimizers_on_one_model(stories, text):
    """`zero_grad` of one optimizer keeps the other's gradients, which continue to accumulate."""

    def run(model):
        mlp = [p for n, p in model.named_parameters() if "mlp" in n]
        others = [p for n, p in model.named_parameters() if "mlp" not in n]
        first, second = prepare_optimizer(adamw(mlp)), prepare_optimizer(torch.optim.SGD(others, lr=1e-1))
        for step in range(2):
            backward(model, (2 * step, 2 * step + 1))
            first.step()
            first.zero_grad()
            backward(model, (step + 7,))
            second.step()
            second.zero_grad()

    assert measure_error(stories, run, parse_layout(text)) < LIMIT


def test_parameter_outside_model_is_rejected(stories):
    def on_rank():
        model = load_model(stories, parse_layout("dp2"))
        parameters = [*model.parameters(), torch.nn.Parameter(torch.zeros(3))]
        with pytest.raises(ConfigError, match=r"shape \(3,\)"):
            prepare_optimizer(adamw(parameters))

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("text", ["tp2", "dp2+zero0", "dp2", "dp2+zero3", "pp2"])
def test_one_optimizer_for_two_models_is_rejected(stories, text):
    def on_rank():
        first, second = load_model(stories, parse_layout(text)), load_model(stories, parse_layout(text))
        optimizer = adamw([*first.parameters(), *second.parameters()])
        with pytest.raises(ConfigError, match="Create one optimizer per model"):
            prepare_optimizer(optimizer)
        accelerator = Accelerator(cpu=True)
        with pytest.raises(ConfigError, match="Create one optimizer per model"):
            accelerator.prepare(first, second, optimizer)

    run_ranks(on_rank, 2)


# Accumulation windows


def largest_difference(found, expected):
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


def use_collectives():
    """Uses the code path of backends with native collectives, here with gloo's collectives."""
    torch.distributed.get_backend = lambda group=None: "nccl"


def keep_reduced_shard_in_buffer():
    use_collectives()

    def open_buffer(bucket):
        bucket.in_rows = False
        if bucket.rows is None:
            bucket.rows = bucket._make_rows(bucket.ranks)
        return bucket.rows

    Bucket.open_buffer = open_buffer


@pytest.mark.parametrize(
    ("text", "prepare", "is_right"),
    [
        ("dp2", None, True),
        ("dp2+zero0", None, True),
        ("dp2+zero2", None, True),
        ("dp4+replicas2", None, True),
        ("dp2", use_collectives, True),
        ("dp2+zero2", use_collectives, True),
        ("dp2", keep_reduced_shard_in_buffer, False),
    ],
)
def test_accumulation_with_no_sync_and_zero_grad(stories, text, prepare, is_right):
    reference = load_model(stories)
    backward(reference, (0, 1, 2))
    expected = gather_gradients(reference)

    def on_rank():
        if prepare is not None:
            prepare()
        model = load_model(stories, parse_layout(text))
        optimizer = prepare_optimizer(adamw(model.parameters()))
        errors = []
        for forget in (optimizer.zero_grad, model.zero_grad):
            backward(model, (0, 1, 2))
            errors.append(largest_difference(gather_gradients(model), expected))
            forget()
            assert all(gradient is None for gradient in gather_gradients(model).values())
            for seed in (0, 1, 2):
                (model(**shard_batch(model, make_batch(seed))).loss / 3).backward()
            errors.append(largest_difference(gather_gradients(model), expected))
            forget()
            # Partial windows are discarded, reduced or not.
            (model(**shard_batch(model, make_batch(5))).loss / 3).backward()
            forget()
            with model.no_sync():
                (model(**shard_batch(model, make_batch(6))).loss / 3).backward()
            forget()
        # Gradients of two windows must differ from gradients of one window.
        backward(model, (0, 1, 2))
        backward(model, (0, 1, 2))
        return max(errors), largest_difference(gather_gradients(model), expected)

    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for error, twice in run_ranks(on_rank, count_ranks(parse_layout(text))):
        assert (error < 1e-5 * scale) == is_right
        assert twice > 0.5 * scale


@pytest.mark.parametrize("text", ["dp2", "dp2+zero2", "tp2+dp2"])
def test_no_sync_reduces_once_per_window(stories, text):
    def on_rank():
        bucket_assignment.default_capacity = lambda *args, **kwargs: 2**17
        model = load_model(stories, parse_layout(text))
        reducer = parallel_state(model).data_parallel.reducer
        sends, send = [], torch.distributed.isend
        torch.distributed.isend = lambda tensor, **kwargs: sends.append(tensor) or send(tensor, **kwargs)
        backward(model, (0, 1, 2))
        reducer.finish()
        with_no_sync = len(sends)
        reducer.discard()
        for seed in (0, 1, 2):
            model(**shard_batch(model, make_batch(seed))).loss.backward()
        reducer.finish()
        return len(reducer.buckets), with_no_sync, len(sends) - with_no_sync

    for bucket_count, with_no_sync, without in run_ranks(on_rank, count_ranks(parse_layout(text))):
        assert bucket_count > 3 and with_no_sync == bucket_count and without == 3 * bucket_count


@pytest.mark.parametrize("text", ["dp2", "dp2+zero0"])
def test_layer_skipped_by_one_rank(stories, text):
    """One rank has no gradient for some buckets and starts its reductions later than the other."""

    def skip(model):
        model.model.layers[-1].forward = lambda hidden_states, *args, **kwargs: hidden_states

    def half(seed, rank):
        model = load_model(stories)
        part = {name: value.tensor_split(2)[rank] for name, value in make_batch(seed).items()}
        targets = (make_batch(seed)["labels"][:, 1:] != -100).sum()
        if rank == 1:
            skip(model)
        (model(**part, num_items_in_batch=targets).loss).backward()
        return gather_gradients(model)

    expected = {}
    for seed, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
        for name, gradient in half(seed, rank).items():
            if gradient is not None:
                expected[name] = expected.get(name, 0) + gradient

    def on_rank():
        bucket_assignment.default_capacity = lambda *args, **kwargs: 2**17
        model = load_model(stories, parse_layout(text))
        if torch.distributed.get_rank() == 1:
            skip(model)
        for seed in (3, 4):
            model(**shard_batch(model, make_batch(seed))).loss.backward()
            model.zero_grad()
        for seed in (0, 1):
            model(**shard_batch(model, make_batch(seed))).loss.backward()
        return largest_difference(gather_gradients(model), expected)

    scale = max(gradient.abs().max().item() for gradient in expected.values())
    for error in run_ranks(on_rank, 2):
        assert error < 1e-5 * scale


# Half precision and offload

STEPS = 8


def train_bf16_single_process(stories, start):
    """Trains a bf16 model with separate fp32 main weights."""
    model = load_model(stories, dtype=torch.bfloat16)
    main = {name: start[name].clone().requires_grad_() for name, _ in model.named_parameters()}
    optimizer = adamw(main.values(), lr=1e-5)
    for step in range(STEPS):
        model.zero_grad()
        backward(model, (2 * step,))
        for name, parameter in model.named_parameters():
            main[name].grad = parameter.grad.float()
        optimizer.step()
        restore_parameters(model, main)
    return main


@pytest.mark.parametrize("text", ["dp2", "tp2", "tp2+dp2"])
def test_bf16_parameters_follow_fp32(stories, text):
    """Steps of 1e-5 are below the bf16 spacing of 1e-3, so that only fp32 main weights can represent them."""
    rounded = load_model(stories, dtype=torch.bfloat16)
    start = {name: parameter.detach().float() for name, parameter in rounded.named_parameters()}
    exact = load_model(stories)
    restore_parameters(exact, start)
    reference = adamw(exact.parameters(), lr=1e-5)
    for step in range(STEPS):
        reference.zero_grad()
        backward(exact, (2 * step,))
        reference.step()
    expected = clone_parameters(exact)
    allowed = measure_movement_error(train_bf16_single_process(stories, start), expected, start)

    def on_rank():
        model = load_model(stories, parse_layout(text), dtype=torch.bfloat16)
        optimizer = prepare_optimizer(adamw(model.parameters(), lr=1e-5))
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model, (2 * step,))
            optimizer.step()
        state = parallel_state(model)
        squared_error = squared_movement = moved = 0.0
        for leaf in optimizer._hf_megatron.leaves:
            assert leaf.tensor.dtype is torch.float32 and leaf.parameter.dtype is torch.bfloat16

            def local_segment(full, leaf=leaf):
                place = state.shardings[leaf.name].placement
                local = local_part(full, place, state.axes).reshape(-1)
                return local[leaf.start : leaf.stop]

            main, begin, end = (
                leaf.tensor.detach().reshape(-1),
                local_segment(start[leaf.name]),
                local_segment(expected[leaf.name]),
            )
            assert torch.equal(leaf.view().reshape(-1), main.bfloat16()), leaf.name
            squared_error += (main - end).double().pow(2).sum().item()
            squared_movement += (end - begin).double().pow(2).sum().item()
            moved += (main != begin).sum().item() / begin.numel() if begin.numel() else 1.0
        return squared_error, squared_movement, moved / len(optimizer._hf_megatron.leaves)

    results = run_ranks(on_rank, count_ranks(parse_layout(text)))
    error = (
        sum(squared_error for squared_error, _, _ in results)
        / sum(squared_movement for _, squared_movement, _ in results)
    ) ** 0.5
    assert error < 1.5 * allowed, (error, allowed)
    assert all(moved > 0.9 for _, _, moved in results)


def test_bf16_without_main_params_stalls(stories):
    """The test above fails without main weights."""

    def on_rank():
        config = MegatronConfig(dp_size=2, fp32_main_params=False)
        model = load_model(stories, config, dtype=torch.bfloat16)
        before = clone_parameters(model)
        optimizer = prepare_optimizer(adamw(model.parameters(), lr=1e-5))
        train(model, optimizer, 3)
        after = clone_parameters(model)
        return sum((after[n] != before[n]).sum().item() for n in before) / sum(p.numel() for p in before.values())

    assert all(moved < 0.1 for moved in run_ranks(on_rank, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offload_is_bitwise_identical(stories, dtype):
    def on_rank(stage):
        results = []
        for offload in (False, True):
            model = load_model(
                stories, MegatronConfig(dp_size=2, zero_stage=stage, offload_optimizer=offload), dtype=dtype
            )
            train(model, prepare_optimizer(adamw(make_param_groups(model))), 2)
            results.append(clone_parameters(model))
        return all(
            torch.equal(results[0][name].view(torch.uint8), v.view(torch.uint8)) for name, v in results[1].items()
        )

    for stage in (0, 1):
        assert run_ranks(on_rank, 2, stage) == [True, True]


# Optimizer classes


class Unknown(torch.optim.SGD):
    pass


REJECTED = {
    "LBFGS is not supported": lambda model: torch.optim.LBFGS(model.parameters()),
    "Unknown is not known to be elementwise": lambda model: Unknown(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("text", ["dp2", "tp2", "tp2+dp2+zero0", "dp2+zero3"])
def test_non_elementwise_classes_are_rejected(stories, text):
    def on_rank():
        model = load_model(stories, parse_layout(text))
        for message, make in REJECTED.items():
            with pytest.raises(UnsupportedError, match=message):
                prepare_optimizer(make(model))

    run_ranks(on_rank, count_ranks(parse_layout(text)))


def test_zero_stage_0_accepts_any_class(stories):
    def run(model):
        train(model, prepare_optimizer(Unknown(model.parameters(), lr=1e-1)))

    assert measure_error(stories, run, parse_layout("dp2+zero0")) < LIMIT


@pytest.mark.parametrize("declaration", ["elementwise", "layer_wise"])
def test_unknown_class_is_declared(stories, declaration):
    """The two cures of the error that rejects an unknown class."""

    def run(model):
        optimizer = Unknown(model.parameters(), lr=1e-1)
        if parallel_state(model) is not None:
            with pytest.raises(UnsupportedError, match=f"Unknown is not known to be elementwise .*{declaration}=True"):
                prepare_optimizer(optimizer)
        train(model, prepare_optimizer(optimizer, **{declaration: True}))

    assert measure_error(stories, run, parse_layout("tp2+dp2")) < LIMIT


def test_one_declaration_is_accepted(stories):
    def on_rank():
        model = load_model(stories, parse_layout("tp2"))
        with pytest.raises(ConfigError, match="set one of them"):
            prepare_optimizer(Unknown(model.parameters()), elementwise=True, layer_wise=True)
        prepare_optimizer(Unknown(model.parameters()), layer_wise=True)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("text", ["dp2", "dp2+zero0"])
def test_unprepared_optimizer_step_is_rejected(stories, text):
    def on_rank():
        model = load_model(stories, parse_layout(text))
        optimizer = adamw(model.parameters())
        backward(model)
        parallel_state(model).data_parallel.reducer.finish()
        with pytest.raises(ConfigError, match="prepare_optimizer"):
            optimizer.step()

    run_ranks(on_rank, 2)


def test_closure_is_rejected(stories):
    def on_rank():
        model = load_model(stories, parse_layout("dp2"))
        optimizer = prepare_optimizer(adamw(model.parameters()))
        backward(model)
        parallel_state(model).data_parallel.reducer.finish()
        with pytest.raises(UnsupportedError, match="closure"):
            optimizer.step(lambda: model(**shard_batch(model, make_batch())).loss)
        with pytest.raises(UnsupportedError, match="closure"):
            optimizer.step(closure=lambda: 0.0)

    run_ranks(on_rank, 2)


def test_stepped_optimizer_is_rejected(stories):
    def on_rank():
        model = load_model(stories, parse_layout("tp2"))
        optimizer = adamw([p for n, p in model.named_parameters() if "mlp" in n])
        backward(model)
        optimizer.step()
        with pytest.raises(ConfigError, match="stepped already"):
            prepare_optimizer(optimizer)

    run_ranks(on_rank, 2)


# Norm and clipping


@pytest.mark.parametrize("text", ["dp2", "tp2+dp2", "tp2+sp+dp2+zero0", "dp4+replicas2", "tp2+dp2+zero3"])
def test_norm_and_clipping_with_frozen_parameters(stories, text):
    """Clips with Accelerate, torch and the config, one step each."""
    from accelerate import Accelerator
    from torch.nn.utils import clip_grad_norm_

    norms = []

    def run(model):
        freeze_except(model, "mlp", "norm", "q_proj")
        accelerator = Accelerator(cpu=True) if parallel_state(model) is not None else None
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        for step, by in enumerate(("accelerate", "torch", "config")):
            optimizer.zero_grad()
            backward(model, (2 * step, 2 * step + 1))
            if accelerator is None:
                norms.append(clip_grad_norm_(model.parameters(), 0.1).item())
            elif by != "config":
                clip = accelerator.clip_grad_norm_ if by == "accelerate" else clip_grad_norm_
                assert clip(model.parameters(), 0.1).item() == pytest.approx(norms[step], rel=1e-5)
            optimizer.step()
        assert min(norms) > 0.2, "nothing was clipped"

    config = MegatronConfig(**parse_layout(text).to_dict() | {"gradient_clipping": 0.1})
    assert measure_error(stories, run, config) < LIMIT


@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "SGD"])
def test_elementwise_optimizers_with_sharded_weights(stories, name):
    assert (
        measure_error(stories, lambda m: train(m, prepare_optimizer(MAKERS[name](m))), parse_layout("dp2+zero3"))
        < LIMIT
    )


@pytest.mark.parametrize("text", ["dp2", "tp2"])
def test_prepared_optimizer_cannot_be_copied(stories, text):
    def on_rank():
        optimizer = prepare_optimizer(adamw(load_model(stories, parse_layout(text)).parameters()))
        for take in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedError, match="cannot be copied or pickled"):
                take(optimizer)

    run_ranks(on_rank, 2)


def make_muon(parameters):
    return torch.optim.Muon([parameter for parameter in parameters if parameter.ndim == 2], lr=1e-3)


@pytest.mark.parametrize(("text", "make"), [("dp2", adamw), ("tp2", adamw), ("dp2+zero3", adamw), ("dp2", make_muon)])
def test_state_dict_of_another_rank_is_rejected(stories, text, make):
    """As after `if rank == 0: torch.save(optimizer.state_dict(), file)`; Muon's full parameters have one owner each."""

    def on_rank():
        model = load_model(stories, parse_layout(text))
        optimizer = prepare_optimizer(make(model.parameters()))
        train(model, optimizer, steps=1)
        states = [None, None]
        dist.all_gather_object(states, optimizer.state_dict())
        with pytest.raises(CheckpointError, match="another rank's or layout's shard of .* use accelerator.save_state"):
            optimizer.load_state_dict(states[1 - dist.get_rank()])
        optimizer.load_state_dict(states[dist.get_rank()])
        train(model, optimizer, steps=1, first=1)

    run_ranks(on_rank, 2)


def test_state_dict_of_a_replica_is_accepted(stories):
    """Without ZeRO every data-parallel rank has the full state."""

    def on_rank():
        model = load_model(stories, parse_layout("dp2+zero0"))
        optimizer = prepare_optimizer(adamw(model.parameters()))
        states = [None, None]
        dist.all_gather_object(states, optimizer.state_dict())
        optimizer.load_state_dict(states[1 - dist.get_rank()])

    run_ranks(on_rank, 2)
