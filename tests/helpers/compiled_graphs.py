"""Graphs and graph breaks of compiled layers by layout: expected numbers, measurement and table of the docs."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks

LAYERS = 10
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "dp2": {"dp_size": 2},
    "dp2 ZeRO 3": {"dp_size": 2, "zero_stage": 3},
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "cp2": {"cp_size": 2},
    "ep2": {"ep_size": 2},
}
# (layout, kind of layers, recomputation) -> graphs and most breaks of a rank.
EXPECTED: dict[tuple[str, str, str | None], tuple[int, int]] = {
    ("tp2", "dense", None): (1, 0),
    ("tp2", "dense", "selective"): (1, 0),
    ("tp2", "dense", "full"): (1, 0),
    ("tp2", "MoE", None): (1, 0),
    ("tp2", "MoE", "full"): (1, 0),
    # The first layer splits the sequence and the last one gathers it; those between share a graph.
    ("tp2+sp", "dense", None): (3, 0),
    ("tp2+sp", "dense", "selective"): (3, 0),
    ("tp2+sp", "dense", "full"): (3, 0),
    ("tp2+sp", "MoE", None): (3, 0),
    ("dp2", "dense", None): (1, 0),
    ("dp2", "dense", "full"): (1, 0),
    ("dp2 ZeRO 3", "dense", None): (1, 0),
    ("dp2 ZeRO 3", "dense", "full"): (1, 0),
    ("pp2", "dense", None): (1, 0),
    ("pp2", "dense", "full"): (1, 0),
    ("cp2", "dense", None): (1, 0),
    ("cp2", "dense", "selective"): (1, 0),
    ("cp2", "dense", "full"): (1, 0),
    # Attention and the router; the exchange of tokens is not compiled. Seven breaks before transformers 5.24.
    ("ep2", "MoE", None): (4, 8),
}


def save_model(kind: str, folder: str) -> None:
    """Saves a small model of ten layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": LAYERS, "vocab_size": 96, "max_position_embeddings": 64}
    torch.manual_seed(0)
    if kind == "dense":
        LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    else:
        config = MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2)
        MixtralForCausalLM(config).save_pretrained(folder)


def count_graphs(layout: str, kind: str, recompute: str | None, folder: str) -> list[tuple[int, int]]:
    """Returns each rank's graphs and breaks in two training steps with compiled layers."""

    def on_rank() -> tuple[int, int]:
        from torch._dynamo.utils import counters
        from transformers import AutoModelForCausalLM

        config = MegatronConfig(**LAYOUTS[layout], recompute=recompute)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, megatron_config=config).train()
        counters.clear()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=EXPECTED[layout, kind, recompute][1] == 0)
        ids = torch.arange(32).view(2, 16) % 96
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    return run_ranks(on_rank, 2, timeout=600)


def render_table() -> str:
    """Renders the expected numbers, which the tests measure, for docs/tensor_parallel.md."""
    lines = ["| layout | layers | graphs by `recompute` | breaks |", "|---|---|---|---|"]
    for layout, kind in dict.fromkeys((layout, kind) for layout, kind, _ in EXPECTED):
        counts = {mode: counted for (*case, mode), counted in EXPECTED.items() if case == [layout, kind]}
        graphs = ", ".join(f"{mode or 'none'}: {number}" for mode, (number, _) in counts.items())
        lines.append(f"| {layout} | {kind} | {graphs} | {max(breaks for _, breaks in counts.values())} |")
    return "\n".join(lines) + "\n"
