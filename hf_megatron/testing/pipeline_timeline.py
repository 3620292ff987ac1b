"""`hf-megatron timeline`: plots a training step of a small model on a pipeline of forked ranks."""

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..compat.ecosystem import require_plots
from ..config import MegatronConfig
from ..core.fork_harness import run_ranks
from ..core.spans import SpanRecorder, Timeline, bubble_share
from ..data_parallel.distributed_optimizer import prepare_optimizer
from ..diagnostics.timeline import gather_timeline, write_pictures
from ..errors import ConfigError
from ..models.verification_gate import ConfigUnderTest
from ..parallel_state import parallel_state
from ..pipeline_parallel.schedule_simulator import bubble
from ..pipeline_parallel.schedules import check_schedule, schedule
from .resolve_model import resolve_config
from .tiny_config import LAYER_COUNTS, LAYER_INDICES, tiny_config
from .tiny_model import make_batch


def small_config(
    config: PreTrainedConfig, *, layers: int, sequence_length: int, hidden: int | None = None
) -> PreTrainedConfig:
    """Returns a tiny config with the given number of layers; the kinds of layers repeat in the tiny config's order.

    Positions are sufficient for `sequence_length` tokens. With `hidden`, an MLP is four times as wide.
    """
    tiny = tiny_config(config)
    text, original = tiny.get_text_config(), config.get_text_config().to_dict()
    values = text.to_dict()
    counts = [original[name] for name in LAYER_COUNTS if original.get(name) is not None]
    for name, value in values.items():
        listed = isinstance(original.get(name), Sequence) and not isinstance(original[name], str)
        if name in LAYER_COUNTS and value is not None:
            setattr(text, name, layers)
        elif listed and name not in LAYER_INDICES and len(original[name]) in counts and value:
            setattr(text, name, [value[index % len(value)] for index in range(layers)])
        elif name in ("max_position_embeddings", "n_positions") and value is not None:
            setattr(text, name, max(value, sequence_length))
        elif hidden is not None and name in ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"):
            setattr(text, name, hidden)
        elif hidden is not None and name in ("intermediate_size", "ffn_hidden_size", "ffn_dim", "d_ff"):
            setattr(text, name, 4 * hidden)
    return tiny


def draw_timeline(
    model: str,
    config: MegatronConfig,
    output: str | os.PathLike[str],
    *,
    layers: int = 8,
    hidden: int | None = None,
    batch_size: int = 8,
    sequence_length: int = 64,
    steps: int = 3,
    device: str = "cpu",
    timeout: float = 300.0,
    echo: Callable[[str], Any] = print,
) -> Timeline:
    """Trains a small model on forked ranks and draws its last step into `output`.

    Args:
        model (`str`): a model type, a local folder or a hub name; its config is read, never its weights.
        config (`MegatronConfig`): the layout; one data parallel rank.
        output (`str` or `Path`): the directory of `timeline-step{N}.png` and `.json`.
        layers (`int`, defaults to 8): number of layers of the small model.
        hidden (`int`, *optional*): hidden size of the small model; by default that size of the tiny config.
        batch_size, sequence_length (`int`): size of the batch, which is split into microbatches.
        steps (`int`, defaults to 3): optimizer steps; the last one is plotted.
        device (`str`): device of the ranks, see `run_ranks`; on a GPU, every span begins and ends with a device sync.
        timeout (`float`): seconds.
        echo (`Callable`): called with each line of the report.

    Raises:
        ConfigError: incompatible sizes, an unknown model, or matplotlib is not installed.
        RankError: a rank failed.
    """
    require_plots()
    if config.pp_size < 2:
        raise ConfigError(f"MegatronConfig.pp_size = {config.pp_size}: expected 2 or more for a pipeline.")
    # Check here, rather than raising on a rank.
    order = schedule(config.pipeline_schedule)
    check_schedule(order.name, config.pp_size, config.virtual_stages or order.stages_per_rank)
    stages = config.pp_size * (config.virtual_stages or order.stages_per_rank)
    if layers < stages:
        raise ConfigError(f"layers = {layers}: expected {stages} or more, one for each stage.")
    if steps < 1:
        raise ConfigError(f"steps = {steps}: expected 1 or more; the last one is drawn.")
    small = small_config(resolve_config(model), layers=layers, sequence_length=sequence_length, hidden=hidden)
    layout = ConfigUnderTest(**config.to_dict())
    ids = make_batch(small, batch_size=batch_size, sequence_length=sequence_length)["input_ids"]

    def on_rank() -> tuple[Timeline, dict[str, Any]]:
        torch.manual_seed(0)
        tokens = ids.to(device)
        instance = AutoModelForCausalLM.from_config(small, megatron_config=layout).train()
        parallel = parallel_state(instance)
        assert parallel is not None and parallel.pipeline is not None
        optimizer = prepare_optimizer(torch.optim.SGD(instance.parameters(), lr=1e-3))
        recorder = SpanRecorder(torch.cuda.synchronize if device == "cuda" else None)
        for step in range(steps):
            optimizer.zero_grad()
            if step == steps - 1:
                # All ranks start the recorded step together.
                dist.barrier()
                parallel.pipeline.recorder = recorder
            instance(input_ids=tokens, labels=tokens).loss.backward()
            with recorder.record("optimizer", parallel.mesh.pp_rank):
                optimizer.step()
            if step < steps - 1:
                recorder.clear()
        facts = parallel.pipeline.describe()
        return gather_timeline(recorder, parallel.mesh.pp_group, **facts), facts

    timeline, facts = run_ranks(on_rank, config.ranks_per_replica, timeout=timeout, device=device)[0]
    formula = bubble(facts["schedule"], facts["ranks"], facts["stages_per_rank"], timeline.microbatches)
    for path in write_pictures(timeline, output, f"timeline-step{steps - 1}", formula):
        echo(str(path))
    echo(f"bubble: measured {bubble_share(timeline):.1%}, formula {formula:.1%}")
    return timeline
