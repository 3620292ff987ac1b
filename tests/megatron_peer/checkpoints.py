"""Loading and saving a model of megatron-core in a process of its own, for classes other than GPTModel."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def load(model: torch.nn.Module, folder: Path, rank: int) -> None:
    """Strictly: no missing key, no surplus one in the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    if (folder / "metadata.json").exists():
        state = dist_checkpointing.load({"model": _sharded(model)}, str(folder))["model"]
    else:
        state = torch.load(folder / f"mp_rank_{rank:02d}" / "model_optim_rng.pt", weights_only=False)["model"]
    model.load_state_dict(state, strict=True)


def save(model: torch.nn.Module, core: Path, legacy: Path, rank: int) -> None:
    """In both formats, as a release without arguments."""
    common = {"checkpoint_version": 3.0, "iteration": 0}
    if rank == 0:
        for root in (core, legacy):
            (root / "release").mkdir(parents=True)
            (root / "latest_checkpointed_iteration.txt").write_text("release")
    dist.barrier()
    dist_checkpointing.save({**_sharded(model), **common}, core / "release")
    own = legacy / "release" / f"mp_rank_{rank:02d}"
    own.mkdir()
    torch.save({**common, "model": model.state_dict_for_save_checkpoint()}, own / "model_optim_rng.pt")


def _sharded(model: torch.nn.Module) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def on_ranks(function: Callable, size: int, *arguments) -> None:
    """Call a function with rank, ranks and these arguments in a process per tensor-parallel rank."""
    with tempfile.TemporaryDirectory() as root:
        torch.multiprocessing.spawn(_start, (function, str(Path(root) / "store"), size, *arguments), nprocs=size)


def _start(rank: int, function: Callable, store: str, size: int, *arguments) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(size, expert_tensor_parallel_size=size)
    model_parallel_cuda_manual_seed(0)
    function(rank, size, *arguments)
    dist.destroy_process_group()
