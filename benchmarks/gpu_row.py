"""One row of `gpu.py`, measured in a process of its own: a training step, the optimizer alone, ceilings, or two ranks.

A rank of a larger job runs on torch's process group `fake`: its kernels, host time and memory are real, communication
returns at once, and its bytes are counted. Losses of such rows are not those of a job.
"""

import statistics
import time
from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch
from torch.utils._pytree import tree_leaves

GIB = 2**30
LOSS_TOLERANCE = 2e-2  # both in bf16


@dataclass(frozen=True)
class Row:
    """What a row measures.

    Attributes:
        number (`int`): place in the order of the rows.
        seconds (`int`): expected time on an H200; the process is killed after three times as long.
        kind (`str`): `"step"`, `"optimizer"` (its step alone), `"ceilings"` or `"ranks"` (two real ones).
        ranks (`int`): of the job, 1 for the stock model.
        compiled (`bool`): whether each layer is compiled.
        float8 (`str`): torchao's recipe.
    """

    id: str
    number: int
    seconds: int
    kind: str = "step"
    model: str = "8B width"
    ranks: int = 1
    layout: dict = field(default_factory=dict)
    fused: bool = True
    compiled: bool = False
    liger: bool = False
    float8: str | None = None
    lora: bool = False


@dataclass(frozen=True)
class Settings:
    """Sizes and device of all rows."""

    device: str
    models: dict
    tokens: int
    warm_up_steps: int
    timed_steps: int
    host_steps: int
    product: int  # size of the square product of the ceilings
    copied_bytes: int

    @property
    def backend(self):
        return "inductor" if self.device == "cuda" else "aot_eager"


def measure_row(row, settings):
    """Returns the row's JSON object; raises what its code raises."""
    measure = {"step": measure_step, "optimizer": measure_optimizer, "ceilings": measure_ceilings, "ranks": two_ranks}
    return measure[row.kind](row, settings)


# Model and optimizer


def build(row, settings):
    """Returns the model, its layers and its optimizer; weights are drawn on the device."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**settings.models[row.model], max_position_embeddings=8192, use_cache=False)
    if row.ranks == 1:
        torch.manual_seed(0)
        with torch.device(settings.device):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        from hf_megatron import MegatronConfig
        from hf_megatron.testing.fake_rank import join_as_fake_rank

        join_as_fake_rank(0, row.ranks, settings.device)
        layout = MegatronConfig(**row.layout)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, megatron_config=layout)
    layers = model.model.layers
    if row.liger:
        use_liger(model)
    if row.float8 is not None:
        use_float8(model, row.float8, settings.device)
    if row.lora:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=row.fused)
    if row.ranks > 1:
        from hf_megatron import prepare_optimizer

        optimizer = prepare_optimizer(optimizer)
    return model, layers, optimizer


def use_liger(model):
    """Installs Liger's norm, SwiGLU and rotary embedding; head and loss stay."""
    if find_spec("liger_kernel") is None:
        raise RuntimeError("liger-kernel is not installed")
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=False, model=model
    )


def use_float8(model, recipe, device):
    """Computes products in float8 with torchao, but the head's; scales are powers of two."""
    if find_spec("torchao") is None:
        raise RuntimeError("torchao is not installed")
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        raise RuntimeError(f"{torch.cuda.get_device_name()} has no float8 products")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, round_scales_to_power_of_2=True, emulate=device == "cpu")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: "lm_head" not in name)


