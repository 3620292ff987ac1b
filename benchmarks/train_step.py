"""A training step of a Llama: stock transformers, its tensor parallelism, megatron-core, plain Megatron, hf_megatron.

    python benchmarks/train_step.py --models tiny 61M --dtypes fp32 bf16 --rounds 15 \
        --out benchmarks/results/train_step_cpu.json

README.md in this folder describes the method.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import tempfile
import time

import torch
import transformers  # imported before the fork, so that the workers need not import it
from variants import DTYPES, VARIANTS
from workers import Skipped, WorkerGroup, median

FOREIGN_LIMIT = 0.08  # discard a sample if other processes used more of the machine than this
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-2}
# A step of the tiny model takes only one or two of the kernel's 10 ms clock ticks, so a turn runs several steps.
MODELS = {
    "tiny": {
        "config": {
            "hidden_size": 64,
            "intermediate_size": 176,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 512,
        },
        "batch": {"batch_size": 2, "sequence_length": 32},
        "steps_per_turn": 10,
    },
    "61M": {
        "config": {
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 4,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "vocab_size": 8000,
        },
        "batch": {"batch_size": 2, "sequence_length": 256},
        "steps_per_turn": 1,
    },
}


def save_random_model(shape, folder):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=1024, use_cache=False, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)


def start_groups(variants, folder, dtype, batch, expected=None):
    """Starts the variants sequentially and compares their first loss with `expected` or the first one's."""
    groups, skipped = {}, {}
    try:
        for name, variant in variants.items():
            try:
                group = WorkerGroup(name, variant, folder=folder, dtype=dtype, **batch)
            except Skipped as reason:
                skipped[name] = str(reason)
                print(f"  {name} skipped: {reason}", flush=True)
                continue
            group.ask("give_back_memory")
            groups[name] = group
            expected = group.first_loss if expected is None else expected
            difference = abs(group.first_loss - expected)
            if not difference <= LOSS_TOLERANCE[dtype]:
                raise SystemExit(
                    f"{name} {dtype}: first loss {group.first_loss}, but the single-process run has {expected}"
                )
            print(f"  {name} first loss {group.first_loss:.6f}, difference {difference:.1e}", flush=True)
    except BaseException:
        for group in groups.values():
            group.close()
        raise
    return groups, skipped


def take_turns(groups, rounds, steps, lean=False, warm_up=True):
    """Takes up to `2 * rounds` samples of every variant, until each has `rounds` undisturbed ones.

    If memory does not suffice for all variants, `lean` makes waiting ones release free memory; each turn then starts
    with an untimed step in which the variant allocates its memory again.
    """
    samples = {name: [] for name in groups}

    def undisturbed(name):
        return [sample for sample in samples[name] if sample["foreign"] <= FOREIGN_LIMIT]

    for group in groups.values() if warm_up else ():
        group.sample(steps)
        if lean:
            group.ask("give_back_memory")
    for _ in range(2 * rounds):
        for name, group in groups.items():
            time.sleep(0.01)  # lets the previous variant's OpenMP threads go to sleep
            if lean:
                group.ask("steps", 1)
            samples[name].append(group.sample(steps))
            if lean:
                group.ask("give_back_memory")
        if all(len(undisturbed(name)) >= rounds for name in groups):
            break
    return {name: (undisturbed(name), samples[name]) for name in groups}


def summarize(groups, samples):
    results = {}
    for name, group in groups.items():
        kept, taken = samples[name]
        used = kept or taken  # results from disturbed samples only are marked below
        results[name] = {
            "ranks": group.variant.ranks,
            "threads_per_rank": group.variant.threads,
            "step_ms": 1e3 * median(s["step"] for s in used),
            "forward_backward_ms": 1e3 * median(s["forward_backward"] for s in used),
            "cpu_ms_per_step": 1e3 * median(s["cpu"] for s in used),
            "peak_rss_mib_per_rank": group.ask("memory"),
            "samples_kept": len(kept),
            "samples_taken": len(taken),
            "disturbed": not kept,
            "first_loss": group.first_loss,
        }
    for entry in results.values():
        for base in ("one_process_2_threads", "transformers_tp"):
            if base in results:
                entry[f"step_over_{base}"] = entry["step_ms"] / results[base]["step_ms"]
        if "one_process_1_thread" in results:
            entry["step_over_half_of_one_thread"] = 2 * entry["step_ms"] / results["one_process_1_thread"]["step_ms"]
    return results


