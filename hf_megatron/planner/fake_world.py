"""Fake world: runs one rank of a job of any size without communication and without memory for tensors.

    def steps(world: FakeWorld) -> StepFigures:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, megatron_config=layout)
        optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters()))
        with world.running(model) as tracker:
            ids = torch.zeros(1, 8192, dtype=torch.int64)
            for _ in range(2):
                tracker.begin_step(kept_tensors(model, optimizer))
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return tracker.figures

    [figures] = run_fake_ranks(steps, [64], world_size=2048)

The library's own code runs: planning, loading, schedules, gradient reduction, and optimizer. Collectives of torch's
process group `fake` return at once, weights are initialized as fake tensors, and `AllocationTracker` counts. Fake
tensors represent device memory, real ones host memory. The internal allocations of NCCL and cuBLAS and the
fragmentation of the allocator are not included.
"""

import functools
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..checkpoint import initialize
from ..compat.shard_safe import shard_safe
from ..compat.torch_memory import fake_mode, is_fake, join_fake_job, take_fakes_for_real
from ..core.communication import collectives, rng, watchdog
from ..core.communication.collectives import bounds
from ..core.fork_harness import run_forks, set_rank_environment
from ..core.off_stage import local_named_parameters
from ..data_parallel import norm_checks
from ..diagnostics.allocation_tracker import AllocationTracker
from ..errors import PlanError, UnsupportedError
from ..losses.inline_losses import MeansOfBatch
from ..parallel_state import parallel_state
from ..pipeline_parallel.p2p import Shapes
from ..testing.fake_rank import answer_for_other_ranks


class FakeWorld:
    """Context passed to a function that runs as one rank of a fake job; created by `run_fake_ranks`."""

    def __init__(self) -> None:
        # Buffers, and tensors that a training loop creates before the step, are real.
        self.mode = fake_mode()

    @contextmanager
    def running(self, model: Any, tracker: AllocationTracker | None = None) -> Iterator[AllocationTracker]:
        """Runs the code inside with fake tensors and counts it; pipeline ranks run without their peers.

        Args:
            model: loaded in this world, with fake weights.
            tracker (`AllocationTracker`, *optional*): used instead of a new one.

        Raises:
            PlanError: a stage sends other shapes than it was assumed to receive.
        """
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self.mode.from_tensor(buffer)
        state = parallel_state(model)
        transport = None if state is None or state.pipeline is None else state.pipeline.runner.transport
        if transport is not None:
            transport.learn = functools.partial(_shapes_received, model)
        # Next-token losses are computed by this library's own function and need no patch.
        losses = nullcontext() if state is None or state.loss.shifts else MeansOfBatch(state.loss)
        with self.mode, losses, tracker or AllocationTracker(model) as counting:
            yield counting
        known = {} if transport is None else transport.known
        for (stage, kind), shapes in known.items():
            if known.get((stage + 1, kind), shapes) != shapes:
                raise PlanError(
                    f"Stage {stage} was assumed to receive {shapes}, but it sends {known[stage + 1, kind]}."
                )


def run_fake_ranks(
    function: Callable[..., Any],
    ranks: Sequence[int],
    world_size: int,
    *args: Any,
    as_gloo: bool = False,
    timeout: float = 600.0,
) -> list[Any]:
    """Calls `function(world, *args)` as some ranks of a job whose other ranks do not exist, each in its own fork.

    Args:
        function (`Callable`): takes a `FakeWorld`; its result must be picklable.
        ranks: to run, such as one of each kind of stage.
        world_size (`int`): ranks of the job.
        as_gloo (`bool`, defaults to `False`): whether the groups appear as gloo groups, for a comparison with CPU
            ranks, instead of groups of an accelerator.
        timeout (`float`): seconds until all forks are killed.

    Returns:
        `list`: the results, in the order of `ranks`.

    Raises:
        RankError: with the tracebacks of the ranks that failed.
    """
    places = [(rank, world_size) for rank in ranks]
    return run_fake_places(lambda world, number: function(world, *args), places, as_gloo=as_gloo, timeout=timeout)


