"""A pipeline-parallel training step of a Llama on two CPU ranks: torch.distributed.pipelining and hf_megatron.

    python benchmarks/pipeline.py --out benchmarks/results/pipeline_cpu.json
    python benchmarks/pipeline.py --models tiny --rounds 5 --out benchmarks/results/pipeline_tiny_cpu.json
    python benchmarks/pipeline.py --models tiny --schedules 1f1b zbv --microbatches 4 --rounds 2

All variants run the same microbatches of the same samples. README.md describes the method.
"""

import argparse
import os
import tempfile
from functools import partial

import torch
import transformers  # imported before the fork, so that the workers need not import it
from data_parallel import check_later_losses, ratio
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
from variants import Variant, load_model, prepared_adamw

RANKS = 2
ROWS = 8  # samples of a batch, or one per microbatch if there are more microbatches
IGNORED = -100
# torch's class, and the placement of the stages of rank r: r alone, r and r + 2 in a loop, r and 3 - r in a V.
SCHEDULES = {
    "gpipe": ("ScheduleGPipe", "single"),
    "1f1b": ("Schedule1F1B", "single"),
    "interleaved_1f1b": ("ScheduleInterleaved1F1B", "loop"),
    "interleaved_zero_bubble": ("ScheduleInterleavedZeroBubble", "loop"),
    "zbv": ("ScheduleZBVZeroBubble", "v"),
    "dualpipev": ("ScheduleDualPipeV", "v"),
}
PIPELINE_MODELS = {
    "tiny": {
        "config": MODELS["tiny"]["config"],
        "sequence_length": 32,
        "steps_per_turn": 5,
        "checked_steps": 2,
    },
    "107M": {
        "config": {**MODELS["61M"]["config"], "num_hidden_layers": 8},
        "sequence_length": 64,
        "steps_per_turn": 1,
        "checked_steps": 1,  # a step takes seconds; no other warm-up follows
    },
}


def describe_stages(rank, placement):
    """The stages of a rank and the total number of stages."""
    if placement == "single":
        return [rank], RANKS
    return [rank, RANKS + rank if placement == "loop" else 2 * RANKS - 1 - rank], 2 * RANKS


def even_partition(layers, stages):
    assert layers % stages == 0
    return [layers // stages] * stages


def labels_of(ids):
    """Labels `[batch, sequence]` shifted as in transformers, and the number of valid targets."""
    labels = ids.roll(-1, 1)
    labels[:, -1] = IGNORED
    return labels, (labels != IGNORED).sum()


def already_backward(loss):
    """Wraps a loss whose backward has already run, so that the worker's own backward does nothing."""
    return loss.detach().requires_grad_()


def accumulated(job, microbatches):
    """Single-process reference that accumulates the gradients of the microbatches."""
    model = load_model(job)
    chunks = job.token_ids(model.config).chunk(microbatches)
    targets = sum(labels_of(chunk)[1] for chunk in chunks)

    def step():
        total = torch.zeros(())
        for ids in chunks:
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=targets).loss
            loss.backward()
            total += loss.detach()
        return already_backward(total)

    return list(model.parameters()), step


class LlamaStage(torch.nn.Module):
    """Layers `start` to `stop` of a Llama, with the embedding before the first and norm and head after the last layer.

    Mask and rotary tables are computed once, because they depend only on the sequence length.
    """

    def __init__(self, model, start, stop, sequence_length):
        super().__init__()
        from transformers.masking_utils import create_causal_mask

        body, is_last = model.model, stop == len(model.model.layers)
        self.embedding = body.embed_tokens if start == 0 else None
        self.layers = body.layers[start:stop]
        self.norm, self.head = (body.norm, model.lm_head) if is_last else (None, None)
        like, positions = torch.empty(1, sequence_length, model.config.hidden_size), torch.arange(sequence_length)[None]
        self.mask = create_causal_mask(model.config, like, None, past_key_values=None, position_ids=positions)
        self.rotary = body.rotary_emb(like, position_ids=positions)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, attention_mask=self.mask, position_embeddings=self.rotary)
        return x if self.head is None else self.head(self.norm(x))


