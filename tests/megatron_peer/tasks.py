"""Runner of tasks on real megatron-core: `python -m tests.megatron_peer.tasks JOB.json`. README.md has the format."""

import contextlib
import ctypes
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from datetime import timedelta
from pathlib import Path

warnings.filterwarnings("ignore")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Compiling the activations, which are wrapped in torch.compile, would dominate the run time.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from tests.megatron_peer.patches import patch_megatron, patch_torch  # noqa: E402

patch_torch()
import logging  # noqa: E402

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoConfig  # noqa: E402

from tests.megatron_peer.models import (  # noqa: E402
    Layout,
    Unsupported,
    build_model,
    make_settings,
    megatron_args,
    reject_wrong_gradients,
)

patch_megatron()

CHECKPOINT_VERSION = 3.0
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
VOTE_TIMEOUT = timedelta(seconds=10)  # for the other ranks to end after a failure
LAUNCH_TIMEOUT = 300  # seconds


# --- the model ------------------------------------------------------------------------------------------------------


class Session:
    """Model parallelized with the layout of this launch."""

    def __init__(self, task: dict, layout: Layout):
        self.layout = layout
        self.hf = AutoConfig.from_pretrained(task["hf"])
        self.vocab = self.hf.vocab_size
        self.padded_vocab = task.get("padded_vocab", self.vocab)
        torch.manual_seed(1234)
        self.model = build_model(
            self.hf, self.padded_vocab, layout, task.get("keys", "te"), task.get("mtp_layers")
        ).eval()
        self.homogeneous = not task.get("non_homogeneous", False)
        self.stages = parallel_state.get_pipeline_model_parallel_world_size()
        self.stage = parallel_state.get_pipeline_model_parallel_rank()

    def metadata(self, **more) -> dict:
        # The group is needed to compute replica ids.
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return {"dp_cp_group": group, "non_homogeneous_layers": not self.homogeneous, **more}

    def matching(self, directory: str) -> dict:
        """Returns the metadata that matches a checkpoint: whether each layer has separate keys."""
        names = dist_checkpointing.load_tensors_metadata(directory)
        return {"non_homogeneous_layers": any(re.match(r"decoder\.layers\.\d+\.", name) for name in names)}

    def sharded(self, **more) -> dict:
        return self.model.sharded_state_dict(metadata=self.metadata(**more))

    @torch.no_grad()
    def randomize(self, seed: int = 0) -> None:
        """Sets layout-independent values: each shard is a slice of a global tensor seeded by its key."""
        zero_centered = self.model.config.layernorm_zero_centered_gamma
        for shard in list_sharded_tensors(self.sharded()):
            key = shard.key
            unsharded = torch.randn(shard.global_shape, generator=generator(f"{seed} {key}"))
            shard_slices = tuple(
                slice(offset, offset + size)
                for offset, size in zip(shard.global_offset, get_shard_shape(shard), strict=True)
            )
            is_norm = "norm" in key and key.endswith("weight")
            vector = is_norm or key.endswith(("bias", "softmax_offset"))
            values = unsharded[shard_slices].reshape(shard.data.shape) * (0.1 if vector else 0.05)
            shard.data.copy_(values + float(is_norm and not zero_centered))

    def load(self, directory: str, form: str = "torch_dist") -> None:
        """Loads strictly: missing or unexpected keys raise."""
        if form == "legacy":
            state = torch.load(legacy_file(directory, self.layout), weights_only=False)["model"]
        else:
            sharded = self.sharded(**self.matching(directory))
            state = dist_checkpointing.load({"model": sharded}, directory)["model"]
        self.model.load_state_dict(state, strict=True)

    def start(self, task: dict) -> None:
        if "load" in task:
            self.load(task["load"], task.get("load_format", "torch_dist"))
        else:
            self.randomize(task.get("seed", 0))

    def logits(self, ids: torch.Tensor) -> torch.Tensor | None:
        """Returns [batch, sequence, vocabulary] on the last stage, without padded columns; None on other stages."""
        batch, length = ids.shape
        positions = torch.arange(length)[None].expand(batch, -1)
        group = parallel_state.get_pipeline_model_parallel_group()
        ranks = dist.get_process_group_ranks(group)
        with torch.no_grad():
            if self.stage > 0:
                sequence_length = length // self.layout.tp if self.layout.sp else length
                hidden = torch.empty(sequence_length, batch, self.model.config.hidden_size)
                dist.recv(hidden, ranks[self.stage - 1])
                self.model.set_input_tensor(hidden)
            if self.model.config.mtp_num_layers:
                return self.mtp_logits(ids, positions)
            output = self.model(ids, positions, None)
            if self.stage < self.stages - 1:
                dist.send(output.contiguous(), ranks[self.stage + 1])
                return None
        parts = [torch.empty_like(output) for _ in range(self.layout.tp)]
        dist.all_gather(parts, output.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return torch.cat(parts, -1)[..., : self.vocab].contiguous()

    def mtp_logits(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Returns [1 + depth, batch, sequence, vocabulary] on a single rank: main logits, then each MTP depth."""
        outputs: list[torch.Tensor] = []
        # Cloned, since the loss overwrites the logits in place (tensor_parallel/cross_entropy.py).
        hook = self.model.output_layer.register_forward_hook(lambda module, args, out: outputs.append(out[0].clone()))
        self.model(ids, positions, None, labels=ids)
        hook.remove()
        *mtp_outputs, main_logits = outputs
        return torch.stack([main_logits, *mtp_outputs]).transpose(1, 2)[..., : self.vocab].contiguous()


def list_sharded_tensors(state) -> list[ShardedTensor]:
    """Returns every ShardedTensor of a sharded state dict; a factory returns views of its tensor."""
    tensors = []
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, ShardedTensorFactory):
            tensors += list_sharded_tensors(value.build())
        elif isinstance(value, ShardedTensor):
            tensors.append(value)
        elif isinstance(value, dict | list):
            tensors += list_sharded_tensors(value)
    return tensors


def get_shard_shape(shard: ShardedTensor) -> tuple[int, ...]:
    return (1,) * shard.prepend_axis_num + tuple(shard.local_shape)


def generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(text.encode()))


def legacy_file(directory: str, layout: Layout) -> Path:
    """Returns the file of this rank: iter_0000001/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt."""
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if layout.pp > 1:
        name += f"_{parallel_state.get_pipeline_model_parallel_rank():03d}"
    if layout.ep > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    root = Path(directory)
    iteration = (root / "latest_checkpointed_iteration.txt").read_text().strip() if root.is_dir() else "1"
    folder = "release" if iteration == "release" else f"iter_{int(iteration):07d}"
    return root / folder / name / "model_optim_rng.pt"


def run_on_rank_zero(write) -> None:
    if dist.get_rank() == 0:
        write()
    dist.barrier()


def task_file(task: dict, out: Path) -> Path:
    return out / f"{task['name']}.safetensors"


def input_ids(task: dict) -> torch.Tensor:
    return load_file(task["ids"])["ids"] if isinstance(task["ids"], str) else torch.tensor(task["ids"])


def write_tensors(tensors: dict, path: Path) -> None:
    """Writes the tensors on one rank of the last pipeline stage, which has the logits."""
    first_copy = parallel_state.get_data_parallel_rank() == 0 and parallel_state.get_tensor_model_parallel_rank() == 0
    if first_copy and parallel_state.is_pipeline_last_stage():
        save_file(tensors, str(path))
    dist.barrier()


# --- tasks ----------------------------------------------------------------------------------------------------------


def load_logits(task: dict, layout: Layout, out: Path) -> dict:
    """Loads `load` strictly and writes the logits of `ids`."""
    session = Session(task, layout)
    session.start(task)
    write_tensors({"logits": session.logits(input_ids(task))}, task_file(task, out))
    return {}


def save(task: dict, layout: Layout, out: Path) -> dict:
    """Builds the model, random or from `load`, saves it to `dir` in `format`, and writes the logits of any `ids`."""
    session = Session(task, layout)
    session.start(task)
    common = {
        "args": megatron_args(session.hf, session.padded_vocab, layout),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": 1,
    }
    common["args"].mtp_num_layers = task.get("mtp_layers")
    if task.get("format", "torch_dist") == "legacy":
        common["args"].ckpt_format = "torch"
        run_on_rank_zero(lambda: _write_tracker(Path(task["dir"])))
        path = legacy_file(task["dir"], layout)
        replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_expert_data_parallel_rank()
        if 0 in replicas:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({**common, "model": session.model.state_dict_for_save_checkpoint()}, path)
        dist.barrier()
    else:
        run_on_rank_zero(lambda: Path(task["dir"]).mkdir(parents=True))
        dist_checkpointing.save({**common, "model": session.sharded()}, task["dir"])
    if "ids" in task:
        write_tensors({"logits": session.logits(input_ids(task))}, task_file(task, out))
    return {"args": vars(common["args"])}


def _write_tracker(root: Path) -> None:
    root.mkdir(parents=True)
    (root / "latest_checkpointed_iteration.txt").write_text("1")


def train_save(task: dict, layout: Layout, out: Path) -> dict:
    """Trains, saves model and optimizer after `steps`, and trains `resumed_steps` more as the reference of a resume."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    session = Session(task, layout)
    reject_wrong_gradients(session.model.config)
    sharding = task.get("sharding", "fully_reshardable")
    with_optimizer = "load" in task and task.get("load_optimizer", False)
    if with_optimizer and sharding != "fully_reshardable":
        raise Unsupported(f"resuming from {sharding}")
    if not with_optimizer:
        session.start(task)
    model = session.model.train()
    if task.get("mask_padding", True) and model.post_process:
        _mask_padding(session)
    model = DistributedDataParallel(
        model.config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
        ),
        model,
    )
    _reject_shifted_buckets(model)
    hyper = {"lr": 1e-3, "weight_decay": 0.01, "clip_grad": 1.0, **task.get("optimizer", {})}
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            use_distributed_optimizer=True,
            params_dtype=torch.float32,
            bf16=False,
            fp16=False,
            **hyper,
        ),
        [model],
    )
    for group in optimizer.param_groups:
        # Usually done by Megatron-LM's learning rate scheduler; without it, norms and biases would decay too.
        group["weight_decay"] = hyper["weight_decay"] * group["wd_mult"]
    session.model.config.finalize_model_grads_func = finalize_model_grads
    session.model.config.grad_scale_func = optimizer.scale_loss
    session.model.config.timers = None

    def state(is_loading: bool, **layers) -> dict:
        # As in Megatron-LM: keys without the optimizer's index in the chain.
        more = session.metadata(distrib_optim_sharding_type=sharding, chained_optim_avoid_prefix=True, **layers)
        weights = session.model.sharded_state_dict(metadata=more)
        moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=more)
        return {"model": weights, "optimizer": moments}

    if with_optimizer:
        _empty_moments(optimizer)
        loaded = dist_checkpointing.load(state(True, **session.matching(task["load"])), task["load"])
        with torch.no_grad():
            optimizer.load_state_dict(loaded["optimizer"])
        session.model.load_state_dict(loaded["model"], strict=True)

    ids = input_ids(task)
    batches = ids if ids.ndim == 3 else ids[None]
    history = []

    def one_step(index: int) -> None:
        samples = batches[index % len(batches)].chunk(layout.dp)[parallel_state.get_data_parallel_rank()]
        positions = torch.arange(samples.shape[1])[None].expand_as(samples)
        labels = samples.roll(-1, 1)

        def forward(iterator, module):
            def mean_loss(per_token):
                loss = per_token[:, :-1].float().mean()
                return loss, {"loss": loss.detach().clone()}  # the schedule divides `loss` in place

            return module(samples, positions, None, labels=labels), mean_loss

        model.zero_grad_buffer()
        optimizer.zero_grad()
        result = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=[model],
            num_microbatches=1,
            seq_length=samples.shape[1],
            micro_batch_size=samples.shape[0],
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        loss = result[0]["loss"].clone() if result else torch.zeros(())
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(loss, group=group)
        history.append({"loss": loss.item() / dist.get_world_size(group), "grad_norm": float(norm)})

    first = task.get("first_step", 0)
    steps = task.get("steps", 2)
    for step in range(first, first + steps):
        one_step(step)
    if "dir" in task:
        common = {
            "args": megatron_args(session.hf, session.padded_vocab, layout),
            "checkpoint_version": CHECKPOINT_VERSION,
            "iteration": first + steps,
        }
        run_on_rank_zero(lambda: Path(task["dir"]).mkdir(parents=True))
        dist_checkpointing.save({**common, **state(False)}, task["dir"])
    for step in range(first + steps, first + steps + task.get("resumed_steps", 1)):
        one_step(step)
    # Only the last stage has the losses.
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (session.stage, history))
    history = max(gathered, key=lambda entry: entry[0])[1]
    return {
        "steps": history[:steps],
        "resumed": history[steps:],
        "optimizer": hyper,
        "groups": _describe_groups(optimizer),
    }


