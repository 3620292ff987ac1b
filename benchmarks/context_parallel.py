"""Context parallelism on two and four CPU ranks: CPU seconds and bytes sent per step and scheme, and peak memory.

    python benchmarks/context_parallel.py --out benchmarks/results/context_parallel_cpu.json
    python benchmarks/context_parallel.py --lengths 1024 --rounds 1 --memory-length 2048

Each round measures every variant once, in turn; compared are medians of each rank's CPU seconds, which other load on
the machine affects little. `apart` runs two processes without communication, each with a sequence of half the length.
Packed sequences hold documents of log-normal length (median 600 tokens, sigma 1.2, fixed seed). Weights stay fixed.
"""

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from train_step import versions, write_report
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_megatron  # noqa: F401
from hf_megatron import MegatronConfig
from hf_megatron.context_parallel import token_exchange
from hf_megatron.core.fork_harness import run_ranks

MODEL = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
}
LAYERS, MEMORY_LAYERS, CHUNK, SEED = 2, 4, 1024, 7
VARIANTS = {
    "one process": None,
    "apart": None,
    "p2p": {"cp_size": 2, "cp_comm_type": "p2p"},
    "a2a": {"cp_size": 2, "cp_comm_type": "a2a"},
    "all_gather": {"cp_size": 2, "cp_comm_type": "all_gather"},
    "p2p of 4": {"cp_size": 4, "cp_comm_type": "p2p"},
    "a2a+p2p of 2 x 2": {"cp_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)},
}
RANKS = {"one process": 1, "p2p of 4": 4, "a2a+p2p of 2 x 2": 4}


def documents(length):
    """Positions `[1, length]` of a packed sequence of documents."""
    generator, found = torch.Generator().manual_seed(SEED), []
    while sum(found) < length:
        found.append(max(int(600 * torch.exp(1.2 * torch.randn((), generator=generator))), 1))
    return torch.cat([torch.arange(size) for size in found])[:length].unsqueeze(0)


def batch_of(length, packed):
    ids = torch.randint(1, MODEL["vocab_size"], (1, length), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    return batch | {"position_ids": documents(length)} if packed else batch


@contextlib.contextmanager
def counted_bytes(total):
    """Counts the bytes that this rank sends for attention: ring sends, all-to-all, all-gather and reduce-scatter."""
    stock = (
        token_exchange.Passing.__init__,
        dist.all_to_all_single,
        token_exchange.all_gather_flat,
        token_exchange.reduce_scatter,
    )

    def passing(self, tensor, size, group):
        total[0] += tensor.nbytes
        stock[0](self, tensor, size, group)

    def all_to_all(output, sent, *args, group=None, **kwargs):
        total[0] += sent.nbytes * (dist.get_world_size(group) - 1) // dist.get_world_size(group)
        return stock[1](output, sent, *args, group=group, **kwargs)

    def all_gather(shard, group):
        total[0] += shard.nbytes * (dist.get_world_size(group) - 1)
        return stock[2](shard, group)

    def reduce_scatter(tensor, dim, group):
        total[0] += tensor.nbytes * (dist.get_world_size(group) - 1) // dist.get_world_size(group)
        return stock[3](tensor, dim, group)

    def put(functions):
        token_exchange.Passing.__init__, dist.all_to_all_single = functions[:2]
        token_exchange.all_gather_flat, token_exchange.reduce_scatter = functions[2:]

    put((passing, all_to_all, all_gather, reduce_scatter))
    try:
        yield
    finally:
        put(stock)


def load(folder, layout):
    config = None if layout is None else MegatronConfig(**layout, loss_chunk_size=CHUNK, zero_stage=0)
    return AutoModelForCausalLM.from_pretrained(folder, megatron_config=config).train()


def step(folder, variant, length, packed):
    """CPU seconds, wall seconds, bytes sent and loss of a step on this rank, after a warm-up with a short sequence."""
    model = load(folder, VARIANTS[variant])
    model(**batch_of(256, packed)).loss.backward()
    batch = batch_of(length // 2 if variant == "apart" else length, packed)
    total = [0]
    with counted_bytes(total):
        began, cpu = time.perf_counter(), time.process_time()
        loss = model(**batch).loss
        loss.backward()
        return time.process_time() - cpu, time.perf_counter() - began, total[0], loss.item()


def status(name):
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) / 1024 for line in file if line.startswith(name))


def growth(folder, size, length):
    """Peak growth of a rank's resident memory in a step, in MiB."""
    model = load(folder, {"cp_size": size, "cp_comm_type": "p2p"} if size > 1 else None)
    model(**batch_of(256, False)).loss.backward()
    batch = batch_of(length, False)
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmRSS")
    model(**batch).loss.backward()
    return status("VmHWM") - before


def measured(folder, lengths, rounds, packed):
    """Medians over the rounds; for wall seconds, of the slowest rank."""
    rows = {}
    for length in lengths:
        samples = {name: [] for name in VARIANTS}
        for _ in range(rounds):
            for name in VARIANTS:
                samples[name].append(run_ranks(step, RANKS.get(name, 2), folder, name, length, packed, timeout=900))
        alone = statistics.median(sample[0][0] for sample in samples["one process"])
        for name, taken in samples.items():
            per_rank = [statistics.median(sample[rank][0] for sample in taken) for rank in range(len(taken[0]))]
            rows[f"{length}, {name}"] = {
                "cpu_seconds_per_rank": [round(value, 3) for value in per_rank],
                "busiest_over_one_process": round(max(per_rank) / alone, 3),
                "busiest_over_mean": round(max(per_rank) / statistics.mean(per_rank), 3),
                "wall_seconds": round(statistics.median(max(rank[1] for rank in sample) for sample in taken), 3),
                "mib_sent_per_rank": [round(rank[2] / 2**20, 2) for rank in taken[0]],
                "loss": round(taken[0][0][3], 5),
            }
            print(f"{length}, {name}: {rows[f'{length}, {name}']}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--packed-length", type=int, default=8192)
    parser.add_argument("--memory-length", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        for layers in (LAYERS, MEMORY_LAYERS):
            torch.manual_seed(0)
            config = LlamaConfig(**MODEL, num_hidden_layers=layers)
            AutoModelForCausalLM.from_config(config).save_pretrained(f"{directory}/{layers}")
        rows = measured(f"{directory}/{LAYERS}", given.lengths, given.rounds, packed=False)
        packed = measured(f"{directory}/{LAYERS}", [given.packed_length], given.rounds, packed=True)
        memory = {}
        for size in (1, 2, 4):
            grown = run_ranks(growth, size, f"{directory}/{MEMORY_LAYERS}", size, given.memory_length, timeout=1800)
            memory[f"cp{size}"] = round(max(grown), 1)
            print(f"memory, cp{size}: {memory[f'cp{size}']} MiB", flush=True)
    report = {
        "versions": versions(),
        "machine": {"cores": os.cpu_count(), "threads_per_rank": 1},
        "model": MODEL | {"layers": LAYERS, "layers_of_memory": MEMORY_LAYERS, "loss_chunk_size": CHUNK},
        "documents": {"median": 600, "sigma": 1.2, "seed": SEED},
        "rounds": given.rounds,
        "rows": rows,
        "packed_rows": packed,
        "growth_mib_of_busiest_rank": {"tokens": given.memory_length, **memory},
        "growth_over_cp1": {name: round(value / memory["cp1"], 3) for name, value in memory.items()},
    }
    if given.out:
        write_report(given.out, report)


if __name__ == "__main__":
    main()