def draw_ids(model, tokens, device, shards=1):
    """Draws tokens of the first rank's share of the vocabulary: with zeros for the others, kernels would run faster."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size // shards, (1, tokens), generator=generator).to(device)


# Clocks


class Timeline:
    """Times between marks: of the device on CUDA, where the host may run ahead, else of the host."""

    def __init__(self, device):
        self.is_cuda = device == "cuda"
        self.marks = []

    def mark(self):
        if self.is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def milliseconds(self):
        pairs = zip(self.marks, self.marks[1:], strict=False)
        if not self.is_cuda:
            return [1e3 * (stop - start) for start, stop in pairs]
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


def spread(milliseconds):
    ordered = sorted(milliseconds)
    last = len(ordered) - 1
    return {
        "median": statistics.median(ordered),
        "p10": ordered[round(0.1 * last)],
        "p90": ordered[round(0.9 * last)],
        "n": len(ordered),
    }


def profile_kernels(function, device):
    """Returns the sum of the kernels' milliseconds, and the number of launches and copies; CUDA only."""
    if device != "cuda":
        return None, None
    from torch.autograd import DeviceType

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    kernels = [
        event
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False)
    ]
    return sum(event.time_range.elapsed_us() for event in kernels) / 1e3, len(kernels)


def peak_gib(device):
    return torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None


# Kinds of rows


def describe(row, settings):
    """The fields of a row that need no measurement."""
    options = {
        "compile": settings.backend if row.compiled else None,
        "liger": ["rms_norm", "swiglu", "rope"] if row.liger else [],
        "float8": row.float8,
        "optimizer": "adamw-fused" if row.fused else "adamw",
        "packs": row.layout.get("sequence_parallel", False) and row.layout.get("shard_saved_activations", True),
        "lora": 16 if row.lora else None,
    }
    shared = {"cuda": "nccl-shared", "cpu": "gloo"}[settings.device]
    return {
        "id": row.id,
        "number": row.number,
        "kind": row.kind,
        "world": shared if row.kind == "ranks" else "one" if row.ranks == 1 else "fake",
        "rank": 0,
        "ranks": row.ranks,
        "layout": row.layout,
        "model": settings.models.get(row.model, {}),
        "tokens": [1, settings.tokens],
        "dtype": "bf16",
        "options": options,
        "error": None,
    }


class Step:
    """A training step in its phases."""

    def __init__(self, model, optimizer, ids):
        self.model, self.optimizer, self.ids = model, optimizer, ids

    def forward(self):
        self.loss = self.model(input_ids=self.ids, labels=self.ids).loss

    def backward(self):
        self.loss.backward()

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self):
        self.forward()
        self.backward()
        self.step()

    def host_milliseconds(self, phases, steps, device):
        """Medians of the host's time in each phase, which starts with an idle device."""
        times = {phase: [] for phase in phases}
        for _ in range(steps):
            for phase in ("forward", "backward", "step"):
                synchronize(device)
                start = time.perf_counter()
                getattr(self, phase)()
                if phase in times:
                    times[phase].append(1e3 * (time.perf_counter() - start))
        return {phase: statistics.median(found) for phase, found in times.items()}


def flops_per_token(row, config, tokens):
    """FLOPs of forward and backward per token; frozen weights have no gradient."""
    from hf_megatron.diagnostics.throughput import estimate_model_work

    work = estimate_model_work(config)
    if row.lora:
        return 4 * work.per_token, "4N"
    return 3 * work.flops(1, tokens) / tokens, "6N+attention"


def count_memory_and_traffic(row, step):
    """Memory kept between steps and at the peak by category, and the bytes that a rank sends by axis, in one step."""
    from measured_step import sum_storages

    from hf_megatron.compat.torch_distributed import communication_through
    from hf_megatron.diagnostics.allocation_tracker import AllocationTracker
    from hf_megatron.diagnostics.step_memory import kept_tensors

    kept = kept_tensors(step.model, step.optimizer)
    if row.ranks == 1:
        states = step.optimizer.state.values()
        kept["moments"] = [value for state in states for value in state.values() if torch.is_tensor(value)]
    sizes, sent = sum_storages(kept), {}

    def count(communicate, group, name, args):
        count_collective(sent, group, name, args)
        return communicate()

    with communication_through(count, lambda wait, work: wait()), AllocationTracker(step.model) as tracker:
        tracker.begin_step(kept)
        step.run()
    figures = tracker.figures
    # The layouts of the rows have a single axis.
    axis = "tp" if row.layout.get("tp_size", 1) > 1 else "dp"
    return {
        "kept_gib": {name: size / GIB for name, size in sizes.items()},
        "peak_by_category_gib": {name: size / GIB for name, size in figures.at_peak.items()},
        "bytes_sent": {axis: sum(size for _, size in sent.values())} if row.ranks > 1 else {},
        "collectives": {name: {"calls": calls, "bytes_sent": size} for name, (calls, size) in sent.items()},
        "host_reads": len(figures.reads),
    }


