"""A training step, a save, a load and conversions of two installed versions of this library, measured in turn.

    python benchmarks/versions.py --before OLD/.venv/bin/python --after NEW/.venv/bin/python \
        --out benchmarks/results/versions_cpu.json

Each scenario runs on two single-threaded ranks (conversions on one) for both versions, whose processes stay alive; a
turn is a few steps of one version while the other waits. Reported is the median over rounds of after / before. Files
are written to the temporary folder (`TMPDIR`) and deleted within the turn.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

MODELS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 8, "vocab_size": 512},
    "61M": {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "vocab_size": 8000},
}
HEADS = {"tiny": (4, 4), "61M": (16, 4)}
# scenario -> (model, layout, [batch, sequence] of all ranks, steps in a turn)
SCENARIOS = {
    "train_step tiny tp2": ("tiny", {"tp_size": 2}, (2, 32), 20),
    "train_step tiny tp2+sp": ("tiny", {"tp_size": 2, "sequence_parallel": True}, (2, 32), 20),
    "train_step 61M tp2": ("61M", {"tp_size": 2}, (2, 256), 1),
    "data_parallel tiny zero1": ("tiny", {"dp_size": 2, "zero_stage": 1}, (4, 32), 20),
    "data_parallel 61M zero0": ("61M", {"dp_size": 2, "zero_stage": 0}, (2, 256), 1),
    "data_parallel 61M zero1": ("61M", {"dp_size": 2, "zero_stage": 1}, (2, 256), 1),
    "data_parallel 61M zero2": ("61M", {"dp_size": 2, "zero_stage": 2}, (2, 256), 1),
    "pipeline tiny 1f1b": ("tiny", {"pp_size": 2, "num_microbatches": 4}, (8, 32), 10),
    "pipeline 61M 1f1b": ("61M", {"pp_size": 2, "num_microbatches": 4}, (4, 128), 1),
    "checkpoint 61M save": ("61M", {"tp_size": 2}, (2, 32), 1),
    "checkpoint 61M load": ("61M", {"tp_size": 2}, (2, 32), 1),
    "checkpoint 61M merged": ("61M", {"tp_size": 2}, (2, 32), 1),
    "conversion 61M hf sharded": ("61M", {}, (), 1),
    "conversion 61M sharded hf": ("61M", {}, (), 1),
    "conversion 61M hf megatron_core": ("61M", {}, (), 1),
    "conversion 61M megatron_core hf": ("61M", {}, (), 1),
    "conversion 61M hf megatron_legacy": ("61M", {}, (), 1),
    "conversion 61M megatron_legacy hf": ("61M", {}, (), 1),
    "conversion 61M hf dcp": ("61M", {}, (), 1),
    "conversion 61M dcp hf": ("61M", {}, (), 1),
}
SMALLEST_SHARE = 0.92  # minimum share of the machine's busy time for a round to count as undisturbed


def serve(scenario):
    """Runs two ranks that execute as many steps as each line on stdin requests, and print the seconds they took."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    import hf_megatron  # noqa: F401 - before the ranks are forked

    try:
        from hf_megatron.testing import run_ranks
    except ImportError:
        # Versions before modules were moved to their current folders.
        from hf_megatron.verify.ranks import run_ranks

    logging.disable_progress_bar()
    name, layout, shape, _ = SCENARIOS[scenario]
    heads, groups = HEADS[name]
    config = LlamaConfig(
        **MODELS[name],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        max_position_embeddings=1024,
        use_cache=False,
        tie_word_embeddings=False,
    )
    folder = tempfile.mkdtemp()
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)

    kind = scenario.split()[0]
    make = {"checkpoint": _saving, "conversion": _converting}.get(kind, _training)

    def on_rank():
        step = make(scenario, folder, layout, shape)
        wanted = [1]
        while wanted[0]:
            began = time.perf_counter()
            for _ in range(wanted[0]):
                step()
            dist.barrier()
            if dist.get_rank() == 0:
                print(time.perf_counter() - began, flush=True)
                wanted = [int(sys.stdin.readline() or 0)]
            dist.broadcast_object_list(wanted, src=0)

    run_ranks(on_rank, 1 if kind == "conversion" else 2, timeout=3600)


def _training(scenario, folder, layout, shape):
    """A training step in a plain loop."""
    import torch
    import torch.distributed as dist
    from transformers import LlamaForCausalLM

    from hf_megatron import MegatronConfig, prepare_optimizer

    model = LlamaForCausalLM.from_pretrained(folder, megatron_config=MegatronConfig(**layout)).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    rows = ids.tensor_split(2)[dist.get_rank()] if "dp_size" in layout else ids

    def step():
        optimizer.zero_grad()
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()

    return step


