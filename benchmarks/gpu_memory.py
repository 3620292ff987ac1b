"""Memory of an accelerator rank, predicted with a fake process group and compared with real CPU or GPU ranks.

    python benchmarks/gpu_memory.py --out benchmarks/results/gpu_memory_predicted.json
    python benchmarks/gpu_memory.py --cases 8B-dp8
    python benchmarks/gpu_memory.py --device cuda --cases --out benchmarks/results/gpu_memory_cuda.json

The first part runs the library as ranks of large jobs without allocating memory: persistent bytes per parameter,
activations that a layer saves per microbatch by operation, collectives, and host syncs. The second part predicts
smaller steps of two gloo ranks or, with `--device cuda`, two NCCL ranks, and measures them with torch's allocator.
Measurements on a GPU include cuBLAS's workspace, predictions do not; neither includes NCCL's own memory and the
fragmentation of the allocator.
"""

import argparse
import json
import os
import time
from importlib import metadata
from pathlib import Path

import torch
from measured_step import measure_step
from transformers import LlamaConfig
from transformers.utils import logging

from hf_megatron import MegatronConfig
from hf_megatron.planner.predicted_step import dry_run

GIB = 2**30


def llama(hidden, intermediate, layers, heads, groups, vocabulary):
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        max_position_embeddings=2**20,
        tie_word_embeddings=False,
        use_cache=False,
    )


# Sizes of Llama 3.1.
LLAMA_405B = llama(16384, 53248, 126, 128, 8, 128256)
LLAMA_8B = llama(4096, 14336, 32, 32, 8, 128256)
# Models for the measurement on two ranks, and their batch [samples, tokens].
MEASURED = {
    "cpu": (llama(512, 1376, 4, 8, 4, 8000), (4, 256)),
    "cuda": (llama(2048, 8192, 8, 32, 8, 32000), (4, 2048)),
}
LARGEST = {"tp_size": 8, "sequence_parallel": True, "pp_size": 16, "zero_stage": 1, "num_microbatches": 2}
# name -> (model, layout, ranks, ranks of the job, [samples, tokens] per dp rank, S of ZeRO-1)
CASES = {
    "405B-tp8-sp-pp16-zero1": (LLAMA_405B, LARGEST, {"first": 0, "middle": 64, "last": 120}, 2048, (2, 8192), 16),
    "405B-recompute": (LLAMA_405B, LARGEST | {"recompute": "full"}, {"middle": 64}, 2048, (2, 8192), 16),
    "8B-dp8": (LLAMA_8B, {"zero_stage": 1}, {"any": 0}, 8, (1, 8192), 8),
    "8B-dp8-zero2": (LLAMA_8B, {"zero_stage": 2}, {"any": 0}, 8, (1, 8192), None),
}
LONG = {"cp_size": 8, "cp_comm_type": "a2a", "zero_stage": 3}
LESS = LONG | {"recompute": "full", "loss_chunk_size": 2048}
TILED = LESS | {"mlp_chunk_size": 4096}
# One sequence over eight ranks, which also shard weights and optimizer state.
for _name, _layout, _tokens in (
    ("8B-cp8-128k", LONG, 2**17),
    ("8B-cp8-128k-recompute", LESS, 2**17),
    ("8B-cp8-512k-recompute", LESS, 2**19),
    ("8B-cp8-512k-tiled", TILED, 2**19),
    ("8B-cp8-512k-tiled-offload", TILED | {"offload_activations": True}, 2**19),
):
    CASES[_name] = (LLAMA_8B, _layout, {"any": 1}, 8, (1, _tokens), None)
COMPARED = {
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2, "num_microbatches": 4},
    "dp2 zero1": {"zero_stage": 1},
    "dp2 zero2": {"zero_stage": 2},
    "dp2 zero3": {"zero_stage": 3},
    "cp2": {"cp_size": 2},
    "tp2+sp recompute": {"tp_size": 2, "sequence_parallel": True, "recompute": "full"},
}


