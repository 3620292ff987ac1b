"""Tests of learning-rate and weight-decay schedules against Megatron-Core's scheduler."""

import logging
import random
import types

import pytest
import torch

from hf_megatron.datasets.schedules import MegatronSchedule, MegatronScheduler, schedule_from_megatron_args
from hf_megatron.errors import DataError

STYLES = ["constant", "linear", "cosine", "inverse-square-root", "WSD"]
WSD_STYLES = ["linear", "cosine", "exponential", "minus_sqrt"]


def draw_schedule(seed):
    """Returns random schedule arguments, the batch size and the number of iterations."""
    generator = random.Random(seed)
    batch, iterations = generator.randrange(1, 9), generator.randrange(4, 40)
    decay = generator.randrange(2, iterations + 4)
    end = generator.choice([0.1, 0.3])
    style = generator.choice(["constant", "linear", "cosine"])
    arguments = {
        "lr": generator.choice([3e-4, 1.0]),
        "min-lr": generator.choice([0.0, 1e-5]),
        "lr-warmup-init": generator.choice([0.0, 1e-6]),
        "lr-decay-style": generator.choice(STYLES),
        "lr-wsd-decay-style": generator.choice(WSD_STYLES),
        "lr-warmup-iters": generator.randrange(0, decay),
        "lr-decay-iters": decay,
        "lr-wsd-decay-iters": generator.randrange(1, decay + 1),
        "weight-decay": end,
        **({} if style == "constant" else {"start-weight-decay": 0.01, "end-weight-decay": end}),
        "weight-decay-incr-style": style,
        "train-iters": iterations,
        "global-batch-size": batch,
    }
    return arguments, batch, iterations


@pytest.mark.parametrize("seed", range(60))
def test_equals_megatron_core(seed):
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler")
    logging.getLogger(module.__name__).setLevel(logging.ERROR)
    arguments, batch, iterations = draw_schedule(seed)
    groups = [{"wd_mult": 1.0}, {"wd_mult": 0.0}]
    constant = arguments["weight-decay-incr-style"] == "constant"
    peer = module.OptimizerParamScheduler(
        types.SimpleNamespace(param_groups=groups),
        arguments["lr-warmup-init"],
        arguments["lr"],
        arguments["min-lr"],
        arguments["lr-warmup-iters"] * batch,
        arguments["lr-decay-iters"] * batch,
        arguments["lr-decay-style"],
        arguments["weight-decay"] if constant else arguments["start-weight-decay"],
        arguments["weight-decay"] if constant else arguments["end-weight-decay"],
        iterations * batch,
        arguments["weight-decay-incr-style"],
        wsd_decay_steps=arguments["lr-wsd-decay-iters"] * batch,
        lr_wsd_decay_style=arguments["lr-wsd-decay-style"],
    )
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}], lr=7.0)
    scheduler = MegatronScheduler(optimizer, schedule_from_megatron_args(arguments), batch)
    for _ in range(iterations + 6):
        for group, other in zip(optimizer.param_groups, groups, strict=True):
            assert (group["lr"], group["weight_decay"]) == (other["lr"], other["weight_decay"])
        optimizer.step()
        scheduler.step()
        peer.step(batch)


def test_resumes_with_another_batch_size():
    def make_scheduler(batch):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, weight_decay=0.01)
        return optimizer, MegatronScheduler(optimizer, MegatronSchedule(1.0, decay=64, style="cosine"), batch)

    optimizer, scheduler = make_scheduler(4)
    for _ in range(6):
        optimizer.step()
        scheduler.step()
    other, restored = make_scheduler(8)
    restored.load_state_dict(scheduler.state_dict())
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == restored.schedule.learning_rate(24)
    other.step()
    restored.step()
    assert restored.samples == 32 and restored.get_last_lr() == [restored.schedule.learning_rate(32)]
    with pytest.raises(DataError, match="does not count samples"):
        restored.load_state_dict(torch.optim.lr_scheduler.LambdaLR(other, lambda step: 1.0).state_dict())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lr": 1.0, "train-iters": 10}, "global_batch_size = None"),
        ({"lr": 1.0}, "either train_iters or train_samples"),
        ({"lr": 1.0, "train-samples": 10, "lr-decay-style": "cubic"}, "style = 'cubic'"),
        ({"lr": 1.0, "train-samples": 10, "lr-warmup-samples": 10}, "expected warmup below decay"),
        ({"lr": 1.0, "train-samples": 10, "lr-decay-style": "WSD"}, "wsd_decay = None"),
        ({"lr": 1.0, "train-samples": 10, "min-lr": 2.0}, "expected max_lr to be the largest"),
        ({"lr": 1.0, "train-samples": 10, "tensor-parallel-size": 2}, "not an argument of the schedule"),
        ({"train-samples": 10}, "lr = None"),
        ({"lr": 1.0, "train-samples": 10, "lr-warmup-iters": 2}, "with train_samples; use lr_warmup_samples"),
        (
            {"lr": 1.0, "train-iters": 10, "global-batch-size": 2, "lr-decay-samples": 4},
            "with train_iters; use lr_decay_iters",
        ),
        (
            {"lr": 1.0, "train-samples": 10, "lr-warmup-samples": 2, "lr-warmup-fraction": 0.1},
            "lr_warmup_fraction and lr_warmup_samples",
        ),
        ({"lr": 1.0, "train-samples": 10, "end-weight-decay": 0.1}, "use weight_decay"),
        ({"lr": 1.0, "train-samples": 10, "weight-decay": "a"}, "weight_decay = 'a': expected a number"),
    ],
)
def test_invalid_arguments_are_rejected(given, message):
    with pytest.raises(DataError, match=message):
        schedule_from_megatron_args(given)


def test_unused_weight_decay_is_reported():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(DataError, match="no optimizer group has weight decay"):
        MegatronScheduler(optimizer, MegatronSchedule(1.0), 1)
    MegatronScheduler(optimizer, MegatronSchedule(1.0, start_weight_decay=0.0, end_weight_decay=0.0), 1)