def run_fake_places(
    function: Callable[[FakeWorld, int], Any],
    places: Sequence[tuple[int, int]],
    *,
    as_gloo: bool = False,
    timeout: float = 600.0,
) -> list[Any]:
    """Calls `function(world, number)` for ranks of several jobs, as `run_fake_ranks` does for one job.

    Args:
        places: (rank, world size) of each call; `number` is the index in this list.
    """

    def join(number: int, directory: Path) -> None:
        set_rank_environment(*places[number])
        join_fake_job(*places[number])
        take_fakes_for_real()
        # Fake tensors have data pointer 0. Code that compares pointers then correctly sees that nothing was moved.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        joined.append(number)

    def be_rank() -> Any:
        # Runs in its own fork, so no patch is undone.
        world = FakeWorld()
        answer_for_other_ranks()
        # RNG states are real host tensors, which the fake broadcast from another rank would not fill.
        rng.broadcast_state = lambda *args: None  # type: ignore[assignment]
        nn.Module._apply = _replaced  # type: ignore[assignment, method-assign]
        norm_checks.ListOfRanks.judge = lambda self, added: self.is_complete  # type: ignore[method-assign]
        if as_gloo:
            dist.get_backend = lambda group=None: dist.Backend("gloo")
            # They read the name of the group itself.
            collectives.uses_gloo = collectives.gathers_into_parts = lambda group: True
            watchdog.watch_ranks = lambda *args, **kwargs: None  # type: ignore[assignment]
        else:
            attend = shard_safe(functools.partial(_attended, nn.functional.scaled_dot_product_attention))
            nn.functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
        original = initialize.initialize

        def draw_nothing(*args: Any, **kwargs: Any) -> None:
            with world.mode:
                original(*args, **kwargs)

        initialize.initialize = draw_nothing
        return function(world, joined[0])

    # Each fork has its own copy of this list.
    joined: list[int] = []
    return run_forks(be_rank, range(len(places)), len(places), join, timeout)


def _replaced(module: nn.Module, function: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replaces `Module._apply`, which cannot swap the data of a fake parameter that has other references."""
    for child in module.children() if recurse else ():
        child._apply(function)
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        values = parameter.detach()
        # An unchanged tensor keeps its parameter, which may be tied.
        if (changed := function(values)) is not values:
            module._parameters[name] = nn.Parameter(changed, parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = function(buffer)
    return module


# Dtypes for which CUDA has flash kernels, which support grouped-query attention.
_FLASH = (torch.float16, torch.bfloat16)


def _attended(
    original: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **settings: Any,
) -> Tensor:
    """Replaces torch's attention with CUDA's choice of kernel, where fake tensors would take the CPU's choice.

    With other head dims in values than in keys (DeepSeek), CPUs have no fused kernel and materialize the scores
    `[queries, keys]`, while CUDA does not. With grouped-query attention in fp32, CUDA materializes them, because its
    fused kernel for fp32 does not support it.
    """
    if is_fake(query) and settings.get("enable_gqa") and query.dtype not in _FLASH and query.shape[1] != key.shape[1]:
        written: Any = torch.ops.aten._scaled_dot_product_attention_math.default
        scale = settings.get("scale")
        return written(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True)[0]
    if not is_fake(query) or query.shape[-1] == value.shape[-1] or query.shape[1] != key.shape[1]:
        return original(query, key, value, attn_mask, dropout_p, is_causal, **settings)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention.default
    return fused(query, key, value, attn_mask, True, dropout_p, is_causal, scale=settings.get("scale"))[0]


def _shapes_received(model: nn.Module, peer: int, tag: int, kind: Hashable) -> tuple[Shapes, str]:
    """Returns the shape of a stage's input: `[microbatch, sequence, hidden]`, with the local shard under sp."""
    state: Any = parallel_state(model)
    config: Any = model.config
    if config.is_encoder_decoder:
        raise UnsupportedError(
            f"Predicting {type(model).__name__} with pp_size > 1 is not supported: its communication from encoder to "
            "decoder is not known without the other ranks. Use pp_size=1."
        )
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise UnsupportedError("Predicting output_router_logits=True with pp_size > 1 is not supported.")
    # `kind` is (stage, (flags, shape description)): see `Execution` and `microbatches.describe`.
    described: Any = kind[1][1]  # type: ignore[index]
    rows, length = next(value[1] for value in described if isinstance(value, tuple) and len(value) == 3)[:2]
    if state.config.sequence_parallel:
        start, stop = bounds(length, state.mesh.tp_size, state.mesh.tp_rank)
        length = stop - start
    dtype = next(parameter.dtype for _, parameter in local_named_parameters(model))
    return (((rows, length, config.get_text_config().hidden_size), dtype),), ""
