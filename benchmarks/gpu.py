"""Speed and memory on one GPU: a rank of a larger job, compared with the stock model; JSON after each row.

    python benchmarks/gpu.py --part 1 --out benchmarks/results/gpu_cuda.json
    python benchmarks/gpu.py --part 2 --out benchmarks/results/gpu_cuda.json
    python benchmarks/gpu.py --chart benchmarks/results/gpu_cuda.json chart.svg
    python benchmarks/gpu.py --device cpu --tiny --out /tmp/tiny.json

Each row runs in a process of its own, with a time limit. An error is recorded in its row, and the next row starts. Rows
that do not fit into `--minutes` are dropped from the end of the part. The second part adds its rows to the file of the
first one. README.md in this folder describes the method.
"""

import argparse
import ctypes
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from importlib import metadata
from pathlib import Path

# Torch would initialize CUDA to look for devices, after which forked rows could not use it.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

from gpu_chart import draw_chart
from gpu_row import Row, Settings, describe, measure_row

SCHEMA = 1
LEAST_SECONDS = 10  # a row that would have less time is dropped
TP2, SP2 = {"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}
UNPACKED = SP2 | {"shard_saved_activations": False}
SP8 = {"tp_size": 8, "sequence_parallel": True}
ZERO1, ZERO2 = {"dp_size": 8, "zero_stage": 1}, {"dp_size": 8, "zero_stage": 2}

# In the order of what they tell; there is no row 3, which compared changes that are now part of the library.
ROWS = (
    Row("ceilings", 0, 20, "ceilings"),
    Row("stock adamw", 1, 20, fused=False),
    Row("stock", 1, 20),
    Row("tp2", 2, 25, ranks=2, layout=TP2),
    Row("tp2+sp", 2, 25, ranks=2, layout=SP2),
    Row("tp2+sp unpacked", 2, 25, ranks=2, layout=UNPACKED),
    Row("tp8+sp", 2, 25, ranks=8, layout=SP8),
    Row("stock compiled", 4, 50, compiled=True),
    Row("tp2 compiled", 4, 50, ranks=2, layout=TP2, compiled=True),
    Row("tp2+sp compiled", 4, 60, ranks=2, layout=SP2, compiled=True),
    Row("dp8 zero1", 5, 25, ranks=8, layout=ZERO1),
    Row("dp8 zero2", 5, 25, ranks=8, layout=ZERO2),
    Row("stock, optimizer alone", 5, 15, "optimizer"),
    Row("dp8 zero1, optimizer alone", 5, 15, "optimizer", ranks=8, layout=ZERO1),
    Row("tp2, optimizer alone", 5, 15, "optimizer", ranks=2, layout=TP2),
    Row("stock liger", 6, 25, liger=True),
    Row("tp2+sp liger", 6, 30, ranks=2, layout=SP2, liger=True),
    Row("stock float8 rowwise", 7, 55, compiled=True, float8="rowwise"),
    Row("stock float8 tensorwise", 7, 55, compiled=True, float8="tensorwise"),
    Row("tp2+sp float8 rowwise", 7, 20, ranks=2, layout=SP2, compiled=True, float8="rowwise"),
    Row("8B LoRA stock", 8, 35, model="8B", lora=True),
    Row("8B LoRA tp2", 8, 35, model="8B", ranks=2, layout=TP2, lora=True),
    Row("1B stock", 9, 15, model="1B"),
    Row("1B tp2", 9, 15, model="1B", ranks=2, layout=TP2),
    Row("1B tp2+sp", 9, 15, model="1B", ranks=2, layout=SP2),
    Row("1B tp2 compiled", 9, 40, model="1B", ranks=2, layout=TP2, compiled=True),
    Row("two ranks, tp2+sp", 10, 40, "ranks", model="2 layers", ranks=2, layout=SP2),
)
PARTS = {"1": range(5), "2": range(5, 11), "all": range(11)}

WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
NARROW = {"hidden_size": 2048, "intermediate_size": 8192}
# Sizes of Llama 3.1 8B and Llama 3.2 1B; the last one is drawn on the host.
MODELS = {
    "8B width": WIDE | {"num_hidden_layers": 8},
    "8B": WIDE | {"num_hidden_layers": 32},
    "1B": WIDE | NARROW | {"num_hidden_layers": 16, "tie_word_embeddings": True},
    "2 layers": WIDE | NARROW | {"num_hidden_layers": 2, "vocab_size": 32000},
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
SIZES = {
    False: {"tokens": 4096, "warm_up_steps": 3, "timed_steps": 10, "host_steps": 5, "product": 8192},
    True: {"tokens": 32, "warm_up_steps": 1, "timed_steps": 2, "host_steps": 1, "product": 256},
}


def choose_settings(device, *, tiny):
    models = {name: sizes | TINY for name, sizes in MODELS.items()} if tiny else MODELS
    return Settings(device, models, **SIZES[tiny], copied_bytes=2**20 if tiny else 2**32)


# The process of a row


def be_row(row, settings, out, log):
    """Measures a row, writes its JSON and exits."""
    os.setsid()  # its own process group, which the parent can kill with all that the row has started
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with the parent
    file = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        import torch

        torch.set_num_threads(1)
        # CUDA is not initialized here: a row with two real ranks forks them. Each row compiles with an empty cache.
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(out).parent / "inductor")
        found = measure_row(row, settings)
    except BaseException as error:  # noqa: BLE001  every error belongs into the JSON
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    # Renamed when complete: the parent may kill this process at any time.
    Path(f"{out}.part").write_text(json.dumps(found), encoding="utf-8")
    os.replace(f"{out}.part", out)
    sys.stdout.flush()
    os._exit(0)


def run_row(row, settings, context, limit):
    """Runs a row in a process of its own, at most `limit` seconds; returns its JSON object."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "row.json"), Path(folder, "log")
        process = context.Process(target=be_row, args=(row, settings, out, log))
        process.start()
        process.join(limit)
        is_late = process.exitcode is None
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            process.kill()
        process.join()
        if out.exists():
            found = json.loads(out.read_text(encoding="utf-8"))
        elif is_late:
            found = {"error": f"killed after {limit:.0f} s"}
        else:
            found = {"error": f"the process died with exit code {process.exitcode}"}
        if found.get("error") and log.exists():
            found["log"] = log.read_text(encoding="utf-8", errors="replace")[-2000:]
    return describe(row, settings) | found | {"seconds": round(time.monotonic() - began, 1)}


def use_cuda():
    import torch

    torch.zeros(1, device="cuda")


def choose_context(device, *, spawns):
    """Forks rows if they can use the GPU, as a fork has imported everything; otherwise starts new interpreters."""
    if spawns:
        return multiprocessing.get_context("spawn")
    import torch

    import hf_megatron  # noqa: F401
    from hf_megatron.core.fork_harness import make_ready_to_fork

    torch.set_num_threads(1)
    make_ready_to_fork()
    context = multiprocessing.get_context("fork")
    if device == "cuda":
        probe = context.Process(target=use_cuda)
        probe.start()
        probe.join()
        if probe.exitcode:
            return multiprocessing.get_context("spawn")
    return context


# The report


def derive(found, report):
    """Adds the rates that follow from a row's measurements and the ceilings of the run."""
    if found["kind"] != "step" or found.get("step_ms") is None:
        return found
    replica = 1
    for size in ("tp_size", "pp_size", "cp_size"):
        replica *= found["layout"].get(size, 1)
    rows, length = found["tokens"]
    found["tokens_per_s"] = rows * length / found["step_ms"]["median"] * 1e3 / replica
    ceiling = report["gpu"].get("bf16_tflops")
    achieved = found["tokens_per_s"] * found["flops_per_token"] / 1e12
    return found | {"tflops": achieved, "mfu_measured_peak": achieved / ceiling if ceiling else None}


def versions():
    packages = ("torch", "triton", "transformers", "accelerate", "peft", "liger-kernel", "torchao", "hf-megatron")
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    import torch

    return found | {"cuda": torch.version.cuda}


def commit():
    if shutil.which("git") is None:
        return None
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def write_report(path, report):
    part = Path(f"{path}.part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def start_report(path, given_commit):
    """Returns the report of the first part, or a new one."""
    fresh = {"schema": SCHEMA, "commit": given_commit or commit(), "versions": versions(), "gpu": {}, "rows": []}
    if path is None or not path.exists():
        return fresh
    report = json.loads(path.read_text(encoding="utf-8"))
    same = all(report.get(key) == fresh[key] for key in ("schema", "commit", "versions"))
    return report if same else fresh


def summarize(found):
    if found["error"]:
        return f"error: {found['error'][:200]}"
    if found["kind"] == "ceilings":
        return json.dumps(found["gpu"])
    if found["kind"] == "ranks":
        return f"losses {found['loss']}, difference {found['difference']:.1e}"
    kernels = "" if found["kernel_ms"] is None else f", kernels {found['kernel_ms']:.1f} ms in {found['launches']}"
    rate = f", {found['tokens_per_s']:.0f} tokens/s" if "tokens_per_s" in found else ""
    return f"{found['step_ms']['median']:.1f} ms{kernels}{rate}"


def run(rows, settings, out=None, minutes=7.0, given_commit=None, *, spawns=False):
    """Runs rows in order and writes the report after each; returns it."""
    deadline = time.monotonic() + 60 * minutes
    context, report = choose_context(settings.device, spawns=spawns), start_report(out, given_commit)
    if not report["gpu"] and not any(row.kind == "ceilings" for row in rows):
        rows = [ROWS[0], *rows]
    for row in rows:
        left = deadline - time.monotonic()
        if left < min(LEAST_SECONDS, row.seconds):
            found = describe(row, settings) | {"error": f"dropped: the time limit of {minutes:g} minutes was reached"}
        else:
            found = derive(run_row(row, settings, context, min(3 * row.seconds, left)), report)
        report["gpu"] |= found.get("gpu", {})
        report["rows"] = [other for other in report["rows"] if other["id"] != row.id] + [found]
        print(f"{row.number:2} {row.id:28} {summarize(found)}", flush=True)
        if out is not None:
            write_report(out, report)
    return report


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to try every row")
    parser.add_argument("--part", choices=PARTS, default="all")
    parser.add_argument("--rows", nargs="+", choices=[row.id for row in ROWS], help="only these")
    parser.add_argument("--minutes", type=float, default=7.0, help="time limit of this call")
    parser.add_argument("--spawn", action="store_true", help="start rows as new interpreters instead of forks")
    parser.add_argument("--commit", help="recorded where there is no git checkout")
    parser.add_argument("--out", type=Path, help="a JSON file")
    parser.add_argument("--chart", nargs=2, type=Path, metavar=("JSON", "IMAGE"), help="draw a report, measure nothing")
    wanted = parser.parse_args(words)
    if wanted.chart:
        report, image = wanted.chart
        draw_chart(json.loads(report.read_text(encoding="utf-8")), image)
        return
    rows = [row for row in ROWS if row.number in PARTS[wanted.part] and row.id in (wanted.rows or [row.id])]
    settings = choose_settings(wanted.device, tiny=wanted.tiny)
    run(rows, settings, wanted.out, wanted.minutes, wanted.commit, spawns=wanted.spawn)


if __name__ == "__main__":
    main()
