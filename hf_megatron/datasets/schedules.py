"""Megatron-LM's learning rate and weight decay schedules, which count samples, as a torch scheduler.

The formulas are from `megatron/core/optimizer_param_scheduler.py`, whose steps are samples.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..errors import DataError
from .argument_values import parse_integer, real_number, with_defaults
from .ramp_up import BatchRampUp


def _linear(passed: float) -> float:
    return 1.0 - passed


def _cosine(passed: float) -> float:
    return 0.5 * (math.cos(math.pi * passed) + 1.0)


# Remaining share of a decay as a function of the share that has passed.
_DECAYS: dict[str, Callable[[float], float]] = {"linear": _linear, "cosine": _cosine}
_WSD_DECAYS: dict[str, Callable[[float], float]] = {
    **_DECAYS,
    "exponential": lambda passed: 2.0 * math.pow(0.5, passed) - 1.0,
    "minus_sqrt": lambda passed: 1.0 - math.sqrt(passed),
}
_STYLES = ("constant", *_DECAYS, "inverse-square-root", "WSD")
_WEIGHT_DECAY_STYLES = ("constant", *_DECAYS)


@dataclass(frozen=True)
class MegatronSchedule:
    """Learning rate and weight decay as functions of the number of samples.

    Attributes:
        max_lr, min_lr, init_lr (`float`): after the warm-up, at the end, and at the first sample.
        warmup (`float`), decay (`int`): samples until the maximum and until the minimum learning rate.
        style (`str`): `"constant"`, `"linear"`, `"cosine"`, `"inverse-square-root"` or `"WSD"`.
        wsd_decay (`int`, *optional*): samples of the decay at the end of WSD.
        wsd_style (`str`): `"linear"`, `"cosine"`, `"exponential"` or `"minus_sqrt"`.
        start_weight_decay, end_weight_decay (`float`): at the beginning and the end.
        weight_decay_samples (`int`): samples until `end_weight_decay`.
        weight_decay_style (`str`): `"constant"`, `"linear"` or `"cosine"`.
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup: float = 0
    decay: int = 1
    style: str = "linear"
    wsd_decay: int | None = None
    wsd_style: str = "exponential"
    start_weight_decay: float = 0.01
    end_weight_decay: float = 0.01
    weight_decay_samples: int = 1
    weight_decay_style: str = "constant"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("style", self.style, _STYLES),
            ("wsd_style", self.wsd_style, _WSD_DECAYS),
            ("weight_decay_style", self.weight_decay_style, _WEIGHT_DECAY_STYLES),
        ):
            if value not in known:
                raise DataError(f"{name} = {value!r}: expected one of {', '.join(known)}.")
        if not (0 <= self.min_lr <= self.max_lr and self.init_lr <= self.max_lr):
            raise DataError(
                f"max_lr = {self.max_lr}, min_lr = {self.min_lr}, init_lr = {self.init_lr}: expected max_lr to be the "
                "largest."
            )
        if not 0 <= self.warmup < self.decay:
            raise DataError(f"warmup = {self.warmup}, decay = {self.decay} samples: expected warmup below decay.")
        if self.style == "WSD" and not 0 < (self.wsd_decay or 0) <= self.decay:
            raise DataError(f"wsd_decay = {self.wsd_decay}: expected above 0 and at most decay = {self.decay} samples.")
        if not 0 <= self.start_weight_decay <= self.end_weight_decay:
            raise DataError(
                f"start_weight_decay = {self.start_weight_decay}, end_weight_decay = {self.end_weight_decay}: expected "
                "no decrease."
            )

    def learning_rate(self, samples: int) -> float:
        """Returns the learning rate after `samples` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.init_lr + (self.max_lr - self.init_lr) * float(samples) / float(self.warmup)
        if self.style == "constant":
            return self.max_lr
        if samples > self.decay:
            return self.min_lr
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.max_lr * max(self.warmup, 1) ** 0.5 / max(samples, 1) ** 0.5)
        if self.style == "WSD":
            assert self.wsd_decay is not None
            passed = samples - (self.decay - self.wsd_decay)
            left = 1.0 if passed <= 0 else _WSD_DECAYS[self.wsd_style](float(passed) / float(self.wsd_decay))
        else:
            left = _DECAYS[self.style](float(samples - self.warmup) / float(self.decay - self.warmup))
        return self.min_lr + left * (self.max_lr - self.min_lr)

    def weight_decay(self, samples: int) -> float:
        """Returns the weight decay after `samples` samples."""
        if self.weight_decay_style == "constant" or samples > self.weight_decay_samples:
            return self.end_weight_decay
        passed = float(samples) / float(self.weight_decay_samples)
        share = passed if self.weight_decay_style == "linear" else 0.5 * (math.cos(math.pi * (1 - passed)) + 1.0)
        return self.start_weight_decay + share * (self.end_weight_decay - self.start_weight_decay)


class MegatronScheduler(LRScheduler):
    """Sets an optimizer's learning rates and weight decays as Megatron-LM does, by the number of samples seen.

        scheduler = MegatronScheduler(optimizer, schedule, samples_per_step=512)
        Trainer(..., optimizers=(optimizer, scheduler))

    Parameter groups without weight decay keep none. Checkpoints store the number of samples, so a run can resume with
    another batch size.

    Args:
        optimizer: the learning rates of its groups are replaced.
        schedule: learning rate and weight decay by number of samples.
        samples_per_step (`int` or `BatchRampUp`): of all replicas and all calls in a step.
        samples (`int`, defaults to 0): seen before, for example in a Megatron-LM run that is continued.

    Attributes:
        step_size (`int`, *optional*): samples of the current step, if they are counted. After skipped steps the
            schedule has seen fewer samples than the data loader.
    """

    def __init__(
        self, optimizer: Optimizer, schedule: MegatronSchedule, samples_per_step: int | BatchRampUp, samples: int = 0
    ):
        if (not isinstance(samples_per_step, BatchRampUp) and samples_per_step < 1) or samples < 0:
            raise DataError(
                f"samples_per_step = {samples_per_step}, samples = {samples}: expected 1 or more and 0 or more."
            )
        self.schedule, self.samples_per_step, self.samples = schedule, samples_per_step, samples
        self.step_size: int | None = None
        self._has_begun = False
        self._decays = [group.get("weight_decay", 0.0) != 0 for group in optimizer.param_groups]
        if schedule.end_weight_decay and not any(self._decays):
            raise DataError(
                f"The schedule sets weight decay to {schedule.end_weight_decay}, but no optimizer group has weight "
                "decay. Set it above 0 for the groups that need it (weight_decay of TrainingArguments or the "
                "optimizer)."
            )
        # The base constructor calls `step()`, which must not count samples.
        super().__init__(optimizer)
        self._has_begun = True

    def step(self, epoch: int | None = None) -> None:
        """Counts the samples of a step, and updates learning rates and weight decays."""
        if self._has_begun:
            sizes = self.samples_per_step
            known = sizes.batch_size(self.samples) if isinstance(sizes, BatchRampUp) else sizes
            self.samples += known if self.step_size is None else self.step_size
        super().step()
        for group, has_decay in zip(self.optimizer.param_groups, self._decays, strict=True):
            if has_decay:
                group["weight_decay"] = self.schedule.weight_decay(self.samples)

    def get_lr(self) -> list[float | Any]:
        """Returns the learning rate of each group."""
        return [self.schedule.learning_rate(self.samples)] * len(self.optimizer.param_groups)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"samples": self.samples, "last_epoch": self.last_epoch, "_last_lr": self._last_lr}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Resumes at the number of samples in a checkpoint."""
        if "samples" not in state_dict:
            raise DataError("The checkpoint's scheduler does not count samples.")
        self.samples, self.last_epoch = int(state_dict["samples"]), int(state_dict["last_epoch"])
        self._last_lr = self.get_lr()
        for group, rate, has_decay in zip(self.optimizer.param_groups, self._last_lr, self._decays, strict=True):
            group["lr"] = rate
            if has_decay:
                group["weight_decay"] = self.schedule.weight_decay(self.samples)