def _saving(scenario, folder, layout, shape):
    """Accelerate's save_state or load_state with AdamW's moments, or a merged save_pretrained."""
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator
    from transformers import LlamaForCausalLM

    from hf_megatron import MegatronConfig

    model = LlamaForCausalLM.from_pretrained(folder, megatron_config=MegatronConfig(**layout)).train()
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-4))
    ids = torch.randint(model.config.vocab_size, shape, generator=torch.Generator().manual_seed(1))
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    optimizer.zero_grad()
    saved = os.path.join(folder, "saved")
    accelerator.save_state(saved)

    def remove(made):
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(made)

    def save():
        accelerator.save_state(os.path.join(folder, "again"))
        remove(os.path.join(folder, "again"))

    def save_merged():
        model.save_pretrained(os.path.join(folder, "merged"))
        remove(os.path.join(folder, "merged"))

    return {"save": save, "merged": save_merged, "load": lambda: accelerator.load_state(saved)}[scenario.split()[2]]


def _converting(scenario, folder, layout, shape):
    """A conversion with checksums, as on the command line."""
    from hf_megatron.conversion import convert

    _, _, source, to = scenario.split()
    scratch = tempfile.mkdtemp()
    first, made = folder, os.path.join(scratch, "made")
    if source != "hf":
        first = os.path.join(scratch, "first")
        convert(folder, first, source)

    def step():
        convert(first, made, to)
        shutil.rmtree(made)

    return step


class Side:
    """Process of one version, kept alive for a scenario."""

    def __init__(self, python, scenario):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        command = [python, os.path.abspath(__file__), "--serve", scenario]
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=os.path.dirname(python),
        )
        self._answer()

    def _answer(self):
        return float(self.process.stdout.readline())

    def steps(self, number):
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self):
        self.process.stdin.write("0\n")
        self.process.stdin.close()
        self.process.wait()


def busy_seconds():
    with open("/proc/stat") as file:
        fields = [int(field) for field in file.readline().split()[1:]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def tree_seconds(processes):
    import psutil

    total = 0.0
    for process in processes:
        for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def measure(scenario, before, after, rounds):
    sides = {"before": Side(before, scenario), "after": Side(after, scenario)}
    processes = [side.process for side in sides.values()]
    number = SCENARIOS[scenario][3]
    for side in sides.values():
        side.steps(number)
    kept, disturbed = [], 0
    for index in range(rounds):
        order = ("before", "after") if index % 2 else ("after", "before")
        started = busy_seconds(), tree_seconds(processes)
        seconds = {name: sides[name].steps(number) / number for name in order}
        spent = busy_seconds() - started[0], tree_seconds(processes) - started[1]
        if spent[1] < SMALLEST_SHARE * spent[0]:
            disturbed += 1
        kept.append((spent[1] >= SMALLEST_SHARE * spent[0], seconds))
    for side in sides.values():
        side.end()
    counted = [seconds for quiet, seconds in kept if quiet] or [seconds for _, seconds in kept]
    ratios = [seconds["after"] / seconds["before"] for seconds in counted]
    return {
        "ratio": statistics.median(ratios),
        "before_ms": statistics.median(seconds["before"] for seconds in counted) * 1e3,
        "after_ms": statistics.median(seconds["after"] for seconds in counted) * 1e3,
        "rounds": len(counted),
        "disturbed_rounds": disturbed,
        "all_disturbed": disturbed == rounds,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", help="python of the one version")
    parser.add_argument("--after", help="python of the other")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", help="a JSON file")
    parser.add_argument("--serve", choices=SCENARIOS, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.serve:
        serve(wanted.serve)
        return
    results = {}
    for scenario in wanted.scenarios:
        results[scenario] = found = measure(scenario, wanted.before, wanted.after, wanted.rounds)
        note = f", {found['disturbed_rounds']} of {wanted.rounds} rounds disturbed" if found["disturbed_rounds"] else ""
        times = f"{found['before_ms']:.1f} -> {found['after_ms']:.1f} ms"
        print(f"{scenario:28s} {found['ratio']:.3f}  {times}{note}", flush=True)
        if wanted.out:
            write(wanted.out, results)
    print(f"{'median':28s} {median_of(results):.3f}")


def median_of(results):
    return statistics.median(found["ratio"] for found in results.values())


def write(path, results):
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate")}
    facts = {"versions": versions, "cores": os.cpu_count(), "median_ratio": median_of(results), "scenarios": results}
    with open(path, "w") as file:
        json.dump(facts, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
