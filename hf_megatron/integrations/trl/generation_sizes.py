"""Generation batch sizes of TRL's online trainers, counted over data-parallel replicas."""

from collections.abc import Callable
from typing import Any

from ...config import MegatronConfig, validate_world_size
from ...core.runtime import RUNTIME
from ...errors import ConfigError
from ...parallel_state import parallel_state
from ..accelerate.environment import job_world_size

_GIVEN = "_hf_megatron_given"


def count_generations(original: Callable, self: Any) -> None:
    """Records the sizes that the user set; upstream derives the others from all ranks instead of replicas."""
    user_sizes = self.generation_batch_size, self.steps_per_generation
    if job_world_size() == 1 or None not in user_sizes:
        return original(self)
    # Use values that always pass upstream's checks, which count ranks; the checks below count replicas.
    self.generation_batch_size, self.steps_per_generation = None, self.num_generations
    original(self)
    vars(self)[_GIVEN] = user_sizes, None
    layout = _known_layout(self)
    if layout is None:
        _fill_in(self, job_world_size())
    else:
        settle_generation_sizes(self, validate_world_size(layout, job_world_size()))


def _known_layout(args: Any) -> MegatronConfig | None:
    layout = (args.model_init_kwargs or {}).get("megatron_config")
    if layout is not None:
        return MegatronConfig.coerce(layout)
    if RUNTIME.launch is not None:
        return RUNTIME.launch.layout
    states = [state for state in map(parallel_state, RUNTIME.models) if state is not None]
    return states[0].config if states else None


def _fill_in(args: Any, replicas: int) -> int:
    (batch, steps), _ = vars(args)[_GIVEN]
    rows: int = args.per_device_train_batch_size * replicas
    if steps is None:
        steps = args.gradient_accumulation_steps if batch is None else batch // rows
    args.steps_per_generation = steps
    args.generation_batch_size = rows * steps if batch is None else batch
    vars(args)[_GIVEN] = (vars(args)[_GIVEN][0], _sizes(args))
    return rows


def _sizes(args: Any) -> tuple[int, int]:
    return args.generation_batch_size, args.steps_per_generation


def require_replica_batches(args: Any, replicas: int) -> None:
    """Raises `ConfigError` for sizes that count all ranks, in arguments created before hf_megatron was imported."""
    if args is None or "generation_batch_size" not in vars(args):
        return
    rows = args.per_device_train_batch_size * replicas * args.steps_per_generation
    if args.generation_batch_size != rows:
        raise ConfigError(
            f"{type(args).__name__}.generation_batch_size = {args.generation_batch_size}: expected {rows}, which is "
            f"per_device_train_batch_size={args.per_device_train_batch_size} on {replicas} data-parallel rank(s) times "
            f"steps_per_generation={args.steps_per_generation}. If you did not set it, the arguments were created "
            "before hf_megatron was imported and count all ranks: import it first."
        )


def settle_generation_sizes(args: Any, replicas: int) -> None:
    """Sets the unset sizes of a `GRPOConfig` or `RLOOConfig` once the number of replicas is known.

    Raises:
        ConfigError: sizes that do not divide into groups of completions or optimizer steps.
    """
    if args is None or _GIVEN not in vars(args) or vars(args)[_GIVEN][1] not in (None, _sizes(args)):
        # Created in a single process, created before hf_megatron was imported, or changed by the user since.
        return
    rows = _fill_in(args, replicas)
    size, group = args.generation_batch_size, args.num_generations
    of = f"per_device_train_batch_size={args.per_device_train_batch_size} on {replicas} data-parallel rank(s)"
    if size % rows or not args.steps_per_generation:
        raise ConfigError(f"generation_batch_size={size}: expected a multiple of {rows}, which is {of}.")
    if size % group:
        raise ConfigError(
            f"generation_batch_size={size} ({of}, steps_per_generation={args.steps_per_generation}): expected a "
            f"multiple of num_generations={group}, so that groups of completions are not split."
        )
    evaluated = args.per_device_eval_batch_size * replicas
    group = args.num_generations_eval or group
    if args.eval_strategy != "no" and evaluated % group:
        raise ConfigError(
            f"per_device_eval_batch_size={args.per_device_eval_batch_size} on {replicas} data-parallel rank(s) is "
            f"{evaluated} samples: expected a multiple of the {group} generations per prompt in evaluation."
        )