# Argument -> its default in Megatron-LM (`megatron/training/arguments.py`).
_DEFAULTS: dict[str, Any] = {
    "lr": None,
    "min_lr": 0.0,
    "lr_warmup_init": 0.0,
    "lr_decay_style": "linear",
    "lr_wsd_decay_style": "exponential",
    "lr_warmup_fraction": None,
    "lr_warmup_iters": 0,
    "lr_warmup_samples": 0,
    "lr_decay_iters": None,
    "lr_decay_samples": None,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "weight_decay": 0.01,
    "start_weight_decay": None,
    "end_weight_decay": None,
    "weight_decay_incr_style": "constant",
    "train_iters": None,
    "train_samples": None,
    "global_batch_size": None,
}


def schedule_from_megatron_args(arguments: Mapping[str, Any]) -> MegatronSchedule:
    """Returns the schedule of Megatron-LM's arguments, as in `get_optimizer_param_scheduler`.

    Args:
        arguments: by name, with or without leading dashes; numbers may be text.

    Raises:
        DataError: an argument that is not part of a schedule, or that is missing.
    """
    args = with_defaults(arguments, _DEFAULTS, "the schedule")
    if (args["train_iters"] is None) == (args["train_samples"] is None):
        raise DataError("expected either train_iters or train_samples, not both.")
    unit, other, batch = ("samples", "iters", 1)
    if args["train_iters"] is not None:
        unit, other, batch = ("iters", "samples", parse_integer(args, "global_batch_size", 1))
    for name in ("lr_warmup", "lr_decay", "lr_wsd_decay"):
        if args[f"{name}_{other}"]:
            raise DataError(
                f"{name}_{other} = {args[f'{name}_{other}']!r} is not valid with train_{unit}; use {name}_{unit}."
            )
    if args["lr_warmup_fraction"] is not None and args[f"lr_warmup_{unit}"]:
        raise DataError(f"lr_warmup_fraction and lr_warmup_{unit}: expected only one of them.")
    total = parse_integer(args, f"train_{unit}") * batch
    decay = total if args[f"lr_decay_{unit}"] is None else parse_integer(args, f"lr_decay_{unit}") * batch
    if args["lr_warmup_fraction"] is not None:
        warmup = real_number(args, "lr_warmup_fraction") * decay
    else:
        warmup = parse_integer(args, f"lr_warmup_{unit}") * batch
    wsd = args[f"lr_wsd_decay_{unit}"]
    style, end = args["weight_decay_incr_style"], real_number(args, "weight_decay")
    start = end
    if style != "constant":
        start, end = (real_number(args, name) for name in ("start_weight_decay", "end_weight_decay"))
    elif any(args[name] is not None for name in ("start_weight_decay", "end_weight_decay")):
        raise DataError(
            "start_weight_decay and end_weight_decay are not valid with weight_decay_incr_style='constant'; use "
            "weight_decay."
        )
    return MegatronSchedule(
        max_lr=real_number(args, "lr"),
        min_lr=real_number(args, "min_lr"),
        init_lr=real_number(args, "lr_warmup_init"),
        warmup=warmup,
        decay=decay,
        style=args["lr_decay_style"],
        wsd_decay=None if wsd is None else parse_integer(args, f"lr_wsd_decay_{unit}") * batch,
        wsd_style=args["lr_wsd_decay_style"],
        start_weight_decay=start,
        end_weight_decay=end,
        weight_decay_samples=total,
        weight_decay_style=style,
    )
