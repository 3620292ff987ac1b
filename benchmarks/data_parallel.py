"""A data-parallel training step of a Llama on two CPU ranks: DDP, ZeroRedundancyOptimizer, FSDP2 and hf_megatron.

    python benchmarks/data_parallel.py --out benchmarks/results/data_parallel_cpu.json
    python benchmarks/data_parallel.py --models tiny --variants ddp hf_megatron_zero1 --rounds 5
    python benchmarks/data_parallel.py --memory-table --out benchmarks/results/optimizer_memory_cpu.json

Every variant trains on the same global batch, split evenly over the ranks. README.md describes the method.
"""

import argparse
import os
import tempfile
from functools import partial

import torch
import transformers  # imported before the fork, so that the workers need not import it
from train_step import (
    FOREIGN_LIMIT,
    MODELS,
    save_random_model,
    start_groups,
    summarize,
    take_turns,
    versions,
    write_report,
)
from variants import VARIANTS, Variant, half_batch, load_model, prepared_adamw, read_loss
from workers import WorkerGroup, median

CHECKED_STEPS = 2  # after the first step: their losses show whether gradients were averaged
LATER_LOSS_TOLERANCE = 1e-4
STAGES = (0, 1, 2, 3)


def on_its_part(model, job, forward=None):
    """Return value of a builder: parameters and loss of a model that trains on this rank's shard of the batch."""
    ids = job.token_ids(model.config).chunk(job.ranks)[job.rank]
    return list(model.parameters()), read_loss(forward or model, ids)


def ddp(job):
    model = load_model(job)
    return on_its_part(model, job, torch.nn.parallel.DistributedDataParallel(model))


def zero_redundancy(parameters):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-4)


def fsdp2_transformers(job):
    from transformers.distributed import DistributedConfig

    return on_its_part(load_model(job, distributed_config=DistributedConfig(fsdp_size=job.ranks)), job)


def fsdp2_plain(job):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = load_model(job), init_device_mesh("cpu", (job.ranks,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    return on_its_part(model, job)


def hf_megatron_zero(job, stage):
    import hf_megatron

    config = hf_megatron.MegatronConfig(dp_size=job.ranks, zero_stage=stage)
    return on_its_part(load_model(job, megatron_config=config), job)


def hf_megatron_variant(stage, ranks):
    return Variant(partial(hf_megatron_zero, stage=stage), ranks=ranks, threads=1, optimizer=prepared_adamw)


DP_VARIANTS = {
    "one_process_2_threads": VARIANTS["one_process_2_threads"],
    "two_processes_no_communication": Variant(half_batch, ranks=2, threads=1, needs_group=False),
    "ddp": Variant(ddp, ranks=2, threads=1),
    "ddp_zero1": Variant(ddp, ranks=2, threads=1, optimizer=zero_redundancy),
    "fsdp2_transformers": Variant(fsdp2_transformers, ranks=2, threads=1),
    "fsdp2_plain": Variant(fsdp2_plain, ranks=2, threads=1),
    **{f"hf_megatron_zero{stage}": hf_megatron_variant(stage, ranks=2) for stage in STAGES},
}


def check_later_losses(groups, steps=CHECKED_STEPS, expected=None):
    """Checks that all variants that exchange gradients have the loss `expected`, or the first one's, after updates."""
    found = {}
    for name, group in groups.items():
        if name != "two_processes_no_communication":
            losses = [records[-1][-1] for records in group.ask("steps", steps)]
            group.ask("give_back_memory")
            found[name] = sum(losses) / len(losses)
            expected = found[name] if expected is None else expected
            difference = abs(found[name] - expected)
            if not difference <= LATER_LOSS_TOLERANCE:
                raise SystemExit(
                    f"{name}: loss {found[name]} after {steps} updates, but the single-process run has {expected}"
                )
            print(f"  {name} loss {found[name]:.6f} after {steps} updates, difference {difference:.1e}")
    return found


def ratio(samples, numerator, denominator):
    """Median over rounds of two variants' ratio within a round, which is robust against drift of the machine."""
    pairs = list(zip(samples[numerator][1], samples[denominator][1], strict=True))
    calm = [pair for pair in pairs if all(sample["foreign"] <= FOREIGN_LIMIT for sample in pair)]
    ratios = torch.tensor([a["step"] / b["step"] for a, b in calm or pairs], dtype=torch.float64)
    low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)).tolist()
    return {"median": middle, "quartiles": [low, high], "rounds": len(calm), "disturbed": not calm}


def compare(results, samples):
    """The ratios that summarize the results, for the variants that were measured."""
    wanted = {f"zero{stage}_over_ddp": (f"hf_megatron_zero{stage}", "ddp") for stage in STAGES}
    wanted["ddp_over_no_communication"] = ("ddp", "two_processes_no_communication")
    wanted["zero1_over_no_communication"] = ("hf_megatron_zero1", "two_processes_no_communication")
    wanted["zero1_over_ddp_zero1"] = ("hf_megatron_zero1", "ddp_zero1")
    sharded = [name for name in ("fsdp2_transformers", "fsdp2_plain") if name in results]
    if sharded:
        fastest = min(sharded, key=lambda name: results[name]["step_ms"])
        wanted["fastest_fsdp2_over_zero1"] = (fastest, "hf_megatron_zero1")
        wanted["zero3_over_fastest_fsdp2"] = ("hf_megatron_zero3", fastest)
    return {
        key: {"of": list(pair), **ratio(samples, *pair)} for key, pair in wanted.items() if set(pair) <= set(results)
    }


