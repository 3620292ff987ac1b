"""Writes a synthetic run of any size in RunCallback's format, to measure and inspect reports.

python benchmarks/made_run.py /tmp/run --ranks 64 --steps 10000 && hf-megatron debug report /tmp/run --no-plan
"""

import argparse
import json
import math
import random
from dataclasses import asdict
from pathlib import Path

from hf_megatron.config import MegatronConfig
from hf_megatron.diagnostics.rank_files import rank_file, write_rank_file
from hf_megatron.diagnostics.rank_trace import Communication, RankTrace
from hf_megatron.diagnostics.run_record import RunFacts, add_straggler, memory_folder, trace_folder
from hf_megatron.diagnostics.step_memory import MEMORY, MeasuredMemory

LAYERS, EXPERT_LAYERS, MICROBATCHES = 48, 48, 16
HELD = {"weights": 4e9, "gradients": 8e9, "main weights": 4e9, "moments": 8e9, "activations of layers": 3e10}


def layout_of(ranks):
    """Returns the layout tp4 x pp4, with the remaining ranks data parallel."""
    return MegatronConfig(tp_size=4, pp_size=4, dp_size=ranks // 16)


def make_run(directory, ranks=64, steps=10_000, broken=None, slow=None):
    """Writes the folder of a run on tp4 x pp4 and dp; `broken` is a step with a NaN loss, `slow` a slow rank."""
    folder, drawn = Path(directory), random.Random(0)
    replicas = ranks // 16
    places = [[rank // 4 % replicas, rank // 4 // replicas, 0, rank % 4] for rank in range(ranks)]
    axes = {"dp": replicas, "pp": 4, "cp": 1, "tp": 4}
    hosts = [f"node{rank // 8:02}" for rank in range(ranks)]
    layout, device = layout_of(ranks), ("NVIDIA H100 80GB HBM3", 85 * 10**9)
    versions = {"hf_megatron": "0.1.0", "torch": "2.13.0", "transformers": "5.23.0"}
    facts = RunFacts(
        "Qwen3MoeForCausalLM", 30_500_000_000, layout.layout(), ranks, axes, places, hosts, *device, versions, 0.0
    )
    facts.write(folder)
    with open(folder / "logs.jsonl", "w", encoding="utf-8") as file:
        for step in range(1, steps + 1):
            file.write(json.dumps(_logged(step, steps, drawn, broken)) + "\n")
    if slow is not None:
        add_straggler(
            folder, steps // 2, f"after {steps // 2} steps: rank {slow} (stage 2) is slow: 1.61 x the usual time"
        )
    for rank, place in enumerate(places):
        _write_memory(folder, rank, ranks, place[1])
        _write_trace(folder, rank, ranks, place[1], is_slow=rank == slow)


def _logged(step, steps, drawn, broken):
    decay = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    found = {
        "step": step,
        "time": float(step),
        "loss": float("nan") if step == broken else 2.2 + 8 * math.exp(-10 * step / steps) + drawn.gauss(0, 0.05),
        "grad_norm": abs(drawn.gauss(0.8, 0.2)),
        "learning_rate": 3e-4 * min(1, 20 * step / steps) * decay,
        "tokens_per_second": 2.1e6 * (1 + drawn.gauss(0, 0.02)),
        "mfu": 0.41 * (1 + drawn.gauss(0, 0.02)),
    }
    if step % 10 == 0:
        names = (f"expert_load/model.layers.{layer}.mlp.experts" for layer in range(EXPERT_LAYERS))
        found |= {name: 1.2 + abs(drawn.gauss(0, 0.4)) for name in names}
        found["expert_load_of_ranks"] = 1.3 + 0.3 * drawn.random()
    return found


def _write_memory(folder, rank, ranks, stage):
    at_peak = {name: int(size * (1.3 - 0.2 * stage)) for name, size in HELD.items()}
    kept, peak = {name: at_peak[name] for name in ("weights", "moments")}, sum(at_peak.values())
    sizes = {"rows": 1, "length": 4096, "microbatches": 8, "trains_all": True}
    found = MeasuredMemory(
        rank,
        ranks,
        stage,
        layout_of(ranks).to_dict(),
        {},
        "sdpa",
        "bfloat16",
        "cuda",
        **sizes,
        kept=kept,
        peak=peak,
        at_peak=at_peak,
        layers={"model.layers.0": 10**9},
        allocator={"peak": peak + 10**9, "reserved": peak + 2 * 10**9},
    )
    write_rank_file(rank_file(memory_folder(folder), rank), MEMORY, asdict(found))


def _write_trace(folder, rank, ranks, stage, *, is_slow):
    group, time = tuple(range(rank // 4 * 4, rank // 4 * 4 + 4)), 0.05 * stage
    computed, calls = [], []
    for _ in range(MICROBATCHES):
        for kind, seconds in (("forward", 0.003), ("backward", 0.006)):
            for layer in range(LAYERS // 4):
                stop, late = time + seconds, 0.0008 if is_slow else 0.0
                computed.append((f"{kind} model.layers.{stage * LAYERS // 4 + layer}", time, stop + late))
                calls.append(
                    Communication("tp", "allreduce", group, len(calls), stop + late, [(stop + late, stop + 0.001)])
                )
                time = stop + 0.001
    computed.append(("optimizer", time, time + 0.02))
    RankTrace(rank, ranks, layout_of(ranks).layout(), 0.0, 0.0, 2.3, computed, calls).write(trace_folder(folder))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--steps", type=int, default=10_000)
    given = parser.parse_args()
    make_run(given.directory, given.ranks, given.steps, broken=given.steps * 6 // 10, slow=given.ranks // 2 + 5)


if __name__ == "__main__":
    main()
