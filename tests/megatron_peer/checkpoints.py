"""Loading and saving of megatron-core models other than GPTModel, in separate processes."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed


def load(model: torch.nn.Module, folder: Path) -> None:
    """Loads `torch_dist` or legacy weights strictly: missing or unexpected keys raise."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    if (folder / "metadata.json").exists():
        state = dist_checkpointing.load({"model": _sharded_state_dict(model)}, str(folder))["model"]
    else:
        state = torch.load(folder / _rank_folder_name() / "model_optim_rng.pt", weights_only=False)["model"]
    model.load_state_dict(state, strict=True)


def save(model: torch.nn.Module, core: Path, legacy: Path) -> None:
    """Saves in both formats, as a release without arguments."""
    common = {"checkpoint_version": 3.0, "iteration": 0}
    if dist.get_rank() == 0:
        for root in (core, legacy):
            (root / "release").mkdir(parents=True)
            (root / "latest_checkpointed_iteration.txt").write_text("release")
    dist.barrier()
    dist_checkpointing.save({**_sharded_state_dict(model), **common}, core / "release")
    rank_folder = legacy / "release" / _rank_folder_name()
    rank_folder.mkdir()
    torch.save({**common, "model": model.state_dict_for_save_checkpoint()}, rank_folder / "model_optim_rng.pt")


def _rank_folder_name() -> str:
    stages, stage = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    return f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}" + (f"_{stage:03d}" if stages > 1 else "")


def run_through_stages(model: torch.nn.Module, shape: tuple[int, ...], *arguments) -> torch.Tensor | None:
    """Runs the forward of a pipeline-parallel model.

    Args:
        shape: Shape of the fp32 hidden states sent between stages.

    Returns:
        The output on the last stage, `None` on other stages.
    """
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if not first:
        hidden = torch.empty(shape)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    with torch.no_grad():
        output = model(*arguments).contiguous()
    if last:
        return output
    dist.send(output, parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def _sharded_state_dict(model: torch.nn.Module) -> dict:
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return model.sharded_state_dict(metadata={"dp_cp_group": group})


def run_on_ranks(function: Callable, layout: str, *arguments) -> None:
    """Calls `function(*arguments)` in one process per rank; `layout` is the tensor-parallel size or `TPxPP`."""
    tp, pp = map(int, layout.split("x")) if "x" in layout else (int(layout), 1)
    with tempfile.TemporaryDirectory() as root:
        torch.multiprocessing.spawn(_start, (function, str(Path(root) / "store"), tp, pp, *arguments), nprocs=tp * pp)


def _start(rank: int, function: Callable, store: str, tp: int, pp: int, *arguments) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=tp * pp)
    parallel_state.initialize_model_parallel(tp, pp, expert_tensor_parallel_size=tp)
    model_parallel_cuda_manual_seed(0)
    function(*arguments)
    dist.destroy_process_group()
