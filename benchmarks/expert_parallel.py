"""Expert parallelism on two CPU ranks: CPU seconds of a step, time in all-to-alls, bytes of weights and moments.

    python benchmarks/expert_parallel.py --out benchmarks/results/expert_parallel_cpu.json
    python benchmarks/expert_parallel.py --tokens 1024 --rounds 1 --experts 8 --choices 2 --dtypes float32

A step is forward, backward and AdamW's step on one batch of Qwen3-MoE with four layers (hidden 512); the total width of
the experts is the same for every number of experts. Each round measures every variant once, in turn; compared are
medians of each rank's CPU seconds, which other load on the machine affects little. `apart` runs two processes without
communication, with half of the samples each. In a skewed batch half of the tokens are the same word, which is routed to
the same experts.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.tensor import DTensor
from train_step import versions, write_report
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.distributed import DistributedConfig

from hf_megatron import MegatronConfig, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest

MODEL = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
}
# Total width of all experts of a layer, and sequence length.
WIDTH, ROW = 8192, 512
OURS = {
    "tp2": {"tp_size": 2},
    "ep2 over tp2": {"tp_size": 2, "ep_size": 2},
    "ep2 over tp2+sp": {"tp_size": 2, "sequence_parallel": True, "ep_size": 2},
    "dp2": {"dp_size": 2},
    "ep2 over dp2": {"dp_size": 2, "ep_size": 2},
}
PEERS = {
    "transformers tp2 x ep2": {"tp_size": 2, "tp_plan": "auto", "ep_size": 2},
    "transformers fsdp2 x ep2": {"fsdp_size": 2, "ep_size": 2},
}
VARIANTS = ("one process", "apart", *OURS, *PEERS)
# Variants in which each rank gets half of the samples.
_HALVES = ("apart", "dp2", "ep2 over dp2", "transformers fsdp2 x ep2")
_EXPERTS = ".experts."


def config_of(experts, choices):
    sizes = {"num_experts": experts, "num_experts_per_tok": choices, "moe_intermediate_size": WIDTH // experts}
    return Qwen3MoeConfig(**MODEL, **sizes)


def batch_of(tokens, skewed):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, MODEL["vocab_size"], (tokens // ROW, ROW), generator=generator)
    if skewed:
        ids[torch.rand(ids.shape, generator=generator) < 0.5] = 7
    return ids


def load(folder, variant, dtype):
    options = {}
    if variant in OURS:
        options["megatron_config"] = ConfigUnderTest(**MegatronConfig(**OURS[variant]).to_dict())
    elif variant in PEERS:
        options["distributed_config"] = DistributedConfig(**PEERS[variant])
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), **options).train()


class _Timed:
    """An asynchronous all-to-all whose wait is timed."""

    def __init__(self, work, seconds, place):
        self.work, self.seconds, self.place = work, seconds, place

    def wait(self):
        began = time.perf_counter()
        self.work.wait()
        self.seconds[self.place] += time.perf_counter() - began


def timed_exchanges(seconds):
    """Records the seconds spent in each all-to-all of tokens or sizes, including the wait for the other rank."""
    stock = dist.all_to_all_single

    def timed(*args, **kwargs):
        began = time.perf_counter()
        found = stock(*args, **kwargs)
        seconds.append(time.perf_counter() - began)
        return found if found is None else _Timed(found, seconds, len(seconds) - 1)

    dist.all_to_all_single = timed


def measure_bytes(model, optimizer):
    """Bytes of this rank's experts, and of its optimizer state for all weights."""
    weights = [p.to_local() if isinstance(p, DTensor) else p for n, p in model.named_parameters() if _EXPERTS in n]
    moments = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in moments]
    return sum(w.nbytes for w in weights), sum(value.nbytes for value in local)