def torch_pipeline(job, microbatches, schedule):
    from torch.distributed import pipelining

    model = load_model(job)
    ids = job.token_ids(model.config)
    labels, targets = labels_of(ids)
    name, placement = SCHEDULES[schedule]
    owned, stages = describe_stages(job.rank, placement)
    size = model.config.num_hidden_layers // stages
    modules = [LlamaStage(model, size * stage, size * (stage + 1), job.sequence_length) for stage in owned]
    ends = [pipelining.PipelineStage(m, i, stages, torch.device("cpu")) for m, i in zip(modules, owned, strict=True)]

    def sum_over_targets(logits, labels):
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss / targets

    runtime = getattr(pipelining, name)(
        ends[0] if placement == "single" else ends, microbatches, loss_fn=sum_over_targets, scale_grads=False
    )
    inputs = (ids,) if 0 in owned else ()
    target = labels if stages - 1 in owned else None

    def step():
        losses = []
        runtime.step(*inputs, target=target, losses=losses, return_outputs=False)
        # The worker averages over ranks: this gives the batch's loss without additional communication.
        return already_backward(job.ranks * torch.stack(losses).sum() if losses else torch.zeros(()))

    return [parameter for module in modules for parameter in module.parameters()], step


def hf_megatron_pipeline(job, microbatches, schedule):
    import hf_megatron

    stages = describe_stages(job.rank, SCHEDULES[schedule][1])[1]
    layers = transformers.AutoConfig.from_pretrained(job.folder).num_hidden_layers
    config = hf_megatron.MegatronConfig(
        pp_size=job.ranks,
        num_microbatches=microbatches,
        pipeline_schedule=schedule,
        pipeline_partition=even_partition(layers, stages),
    )
    model = load_model(job, megatron_config=config)
    ids = job.token_ids(model.config)
    return list(model.parameters()), lambda: model(input_ids=ids, labels=ids).loss


def references(microbatches):
    build = partial(accumulated, microbatches=microbatches)
    return {
        "one_process_2_threads": Variant(build, ranks=1, threads=2, needs_group=False),
        "one_process_1_thread": Variant(build, ranks=1, threads=1, needs_group=False),
    }


def pipelines(microbatches, schedule):
    options = {"microbatches": microbatches, "schedule": schedule}
    return {
        "torch": Variant(partial(torch_pipeline, **options), ranks=RANKS, threads=1),
        "hf_megatron": Variant(
            partial(hf_megatron_pipeline, **options), ranks=RANKS, threads=1, optimizer=prepared_adamw
        ),
    }


def close(groups):
    for group in groups.values():
        group.close()


def start_checked(variants, folder, batch, checked_steps, first=None, later=None):
    """Starts variants and checks that their losses, at first and after some updates, match the single-process run."""
    groups, skipped = start_groups(variants, folder, "fp32", batch, first)
    try:
        if skipped:
            raise SystemExit(f"skipped: {skipped}")
        return groups, check_later_losses(groups, checked_steps, later)
    except BaseException:
        close(groups)
        raise


def results_of(groups, rounds, steps):
    samples = take_turns(groups, rounds, steps, warm_up=False)
    results = summarize(groups, samples)
    for name, entry in results.items():
        entry["over_one_process"] = ratio(samples, name, "one_process_2_threads")
    return results, samples


def measure_schedule(one, later, schedule, microbatches, start, turns):
    """Measures torch and hf_megatron in turn with the single-process group that is already running."""
    groups, _ = start_checked(pipelines(microbatches, schedule), **start, first=one.first_loss, later=later)
    try:
        results, samples = results_of({"one_process_2_threads": one, **groups}, **turns)
    finally:
        close(groups)
    peaks = [results[name]["peak_rss_mib_per_rank"] for name in ("hf_megatron", "torch")]
    over_torch = ratio(samples, "hf_megatron", "torch")
    memory = [ours / theirs for ours, theirs in zip(*peaks, strict=True)]
    print(
        f"  step {results['hf_megatron']['step_ms']:.1f} ms, over torch {over_torch['median']:.3f}, "
        f"memory {max(memory):.3f}",
        flush=True,
    )
    return {"variants": results, "over_torch": over_torch, "peak_rss_over_torch": memory}


