"""LoRA on two CPU ranks: seconds and memory of a step, compared with single-process PEFT and with sharded peers.

    python benchmarks/adapters.py --out benchmarks/results/adapters_cpu.json
    python benchmarks/adapters.py --tokens 512 --rounds 1 --layers 2

A step is forward, backward and AdamW's step on one batch of a Llama with a frozen base. Each round measures every
variant once, in turn; the medians over the rounds of the busier rank are compared. Peers are `fully_shard` of every
layer and of the model (FSDP2) around PEFT's model, and PEFT on transformers' own tensor parallelism, which supports
adapters on column-parallel linears only. `frozen` trains one norm of the first layer and no adapter, which measures the
base model's own forward and backward.
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
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from train_step import versions, write_report
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.distributed import DistributedConfig
from workers import forget_peak_memory, give_back_memory, peak_memory_mib

from hf_megatron import MegatronConfig, local_named_parameters, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest

MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "tie_word_embeddings": False,
}
ROW, RANK = 512, 16
COLUMNS = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]
LAYOUTS = {
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2, "num_microbatches": 4},
    "dp2": {"dp_size": 2},
    "dp2, stage 3": {"dp_size": 2, "zero_stage": 3},
}
# Name -> layout, linears with adapters.
OURS = {
    **{name: (name, "all-linear") for name in LAYOUTS},
    "tp2+sp, columns": ("tp2+sp", COLUMNS),
    "tp2+sp, frozen": ("tp2+sp", None),
}
PEERS = {"fully_shard": "all-linear", "transformers tp2, columns": COLUMNS}
VARIANTS = ("one process", "one process, frozen", *OURS, *PEERS)
_HALVES = ("dp2", "dp2, stage 3", "fully_shard")


def load(folder, variant):
    options = {}
    if variant in OURS:
        options["megatron_config"] = ConfigUnderTest(**MegatronConfig(**LAYOUTS[OURS[variant][0]]).to_dict())
    elif variant == "transformers tp2, columns":
        options["distributed_config"] = DistributedConfig(tp_size=2, tp_plan="auto")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    targets = OURS[variant][1] if variant in OURS else PEERS.get(variant, "all-linear")
    if targets is None or variant.endswith("frozen"):
        model.requires_grad_(False)
        model.model.layers[0].input_layernorm.weight.requires_grad_(True)
        return model.train()
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules=targets, task_type="CAUSAL_LM"))
    if variant == "fully_shard":
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model.train()


def measure_bytes(model, optimizer):
    """Bytes of this rank's weights, and of its optimizer state."""

    def held(tensors):
        return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)

    own = [parameter for _, parameter in local_named_parameters(model)]
    moments = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return held(own), held(moments)


def step(folder, variant, tokens):
    """CPU and wall seconds of the last of three steps on this rank, peak memory growth in MiB, bytes, and loss."""
    model = load(folder, variant)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=False)
    optimizer = prepare_optimizer(optimizer) if variant in OURS else optimizer
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, MODEL["vocab_size"], (tokens // ROW, ROW), generator=generator)
    if variant in _HALVES:
        ids = ids.chunk(2)[dist.get_rank()]
    seconds, losses = [], []
    for index in range(3):
        if index == 2:
            forget_peak_memory()
        if dist.is_initialized():
            dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append((time.process_time() - cpu, time.perf_counter() - began))
        loss = loss.detach()
        losses.append((loss.full_tensor() if isinstance(loss, DTensor) else loss).item())
    peak = peak_memory_mib()
    give_back_memory()
    return seconds[-1], peak, measure_bytes(model, optimizer), losses[-1]


def measured(folder, given):
    """Medians over the rounds."""
    samples = {name: [] for name in VARIANTS}
    for _ in range(given.rounds):
        for name in VARIANTS:
            ranks = 1 if name.startswith("one process") else 2
            try:
                samples[name].append(run_ranks(step, ranks, folder, name, given.tokens, timeout=900))
            except Exception as error:  # noqa: BLE001
                if name not in PEERS:
                    raise
                print(f"{name}: {str(error).strip().splitlines()[-1]}", flush=True)
    rows = {}
    for name, taken in samples.items():
        rows[name] = taken and {
            "cpu_seconds_of_the_busier_rank": round(_busiest(taken, 0), 3),
            "wall_seconds": round(_busiest(taken, 1), 3),
            "peak_mib": round(statistics.median(max(rank[1] for rank in sample) for sample in taken)),
            "mib_of_weights": round(max(rank[2][0] for rank in taken[0]) / 2**20, 1),
            "mib_of_optimizer": round(max(rank[2][1] for rank in taken[0]) / 2**20, 2),
            "loss": round(statistics.mean(rank[3] for rank in taken[0]), 5),
        }
    return rows


def _busiest(taken, which):
    return statistics.median(max(rank[0][which] for rank in sample) for sample in taken)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**MODEL, num_hidden_layers=given.layers)).save_pretrained(folder)
        rows = measured(folder, given)
    for variant, row in rows.items():
        print(f"{variant}: {row}", flush=True)
    report = {
        "versions": versions(),
        "machine": {"cores": os.cpu_count(), "threads_per_rank": 1},
        "model": MODEL | {"num_hidden_layers": given.layers, "rank": RANK},
        "tokens": given.tokens,
        "rounds": given.rounds,
        "results": rows,
    }
    if given.out:
        write_report(given.out, report)


if __name__ == "__main__":
    main()
