"""Memory and traffic of a rank's training step: predicted in a fake world, and measured on real ranks to compare."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ..config import MegatronConfig
from ..core.off_stage import local_named_parameters
from ..data_parallel.distributed_optimizer import prepare_optimizer
from ..diagnostics.allocation_tracker import AllocationTracker
from ..diagnostics.step_memory import kept_tensors
from ..diagnostics.step_stats import StepFigures
from ..errors import ConfigError
from ..models.auto_class import auto_class
from ..models.verification_gate import ConfigUnderTest
from ..parallel_state import parallel_state, unwrap_parallel_model
from .fake_world import FakeWorld, run_fake_ranks
from .model_class import model_on_meta
from .uniform_routing import balanced_experts

# The first step creates state, such as optimizer states, that the second one finds.
_STEPS = 2
_MEASURED_STEPS = 16
# Unused entries at the start of a position table (OPT, BioGPT).
_MOST_RESERVED = 2
_INPUTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "attention_mask": torch.ones_like,
    "position_ids": lambda ids: torch.arange(ids.shape[1]).repeat(ids.shape[0], 1),
}


def dry_run(
    config: PreTrainedConfig,
    layout: MegatronConfig,
    ranks: Sequence[int],
    world_size: int,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: torch.dtype = torch.bfloat16,
    inputs: Sequence[str] = (),
    target_length: int | None = None,
    as_gloo: bool = False,
    timeout: float = 600.0,
) -> list[StepFigures]:
    """Predicts a training step with AdamW on some ranks of a job, without memory or other ranks.

    Tokens are routed evenly to experts that are sharded over ranks.

    Args:
        config: of the model, which `auto_class` resolves to a class; nothing else is read.
        layout (`MegatronConfig`): need not be verified, since nothing is trained.
        ranks: to predict, such as one of each kind of pipeline stage.
        world_size (`int`): ranks of the job.
        batch_size, sequence_length (`int`): of one call on one dp rank.
        dtype (`torch.dtype`, defaults to bf16): of the weights.
        inputs: model inputs in addition to tokens and labels, of `attention_mask` and `position_ids`.
        target_length (`int`, *optional*): tokens of a label sequence, which the decoder of an encoder-decoder reads; by
            default `sequence_length`.
        as_gloo (`bool`, defaults to `False`): predicts CPU ranks instead of accelerators.
        timeout (`float`): seconds.

    Returns:
        `list`: the second step's figures, in the order of `ranks`.

    Raises:
        ConfigError: a value is out of its range, a sequence has more tokens than the model has positions (rotary
            embeddings have no limit), or the layout offloads optimizer states, which are not counted separately.
        RankError: the layout does not fit the model or the job, with the rank's own error.
    """
    sizes = StepSizes(batch_size, sequence_length, dtype, tuple(inputs), target_length)
    require_possible(config, layout, ranks, world_size, sizes)

    def on_rank(world: FakeWorld) -> StepFigures:
        return step_figures(world, config, layout, sizes)

    return run_fake_ranks(on_rank, ranks, world_size, as_gloo=as_gloo, timeout=timeout)


@dataclass(frozen=True)
class StepSizes:
    """Shapes and dtype of a step on one dp rank; see `dry_run`."""

    batch_size: int
    sequence_length: int
    dtype: torch.dtype = torch.bfloat16
    inputs: tuple[str, ...] = ()
    target_length: int | None = None


def step_figures(
    world: FakeWorld,
    config: PreTrainedConfig,
    layout: MegatronConfig,
    sizes: StepSizes,
    *,
    adapt: Callable[[Any], Any] | None = None,
    optimizes: bool = True,
    steps: int = _STEPS,
    make_tracker: Callable[[Any], AllocationTracker] = AllocationTracker,
    watching: Callable[[AllocationTracker], AbstractContextManager[Any]] = lambda tracker: nullcontext(),
) -> StepFigures:
    """Runs steps as one rank of a fake world, and returns the figures of the last one.

    Args:
        adapt (`Callable`, *optional*): freezes parts of a model or adds adapters, and returns the model.
        optimizes (`bool`, defaults to `True`): whether the optimizer steps.
        steps (`int`, defaults to 2): number of steps; the second one finds the state that the first one created.
        make_tracker (`Callable`, *optional*): creates the tracker of a model's steps.
        watching (`Callable`, *optional*): creates a context around the last step from its tracker.
    """
    model, optimizer = build_model_and_optimizer(config, layout, sizes.dtype, adapt, world.mode)
    inner = unwrap_parallel_model(model)
    with balanced_experts(), world.running(inner, make_tracker(inner)) as tracker:
        ids, labels = (
            torch.zeros(sizes.batch_size, length, dtype=torch.int64)
            for length in (sizes.sequence_length, sizes.target_length or sizes.sequence_length)
        )
        inputs = {name: make(ids) for name, make in _INPUTS.items() if name in sizes.inputs}
        if config.is_encoder_decoder:
            # Pass decoder inputs: a config may lack the start token for shifting labels.
            inputs["decoder_input_ids"] = labels
        for step in range(steps):
            tracker.begin_step(kept_tensors(inner, optimizer))
            with watching(tracker) if step == steps - 1 else nullcontext():
                run_training_step(model, optimizer, ids, labels, optimizes=optimizes, **inputs)
    tracker.figures.parameters = count_local_parameters(inner)
    return tracker.figures


def require_possible(
    config: PreTrainedConfig,
    layout: MegatronConfig,
    ranks: Sequence[int],
    world_size: int,
    sizes: StepSizes,
) -> None:
    """Raises `ConfigError` for arguments of `dry_run` that are out of their ranges."""
    if not isinstance(layout, MegatronConfig):
        raise ConfigError(f"dry_run(layout={layout!r}): expected a MegatronConfig.")
    if layout.offload_optimizer:
        raise ConfigError("dry_run: offload_optimizer=True is not supported. Use offload_optimizer=False.")
    if world_size < 2:
        raise ConfigError(f"dry_run(world_size={world_size}): expected 2 ranks or more.")
    if not ranks or not all(0 <= rank < world_size for rank in ranks):
        raise ConfigError(f"dry_run(ranks={list(ranks)}): expected some of 0 to {world_size - 1}.")
    for name, value in (("batch_size", sizes.batch_size), ("sequence_length", sizes.sequence_length)):
        if value < 1:
            raise ConfigError(f"dry_run({name}={value}): expected 1 or more.")
    if unknown := sorted(set(sizes.inputs) - _INPUTS.keys()):
        raise ConfigError(f"dry_run(inputs={unknown}): expected some of {', '.join(_INPUTS)}.")
    require_lengths(config, sizes.sequence_length, sizes.target_length)


def require_lengths(config: PreTrainedConfig, sequence_length: int, target_length: int | None) -> None:
    """Raises `ConfigError` for sequence lengths that the model does not support, by the name of the argument.

    Lengths beyond a position table must be rejected here, since fake tensors do no lookup that would fail. Rotary
    embeddings have no limit.

    Raises:
        ConfigError: more tokens than positions, or a label length for a model that is no encoder-decoder.
    """
    if target_length is not None and not (config.is_encoder_decoder and target_length >= 1):
        raise ConfigError(
            f"target_length = {target_length}: model type {config.model_type!r} "
            + ("expects 1 or more." if config.is_encoder_decoder else "has a label for each token; leave it out.")
        )
    text, length = config.get_text_config(), max(sequence_length, target_length or 0)
    most, rotary = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None)
    if not isinstance(most, int) or not 0 < most < length or rotary is not None:
        return
    model = model_on_meta(config)
    if (name := _find_position_table(model, most)) is not None:
        raise ConfigError(f"sequence_length = {length}: {type(model).__name__} has {most} positions ({name}).")


def _find_position_table(model: Any, positions: int) -> str | None:
    """Returns the name of the position table: an embedding, maybe with extra entries, or a buffer of that length.

    Buffers of other lengths are not limits, since they grow on demand.
    """
    rows = range(positions, positions + _MOST_RESERVED + 1)
    for name, module in model.named_modules():
        is_other = isinstance(module, torch.nn.Embedding) and module is not model.get_input_embeddings()
        if is_other and module.num_embeddings in rows:
            return f"{name}.weight"
    buffers = ((name, buffer) for name, buffer in model.named_buffers() if buffer.dim() == 2)
    return next((name for name, buffer in buffers if buffer.shape[0] == positions), None)


def build_model_and_optimizer(
    config: PreTrainedConfig,
    layout: MegatronConfig,
    dtype: torch.dtype,
    adapt: Callable[[Any], Any] | None = None,
    mode: AbstractContextManager[Any] | None = None,
) -> tuple[Any, torch.optim.Optimizer]:
    # With a seed, ranks draw their own shards: those of a dry run cannot receive weights from the first one.
    under_test = ConfigUnderTest(**{**layout.to_dict(), "seed": layout.seed or 0})
    model = auto_class(config).from_config(config, dtype=dtype, megatron_config=under_test).train()
    if adapt is not None:
        with mode or nullcontext():
            model = adapt(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, prepare_optimizer(torch.optim.AdamW(trained))


def run_training_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    ids: Tensor,
    labels: Tensor,
    *,
    optimizes: bool = True,
    **inputs: Tensor,
) -> None:
    model(input_ids=ids, labels=labels, **inputs).loss.backward()
    if optimizes:
        optimizer.step()
    optimizer.zero_grad()


def count_local_parameters(model: Any) -> int:
    """Counts a rank's parameter entries after tp and pp sharding; ZeRO-3 sharding is not subtracted."""
    state = parallel_state(model)
    assert state is not None
    return sum(
        math.prod(state.placement(name).local_shape(state.shardings[name].shape, state.axes))
        for name, _ in local_named_parameters(model)
    )
