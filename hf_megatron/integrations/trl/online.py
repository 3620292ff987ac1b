"""TRL's trainers that generate within a step, GRPO and RLOO: the ranks of a model-parallel group count as one.

generate            the ranks of a replica sample the same tokens (`generation.py`)
rewards             functions are called once per replica, models by all of its ranks
groups, logs        gathered over the replicas
samples of a step   shuffled over all replicas, as in a single process with the same completions
"""

import functools
import random
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ...config import MegatronConfig
from ...core.axes import REPLICA_AXES
from ...core.communication.rng import broadcast_state
from ...errors import UnsupportedError
from ...expert_parallel.router_replay import ABSENT
from ...parallel_state import ParallelState, parallel_state
from ..accelerate.gathering import EvaluationLoss
from .routing import COMPLETIONS, PROMPTS, replaying, replays, with_routing

# Trainer that prepares the samples of a step.
_TRAINER: ContextVar[Any] = ContextVar("trainer that makes the rows of a step", default=None)
# Name of the reward function that this rank calls for its replica.
_CALLS_ALONE: ContextVar[str | None] = ContextVar("reward function that one rank calls", default=None)


def prepare_inputs(original: Callable, self: Any, generation_batch: Any) -> Any:
    """Prepares this rank's samples of a step, with the trainer set for `shuffle`."""
    token = _TRAINER.set(self)
    try:
        return original(self, generation_batch)
    finally:
        _TRAINER.reset(token)


def generate_and_score(original: Callable, self: Any, inputs: Any) -> Any:
    """Generates and scores completions for the prompts of this replica."""
    is_replaying = parallel_state(self.model) is not None and replays(self)
    return with_routing(lambda: original(self, inputs)) if is_replaying else original(self, inputs)


