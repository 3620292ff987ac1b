"""TRL trainers: per-token scores of a parallelized model, and a reference model with the same layout.

TRL replaces a model's forward by one that reads the head's weight and returns per-token values instead of logits. For a
parallelized model these values come from `compute_scores`, which does not gather the full head.
"""

import functools
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...compat.ecosystem import trl_output, trl_sums
from ...compat.torch_dtensor import local_tensor
from ...compat.transformers_models import CACHE_ARGUMENTS, count_tokens_once, prepends_tokens
from ...compat.versions import warn_unchecked_versions
from ...config import MegatronConfig, validate_world_size
from ...core.off_stage import own_state_dict
from ...core.runtime import RUNTIME
from ...errors import UnsupportedError
from ...losses.batch_loss import BatchLoss
from ...losses.targets import IGNORE_INDEX, count_targets, next_tokens
from ...parallel_state import parallel_state
from ...tensor_parallel.sampling import PLAIN, Sampling
from ...tensor_parallel.token_log_probs import compute_scores
from ...tensor_parallel.vocab_log_probs import FIELDS, LOG_PROBS
from ..accelerate.environment import job_world_size
from ..torch.ddp_check import reject_other_trl_trainers
from ..trainer.padded_batches import evaluated
from .checks import reject_arguments, reject_batch_wide_losses, reject_in_memory_datasets
from .generation_sizes import require_replica_batches, settle_generation_sizes
from .online import load_reward_models, reject_online_options
from .preference_pairs import ROWS_OF_REPLICAS

_ONLINE = ("GRPOTrainer", "RLOOTrainer", "DistillationTrainer")


@dataclass
class _Building:
    """A trainer under construction.

    Attributes:
        layout: layout of the policy.
        loads_policy: whether the next model that the trainer loads is the policy, and not an inference-only model.
        frozen_model_key: key of the inference-only model in `MegatronConfig.frozen_models`.
    """

    layout: MegatronConfig
    loads_policy: bool
    frozen_model_key: str


_BUILDING: ContextVar[_Building | None] = ContextVar("trainer that is being built", default=None)


def init(original: Callable, self: Any, model: Any = None, *args: Any, **kwargs: Any) -> None:
    """Rejects unsupported arguments before anything is built, and loads reference models with the policy's layout."""
    from transformers import TrainingArguments

    training_args: Any = next(
        (value for value in (*args, *kwargs.values()) if isinstance(value, TrainingArguments)), None
    )
    layout = get_policy_layout(model, training_args)
    if layout is None:
        settle_generation_sizes(training_args, job_world_size())
        return original(self, model, *args, **kwargs)
    warn_unchecked_versions()
    reject_other_trl_trainers(self)
    dp_size = validate_world_size(layout, job_world_size())
    reject_arguments(self, training_args)
    reject_batch_wide_losses(self, training_args, dp_size)
    reject_in_memory_datasets(training_args, (*args, *kwargs.values()))
    settle_generation_sizes(training_args, dp_size)
    require_replica_batches(training_args, dp_size)
    kinds = {cls.__name__ for cls in type(self).__mro__}
    if not kinds.isdisjoint(_ONLINE):
        bound = inspect.signature(original).bind_partial(self, model, *args, **kwargs)
        reject_online_options(self, training_args, bound.arguments, layout.ranks_per_replica, dp_size)
        if "reward_funcs" in bound.arguments:
            bound.arguments["reward_funcs"] = load_reward_models(bound.arguments["reward_funcs"], training_args, layout)
        args, kwargs = bound.args[2:], bound.kwargs
    frozen_model_key = "teacher" if "DistillationTrainer" in kinds else "reference"
    token = _BUILDING.set(_Building(layout, isinstance(model, str), frozen_model_key))
    try:
        original(self, model, *args, **kwargs)
    finally:
        _BUILDING.reset(token)
    # `gather_for_metrics` counts each batch once, however many ranks share it.
    count_tokens_once(self)


def get_policy_layout(model: Any, args: Any) -> MegatronConfig | None:
    """Returns the layout of a trainer's model, or of a model that the trainer loads by name."""
    state = None if model is None or isinstance(model, str) else parallel_state(model)
    if state is not None:
        return state.config
    layout = None if args is None else (args.model_init_kwargs or {}).get("megatron_config")
    if layout is None and RUNTIME.launch is not None and isinstance(model, str):
        return RUNTIME.launch.layout
    return None if layout is None else MegatronConfig.coerce(layout)


def data_parallel_size(trainer: Any) -> int:
    """Returns the data-parallel size of a trainer, which may be under construction."""
    if (building := _BUILDING.get()) is not None:
        return validate_world_size(building.layout, job_world_size())
    # A trainer under construction has no model yet.
    model = vars(trainer).get("model")
    state = None if model is None else parallel_state(model)
    return 1 if state is None else state.mesh.dp_size


def create_model_from_path(original: Callable, model_id: str, *args: Any, **kwargs: Any) -> Any:
    """Loads a reference or teacher model with the policy's layout, or with its own layout of `frozen_models`."""
    building = _BUILDING.get()
    if building is not None:
        kwargs.setdefault("device_map", None)
        layout, is_policy, building.loads_policy = building.layout, building.loads_policy, False
        if is_policy and RUNTIME.launch is None:
            kwargs["megatron_config"] = layout
        elif not is_policy and (RUNTIME.launch is None or layout.frozen_models):
            kwargs["megatron_config"] = layout.get_frozen_config(building.frozen_model_key)
    return original(model_id, *args, **kwargs)