def count_collective(sent, group, name, args):
    """Adds what a rank sends in a collective of a ring: a one-rank group sends nothing, nor does the host."""
    tensors = [value for value in tree_leaves(args) if isinstance(value, torch.Tensor)]
    ranks, size = group.size(), max((tensor.nbytes for tensor in tensors), default=0)
    if ranks == 1 or all(tensor.dtype == torch.uint8 for tensor in tensors):  # states of random generators
        return
    calls, total = sent.get(name, (0, 0))
    # Its largest tensor is the complete one. An all-reduce is a reduce-scatter and an all-gather.
    rounds = 2 if name.startswith(("allreduce", "all_reduce")) else 1
    sent[name] = calls + 1, total + round(rounds * size * (ranks - 1) / ranks)


def measure_step(row, settings):
    device = settings.device
    model, layers, optimizer = build(row, settings)
    step = Step(model, optimizer, draw_ids(model, settings.tokens, device, row.layout.get("tp_size", 1)))
    flops, rule = flops_per_token(row, model.config, settings.tokens)
    found = describe(row, settings) | {"flops_per_token": flops, "flop_rule": rule}
    # The first step creates the optimizer's state.
    step.run()
    losses = [step.loss.item()]
    # Counted before compiling: what is in a compiled graph cannot be seen. Torch's float8 tensors are not counted.
    if row.float8 is None:
        found |= count_memory_and_traffic(row, step)
    found |= {"compile_s": None, "graphs": None, "graph_breaks": None}
    first = 0.0
    if row.compiled:
        from torch._dynamo.utils import counters

        counters.clear()
        for layer in layers:
            layer.compile(backend=settings.backend)
        synchronize(device)
        start = time.perf_counter()
        step.run()
        synchronize(device)
        first = time.perf_counter() - start
    for _ in range(settings.warm_up_steps):
        step.run()
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    timeline = Timeline(device)
    timeline.mark()
    for _ in range(settings.timed_steps):
        step.run()
        timeline.mark()
    found["step_ms"] = spread(timeline.milliseconds())
    losses.append(step.loss.item())
    found |= {"peak_gib": peak_gib(device), "loss": losses, "skipped_steps": count_skipped(optimizer)}
    found["host_ms"] = step.host_milliseconds(("forward", "backward", "step"), settings.host_steps, device)
    found["kernel_ms"], found["launches"] = profile_kernels(step.run, device)
    if row.compiled:
        found["compile_s"] = first - found["step_ms"]["median"] / 1e3
        found["graphs"] = counters["stats"]["unique_graphs"]
        found["graph_breaks"] = sum(counters["graph_break"].values())
    return found


def count_skipped(optimizer):
    """Steps that the library skipped; `None` for a stock model's optimizer."""
    from hf_megatron.data_parallel.distributed_optimizer import sharded

    attached = sharded(optimizer)
    return None if attached is None else int(attached.step_was_skipped)


