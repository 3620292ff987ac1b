"""Converting a 2 GB Llama between formats, compared with `cp` and hashing, and with transformers' load and save.

    python benchmarks/conversion.py --rounds 5 --out benchmarks/results/conversion_cpu.json

Each sample runs in its own forked process, with files in the page cache: seconds until the result is durable, and
growth of its memory. Variants take turns; reported are medians, ratios to `cp` + sync followed by blake3 of the copy,
and memory in units of the larger of layer and embedding. `--sizes 1 2` also measures a model with twice the layers.
"""

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from hf_megatron.conversion import TargetOptions, convert
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.io.checksums import hash_file

# name -> (format of the source, format of the target)
CONVERSIONS = {
    "hf -> megatron_core": ("hf", "megatron_core"),
    "megatron_core -> hf": ("megatron_core", "hf"),
    "hf -> megatron_legacy (tp 2)": ("hf", "megatron_legacy"),
    "megatron_legacy (tp 2) -> hf": ("megatron_legacy", "hf"),
    "hf -> sharded": ("hf", "sharded"),
    "sharded -> hf": ("sharded", "hf"),
    "hf -> dcp": ("hf", "dcp"),
    "dcp -> hf": ("dcp", "hf"),
}


def _layout(name: str) -> TargetOptions:
    return TargetOptions(tp_size=2) if name.startswith("megatron") else TargetOptions()


def _config(size: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=layers * size,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        tie_word_embeddings=False,
    )


def _memory(name: str) -> int:
    """Returns an entry of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _measured(action: Callable[[], Any]) -> dict[str, float]:
    """Seconds until the written data is durable, and peak growth of the process's memory."""
    os.sync()
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    resident = _memory("VmRSS")
    begin = time.perf_counter()
    action()
    os.sync()
    return {"seconds": time.perf_counter() - begin, "memory": _memory("VmHWM") - resident}


def _convert(source: str, target: str, to: str, checksums: bool) -> dict[str, float]:
    return _measured(lambda: convert(source, target, to, options=_layout(to), checksums=checksums))


def _copy_and_hash(source: str, target: str) -> dict[str, float]:
    def action() -> None:
        Path(target).mkdir()
        for path in Path(source).glob("*.safetensors"):
            shutil.copyfile(path, Path(target) / path.name)
        os.sync()
        for path in Path(target).iterdir():
            hash_file(path)

    return _measured(action)


def _copy(source: str, target: str) -> dict[str, float]:
    def action() -> None:
        Path(target).mkdir()
        for path in Path(source).glob("*.safetensors"):
            shutil.copyfile(path, Path(target) / path.name)

    return _measured(action)


def _transformers(source: str, target: str) -> dict[str, float]:
    return _measured(lambda: LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(target))


def _run(function: Callable[..., dict[str, float]], target: Path, *arguments: Any) -> dict[str, float]:
    shutil.rmtree(target, ignore_errors=True)
    (found,) = run_ranks(function, 1, *arguments, timeout=900)
    shutil.rmtree(target, ignore_errors=True)
    return found


def _sample(name: str, folder: Path, target: Path) -> dict[str, float]:
    own = {"cp": _copy, "cp and hash": _copy_and_hash, "transformers load and save": _transformers}
    if name in own:
        return _run(own[name], target, str(folder / "hf"), str(target))
    first, to = CONVERSIONS[name]
    # Verifying the source's checksums is an additional pass over its bytes, which is optional.
    return _run(_convert, target, str(folder / first), str(target), to, False)


def measure(folder: Path, size: int, layers: int, rounds: int) -> dict[str, Any]:
    """Measures all variants on a model with `layers` x `size` layers."""
    source, target = folder / "hf", folder / "target"
    config = _config(size, layers)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    total = sum(tensor.nbytes for tensor in model.parameters())
    layer = sum(tensor.nbytes for tensor in model.model.layers[0].parameters())
    unit = max(layer, model.lm_head.weight.nbytes)
    model.save_pretrained(source)
    del model
    for name in sorted({first for first, _ in CONVERSIONS.values()} - {"hf"}):
        convert(source, folder / name, name, options=_layout(name))
    names = ["cp", "cp and hash", "transformers load and save", *CONVERSIONS]
    samples: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds + 1):
        # A variant is slower after one that leaves much memory to reclaim, so each turn starts with another variant.
        order = [*names[3 * turn % len(names) :], *names[: 3 * turn % len(names)]]
        found = {name: _sample(name, folder, target) for name in order}
        if turn:  # the first turn warms the page cache
            for name, sample in found.items():
                samples.setdefault(name, []).append(sample)
    rows = {}
    for name, own in samples.items():
        ratios = [a["seconds"] / b["seconds"] for a, b in zip(own, samples["cp and hash"], strict=True)]
        rows[name] = {
            "seconds": round(statistics.median(sample["seconds"] for sample in own), 3),
            "over_cp_and_hash": round(statistics.median(ratios), 3),
            "peak_memory_mib": round(statistics.median(sample["memory"] for sample in own) / 2**20, 1),
            "peak_memory_in_units": round(statistics.median(sample["memory"] for sample in own) / unit, 2),
        }
    return {"model_bytes": total, "largest_of_layer_and_embedding_bytes": unit, "rounds": rounds, "variants": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=18, help="of the model of size 1; 18 are 2 GB")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made; a temporary one by default")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    runs = []
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            runs.append(measure(Path(folder), size, arguments.layers, arguments.rounds))
        print(json.dumps(runs[-1], indent=2))
    names = ("torch", "transformers", "safetensors", "blake3", "hf_megatron")
    result = {
        "runs": runs,
        "cores": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in names},
    }
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
