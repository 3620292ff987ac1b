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

**When:** you train a model with all its weights and want a first layout for 8, 64 or 512 GPUs.

**How:** find the model below that is nearest to yours, and pass the first layout in the row for your number of GPUs.
For example, `tp4+sp+pp2+dp8+zero1` on 64 GPUs, which the tests do not run because it needs 64 ranks:

```python no-run
from hf_megatron import MegatronConfig
from transformers import AutoModelForCausalLM

config = MegatronConfig(tp_size=4, sequence_parallel=True, pp_size=2)
model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
```

The command above each table also plans your own model: it takes seconds and reads only a config. `--yaml layout.yaml`
writes the layout with its schedule and number of microbatches, for `megatron_config="layout.yaml"`.

**Limits:** the tables assume bf16, AdamW, H100s of 80 GiB and sequences of {LENGTH:,} tokens. Use tokens per second
to rank layouts, not as absolute values ([accuracy](planner.md#accuracy)). See [tested hardware](gpu.md).

## Read the tables

`python benchmarks/which_layout.py` writes this page with `hf-megatron plan` ([method](planner.md)).

| entry | meaning |
|---|---|
| `tp4`, `cp2`, `pp2`, `ep2` | `tp_size=4`, `cp_size=2`, `pp_size=2`, `ep_size=2`; sizes of 1 can be omitted |
| `sp` | `sequence_parallel=True` |
| `dp8` | not set: the remaining factor of the number of GPUs |
| `zero1`, `zero3` | `zero_stage=1`, the default; `zero_stage=3` |
| several layouts in a row | within 5 % of the first one: try all; the rest of the row describes the first |
| `zbv`, `interleaved_1f1b x 6` | `pipeline_schedule="zbv"`; `pipeline_schedule="interleaved_1f1b", virtual_stages=6` |
| `recompute full` | `recompute="full"` |
| `GiB` | memory of the fullest GPU, of at most 72 GiB to plan for |
| GPUs | the rows for 8, 64 and 512 GPUs have `--global-batch-size` 64, 256 and 1024 |

If nothing fits, try `--lora 16`, `--quantized nf4` or `--offload-optimizer` ([all options](planner.md#plan-options)).
"""
TABLE = (
    "| GPUs | layout: schedule, recompute, samples in a microbatch | GiB | tokens/s/GPU |",
    "|---|---|---|---|",
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
        cells = ["nothing fits", "", ""]
        if found.nearest is not None:
            missing = (found.nearest.peak - found.job.memory) / _GIB
            cells[0] += f"; `{_name(found.nearest)}` misses {missing:.0f} GiB"
    else:
        first, *others = found.best
        near = [f" or `{_name(one)}`" for one in others if one.seconds <= (1 + NOISE) * first.seconds]
        settings = [f"recompute {first.layout.recompute or 'none'}", f"{first.rows} sample{'s' * (first.rows > 1)}"]
        if first.layout.pp_size > 1:
            chunks = f" x {first.layout.virtual_stages}" if first.layout.virtual_stages else ""
            settings.insert(0, first.layout.pipeline_schedule + chunks)
        rate = found.job.tokens / first.seconds / devices
        cells = [f"`{_name(first)}`{''.join(near)}: {', '.join(settings)}", f"{first.peak / _GIB:.0f}", f"{rate:.0f}"]
    return f"| {' | '.join([str(devices), *cells])} |"


def _name(one: Estimate) -> str:
    return one.layout.layout()


def page(models: dict[str, PreTrainedConfig]) -> Iterator[str]:
    """Yields the page, one model at a time."""
    yield HEAD
    for name, config in models.items():
        began = time.perf_counter()
        rows = [format_row(answer(config, devices)) for devices in SIZES]
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)
        sizes = f"--seq-length {LENGTH} --global-batch-size {SIZES[64]}"
        command = f"hf-megatron plan {name} --num-gpus 64 --gpu {DEVICE} \\\n    {sizes}"
        yield "\n".join([f"## {name}\n", "```bash", command, "```", "", *TABLE, *rows, ""])


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