def measure_optimizer(row, settings):
    """The optimizer's step and `zero_grad` alone, on the gradients of a short sequence."""
    from hf_megatron.compat.torch_dtensor import local_tensor

    device = settings.device
    model, _, optimizer = build(row, settings)
    tokens = min(settings.tokens, 128)
    step = Step(model, optimizer, draw_ids(model, tokens, device, row.layout.get("tp_size", 1)))
    for _ in range(settings.warm_up_steps):
        step.run()
    times = []
    for _ in range(settings.timed_steps):
        step.forward()
        step.backward()
        synchronize(device)
        timeline = Timeline(device)
        timeline.mark()
        step.step()
        timeline.mark()
        times += timeline.milliseconds()
    found = describe(row, settings) | {"tokens": [1, tokens], "step_ms": spread(times)}
    found["host_ms"] = step.host_milliseconds(("step",), settings.host_steps, device)
    found["skipped_steps"] = count_skipped(optimizer)
    step.forward()
    step.backward()
    synchronize(device)
    found["kernel_ms"], found["launches"] = profile_kernels(step.step, device)
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return found | {"parameters": sum(local_tensor(parameter).numel() for parameter in held)}


def measure_ceilings(row, settings):
    """Rates of a bf16 product, a rowwise float8 product and a copy, which the other rows are compared with."""
    device, size = settings.device, settings.product
    product = 2 * size**3
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    gpu = {"name": torch.cuda.get_device_name() if device == "cuda" else "cpu"}
    gpu["bf16_tflops"] = product / seconds_each(lambda: left @ right, device) / 1e12
    source = torch.empty(settings.copied_bytes, device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    # Read and written.
    gpu["copy_tb_s"] = 2 * settings.copied_bytes / seconds_each(lambda: target.copy_(source), device) / 1e12
    found = describe(row, settings) | {"gpu": gpu | {"fp8_tflops": None}}
    if device == "cpu":
        return found | {"fp8_error": "not measured on a CPU"}
    try:
        scales = torch.ones(size, 1, device=device), torch.ones(1, size, device=device)
        eight = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn).t()
        multiply = lambda: torch._scaled_mm(  # noqa: E731
            *eight, scale_a=scales[0], scale_b=scales[1], out_dtype=torch.bfloat16, use_fast_accum=True
        )
        found["gpu"]["fp8_tflops"] = product / seconds_each(multiply, device) / 1e12
    except (RuntimeError, ValueError) as error:  # a device without float8
        found["fp8_error"] = str(error)[:300]
    return found


def seconds_each(function, device, rounds=20):
    """Median seconds of a call on the device."""
    for _ in range(3):
        function()
    timeline = Timeline(device)
    timeline.mark()
    for _ in range(rounds):
        function()
        timeline.mark()
    return statistics.median(timeline.milliseconds()) / 1e3


def two_ranks(row, settings):
    """Two real ranks that share the device, whose losses must equal those of a single process."""
    from hf_megatron.core.fork_harness import run_ranks

    def losses(layout):
        from transformers import AutoModelForCausalLM, LlamaConfig

        from hf_megatron import prepare_optimizer

        config = LlamaConfig(**settings.models[row.model], max_position_embeddings=8192, use_cache=False)
        torch.manual_seed(0)
        options = {"megatron_config": layout} if layout else {}
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options).train().to(settings.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=row.fused)
        step, found = Step(model, prepare_optimizer(optimizer) if layout else optimizer, None), []
        step.ids = draw_ids(model, settings.tokens, settings.device)
        for _ in range(2):
            step.run()
            found.append(step.loss.item())
        return found

    [expected] = run_ranks(losses, 1, None, timeout=row.seconds * 3, device=settings.device)
    ranks = run_ranks(losses, 2, row.layout, timeout=row.seconds * 3, device=settings.device)
    difference = max(abs(a - b) for found in ranks for a, b in zip(found, expected, strict=True))
    found = describe(row, settings) | {"loss": ranks[0], "loss_of_one_process": expected, "difference": difference}
    if not difference <= LOSS_TOLERANCE:
        found["error"] = f"losses {ranks} differ from those of a single process, {expected}"
    return found
