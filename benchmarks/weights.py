"""Loading and merged saving of a 495M-parameter Llama on two tensor-parallel ranks, against transformers and `cp`.

    python benchmarks/weights.py --rounds 5 --out benchmarks/results/weights_cpu.json

Each sample runs on two newly forked ranks: load, touch every parameter, save, sync. Variants take turns; reported are
medians, ratios to `cp` + sync of the same bytes (saving) and to transformers (loading), and each rank's extra memory.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import hf_megatron
from hf_megatron.core.fork_harness import run_ranks

VARIANTS = ("hf_megatron", "transformers")
CONFIG = LlamaConfig(
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_key_value_heads=8,
    vocab_size=20000,
)


def _memory(name: str) -> int:
    """Returns an entry of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _anonymous() -> int:
    return _memory("RssAnon")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _layout(variant: str) -> dict[str, object]:
    if variant == "hf_megatron":
        return {"megatron_config": hf_megatron.MegatronConfig(tp_size=2)}
    return {"distributed_config": DistributedConfig(tp_size=2)}


def _on_rank(variant: str, source: str, target: str) -> dict[str, float]:
    before = _anonymous()
    torch.distributed.barrier()
    start = time.perf_counter()
    model = LlamaForCausalLM.from_pretrained(source, **_layout(variant))
    torch.distributed.barrier()
    returned = time.perf_counter()
    # A memory-mapped weight is read only when it is touched; training touches all of them.
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.mul_(1.0)
    torch.distributed.barrier()
    loaded = time.perf_counter()
    held = _anonymous() - before
    os.sync()
    torch.distributed.barrier()
    _reset_peak()
    resident = _memory("VmRSS")
    begin = time.perf_counter()
    model.save_pretrained(target)
    if torch.distributed.get_rank() == 0:
        os.sync()
    torch.distributed.barrier()
    saved = time.perf_counter()
    return {
        "load": loaded - start,
        "return": returned - start,
        "held": held,
        "save": saved - begin,
        "extra": _memory("VmHWM") - resident,
    }


def _warm(size: int) -> None:
    """Touches as much memory as a sample will: a virtual machine may have returned free memory to its host."""
    torch.ones(2 * size // 4)


def _copy(source: Path, target: Path) -> float:
    os.sync()
    begin = time.perf_counter()
    shutil.copyfile(source / "model.safetensors", target / "copy.safetensors")
    os.sync()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "source", Path(folder) / "target"
        target.mkdir()
        LlamaForCausalLM(CONFIG).save_pretrained(source)
        size = (source / "model.safetensors").stat().st_size
        samples: dict[str, list[list[dict[str, float]]]] = {variant: [] for variant in VARIANTS}
        copies = []
        for round_index in range(arguments.rounds + 1):
            seconds = _copy(source, target)
            for variant in VARIANTS:
                shutil.rmtree(target / variant, ignore_errors=True)
                _warm(size)
                found = run_ranks(_on_rank, 2, variant, str(source), str(target / variant), timeout=600)
                if round_index:  # the first round warms the page cache
                    samples[variant].append(found)
            if round_index:
                copies.append(seconds)
    result = summarise(samples, copies, size)
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def summarise(samples: dict[str, list[list[dict[str, float]]]], copies: list[float], size: int) -> dict[str, object]:
    """Medians over the rounds; for times, of the slower rank, and for memory, of the larger rank."""
    rows = {}
    for variant, rounds in samples.items():
        worst = [{name: max(rank[name] for rank in ranks) for name in ranks[0]} for ranks in rounds]
        saves = [sample["save"] / copy for sample, copy in zip(worst, copies, strict=True)]
        rows[variant] = {
            "load_until_it_returns_s": round(statistics.median(sample["return"] for sample in worst), 3),
            "load_and_touch_s": round(statistics.median(sample["load"] for sample in worst), 3),
            "save_s": round(statistics.median(sample["save"] for sample in worst), 3),
            "save_over_copy": round(statistics.median(saves), 3),
            "extra_memory_of_save_gib": round(statistics.median(sample["extra"] for sample in worst) / 2**30, 3),
            "anonymous_memory_over_model": round(statistics.median(sample["held"] for sample in worst) / size, 3),
        }
    pairs = zip(samples["hf_megatron"], samples["transformers"], strict=True)
    loads = [max(r["load"] for r in ours) / max(r["load"] for r in theirs) for ours, theirs in pairs]
    names = ("torch", "transformers", "safetensors", "hf_megatron")
    return {
        "model_bytes": size,
        "copy_and_sync_s": round(statistics.median(copies), 3),
        "variants": rows,
        "load_and_touch_over_transformers": round(statistics.median(loads), 3),
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "versions": {name: metadata.version(name) for name in names},
    }


if __name__ == "__main__":
    main()