def measure(model, schedules, microbatches, rounds):
    """Measures one number of microbatches: one process first, then with each schedule, to bound the memory."""
    settings = PIPELINE_MODELS[model]
    batch = {"batch_size": max(ROWS, microbatches), "sequence_length": settings["sequence_length"]}
    title = f"{model}, batch {batch['batch_size']} x {batch['sequence_length']}, {microbatches} microbatches"
    run = {"model": model, "dtype": "fp32", "config": settings["config"], "batch": batch, "microbatches": microbatches}
    turns = {"rounds": rounds, "steps": settings["steps_per_turn"]}
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(settings["config"], folder)
        start = {"folder": folder, "batch": batch, "checked_steps": settings["checked_steps"]}
        print(f"\n{title}: one process", flush=True)
        groups, later = start_checked(references(microbatches), **start)
        try:
            run["references"], samples = results_of(groups, **turns)
            split = ratio(samples, "one_process_1_thread", "one_process_2_threads")["median"] / 2
            run["perfect_split_over_one_process"], run["schedules"] = split, {}
            groups.pop("one_process_1_thread").close()
            [(name, one)] = groups.items()
            for schedule in schedules:
                print(f"\n{title}: {schedule}", flush=True)
                entry = measure_schedule(one, later[name], schedule, microbatches, start, turns)
                ours = entry["variants"]["hf_megatron"]["over_one_process"]["median"]
                run["schedules"][schedule] = {**entry, "over_perfect_split": ours / split}
        finally:
            close(groups)
    return run


def add_bubbles(runs):
    """Adds the theoretical bubble share of each schedule.

    Runs after all measurements, because workers would inherit this import.
    """
    from hf_megatron.pipeline_parallel.schedule_simulator import bubble

    for run in runs:
        for schedule, entry in run["schedules"].items():
            per_rank = len(describe_stages(0, SCHEDULES[schedule][1])[0])
            entry["bubble"] = bubble(schedule, RANKS, per_rank, run["microbatches"])


def print_table(run):
    batch, one = run["batch"], run["references"]["one_process_2_threads"]
    print(
        f"\n{run['model']}, {run['microbatches']} microbatches of {batch['batch_size']} x {batch['sequence_length']}; "
        f"one process {one['step_ms']:.1f} ms, {one['peak_rss_mib_per_rank'][0]:.0f} MiB, "
        f"perfect split {run['perfect_split_over_one_process']:.3f} of it"
    )
    headings = ("bubble", "step ms", "torch ms", "/ 1 proc", "torch/1p", "/ split", "/ torch", "cpu ms", "torch cpu")
    print(f"{'':24}" + "".join(f"{heading:>10}" for heading in headings) + "   MiB of the ranks, torch's")
    for schedule, entry in run["schedules"].items():
        ours, theirs = (entry["variants"][name] for name in ("hf_megatron", "torch"))
        ratios = [x["over_one_process"]["median"] for x in (ours, theirs)]
        ratios += [entry["over_perfect_split"], entry["over_torch"]["median"]]
        peaks = [" ".join(f"{x:.0f}" for x in e["peak_rss_mib_per_rank"]) for e in (ours, theirs)]
        print(
            f"{schedule:24}{entry['bubble']:10.3f}{ours['step_ms']:10.1f}{theirs['step_ms']:10.1f}"
            + "".join(f"{value:10.3f}" for value in ratios)
            + f"{ours['cpu_ms_per_step']:10.1f}{theirs['cpu_ms_per_step']:10.1f}   {peaks[0]}, {peaks[1]}"
            + ("  disturbed" if entry["over_torch"]["disturbed"] else f"  {entry['over_torch']['rounds']} rounds")
        )


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=PIPELINE_MODELS, default=["107M"])
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=2, help="undisturbed samples wanted of each variant")
    parser.add_argument("--out", help="file for the results as JSON")
    arguments = parser.parse_args()
    if not all(count in (4, 8) or (count > 8 and count % 4 == 0) for count in arguments.microbatches):
        parser.error("--microbatches: 4, 8 or a multiple of 4 above, which every schedule takes in equal microbatches")
    return arguments


def main():
    arguments = parse_arguments()
    torch.set_num_threads(1)  # this process forks the workers: see workers.py
    transformers.logging.disable_progress_bar()
    instructions = torch.backends.cpu.get_cpu_capability()
    report = {"versions": versions(), "machine": {"cores": os.cpu_count(), "cpu_capability": instructions}}
    report["method"] = {"rounds": arguments.rounds, "foreign_cpu_limit": FOREIGN_LIMIT, "backend": "gloo"}
    report["runs"] = [
        measure(model, arguments.schedules, count, arguments.rounds)
        for model in arguments.models
        for count in arguments.microbatches
    ]
    add_bubbles(report["runs"])
    for run in report["runs"]:
        print_table(run)
    if arguments.out:
        write_report(arguments.out, report)


if __name__ == "__main__":
    main()