def step(folder, variant, tokens, skewed, dtype):
    """CPU and wall seconds, all-to-all seconds, bytes and loss of the last of three steps on this rank."""
    model = load(folder, variant, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, foreach=False)
    optimizer = prepare_optimizer(optimizer) if variant in OURS else optimizer
    ids = batch_of(tokens, skewed)
    if variant in _HALVES:
        ids = ids.chunk(2)[dist.get_rank()]
    exchanges = []
    timed_exchanges(exchanges)
    seconds = []
    for _ in range(3):
        exchanges.clear()
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append((time.process_time() - cpu, time.perf_counter() - began, tuple(exchanges)))
    # All ranks return the same step.
    return seconds[-1], measure_bytes(model, optimizer), loss.item()


def measured(folder, given, skewed, dtype):
    """Medians over the rounds."""
    samples = {name: [] for name in VARIANTS}
    for _ in range(given.rounds):
        for name in VARIANTS:
            ranks = 1 if name == "one process" else 2
            try:
                samples[name].append(run_ranks(step, ranks, folder, name, given.tokens, skewed, dtype, timeout=900))
            except Exception as error:  # noqa: BLE001
                if name not in PEERS:
                    raise
                print(f"{name}: {str(error).strip().splitlines()[-1]}", flush=True)
    rows = {}
    apart = _busiest(samples["apart"])
    for name, taken in samples.items():
        if not taken:
            rows[name] = None
            continue
        ranks = len(taken[0])
        both = [sum(sample[rank][0][0] for rank in range(ranks)) for sample in taken]
        share = [max(sum(rank[0][2]) / rank[0][1] for rank in sample) for sample in taken]
        alone = [_without_waiting(sample) for sample in taken]
        rows[name] = {
            "cpu_seconds_of_all_ranks": round(statistics.median(both), 3),
            "busiest_over_apart": round(_busiest(taken) / apart, 3),
            "wall_seconds": round(statistics.median(max(rank[0][1] for rank in sample) for sample in taken), 3),
            "share_in_exchanges": round(statistics.median(share), 3),
            "share_without_waiting": round(statistics.median(alone), 3),
            "mib_of_experts": round(taken[0][0][1][0] / 2**20, 1),
            "mib_of_optimizer": round(taken[0][0][1][1] / 2**20, 1),
            "loss": round(taken[0][0][2], 5),
        }
    for name, peer in (("ep2 over tp2", "transformers tp2 x ep2"), ("ep2 over dp2", "transformers fsdp2 x ep2")):
        if rows[peer] is not None:
            rows[name]["peer_over_this"] = round(_busiest(samples[peer]) / _busiest(samples[name]), 3)
    return rows


def _without_waiting(sample):
    """Share of all-to-alls in a step, counting each by the rank that arrived last and so did not wait."""
    exchanges = [rank[0][2] for rank in sample]
    if len({len(found) for found in exchanges}) > 1:
        # The ranks called different numbers of all-to-alls, so these cannot be matched.
        return max(sum(rank[0][2]) / rank[0][1] for rank in sample)
    return sum(map(min, zip(*exchanges, strict=True))) / max(rank[0][1] for rank in sample)


def _busiest(taken):
    return statistics.median(max(rank[0][0] for rank in sample) for sample in taken)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--choices", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    results = {}
    for experts, choices in zip(given.experts, given.choices, strict=True):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(config_of(experts, choices)).save_pretrained(folder)
            for dtype in given.dtypes:
                for skewed in (False, True) if experts == given.experts[len(given.experts) // 2] else (False,):
                    name = f"{experts} experts, {choices} choices, {dtype}" + (", skewed" if skewed else "")
                    results[name] = measured(folder, given, skewed, dtype)
                    for variant, row in results[name].items():
                        print(f"{name}, {variant}: {row}", flush=True)
    report = {
        "versions": versions(),
        "machine": {"cores": os.cpu_count(), "threads_per_rank": 1},
        "model": MODEL | {"width_of_all_experts": WIDTH},
        "tokens": given.tokens,
        "rounds": given.rounds,
        "results": results,
    }
    if given.out:
        write_report(given.out, report)


if __name__ == "__main__":
    main()