def print_table(model, results, ratios):
    headings = ("step ms", "fwd+bwd", "optimizer", "cpu ms", "/ 1 proc", "MiB/rank", "opt MiB", "kept")
    print(f"\n{model:32}" + "".join(f"{heading:>10}" for heading in headings))
    for name, entry in results.items():
        values = [entry["step_ms"], entry["forward_backward_ms"], entry["optimizer_ms"], entry["cpu_ms_per_step"]]
        print(
            f"{name:32}"
            + "".join(f"{value:10.1f}" for value in values)
            + f"{entry['over_one_process']['median']:10.3f}{max(entry['peak_rss_mib_per_rank']):10.0f}"
            + f"{max(entry['optimizer_bytes_per_rank']) / 2**20:10.1f}"
            + f"{entry['samples_kept']:6}/{entry['samples_taken']:<3}"
            + ("  disturbed" if entry["disturbed"] else "")
        )
    for key, found in ratios.items():
        low, high = found["quartiles"]
        note = "  disturbed" if found["disturbed"] else f"  {found['rounds']} rounds"
        print(f"  {key:32}{found['median']:8.3f}  [{low:.3f}, {high:.3f}]{note}")


def measure(model, names, rounds):
    settings = MODELS[model]
    print(f"\n{model}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(settings["config"], folder)
        variants = {name: DP_VARIANTS[name] for name in names}
        groups, skipped = start_groups(variants, folder, "fp32", settings["batch"])
        try:
            later = check_later_losses(groups)
            samples = take_turns(groups, rounds, settings["steps_per_turn"], lean=True)
            results = summarize(groups, samples)
            for name, entry in results.items():
                used = samples[name][0] or samples[name][1]
                entry["optimizer_ms"] = 1e3 * median(s["step"] - s["forward_backward"] for s in used)
                entry["over_one_process"] = ratio(samples, name, "one_process_2_threads")
                entry["optimizer_bytes_per_rank"] = groups[name].ask("optimizer_bytes")
                entry["loss_after_updates"] = later.get(name)
        finally:
            for group in groups.values():
                group.close()
    ratios = compare(results, samples)
    print_table(model, results, ratios)
    return {"model": model, "dtype": "fp32", **settings, "variants": results, "ratios": ratios, "skipped": skipped}


def measure_memory(model, dtype, sizes=(1, 2, 4)):
    """Bytes of optimizer state on every rank after one small step, per data-parallel size and ZeRO stage."""
    rows = []
    print(f"\noptimizer state of {model} {dtype}, MiB on each rank", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(MODELS[model]["config"], folder)
        for ranks in sizes:
            for stage in STAGES:
                variant = hf_megatron_variant(stage, ranks)
                batch = {"batch_size": max(sizes), "sequence_length": 8}
                group = WorkerGroup(f"dp{ranks} zero{stage}", variant, folder=folder, dtype=dtype, **batch)
                try:
                    held = group.ask("optimizer_bytes")
                finally:
                    group.close()
                rows.append({"dp_size": ranks, "zero_stage": stage, "optimizer_bytes_per_rank": held})
                megabytes = " ".join(f"{x / 2**20:9.2f}" for x in held)
                print(f"  dp {ranks} stage {stage}  {megabytes}", flush=True)
    return {"model": model, "dtype": dtype, "config": MODELS[model]["config"], "rows": rows}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["61M"])
    parser.add_argument("--variants", nargs="+", choices=DP_VARIANTS, default=list(DP_VARIANTS))
    parser.add_argument("--rounds", type=int, default=15, help="undisturbed samples wanted of each variant")
    parser.add_argument("--memory-table", action="store_true", help="only count the bytes of optimizer state")
    parser.add_argument("--out", help="file for the results as JSON")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)  # this process forks the workers: see workers.py
    transformers.logging.disable_progress_bar()
    instructions = torch.backends.cpu.get_cpu_capability()
    report = {"versions": versions(), "machine": {"cores": os.cpu_count(), "cpu_capability": instructions}}
    if arguments.memory_table:
        report["memory"] = [measure_memory(m, dtype) for m in arguments.models for dtype in ("fp32", "bf16")]
    else:
        # The single-process variant is always measured: losses and ratios refer to it.
        names = [name for name in DP_VARIANTS if name in {"one_process_2_threads", *arguments.variants}]
        report["method"] = {"rounds": arguments.rounds, "foreign_cpu_limit": FOREIGN_LIMIT, "backend": "gloo"}
        report["runs"] = [measure(model, names, arguments.rounds) for model in arguments.models]
    if arguments.out:
        write_report(arguments.out, report)


if __name__ == "__main__":
    main()