def sft_prediction_step(original: Callable, self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Computes the loss `()` of an evaluation step over the tokens of all ranks, without repeated samples."""
    state = parallel_state(self.model)
    if state is None or not state.loss.has_data_parallel:
        return original(self, model, inputs, *args, **kwargs)

    def step(rows: Any) -> Any:
        loss, *predictions = original(self, model, rows, *args, **kwargs)
        labels = rows["labels"] if prepends_tokens(self.model) else next_tokens(rows["labels"])
        targets = count_targets(labels).to(loss.device)
        # As TRL does for batches without a target: divide by at least 1.
        return state.loss.mean(loss * targets, targets, at_least=1), *predictions

    return evaluated(self, state, inputs, step)


def hash_module(original: Callable, module: Any) -> str:
    """Hashes each rank's local shards, and concatenates the hashes of all ranks."""
    if parallel_state(module) is None:
        return original(module)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, original(_LocalTensors(module)))
    return "-".join(parts)


class _LocalTensors:
    """Interface of a module for `hash_module`, with local shards as its tensors."""

    def __init__(self, module: Any):
        self.module = module

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Returns this rank's local tensors, of any shape."""
        return {name: local_tensor(tensor.detach()) for name, tensor in own_state_dict(self.module).items()}


def add_fused_lm_head(
    original: Callable,
    model: Any,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: Sequence[str] = (LOG_PROBS,),
) -> None:
    """Replaces the forward by one that returns per-token values, `(batch, sequence)`, from the sharded head."""
    state = parallel_state(model)
    if state is None:
        return original(model, temperature, cast_lm_head_to_fp32, outputs)
    # Same fields as TRL's own forward, in a fixed order.
    field_names = tuple(name for name in FIELDS if name in outputs or name == LOG_PROBS)
    state.patches.replace(
        model, "forward", types.MethodType(_with_scores(model, field_names, Sampling(temperature)), model)
    )


def patch_chunked_loss(original: Callable, model: Any, chunk_size: int, is_vlm: bool = False) -> None:
    """Replaces the forward with labels by one that returns the sums logged by TRL 1.14, from the sharded head."""
    state = parallel_state(model)
    if state is None:
        return original(model, chunk_size, is_vlm)
    original_forward, scored = model.forward, _with_scores(model, (LOG_PROBS, "entropy", "is_top1"), output=trl_sums)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("labels") is None and kwargs.get("shift_labels") is None:
            return original_forward(*args, **kwargs)
        return scored(self, *args, fused_lm_head=True, **kwargs)

    state.patches.replace(model, "forward", types.MethodType(forward, model))


def _build_token_output(loss: Any, aux_loss: Any, fields: Mapping[str, Any]) -> Any:
    return trl_output(loss=loss, aux_loss=aux_loss, **fields)


def _with_scores(
    model: Any, field_names: tuple[str, ...], sampling: Sampling = PLAIN, output: Callable = _build_token_output
) -> Callable:
    original_forward = model.forward

    @functools.wraps(type(model).forward)
    def forward(
        self: Any,
        *args: Any,
        fused_lm_head: bool = False,
        labels: Any = None,
        shift_labels: Any = None,
        num_items_in_batch: Any = None,
        **kwargs: Any,
    ) -> Any:
        if not fused_lm_head:
            loss_kwargs = {"labels": labels, "shift_labels": shift_labels, "num_items_in_batch": num_items_in_batch}
            loss_kwargs = {name: value for name, value in loss_kwargs.items() if value is not None}
            return original_forward(*args, **loss_kwargs, **kwargs)
        targets = (next_tokens(labels) if shift_labels is None else shift_labels).as_subclass(torch.Tensor)
        kwargs |= {"use_cache": False, "return_dict": True}
        rows = ROWS_OF_REPLICAS.get()
        if rows is not None:
            if any(kwargs.get(name) is not None for name in CACHE_ARGUMENTS):
                raise UnsupportedError(
                    "Prefix tuning is not supported with a loss over the batch of several data-parallel ranks, "
                    "because the prefixes belong to the samples of all ranks. Use dp_size=1, another adapter, or "
                    "another loss."
                )
            # Inputs hold the samples of all replicas; the model call only takes this rank's.
            targets = rows.local_rows(targets)
            kwargs |= {
                name: rows.local_rows(value) for name, value in kwargs.items() if isinstance(value, torch.Tensor)
            }
        values, aux_loss = compute_scores(
            self, lambda read: read(original_forward(*args, **kwargs)), targets, field_names, sampling
        )
        fields = dict(zip(field_names, values, strict=True)) | {"label_mask": targets != IGNORE_INDEX}
        if shift_labels is None:
            # Copies instead of views: FSDP2 warns about views.
            fields = {name: value[:, :-1].contiguous() for name, value in fields.items()}
        loss = _batch(self).token_mean(-fields[LOG_PROBS], fields["label_mask"], num_items_in_batch)
        if aux_loss is not None:
            loss = loss + getattr(self.config.get_text_config(), "router_aux_loss_coef", 0.0) * aux_loss
        if rows is not None:
            # Losses over the global batch need the values `[batch, sequence]` of all replicas, in TRL's order.
            fields = {name: rows.joined(value) for name, value in fields.items()}
        return output(loss, aux_loss, fields)

    return forward


def _batch(model: Any) -> BatchLoss:
    state = parallel_state(model)
    assert state is not None and state.loss is not None
    return state.loss
