"""Search results as text, as JSON, and as config files for a launch."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..config import MegatronConfig
from ..core.io.safe_paths import replace_file
from ..errors import ConfigError
from .estimate import Estimate
from .job import Job
from .search import NOISE, SearchResult

_GIB, _HOUR = 2**30, 3600
# Fields without a key in accelerate's YAML, passed as environment variables.
_BY_VARIABLE = ("pipeline_schedule", "virtual_stages")
_LINKED = {"tp": "tensor", "cp": "context", "ep": "expert", "pp": "pipeline", "dp": "data"}


def plan_as_dict(result: SearchResult, tokens: float | None = None) -> dict[str, Any]:
    """Returns a search result as JSON-compatible values; sizes are in bytes, times in seconds.

    Args:
        tokens (`float`, *optional*): training tokens, to report hours.
    """
    return {
        "devices": result.job.devices,
        "device": result.job.device.name,
        "sequence_length": result.job.sequence_length,
        "target_length": result.job.target_length,
        "global_batch": result.job.global_batch,
        "training": dataclasses.asdict(result.job.training),
        "document_length": result.job.document_length,
        "considered": result.considered,
        "fits": result.fits,
        "best": [
            _as_dict(result, one, tokens) | {"not_compared": list(lines)}
            for one, lines in zip(result.best, result.uncompared, strict=True)
        ],
        "nearest": None if result.nearest is None else _as_dict(result, result.nearest, tokens),
        "left_out": result.reasons,
    }


def _as_dict(result: SearchResult, one: Estimate, tokens: float | None) -> dict[str, Any]:
    values = {
        "layout": one.layout.layout(),
        "megatron_config": _stated(one.layout),
        "rows": one.rows,
        "microbatches": one.microbatches,
        "seconds": one.seconds,
        "tokens_per_second_and_device": _rate(result, one),
        "within_noise_of_best": one.seconds <= result.best[0].seconds * (1 + NOISE) if result.best else False,
        "compute": one.compute,
        "waits": dict(one.exposed),
        "bubble": one.bubble,
        "sent": dict(one.traffic),
        "memory": [dict(rank) for rank in one.memory],
        "peak": one.peak,
        "launch_bound": one.is_small,
    }
    if tokens is not None:
        values |= {
            "hours": _hours(result, one, tokens),
            "device_hours": _hours(result, one, tokens) * result.job.devices,
        }
    return values


def plan_as_text(result: SearchResult, name: str, tokens: float | None = None) -> str:
    """Returns a search result as a table with its reasons.

    Args:
        name (`str`): of the model.
        tokens (`float`, *optional*): training tokens, to report days.
    """
    job = result.job
    lines = [
        f"{name} on {job.devices} {job.device.name} of {job.device.memory_gib:g} GiB, {job.precision}: "
        f"{job.global_batch} rows of {job.sequence_length} tokens{_format_labels(job)} a step{_trained(job)}",
        f"{result.considered} layouts, {result.fits} of them within {job.memory / _GIB:.1f} GiB, "
        f"{job.memory_share:.0%} of a device",
        "",
    ]
    head = ["", "layout", "schedule", "recompute", "rows", "microbatches", "GiB", "s/step", "tokens/s/device"]
    head += ["bubble", "waits"] + (["days"] if tokens is not None else [])
    plans = [(str(place + 1), one) for place, one in enumerate(result.best)]
    plans += [("-", result.nearest)] if result.nearest is not None else []
    lines += _table([head, *([place, *_cells(result, one, tokens)] for place, one in plans)])
    lines += ["", *_reasons(result)]
    for reason, count in result.reasons.items():
        lines.append(f"left out: {reason}" + (f" ({count} times)" if count > 1 else ""))
    return "\n".join(lines)


def _format_labels(job: Job) -> str:
    return "" if job.target_length is None else f", and of {job.target_length} labels,"


def _trained(job: Job) -> str:
    """Returns a description of partial training and of packing; empty for full training on unpacked sequences."""
    description, training = "", job.training
    if training.lora_rank:
        description += f", LoRA of rank {training.lora_rank} with a frozen base"
    if training.quantized is not None:
        description += f" in {training.quantized}"
    if training.frozen:
        description += f", without {', '.join(training.frozen)}"
    if job.document_length is not None:
        description += f", packed with documents of {job.document_length:g} tokens"
    return description


def _cells(result: SearchResult, one: Estimate, tokens: float | None) -> list[str]:
    layout, virtual = one.layout, one.layout.virtual_stages
    schedule = "" if layout.pp_size == 1 else layout.pipeline_schedule + (f" x {virtual}" if virtual else "")
    waits = ", ".join(
        f"{axis} {fraction:.0%}" for axis, value in one.exposed.items() if (fraction := value / one.seconds) > 0.005
    )
    cells = [layout.layout(), schedule, layout.recompute or "none", str(one.rows), str(one.microbatches)]
    cells += [f"{one.peak / _GIB:.1f}", f"{one.seconds:.2f}", f"{_rate(result, one):.0f}"]
    cells += [f"{max(0.0, one.bubble) / one.seconds:.0%}", waits or "none"]
    return cells + ([f"{_hours(result, one, tokens) / 24:.1f}"] if tokens is not None else [])


def _reasons(result: SearchResult) -> list[str]:
    if not result.best:
        return ["nothing fits"] + ([_what_would_help(result, result.nearest)] if result.nearest is not None else [])
    first, lines = result.best[0], []
    fullest = max(first.memory, key=lambda rank: sum(rank.values()))
    parts = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in fullest.most_common() if size > _GIB / 20)
    lines.append(f"1 holds at its fullest rank, in GiB: {parts}")
    sent = ", ".join(f"{_LINKED[axis]} {size / _GIB:.1f}" for axis, size in sorted(first.traffic.items()) if size)
    lines.append(f"1 sends of each rank in a step, in GiB: {sent or 'nothing'}")
    for place, one in enumerate(result.best[1:], start=2):
        slower = one.seconds / first.seconds - 1
        if slower <= NOISE:
            lines.append(f"{place} is within noise of 1 ({slower:.1%}): try both")
        else:
            lines.append(f"{place} takes {slower:.0%} longer: {_difference(first, one)}")
    if result.nearest is not None:
        lines.append(_what_would_help(result, result.nearest))
    for place, kinds in enumerate(result.uncompared, start=1):
        if kinds:
            what = "; ".join(" ".join(line.split()) for line in kinds)
            lines.append(f"{place} was not compared with one process, loading compares it first: {what}")
    if first.is_small:
        lines.append("launching kernels takes longer than running them: the work of a rank is small, 1 will be slower")
    return lines


def _difference(first: Estimate, other: Estimate) -> str:
    """Returns the largest extra costs of a layout relative to the fastest one."""
    more = {"computing": other.compute - first.compute, "the pipeline's bubble": other.bubble - first.bubble}
    for axis in {*first.exposed, *other.exposed}:
        waits = other.exposed.get(axis, 0.0) - first.exposed.get(axis, 0.0)
        more[f"waiting for {_LINKED[axis]} parallel ranks"] = waits
    most = sorted(more.items(), key=lambda item: -item[1])[:2]
    return ", ".join(f"{name} {value:+.2f} s" for name, value in most if value > 0)


def _what_would_help(result: SearchResult, one: Estimate) -> str:
    missing = (one.peak - result.job.memory) / _GIB
    fullest = max(one.memory, key=lambda rank: sum(rank.values()))
    name, size = fullest.most_common(1)[0]
    helps = {
        "activations": 'recompute="full", fewer rows or more cp',
        "at work": "loss_chunk_size, mlp_chunk_size or more tp",
        "weights": "more tp, more pp or zero_stage=3",
        "decoded weights": "more tp",
        "gradients": "zero_stage=3, more tp or more pp",
        "main weights": "more data parallel ranks",
        "moments": "more data parallel ranks or offload_optimizer",
    }.get(name, "more devices")
    return (
        f"- does not fit: {one.layout.layout()} misses {missing:.1f} GiB; most is {name}, {size / _GIB:.1f} GiB "
        f"({helps} would help)"
    )


def _rate(result: SearchResult, one: Estimate) -> float:
    return result.job.tokens / one.seconds / result.job.devices


def _hours(result: SearchResult, one: Estimate, tokens: float) -> float:
    return tokens / result.job.tokens * one.seconds / _HOUR


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _stated(layout: MegatronConfig) -> dict[str, Any]:
    """Returns the fields that differ from their defaults."""
    default = MegatronConfig().to_dict()
    return {name: value for name, value in layout.to_dict().items() if value != default[name]}


def layout_as_yaml(one: Estimate) -> str:
    """Returns a YAML that `megatron_config=` reads."""
    import yaml

    stated = {name: value for name, value in _stated(one.layout).items() if name != "dp_size"}
    return yaml.safe_dump(stated or {"tp_size": 1}, sort_keys=False)


def launch_as_yaml(result: SearchResult, one: Estimate, devices_per_machine: int = 8) -> str:
    """Returns a YAML for `accelerate launch --config_file`; leading comments have the settings without a key.

    Args:
        devices_per_machine (`int`, defaults to 8): processes of one machine.
    """
    import yaml

    layout = one.layout
    block: dict[str, Any] = {
        "megatron_lm_tp_degree": layout.tp_size,
        "megatron_lm_pp_degree": layout.pp_size,
        "megatron_lm_context_parallel_size": layout.cp_size,
        "megatron_lm_expert_model_parallel_size": layout.ep_size,
        "megatron_lm_sequence_parallelism": layout.sequence_parallel,
        "megatron_lm_use_distributed_optimizer": layout.zero_stage > 0,
        "megatron_lm_num_micro_batches": layout.num_microbatches or 1,
        # Gradient clipping is left to the script.
        "megatron_lm_gradient_clipping": 0.0,
        "megatron_lm_recompute_activations": layout.recompute == "selective",
    }
    if layout.offload_optimizer:
        block["megatron_lm_optimizer_cpu_offload"] = True
    if layout.recompute == "full":
        block["megatron_lm_recompute_granularity"] = "full"
    devices = result.job.devices
    machines = -(-devices // devices_per_machine)
    values = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MEGATRON_LM",
        "machine_rank": 0,
        "main_training_function": "main",
        "megatron_lm_config": block,
        "mixed_precision": "bf16" if result.job.precision == "fp8" else result.job.precision.replace("fp32", "no"),
        "num_machines": machines,
        "num_processes": devices,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": False,
    }
    if machines > 1:
        values |= {"main_process_ip": "127.0.0.1", "main_process_port": 29500}
    variables = launch_variables(layout)
    environment = "".join(f"{name}={value} " for name, value in variables.items())
    lines = [f"# {environment}accelerate launch --config_file THIS_FILE train.py"]
    lines.append(f"# A dp rank's step: {one.microbatches * one.rows} rows, in microbatches of {one.rows}.")
    return "\n".join([*lines, yaml.safe_dump(values, sort_keys=False)])


def launch_variables(layout: MegatronConfig) -> Mapping[str, str]:
    """Returns environment variables for the parts of a layout that the YAML has no keys for."""
    default = MegatronConfig()
    variables = {
        f"HF_MEGATRON_{name.upper()}": str(value)
        for name in _BY_VARIABLE
        if (value := getattr(layout, name)) != getattr(default, name)
    }
    return variables | ({"HF_MEGATRON_ZERO_STAGE": str(layout.zero_stage)} if layout.zero_stage > 1 else {})


def write_plan(result: SearchResult, path: Path, *, for_accelerate: bool = False) -> None:
    """Writes the best layout as a YAML file; raises `ConfigError` if no layout fits."""
    if not result.best:
        raise ConfigError(f"{path} is not written: no layout fits.")
    text = launch_as_yaml(result, result.best[0]) if for_accelerate else layout_as_yaml(result.best[0])
    replace_file(path, lambda partial: partial.write_text(text, encoding="utf-8"))
