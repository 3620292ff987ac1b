"""Writes docs/which_layout.md: the planner's results for ten well-known models on 8, 64 and 512 devices.

    python benchmarks/which_layout.py

The models' configs are in `known_models.json`; nothing is downloaded.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from transformers import CONFIG_MAPPING, PreTrainedConfig

from hf_megatron.planner.devices import device
from hf_megatron.planner.estimate import Estimate
from hf_megatron.planner.job import Job
from hf_megatron.planner.search import NOISE, SearchResult, search_layouts

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "which_layout.md"
DEVICE, LENGTH = "h100", 8192
# Devices -> samples of an optimizer step.
SIZES = {8: 64, 64: 256, 512: 1024}
_GIB = 2**30

HEAD = f"""# Which layout do I need

What `hf-megatron plan` answers for models trained in full, in bf16 with AdamW, on H100s of 80 GiB, in sequences
of {LENGTH} tokens; written by `python benchmarks/which_layout.py`. Find the model that is nearest to yours, or plan
your own: it takes seconds and only reads a config. [Planning](planner.md) describes how memory and time are predicted,
and how far off the seconds are: they are **not measured on a GPU with this library**, take them for a ranking.

- A layout such as `tp4+sp+pp2+dp8+zero1` is what `megatron_config=MegatronConfig(tp_size=4, sequence_parallel=True,
  pp_size=2)` makes of 64 devices: the remaining factor is data parallel. `--yaml layout.yaml` writes it.
- GiB is the fullest device's memory, of which 72 may be planned for. `rows` is the number of samples in a microbatch.
- Layouts within 5 % of the first are listed next to it: try them all.
- Short of memory: `--lora 16`, `--quantized nf4`, `--offload-optimizer` ([all options](planner.md#plan-options)).
"""
TABLE = (
    "| devices | layout | schedule | recompute | rows | GiB | tokens/s/device | with |",
    "|---|---|---|---|---|---|---|---|",
)


def known_models() -> dict[str, PreTrainedConfig]:
    """Returns the configs by hub name."""
    values = json.loads((HERE / "known_models.json").read_text(encoding="utf-8"))
    return {name: CONFIG_MAPPING[config.pop("model_type")](**config) for name, config in values.items()}


def answer(config: PreTrainedConfig, devices: int) -> SearchResult:
    """Searches the layouts of a model."""
    return search_layouts(config, Job(devices, device(DEVICE), LENGTH, SIZES[devices]))


def format_row(found: SearchResult) -> str:
    """Returns a search result as a row of the table."""
    devices = found.job.devices
    if not found.best:
        cells = ["nothing fits", "", "", "", "", ""]
        if found.nearest is not None:
            missing = (found.nearest.peak - found.job.memory) / _GIB
            cells[0] += f"; `{_name(found.nearest)}` misses {missing:.0f} GiB"
    else:
        first, *others = found.best
        near = [f" or `{_name(one)}`" for one in others if one.seconds <= (1 + NOISE) * first.seconds]
        schedule = first.layout.pipeline_schedule if first.layout.pp_size > 1 else ""
        schedule += f" x {first.layout.virtual_stages}" if first.layout.virtual_stages else ""
        rate = found.job.tokens / first.seconds / devices
        cells = [f"`{_name(first)}`" + "".join(near), schedule, first.layout.recompute or "none", f"{first.rows}"]
        cells += [f"{first.peak / _GIB:.0f}", f"{rate:.0f}"]
    command = f"`--num-gpus {devices} --global-batch-size {found.job.global_batch}`"
    return f"| {' | '.join([str(devices), *cells, command])} |"


def _name(one: Estimate) -> str:
    return one.layout.layout()


def page(models: dict[str, PreTrainedConfig]) -> Iterator[str]:
    """Yields the page, one model at a time."""
    yield HEAD
    for name, config in models.items():
        began = time.perf_counter()
        rows = [format_row(answer(config, devices)) for devices in SIZES]
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        options = f"--num-gpus 64 --gpu {DEVICE} --seq-length {LENGTH} --global-batch-size {SIZES[64]}"
        command = f"    hf-megatron plan {name} {options}"
        yield "\n".join([f"## {name}\n", command, "", *TABLE, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE)
    arguments = parser.parse_args()
    text = "\n".join(page(known_models()))
    with tempfile.NamedTemporaryFile("w", dir=arguments.out.parent, delete=False, encoding="utf-8") as file:
        file.write(text)
    Path(file.name).chmod(0o644)
    Path(file.name).replace(arguments.out)


if __name__ == "__main__":
    main()