def print_table(model, dtype, results):
    headings = ("step ms", "fwd+bwd", "cpu ms", "/ 1 proc", "/ hf tp", "MiB/rank", "kept")
    print(f"\n{model} {dtype:27}" + "".join(f"{heading:>10}" for heading in headings))
    for name, entry in results.items():
        ratios = [entry.get(f"step_over_{base}") for base in ("one_process_2_threads", "transformers_tp")]
        print(
            f"{name:32}{entry['step_ms']:10.1f}{entry['forward_backward_ms']:10.1f}{entry['cpu_ms_per_step']:10.1f}"
            + "".join(f"{'-' if ratio is None else format(ratio, '.2f'):>10}" for ratio in ratios)
            + f"{max(entry['peak_rss_mib_per_rank']):10.0f}{entry['samples_kept']:6}/{entry['samples_taken']:<3}"
            + ("  disturbed" if entry["disturbed"] else "")
        )


def bf16_slowdown():
    """Time of a bf16 product relative to fp32: about 0.5 with bfloat16 instructions, over 50 without."""
    seconds = {}
    for dtype in DTYPES.values():
        left, right = torch.ones(128, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
        left @ right
        start = time.perf_counter()
        left @ right
        seconds[dtype] = time.perf_counter() - start
    return seconds[torch.bfloat16] / seconds[torch.float32]


def measure(model, dtype, names, rounds):
    settings = MODELS[model]
    print(f"\n{model} {dtype}", flush=True)
    if model != "tiny" and dtype == "bf16" and (slowdown := bf16_slowdown()) > 8:
        reason = f"bf16 products are {slowdown:.0f} times slower than fp32 on this processor: a step takes minutes"
        print(f"  skipped: {reason}")
        return {"model": model, "dtype": dtype, "variants": {}, "skipped": dict.fromkeys(names, reason)}
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(settings["config"], folder)
        groups, skipped = start_groups({name: VARIANTS[name] for name in names}, folder, dtype, settings["batch"])
        try:
            results = summarize(groups, take_turns(groups, rounds, settings["steps_per_turn"]))
        finally:
            for group in groups.values():
                group.close()
    print_table(model, dtype, results)
    return {"model": model, "dtype": dtype, **settings, "variants": results, "skipped": skipped}


def versions():
    found = {}
    for package in ("torch", "transformers", "accelerate", "megatron-core", "hf-megatron"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return {"python": platform.python_version(), **found}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtypes", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--rounds", type=int, default=15, help="undisturbed samples wanted of each variant")
    parser.add_argument("--out", help="file for the results as JSON")
    return parser.parse_args()


def write_report(path, report):
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w") as file:
        json.dump(report, file, indent=2)
        file.write("\n")


def main():
    arguments = parse_arguments()
    instructions = torch.backends.cpu.get_cpu_capability()
    report = {"versions": versions(), "machine": {"cores": os.cpu_count(), "cpu_capability": instructions}}
    torch.set_num_threads(1)  # this process forks the workers: see workers.py
    transformers.logging.disable_progress_bar()
    # The single-process variant is always measured: losses and ratios refer to it.
    names = [name for name in VARIANTS if name in {"one_process_2_threads", *arguments.variants}]
    report["method"] = {"rounds": arguments.rounds, "foreign_cpu_limit": FOREIGN_LIMIT, "backend": "gloo"}
    report["runs"] = [
        measure(model, dtype, names, arguments.rounds) for model in arguments.models for dtype in arguments.dtypes
    ]
    if arguments.out:
        write_report(arguments.out, report)


if __name__ == "__main__":
    main()