def _reject_shifted_buckets(model) -> None:
    """Raises if a bucket before the last is padded: megatron-core then saves optimizer state from wrong offsets.

    This happens if two stages share the embedding, which gets a separate bucket.
    """
    buffers = model.buffers + model.expert_parallel_buffers
    padded = [bucket.grad_data.numel() != bucket.numel_unpadded for buffer in buffers for bucket in buffer.buckets[:-1]]
    anywhere = torch.tensor(int(any(padded)))
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if anywhere.item():
        raise Unsupported("optimizer state behind a padded bucket: sizes that need no padding, or no pipeline")


def _empty_moments(optimizer) -> None:
    """Initializes empty optimizer state: megatron-core reads it on loading, but torch's AdamW creates it lazily."""
    for chained in optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            for parameter in group["params"]:
                chained.optimizer.state[parameter] = {
                    "step": torch.zeros(()),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def _mask_padding(session: Session) -> None:
    """Masks the logits of padded columns, so that the loss matches transformers."""
    start = parallel_state.get_tensor_model_parallel_rank() * (session.padded_vocab // session.layout.tp)
    padded = torch.arange(start, start + session.padded_vocab // session.layout.tp) >= session.vocab

    def hide(module, args, output):
        logits, bias = output
        return logits.masked_fill(padded, -1e30), bias

    session.model.output_layer.register_forward_hook(hide)


def _describe_groups(optimizer) -> list[dict]:
    plain = (int, float, bool, str, type(None))
    return [
        {name: value for name, value in group.items() if isinstance(value, plain)} | {"tensors": len(group["params"])}
        for group in optimizer.param_groups
    ]


def keys(task: dict, layout: Layout, out: Path) -> dict:
    """Returns sharded keys with global shapes, objects, and the plain state dict keys of every rank."""
    session = Session(task, layout)
    sharded = session.sharded()
    objects = [value for value in sharded.values() if isinstance(value, ShardedObject)]
    state = session.model.state_dict()
    local_keys = {
        "tensors": {shard.key: [list(shard.global_shape), str(shard.dtype)] for shard in list_sharded_tensors(sharded)},
        "objects": sorted(value.unique_key for value in objects),
        "sharded_dims": {
            shard.key: [
                [axis - shard.prepend_axis_num, count]
                for axis, count in enumerate(shard.axis_fragmentations or ())
                if count > 1 and axis >= shard.prepend_axis_num
            ]
            for shard in list_sharded_tensors(sharded)
        },
        "state_dict": {name: list(value.shape) if torch.is_tensor(value) else None for name, value in state.items()},
    }
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, local_keys)
    merged = {part: {} for part in ("tensors", "sharded_dims")}
    for entry in gathered:
        for part in merged:
            merged[part].update(entry[part])
    merged["objects"] = sorted({name for entry in gathered for name in entry["objects"]})
    merged["state_dict"] = [entry["state_dict"] for entry in gathered]
    merged["args"] = vars(megatron_args(session.hf, session.padded_vocab, layout))
    return merged


def supported(task: dict, layout: Layout, out: Path) -> dict:
    """Raises if the peer does not support this model; no model is built."""
    make_settings(AutoConfig.from_pretrained(task["hf"]))
    return {}


TASKS = {task.__name__: task for task in (load_logits, save, train_save, keys, supported)}


# --- launches -------------------------------------------------------------------------------------------------------


def run_rank(rank: int, layout: Layout, tasks: list[dict], out: Path, meeting: Path) -> None:
    """Runs the tasks of a launch on one rank; writes the results to a separate file."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(meeting), layout.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.world, timeout=COLLECTIVE_TIMEOUT)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )
    model_parallel_cuda_manual_seed(1234)
    results = []
    for task_idx, task in enumerate(tasks):
        start = time.time()
        try:
            result = {"ok": True, **TASKS[task["task"]](task, layout, out)}
        except BaseException as error:  # noqa: BLE001 - reported to the caller; CheckpointException is not one
            result = {"ok": False, "error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        end = time.time()
        results.append({"name": task["name"], "seconds": round(end - start, 3), "end": end, **result})
        (out / f"rank{rank}.json").write_text(json.dumps(results, default=str))
        if not _all_ranks_agree(store, task_idx, rank, layout.world, result["ok"]):
            os._exit(1)
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _all_ranks_agree(store, number: int, rank: int, world: int, ok: bool) -> bool:
    """Returns whether all ranks ended the task in the same way, so that their next collectives match."""
    store.set(f"task{number}/{rank}", str(ok))
    names = [f"task{number}/{other}" for other in range(world)]
    try:
        store.wait(names, COLLECTIVE_TIMEOUT if ok else VOTE_TIMEOUT)
    except RuntimeError:  # other ranks are blocked in a collective with this rank; its exit releases them
        return False
    return len({store.get(name) for name in names}) == 1


def run_launch(launch: dict, out: Path) -> dict:
    """Forks the ranks of one launch, which share the imports of this process."""
    layout = Layout(**launch["layout"])
    tasks = [{"name": f"{task_idx}_{task['task']}", **task} for task_idx, task in enumerate(launch["tasks"])]
    out.mkdir(parents=True, exist_ok=True)
    start = time.time()
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory() as folder:
        children = [_fork(run_rank, rank, layout, tasks, out, Path(folder) / "meeting") for rank in range(layout.world)]
        codes = _wait(children)
    ranks = []
    for rank in range(layout.world):
        path = out / f"rank{rank}.json"
        ranks.append(json.loads(path.read_text()) if path.exists() else [])
        path.unlink(missing_ok=True)
    results = []
    for task_idx, task in enumerate(tasks):
        rank_results = [entries[task_idx] for entries in ranks if task_idx < len(entries)]
        # The first rank to fail has the cause; other ranks then lose the connection to it.
        failed = min((entry for entry in rank_results if not entry["ok"]), key=lambda entry: entry["end"], default=None)
        if len(rank_results) < layout.world:
            failed = failed or {"name": task["name"], "ok": False, "error": f"a rank ended early, exit codes {codes}"}
        results.append(failed or rank_results[0])
    return {"layout": launch["layout"], "seconds": round(time.time() - start, 3), "tasks": results}


def _fork(function, *args) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        # Kills the ranks if a test run kills this parent (prctl PR_SET_PDEATHSIG).
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        function(*args)
        code = 0
    except BaseException:  # noqa: BLE001 - a child must never return into the caller
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(children: list[int]) -> list[int | None]:
    """Waits for the children and returns their exit codes; kills remaining ones after the time limit."""
    codes: dict[int, int] = {}
    end = time.time() + LAUNCH_TIMEOUT
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    codes[child] = os.waitstatus_to_exitcode(status)
        if time.time() > end:
            for child in children:
                if child not in codes:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    return [codes[child] for child in children]


def main(job_file: str) -> int:
    started = time.time()
    logging.disable(logging.WARNING)
    job = json.loads(Path(job_file).read_text())
    out = Path(job["out"])
    launches = [
        run_launch(launch, out / launch.get("name", str(number))) for number, launch in enumerate(job["launches"])
    ]
    (out / "results.json").write_text(json.dumps({"launches": launches, "seconds": time.time() - started}, indent=1))
    return 0 if all(task["ok"] for launch in launches for task in launch["tasks"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
