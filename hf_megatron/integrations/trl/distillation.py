"""TRL's distillation trainers, GKD and Distillation: per-token divergences instead of the logits of two models."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...losses.targets import IGNORE_INDEX, next_tokens
from ...parallel_state import parallel_state
from ...tensor_parallel.token_divergence import compute_divergences
from ...tensor_parallel.token_log_probs import hooked_call
from .base import get_policy_layout


def gkd_init(
    original: Callable,
    self: Any,
    model: Any = None,
    teacher_model: Any = None,
    args: Any = None,
    *rest: Any,
    **kwargs: Any,
) -> None:
    """Loads a teacher given by name with the student's layout, or with the teacher layout of `frozen_models`."""
    layout = get_policy_layout(model, args)
    if layout is None or not isinstance(teacher_model, str):
        return original(self, model, teacher_model, args, *rest, **kwargs)
    teacher_kwargs = args.teacher_model_init_kwargs
    # TRL reads the dtype from these kwargs if they are set.
    args.teacher_model_init_kwargs = {"dtype": None, "megatron_config": layout.get_frozen_config("teacher")} | (
        teacher_kwargs or {}
    )
    try:
        original(self, model, teacher_model, args, *rest, **kwargs)
    finally:
        args.teacher_model_init_kwargs = teacher_kwargs


def gkd_training_step(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Synchronizes the choice between student-generated and dataset texts of a step on all ranks."""
    state = parallel_state(self.model)
    if state is not None and dist.get_world_size() > 1:
        of_first = [random.getstate()]
        dist.broadcast_object_list(of_first, src=0, device=state.mesh.device)
        random.setstate(of_first[0])
    return original(self, *args, **kwargs)


def gkd_compute_loss(
    original: Callable, self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Returns GKD's loss `()`, the mean divergence over the targets of all replicas."""
    state = parallel_state(self.model)
    if state is None:
        return original(self, model, inputs, return_outputs, num_items_in_batch)
    # TRL 1.14 requests outputs in every evaluation, and passes separately whether they are read.
    is_loss_enough = inputs.pop("_prediction_loss_only", False) or self.args.prediction_loss_only
    self.teacher_model.eval()
    targets = next_tokens(inputs["labels"])
    divergences, _ = _divergences(self, inputs["input_ids"], inputs["attention_mask"], targets, temperature=1.0)
    if num_items_in_batch is None:
        loss = state.loss.mean(divergences.sum(), (targets != IGNORE_INDEX).sum(), at_least=1)
    else:
        # Each replica divides by the targets of all replicas, but gradients are averaged over dp: multiply by dp_size.
        loss = divergences.sum() / num_items_in_batch * state.mesh.dp_size
    if not return_outputs:
        return loss
    outputs = {"loss": loss} if is_loss_enough else original(self, model, inputs, True, num_items_in_batch)[1]
    return loss, outputs


def distillation_compute_loss(
    original: Callable, self: Any, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
) -> Any:
    """Returns the loss `()` on student-generated samples, over all replicas, and logs the student's entropy."""
    state = parallel_state(self.model)
    if state is None:
        return original(self, model, inputs, return_outputs, num_items_in_batch)
    self.teacher_model.eval()
    is_training = self.model.training
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attention_mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
    mask = inputs["completion_mask"]
    counted = mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]
    counted = torch.cat([torch.zeros_like(inputs["prompt_mask"]), counted], 1)
    targets = next_tokens(ids.masked_fill(counted == 0, IGNORE_INDEX))
    with state.loss.normalizing_over_ranks():
        divergences, entropy = _divergences(self, ids, attention_mask, targets, self.temperature)
        if is_training and inputs.get("num_items_in_batch") is not None:
            count = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            loss = divergences.sum() / count
        else:
            loss = state.loss.mean(divergences.sum(), (targets != IGNORE_INDEX).sum(), at_least=1)
    # Entropy is logged over the tokens of all replicas: sum `[entropy, tokens]` over dp.
    sums = torch.stack([entropy.sum(), (targets != IGNORE_INDEX).sum().float()])
    total, count = self.accelerator.reduce(sums, reduction="sum").tolist()
    self._metrics["train" if is_training else "eval"]["entropy"].append(total / count if count else 0.0)
    return (loss, None) if return_outputs else loss


def _divergences(
    trainer: Any, input_ids: Tensor, attention_mask: Tensor, targets: Tensor, temperature: float
) -> Sequence[Tensor]:
    batch = {"input_ids": input_ids, "attention_mask": attention_mask}
    student, teacher = trainer.accelerator.unwrap_model(trainer.model), trainer.teacher_model
    with trainer.accelerator.autocast():
        return compute_divergences(
            student,
            hooked_call(student, **batch),
            trainer.accelerator.unwrap_model(teacher),
            hooked_call(teacher, **batch),
            targets,
            trainer.beta,
            temperature,
        )
