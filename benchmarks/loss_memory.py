"""Memory and time of the head and cross entropy on two tensor-parallel ranks, forward and backward.

    python benchmarks/loss_memory.py --out benchmarks/results/loss_memory_cpu.json

`gathered` is the method of transformers' tensor parallelism: the local logits are gathered, and every rank computes the
cross entropy of all of them. Reported per rank: the peak resident size above the size before, and the median time.
"""

import argparse
import json
import os
import statistics
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hf_megatron.core.communication.collectives import bounds, copy_to_ranks, gather_from_ranks
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.tensor_parallel.cross_entropy import CrossEntropyOptions, linear_cross_entropy

TOKENS, HIDDEN, VOCABULARY = 2048, 256, 32000
CHUNKS = {"gathered": None, "hf_megatron": None, "hf_megatron_chunk_512": 512, "hf_megatron_chunk_128": 128}


def _status(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _loss(variant: str, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD
    if variant == "gathered":
        local = F.linear(copy_to_ranks(hidden, group), weight)
        return F.cross_entropy(gather_from_ranks(local, -1, VOCABULARY, group).float(), labels)
    vocab_start = bounds(VOCABULARY, dist.get_world_size(), dist.get_rank())[0]
    options = CrossEntropyOptions(group, vocab_start, VOCABULARY, chunk_size=CHUNKS[variant])
    return linear_cross_entropy(hidden, weight, None, labels, None, options)


def _on_rank(variant: str, rounds: int) -> tuple[float, int, float]:
    torch.manual_seed(0)
    start, stop = bounds(VOCABULARY, dist.get_world_size(), dist.get_rank())
    hidden = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight = torch.randn(VOCABULARY, HIDDEN)[start:stop].clone().requires_grad_()
    labels = torch.randint(0, VOCABULARY, (TOKENS,))
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, seconds, loss = _status("VmRSS"), [], 0.0
    for _ in range(rounds):
        hidden.grad = weight.grad = None
        begin = time.perf_counter()
        value = _loss(variant, hidden, weight, labels)
        value.backward()
        seconds.append(time.perf_counter() - begin)
        loss = value.item()
    return loss, _status("VmHWM") - before, statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = {}
    for variant in CHUNKS:
        found = run_ranks(_on_rank, 2, variant, arguments.rounds, timeout=600)
        rows[variant] = {
            "loss": round(found[0][0], 5),
            "extra_memory_mib": round(max(memory for _, memory, _ in found) / 2**20, 1),
            "seconds": round(max(seconds for _, _, seconds in found), 3),
        }
    result = {
        "tokens": TOKENS,
        "hidden": HIDDEN,
        "vocabulary": VOCABULARY,
        "local_logits_mib": TOKENS * VOCABULARY // 2 * 4 / 2**20,
        "variants": rows,
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "versions": {name: metadata.version(name) for name in ("torch", "hf_megatron")},
    }
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
