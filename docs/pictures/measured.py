"""Draws docs/pictures/measured.svg from benchmarks/results: `python docs/pictures/measured.py`."""

import json
import statistics
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
OURS = "hf_megatron"
WIDTH, LABEL_WIDTH, BAR_HEIGHT, MAX_RATIO = 760, 190, 15, 2.0
STYLE = "<style>text{font:12px sans-serif;fill:#24292f}.b{font-weight:600;font-size:13px}.s{fill:#57606a}</style>"
# Title of a comparison -> ratios by name.
Charts = dict[str, dict[str, float]]


def read_results(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def collect_ratios() -> Charts:
    """Returns the ratios of each comparison, relative to what its title names."""
    steps = next(
        run["variants"]
        for run in read_results("train_step_cpu")["runs"]
        if (run["model"], run["dtype"]) == ("61M", "fp32")
    )
    tensor_parallel = {
        name: steps[variant]["step_over_one_process_2_threads"]
        for name, variant in {
            OURS: "hf_megatron",
            "Megatron-Core": "megatron_core",
            "Transformers": "transformers_tp",
        }.items()
    }
    data_parallel = {
        name: entry["median"] for name, entry in read_results("data_parallel_cpu")["runs"][0]["ratios"].items()
    }
    zero1 = data_parallel["zero1_over_ddp"]
    pipelines = [
        schedule["over_torch"]["median"]
        for run in read_results("pipeline_cpu")["runs"]
        for schedule in run["schedules"].values()
    ]
    ring = read_results("context_parallel_cpu")["rows"]["16384, p2p"]
    experts = read_results("expert_parallel_cpu")["results"]["32 experts, 4 choices, float32"]
    checkpoint, weights = read_results("checkpoint_cpu"), read_results("weights_cpu")["variants"]
    return {
        "61M step on tp2, over a single process with two threads": tensor_parallel,
        "61M step with ZeRO-1 on dp2, over DistributedDataParallel": {
            OURS: zero1,
            "torch's ZeRO-1": zero1 / data_parallel["zero1_over_ddp_zero1"],
        },
        "107M pipelined steps on pp2, median of 18, over torch's pipelining": {OURS: statistics.median(pipelines)},
        "16,384 tokens on cp2: CPU time of the busier rank, over a single process": {
            OURS: ring["busiest_over_one_process"]
        },
        "32 experts on ep2: CPU time of the busier rank, over two processes that share no data": {
            OURS: experts["ep2 over tp2"]["busiest_over_apart"],
            "Transformers": experts["transformers tp2 x ep2"]["busiest_over_apart"],
        },
        "sharded save of 5.7 GB, over writing the bytes": {
            OURS: checkpoint["save_over_plain_write"],
            "torch DCP": checkpoint["save_over_plain_write"] / checkpoint["save_over_dcp"],
        },
        "merged save of 1.9 GB, over cp": {
            OURS: weights["hf_megatron"]["save_over_copy"],
            "Transformers": weights["transformers"]["save_over_copy"],
        },
    }


def draw(charts: Charts) -> str:
    """Returns the bar chart as SVG; bars longer than `MAX_RATIO` are cut."""
    scale = (WIDTH - LABEL_WIDTH - 70) / MAX_RATIO
    reference, right = LABEL_WIDTH + scale, LABEL_WIDTH + MAX_RATIO * scale
    parts, y = [], 26
    for title, ratios in charts.items():
        parts.append(f'<text x="20" y="{y}" class="b">{title}</text>')
        y += 8
        top = y
        for name, ratio in ratios.items():
            length = min(ratio, MAX_RATIO) * scale
            color = "#0969da" if name == OURS else "#8c959f"
            middle = y + BAR_HEIGHT - 4
            parts += [
                f'<text x="{LABEL_WIDTH - 8}" y="{middle}" text-anchor="end">{name}</text>',
                f'<rect x="{LABEL_WIDTH}" y="{y}" width="{length:.0f}" height="{BAR_HEIGHT - 3}" fill="{color}"/>',
                f'<text x="{right + 10:.0f}" y="{middle}">{ratio:.2f}</text>',
            ]
            y += BAR_HEIGHT
        line = f"M{reference:.0f} {top - 3}L{reference:.0f} {y}"
        parts.append(f'<path d="{line}" stroke="#24292f" stroke-dasharray="3 3"/>')
        y += 22
    note = f"Shorter is better. The dashed line is 1, the reference of each title; bars end at {MAX_RATIO:g}."
    parts.append(f'<text x="20" y="{y}" class="s">{note}</text>')
    height = y + 14
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">'
    background = f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>'
    return "\n".join([head, STYLE, background, *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(collect_ratios()), encoding="utf-8")
