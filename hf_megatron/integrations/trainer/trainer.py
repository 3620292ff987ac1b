"""Patches of `transformers.Trainer` for parallelized models: argument checks, batch sizes, norms and logged losses."""

import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.trainer_pt_utils import LabelSmoother

from ...core.mesh import is_layout_mesh
from ...core.off_stage import is_off_stage
from ...core.runtime import RUNTIME
from ...errors import ConfigError, UnsupportedError
from ...losses.batch_loss import BatchLoss
from ...parallel_state import parallel_state
from ..accelerate.plugin import parallelism_config
from ..accelerate.wrapped_models import state_around
from ..torch.ddp_check import reject_other_trl_trainers
from .checkpoints import probe
from .fused_kernels import choose_kernels
from .padded_batches import EmptyBatch
from .script_losses import adapt_script_losses
from .termination import TerminationCallback


def has_mixed_dtensor(original: Callable, tensors: Iterable[Tensor]) -> bool:
    """Returns `False` for parameters or gradients of a parallelized model, else upstream's answer.

    Optimizers step on the local shards of a parallelized model, so they never see its DTensor meshes. Of gradients,
    Trainer's norm over several meshes would ignore ZeRO shards and earlier clipping; Accelerate's is replaced.
    """
    local_params = [parameter for parameter in tensors if not is_off_stage(parameter)]
    is_parallelized = any(isinstance(one, DTensor) and is_layout_mesh(one.device_mesh) for one in local_params)
    return False if is_parallelized else original(local_params)


def init(original: Callable, self: Any, model: Any = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
    """Checks the arguments, adapts them to a parallelized model, and builds the trainer.

    Arguments that would train differently from a single process are rejected before anything is built.
    """
    state = None if model is None else parallel_state(model)
    if state is None and RUNTIME.models:
        state = state_around(model, type(self).__name__)
    if state is None and model is not None and RUNTIME.launch is not None:
        RUNTIME.launch.require_parallelized(model)
    if state is None or args is None:
        return original(self, model, args, *rest, **kwargs)
    for name in ("deepspeed", "fsdp"):
        if getattr(args, name, None):
            raise UnsupportedError(f"TrainingArguments.{name} cannot be combined with megatron_config. Remove it.")
    if getattr(args, "use_liger_kernel", False):
        choose_kernels(model, args.liger_kernel_config)
    joined_ranks = 1 if args.distributed_state is None else args.distributed_state.num_processes
    if joined_ranks != dist.get_world_size():
        raise ConfigError(
            f"TrainingArguments reports {joined_ranks} process(es), the job has {dist.get_world_size()}. On CPUs "
            "pass TrainingArguments(use_cpu=True), or create them after the model."
        )
    reject_other_trl_trainers(self)
    if args.save_strategy != "no":
        # Upstream creates the folder on rank 0 only; if that failed, the other ranks would hang.
        probe(Path(args.output_dir))
    # Upstream refuses to resume models that were sharded at load time unless only weights are saved.
    weights_only, args.save_only_model = args.save_only_model, True
    averages_tokens = args.average_tokens_across_devices
    if not averages_tokens and state.mesh.dp_size > 1:
        warnings.warn(
            "TrainingArguments.average_tokens_across_devices=False is ignored: the loss of a parallelized model is "
            "averaged over the tokens of all data-parallel ranks.",
            stacklevel=2,
        )
        args.average_tokens_across_devices = True
    _split_batches(args, state.mesh.dp_size)
    if getattr(args, "local_rank", None) == -1:
        # transformers 5 no longer sets it on launched ranks. Scripts that choose the rank that writes by it would take
        # the job for a single process, and write on every rank or on none.
        args.local_rank = args.local_process_index
    try:
        original(self, model, args, *rest, **kwargs)
    finally:
        args.save_only_model = weights_only
    if self.label_smoother is not None:
        self.label_smoother = _BatchSmoother(self.label_smoother, state.loss)
    adapt_script_losses(self, state.loss, averages_tokens=averages_tokens)
    return self.add_callback(TerminationCallback())


def _split_batches(args: Any, dp_size: int) -> None:
    """Converts global batch sizes, which Accelerate would split, to per-rank sizes, by which Trainer counts samples."""
    sizes = (args.per_device_train_batch_size, args.per_device_eval_batch_size)
    # Accelerate itself raises for sizes that it cannot split.
    if args.accelerator_config.split_batches and all(size % dp_size == 0 for size in sizes):
        args.accelerator_config.split_batches = False
        args.per_device_train_batch_size, args.per_device_eval_batch_size = (size // dp_size for size in sizes)


def floating_point_ops(original: Callable, self: Any, inputs: Any) -> float:
    """Returns this rank's share of the FLOPs of its batch; Trainer sums over all ranks."""
    state = parallel_state(self.model)
    if isinstance(inputs, EmptyBatch):
        return 0.0
    count = original(self, inputs)
    return count if state is None else count / state.config.ranks_per_replica


def call_model_init(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Rejects a parallelized model: Trainer has already created its Accelerator, and recreates the model in `train`."""
    model = original(self, *args, **kwargs)
    if parallel_state(model) is not None:
        raise ConfigError(
            "Trainer(model_init=...) is not supported with megatron_config: Trainer calls it after creating the "
            "Accelerator, which needs the layout. Call set_seed(args.seed), then pass Trainer(model=model_init()); "
            "create a new Trainer for each trial of a hyperparameter search."
        )
    return model


class _BatchSmoother:
    """A label smoother that divides by the targets of all ranks if Trainer has not counted them."""

    def __init__(self, stock: LabelSmoother, batch: BatchLoss):
        self.stock, self.batch = stock, batch

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        """Returns the loss, a scalar, for labels `[batch, sequence]`."""
        if num_items_in_batch is None:
            num_items_in_batch = self.batch.divisor(labels[..., 1:] if shift_labels else labels)
        return self.stock(model_output, labels, shift_labels, num_items_in_batch)


def build_accelerator_args(original: Callable, self: Any, **kwargs: Any) -> dict[str, Any]:
    """Adds a parallelism config that marks the ranks of a model-parallel group to the Accelerator's arguments."""
    arguments = original(self, **kwargs)
    state = None if self.model is None else parallel_state(self.model)
    if state is not None:
        arguments["parallelism_config"] = parallelism_config(state.config.ranks_per_replica)
    return arguments


def sync_replicated_trainable_parameters(original: Callable, self: Any, model: Any) -> None:
    """Skips upstream's all-reduce of plain parameters' gradients over the world: the model's own hooks reduce them."""
    if parallel_state(self.model) is None:
        original(self, model)


def get_tp_size(original: Callable, self: Any) -> int:
    """Returns 1: `num_processes` and `world_size` count replicas, so Trainer must not divide them again."""
    return original(self) if self.model is None or parallel_state(self.model) is None else 1


def finalize_training(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Ends training with the loss averaged over all ranks, including the steps since the last log."""
    from transformers.trainer_pt_utils import nested_gather

    if parallel_state(self.model) is not None:
        self._tr_loss = nested_gather(self._tr_loss, self.args.parallel_mode).mean()
    return original(self, *args, **kwargs)