def describe(figures, shares):
    """Figures of one rank in readable units."""
    kept = figures.per_parameter
    by_cause = max(figures.layers.values(), key=lambda causes: sum(causes.values()), default={})
    largest = sorted(by_cause.items(), key=lambda item: -item[1])
    bound = {} if shares is None else {"6 + 12/S": round(6 + 12 / shares, 3)}
    return bound | {
        "parameters": figures.parameters,
        "kept_bytes_per_parameter": {name: round(size, 3) for name, size in kept.items() if size >= 0.001},
        "kept_sum": round(sum(kept.values()), 3),
        "peak_gib": round(figures.peak / GIB, 2),
        "at_peak_gib": {name: round(size / GIB, 2) for name, size in figures.at_peak.items() if size >= GIB / 100},
        "layer_and_microbatch_gib": round(sum(by_cause.values()) / GIB, 4),
        "layer_and_microbatch_mib_by_cause": {cause: round(size / 2**20, 1) for cause, size in largest},
        "waits_of_the_library": [
            f"{read.moment}: {read.where[0]}" for read in figures.get_package_reads("hf_megatron")
        ],
        "waits_of_transformers": [
            f"{read.moment}: {read.where[0]}" for read in figures.get_package_reads("transformers")
        ],
        "collectives": {
            f"{group} {operation}": {"calls": calls, "gib": round(size / GIB, 3)}
            for (group, operation), (calls, size) in figures.collectives.items()
        },
    }


def predict(name):
    model, layout, ranks, world_size, (rows, tokens), shares = CASES[name]
    began = time.perf_counter()
    found = dry_run(
        model,
        MegatronConfig(**layout),
        list(ranks.values()),
        world_size,
        batch_size=rows,
        sequence_length=tokens,
        timeout=3600,
    )
    stages = {stage: describe(figures, shares) for stage, figures in zip(ranks, found, strict=True)}
    return {"layout": layout, "ranks": world_size, "rows": rows, "tokens": tokens, "stages": stages} | {
        "seconds": round(time.perf_counter() - began, 1)
    }


def compare(layout, dtype, device):
    model, (rows, tokens) = MEASURED[device]
    batch = {"batch_size": rows, "sequence_length": tokens, "dtype": dtype}
    [predicted] = dry_run(model, MegatronConfig(**layout), [0], 2, as_gloo=device == "cpu", **batch)
    measured = measure_step(model, MegatronConfig(**layout), 2, device=device, **batch)[0]
    kept = {name: size for name, size in predicted.kept.items() if name in measured.kept}
    return {
        "kept_predicted": kept,
        "kept_measured": measured.kept,
        "kept_equal": kept == measured.kept,
        "dynamic_peak_predicted": predicted.dynamic_peak,
        "dynamic_peak_measured": measured.dynamic_peak,
        "dynamic_peak_difference": round(predicted.dynamic_peak / measured.dynamic_peak - 1, 4),
        "total_difference": round(predicted.peak / measured.peak - 1, 4),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--compared", nargs="*", choices=COMPARED, default=list(COMPARED))
    parser.add_argument("--device", choices=MEASURED, default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    compared = "compared_with_gloo" if arguments.device == "cpu" else "compared_with_nccl"
    result = {"measured_on_gpu": arguments.device == "cuda", "predicted": {}, compared: {}}
    result |= {"cores": os.cpu_count(), "threads_per_rank": 1}
    result["versions"] = {name: metadata.version(name) for name in ("torch", "transformers", "hf_megatron")}

    def write():
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for name in arguments.cases:
        result["predicted"][name] = found = predict(name)
        for stage, figures in found["stages"].items():
            print(f"{name} {stage}: {json.dumps(figures, indent=1)}", flush=True)
        write()
    for name in arguments.compared:
        for dtype in (torch.bfloat16, torch.float32):
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            result[compared][key] = found = compare(COMPARED[name], dtype, arguments.device)
            print(f"{key}: {json.dumps(found)}", flush=True)
            write()


if __name__ == "__main__":
    main()
