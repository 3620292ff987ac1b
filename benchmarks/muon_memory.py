"""Optimizer state per rank of Muon for the matrices and AdamW for the other parameters, by layout; bytes are counted.

    python benchmarks/muon_memory.py --out benchmarks/results/muon_memory_cpu.json

`DDP` is torch's DistributedDataParallel, where every rank has the state of all parameters. Reported per rank: the bytes
of the optimizers' tensors after one step, without weights and gradients.
"""

import argparse
import json
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_megatron import MegatronConfig, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks

CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2000,
}
LAYOUTS: dict[str, dict[str, int]] = {
    "dp2 zero0": {"dp_size": 2, "zero_stage": 0},
    "dp2 zero1": {"dp_size": 2, "zero_stage": 1},
    "dp2 zero3": {"dp_size": 2, "zero_stage": 3},
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "tp2 dp2 zero1": {"tp_size": 2, "dp_size": 2},
    "dp4 zero1": {"dp_size": 4},
}


def _make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        (matrices if is_matrix else others).append(parameter)
    return [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(others, lr=1e-3)]


def _count_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [
        value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)
    ]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.dim())


def _on_rank(path: str, sizes: dict[str, int] | None) -> dict[str, int]:
    """Takes one step; returns the bytes of optimizer state on this rank. `sizes` is `None` for DDP."""
    config = None if sizes is None else MegatronConfig(**sizes)
    model: Any = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
    optimizers = [prepare_optimizer(optimizer) for optimizer in _make_optimizers(model)]
    if sizes is None:
        model = DistributedDataParallel(model)
    ids = torch.arange(16).view(2, 8)
    model(input_ids=ids, labels=ids).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    muon, adamw = map(_count_bytes, optimizers)
    return {"muon": muon, "adamw": adamw}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
        model.save_pretrained(folder)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        for name, sizes in {"DDP, 2 ranks": None, **{name: LAYOUTS[name] for name in arguments.layouts}}.items():
            size = 2 if sizes is None else sizes.get("tp_size", 1) * sizes.get("pp_size", 1) * sizes.get("dp_size", 1)
            ranks = run_ranks(_on_rank, size, folder, sizes, timeout=300)
            rows[name] = {f"{kind}_bytes_per_rank": [rank[kind] for rank in ranks] for kind in ("muon", "adamw")}
    versions = {name: metadata.version(name) for name in ("torch", "transformers", "hf_megatron")}
    result = {"config": CONFIG, "parameters": parameters, "dtype": "fp32", "rows": rows, "versions": versions}
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
