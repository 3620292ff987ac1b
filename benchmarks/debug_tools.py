"""Overhead of the diagnostic tools that can stay enabled in training, and their false alarms.

    python benchmarks/debug_tools.py --out benchmarks/results/debug_tools_cpu.json
    python benchmarks/debug_tools.py --steps 4 --rounds 1

A step is forward, backward and AdamW's step of a 61M Llama on tp2, two CPU ranks. The variants run blocks of the same
steps in one job, in turn; the CPU seconds of a step are compared within a round, and medians of the ratios reported.
`replicas` is the cost of one comparison, spread over its default interval of 100 steps. Then all tools run on clean
steps of several layouts, with the machine idle and with four busy processes. Last, the report of a synthetic run of 64
ranks and 10,000 steps is measured: its size, and the seconds a headless browser needs to open and draw it, beyond an
empty page.
"""

import argparse
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from made_run import make_run
from train_step import versions, write_report
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_megatron import MegatronConfig, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.diagnostics.nonfinite import NonFiniteWatch
from hf_megatron.diagnostics.replica_check import ReplicaCheck
from hf_megatron.diagnostics.run_record import read_run
from hf_megatron.diagnostics.run_report import write_page
from hf_megatron.diagnostics.stragglers import StragglerWatch
from hf_megatron.diagnostics.throughput import Throughput
from hf_megatron.models.verification_gate import ConfigUnderTest

MODEL = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 8192,
    "tie_word_embeddings": True,
}
SMALL = MODEL | {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 12}
TOKENS, EVERY = 256, 100
VARIANTS = ("off", "non-finite", "stragglers", "throughput")
LAYOUTS = ({"tp_size": 2}, {"dp_size": 2}, {"pp_size": 2, "num_microbatches": 2}, {"cp_size": 2})


def load(folder, sizes):
    layout = ConfigUnderTest(**MegatronConfig(**sizes).to_dict())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, megatron_config=layout).train()
    return model, prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False))


def take_step(model, optimizer, ids):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def tool_of(variant, model, optimizer):
    """Starts a tool; returns a function to call after each step, and a function that stops the tool."""
    if variant == "non-finite":
        return (lambda: None), NonFiniteWatch(model, optimizer).stop
    if variant == "stragglers":
        return (lambda: None), StragglerWatch(model, optimizer).stop
    if variant == "throughput":
        counting = Throughput(model)
        return counting.end_step, counting.stop
    return (lambda: None), (lambda: None)


def cost(folder, blocks, steps):
    """CPU seconds of a step with and without each tool, in alternating blocks of one job, and of comparisons."""
    model, optimizer = load(folder, {"tp_size": 2})
    ids = torch.randint(1, MODEL["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(0))
    take_step(model, optimizer, ids)
    check, taken, comparisons = ReplicaCheck(model, optimizer), {variant: [] for variant in VARIANTS}, []
    for block in range(blocks):
        # Rotate the order, so that no variant always follows the same one.
        for variant in (*VARIANTS[block % len(VARIANTS) :], *VARIANTS[: block % len(VARIANTS)]):
            after_step, stop = tool_of(variant, model, optimizer)
            dist.barrier()
            began = time.process_time()
            for _ in range(steps):
                take_step(model, optimizer, ids)
                after_step()
            taken[variant].append((time.process_time() - began) / steps)
            stop()
        began = time.process_time()
        check()
        comparisons.append(time.process_time() - began)
    return taken, comparisons


def alarms(folder, sizes, steps):
    """Reports of the tools in clean steps."""
    model, optimizer = load(folder, sizes)
    generator = torch.Generator().manual_seed(0)
    stragglers = StragglerWatch(model, optimizer, say=lambda report: None)
    non_finite = NonFiniteWatch(model, optimizer, say=lambda report: None)
    replicas, found = ReplicaCheck(model, optimizer), []
    for step in range(steps):
        ids = torch.randint(1, SMALL["vocab_size"], (4, 128), generator=generator)
        rows = ids.chunk(2)[dist.get_rank()] if "dp_size" in sizes else ids
        take_step(model, optimizer, rows)
        if step % 10 == 9:
            found += map(str, replicas.differences())
    found += map(str, (*stragglers.reports, *non_finite.reports))
    stragglers.stop()
    return found


def compute():
    one = torch.rand(256, 256)
    while True:
        one = (one @ one).clamp(0, 1)


def clean_runs(given):
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(folder)
        for busy_count in (0, 4):
            busy = [multiprocessing.Process(target=compute, daemon=True) for _ in range(busy_count)]
            for process in busy:
                process.start()
            for sizes in LAYOUTS:
                found = run_ranks(alarms, 2, folder, sizes, given.clean, timeout=3000)[0]
                more = f", beside {busy_count} busy processes" if busy_count else ""
                name = MegatronConfig(**sizes).layout() + more
                rows[name] = {"steps": given.clean, "alarms": found}
                print(f"{name}: {found}", flush=True)
            for process in busy:
                process.terminate()
    return rows


def opened_page(folder, rounds=5):
    """Size of a large run's report, seconds to create it, and to open it in a browser beyond an empty page."""
    make_run(folder / "run")
    began = time.monotonic()
    write_page(read_run(folder / "run"), folder / "page.html")
    found = {"bytes": (folder / "page.html").stat().st_size, "seconds_to_make": round(time.monotonic() - began, 2)}
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        return found
    (folder / "empty.html").write_text("<!DOCTYPE html><title>empty</title>", encoding="utf-8")
    taken = {"page": [], "empty": []}
    for _ in range(rounds):
        for name, times in taken.items():
            options = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--screenshot={folder / 'shot.png'}"]
            began = time.monotonic()
            command = [browser, *options, (folder / f"{name}.html").as_uri()]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            times.append(time.monotonic() - began)
    medians = {name: statistics.median(times) for name, times in taken.items()}
    return found | {"seconds_to_open_and_draw": round(medians["page"] - medians["empty"], 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--clean", type=int, default=100)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**MODEL)).save_pretrained(folder)
        ranks = run_ranks(cost, 2, folder, given.rounds, given.steps, timeout=3000)
    # Compare blocks of the same round and rank, which ran under similar conditions.
    ratios = {
        variant: [one / off for taken, _ in ranks for one, off in zip(taken[variant], taken["off"], strict=True)]
        for variant in VARIANTS
    }
    step = {variant: statistics.median(s for taken, _ in ranks for s in taken[variant]) for variant in VARIANTS}
    comparisons = [seconds for _, found in ranks for seconds in found]
    shares = {variant: round(statistics.median(ratios[variant]) - 1, 4) for variant in VARIANTS[1:]}
    shares["replicas"] = round(statistics.median(comparisons) / EVERY / step["off"], 4)
    with tempfile.TemporaryDirectory() as folder:
        page = opened_page(Path(folder))
    results = {
        "page_of_64_ranks_and_10000_steps": page,
        "cpu_seconds_of_a_step": {variant: round(value, 4) for variant, value in step.items()},
        "cpu_seconds_of_a_comparison": round(statistics.median(comparisons), 4),
        "share_of_a_step": shares,
        "clean": clean_runs(given),
    }
    print(results, flush=True)
    report = {
        "versions": versions(),
        "machine": {"cores": os.cpu_count(), "threads_per_rank": 1},
        "model": MODEL | {"tokens": TOKENS},
        "rounds": given.rounds,
        "steps": given.steps,
        "results": results,
    }
    if given.out:
        write_report(given.out, report)


if __name__ == "__main__":
    main()