def calculate_rewards(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Returns the rewards `[global batch, functions]`; each function is called on one rank of a replica."""
    state = parallel_state(self.model)
    if state is None or state.config.ranks_per_replica == 1:
        return original(self, *args, **kwargs)
    functions = self.reward_funcs
    failures: list[BaseException] = []
    is_first = _is_first(state)
    self.reward_funcs = [_called_once(function, is_first, failures) for function in functions]
    try:
        rewards = original(self, *args, **kwargs)
    finally:
        self.reward_funcs = functions
    # Logs and random state of the reward functions exist on the first rank only: broadcast them, because all ranks
    # shuffle samples next and must do it identically.
    logs, failed = (self._pending_extra_logs, self._pending_metrics), repr(failures[0]) if failures else None
    payload: list[Any] = [(rewards.cpu(), logs, random.getstate(), numpy.random.get_state(), failed)]
    _from_first_rank(state, payload)
    of_first, (self._pending_extra_logs, self._pending_metrics), of_python, of_numpy, failed = payload[0]
    if failures:
        raise failures[0]
    if failed is not None:
        raise RuntimeError(f"A reward function failed on another rank of this replica: {failed}")
    random.setstate(of_python)
    numpy.random.set_state(of_numpy)
    mesh = state.mesh
    broadcast_state(mesh.device, *(mesh.host_group(axis) for axis in REPLICA_AXES))
    return of_first.to(rewards.device)


class _Alone:
    """A reward function call on one rank of a replica; exceptions are recorded until all ranks can raise.

    Args:
        function: name of the function.
        failures: list that receives an exception.
    """

    def __init__(self, function: str, failures: list[BaseException]):
        self.function, self.failures = function, failures

    def __enter__(self) -> None:
        self._token = _CALLS_ALONE.set(self.function)
        self._guard = register_module_forward_pre_hook(_reject_split_model)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._guard.remove()
        _CALLS_ALONE.reset(self._token)
        if not isinstance(error, Exception):
            return False
        self.failures.append(error)
        return True


def _called_once(function: Any, is_first: bool, failures: list[BaseException]) -> Any:
    """Returns a reward function that only runs on the first rank of a replica; reward models run on all ranks."""
    if isinstance(function, nn.Module):
        return function
    name = getattr(function, "__name__", type(function).__name__)

    @functools.wraps(function)
    def call(*args: Any, completions: Any, **kwargs: Any) -> Any:
        if is_first:
            with _Alone(name, failures):
                return _require_one_each(name, function(*args, completions=completions, **kwargs), completions)
        # Placeholder rewards `[completions]`, overwritten by the first rank's broadcast.
        return [0.0] * len(completions)

    @functools.wraps(function)
    async def call_later(*args: Any, completions: Any, **kwargs: Any) -> Any:
        if is_first:
            with _Alone(name, failures):
                rewards = await function(*args, completions=completions, **kwargs)
                return _require_one_each(name, rewards, completions)
        return [0.0] * len(completions)

    from trl.trainer.utils import is_async_callable

    return call_later if is_async_callable(function) else call


def _require_one_each(name: str, rewards: Any, completions: Any) -> Any:
    """Raises, as TRL does, unless there is one reward per completion; raised here so that all ranks learn of it."""
    if len(rewards) != len(completions):
        raise ValueError(
            f"The reward function {name!r} returned {len(rewards)} rewards for {len(completions)} completions."
        )
    return rewards


def _reject_split_model(module: nn.Module, args: Any) -> None:
    """Raises if a reward function calls a parallelized model, because only one of its ranks makes the call."""
    if (function := _CALLS_ALONE.get()) is not None and parallel_state(module) is not None:
        raise UnsupportedError(
            f"The reward function {function} calls {type(module).__name__} on only one of the ranks that share a "
            "batch, but the model is sharded over all of them. Pass the model itself in reward_funcs, or load it "
            "without megatron_config."
        )


def _is_first(state: ParallelState) -> bool:
    mesh = state.mesh
    return all(dist.get_rank(group) == 0 for group in (mesh.tp_group, mesh.group("cp"), mesh.pp_group))


def _from_first_rank(state: ParallelState, objects: list[Any]) -> None:
    for axis in REPLICA_AXES:
        group = state.mesh.host_group(axis)
        if group.size() > 1:
            dist.broadcast_object_list(objects, group=group, group_src=0)


def shuffle(original: Callable, seq_dict: dict[str, Any]) -> dict[str, Any]:
    """Shuffles the samples of all replicas together and returns this replica's, as in a single process."""
    trainer = _TRAINER.get()
    state = None if trainer is None else parallel_state(trainer.model)
    if state is None or state.mesh.dp_size == 1 or not all(map(_is_tensor, seq_dict.values())):
        return original(seq_dict)
    group = state.mesh.group("dp")
    global_batch = {name: _gather_replicas(name, value, trainer, group) for name, value in seq_dict.items()}
    count = max(len(value) for value in global_batch.values() if value is not None and value.dim())
    # Use the first replica's permutation: its random state matches the single-process run.
    order = torch.randperm(count).to(state.mesh.device)
    dist.broadcast(order, group=group, group_src=0)
    local_order = order[state.mesh.dp_rank :: state.mesh.dp_size]
    return {
        name: value[local_order.to(value.device)] if _has_rows(value) else value for name, value in global_batch.items()
    }


def _is_tensor(value: Any) -> bool:
    return value is None or isinstance(value, Tensor)


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _gather_replicas(name: str, value: Any, trainer: Any, group: Any) -> Any:
    """Gathers `[batch, ...]` of all replicas, padded as TRL does: prompts on the left, with the pad token."""
    if not _has_rows(value):
        return value
    if value.dim() > 1:
        # all_gather needs equal shapes: pad `[batch, tokens, ...]` to the longest sequence of all replicas.
        width = torch.tensor(value.shape[1], device=value.device)
        dist.all_reduce(width, dist.ReduceOp.MAX, group=group)
        missing = int(width) - value.shape[1]
        token = trainer._tokenizer.pad_token_id
        fill = {"prompt_ids": token, "completion_ids": token, PROMPTS: ABSENT, COMPLETIONS: ABSENT}.get(name, 0)
        sides = (missing, 0) if name.startswith("prompt_") else (0, missing)
        value = F.pad(value, (0, 0) * (value.dim() - 2) + sides, value=fill)
    value = value.contiguous()
    parts = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, value, group=group)
    return torch.cat(parts)


def compute_global_loss(original: Callable, self: Any, model: Any, inputs: Any) -> Tensor:
    """Computes the loss `()` over the samples of all replicas, also for losses that are not means over samples."""
    state = parallel_state(self.model)
    # Evaluations also span all replicas, for the router loss: every replica has full batches.
    with nullcontext() if state is None else state.loss.normalizing_over_ranks(), replaying(self, inputs):
        loss = original(self, model, inputs)
    if state is None or not state.loss.has_data_parallel:
        return loss
    if vars(self).get("loss_type") != "bnpo":
        return loss
    if self.aux_loss_enabled:
        raise UnsupportedError(
            f'loss_type="bnpo" is not supported with a router loss on {state.mesh.dp_size} data-parallel ranks. Set '
            "router_aux_loss_coef=0.0, or use another loss_type."
        )
    # "bnpo" divides by the tokens of the batch: weight this rank's mean by its share of the global token count.
    mask = inputs["completion_mask"]
    local_count = (mask if "tool_mask" not in inputs else mask * inputs["tool_mask"]).sum().float()
    total = local_count.clone()
    dist.all_reduce(total, group=state.mesh.group("dp"))
    # As TRL does: count at least one token.
    return loss * local_count.clamp(min=1) * state.mesh.dp_size / total.clamp(min=1)


def load_reward_models(functions: Any, args: Any, layout: MegatronConfig) -> Any:
    """Replaces names of reward models by models, if `frozen_models` declares a layout for them."""
    names = functions if isinstance(functions, list) else [functions]
    if not (layout.frozen_models or {}).get("reward") or not any(isinstance(name, str) for name in names):
        return functions
    from transformers import AutoModelForSequenceClassification

    kwargs = (
        {"device_map": None} | (args.model_init_kwargs or {}) | {"megatron_config": layout.get_frozen_config("reward")}
    )
    loader: Any = AutoModelForSequenceClassification
    return [loader.from_pretrained(name, num_labels=1, **kwargs) if isinstance(name, str) else name for name in names]


def predict_over_replicas(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the loss `()` of an evaluation step, averaged over all replicas."""
    loss, *rest = original(self, *args, **kwargs)
    state = parallel_state(self.model)
    if state is not None and state.loss.has_data_parallel:
        loss = loss.clone()
        state.loss.average_over_ranks_(loss)
        loss = loss.as_subclass(EvaluationLoss)
    return loss, *rest


def reject_online_options(
    trainer: Any, args: Any, arguments: dict[str, Any], ranks_per_replica: int, dp_size: int
) -> None:
    """Raises `UnsupportedError` for options that would be called, or averaged, separately on each rank."""
    name = type(trainer).__name__
    for argument in ("tools", "environment_factory", "rollout_func"):
        if arguments.get(argument) and ranks_per_replica > 1:
            raise UnsupportedError(
                f"{name}({argument}=...) is not supported on a model sharded over {ranks_per_replica} ranks, because "
                "each of them would call it and get different results. Use only dp_size, or generate beforehand."
            )
    if dp_size > 1 and any(getattr(args, name, 0) for name in ("entropy_coef", "use_adaptive_entropy")):
        raise UnsupportedError(
            f"{name}, entropy_coef or use_adaptive_entropy is not supported on {dp_size} data-parallel ranks, because "
            "the entropy bonus is averaged over the tokens of each rank only. Use dp_size=1 with tp_size or pp_size, "
            "or leave it unset."
        )
