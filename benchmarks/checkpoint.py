"""Saving and loading a 495M-parameter Llama with AdamW state from two ranks: plain writes, `cp`, torch DCP.

    python benchmarks/checkpoint.py --rounds 5 --out benchmarks/results/checkpoint_cpu.json

Two tensor-parallel ranks are forked once; each round runs every way of writing the same bytes (5.7 GB in fp32) and of
reading them back. `plain_write` writes each rank's bytes to a file with fsync and nothing else. Reported are medians,
ratios within a round, and each rank's additional resident memory, including mapped file pages.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from transformers import LlamaForCausalLM
from weights import CONFIG, _memory, _reset_peak

import hf_megatron
from hf_megatron.checkpoint.reader import open_checkpoint
from hf_megatron.checkpoint.training_state import load_model, load_optimizers, pieces, training_metadata
from hf_megatron.checkpoint.transaction import Transaction
from hf_megatron.compat.torch_dtensor import dtensor_from_local
from hf_megatron.core.fork_harness import run_ranks


def _timed(action):
    """Seconds until the slowest rank is done, and this rank's additional resident memory."""
    if dist.get_rank() == 0:
        os.sync()
        time.sleep(0.5)
    dist.barrier()
    _reset_peak()
    resident, start = _memory("VmRSS"), time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - start, _memory("VmHWM") - resident


def _dcp_state(model, optimizer):
    """Weights and moments as DTensors, which DCP reshards as well."""
    state = {}
    for leaf in optimizer._hf_megatron.leaves:
        state[leaf.name] = leaf.parameter.detach()
        for key in ("exp_avg", "exp_avg_sq"):
            state[f"{key}.{leaf.name}"] = dtensor_from_local(optimizer.state[leaf.tensor][key], leaf.parameter)
    return state


def _write_plain(held, path):
    with open(path, "wb", buffering=0) as file:
        for tensor in held:
            view = memoryview(tensor.view(torch.uint8).numpy())
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())


def _on_rank(source, folder, rounds):
    model = LlamaForCausalLM.from_pretrained(source, megatron_config=hf_megatron.MegatronConfig(tp_size=2)).train()
    optimizer = hf_megatron.prepare_optimizer(torch.optim.AdamW(model.parameters()))
    tokens = torch.arange(8).view(1, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    model.zero_grad()
    rank, held = dist.get_rank(), [piece.data for piece in pieces(model, [optimizer])]
    bytes_here = sum(tensor.numel() * tensor.element_size() for tensor in held)
    ours, plain, by_dcp, copied = (folder / name for name in ("ours", "plain", "dcp", "copied"))

    def save_ours():
        with Transaction(ours / "checkpoint-1", training_metadata(model, [optimizer])) as transaction:
            transaction.write(pieces(model, [optimizer]))

    def load_ours(verify):
        checkpoint = open_checkpoint(ours / "checkpoint-1", verify=verify)
        load_model(model, checkpoint)
        load_optimizers(model, [optimizer], checkpoint)

    def copy():
        if rank == 0:
            for file in (ours / "checkpoint-1").glob("shard-*"):
                shutil.copyfile(file, copied / file.name)
            os.sync()

    ways = {
        "plain_write": lambda: _write_plain(held, plain / str(rank)),
        "hf_megatron_save": save_ours,
        "dcp_save": lambda: dcp.save(_dcp_state(model, optimizer), checkpoint_id=by_dcp),
        "cp_and_sync": copy,
        "hf_megatron_load": lambda: load_ours(True),
        "hf_megatron_load_unverified": lambda: load_ours(False),
        "dcp_load": lambda: dcp.load(_dcp_state(model, optimizer), checkpoint_id=by_dcp),
    }
    samples = {name: [] for name in ways}
    for index in range(rounds + 1):
        if rank == 0:
            for path in (ours, plain, by_dcp, copied):
                shutil.rmtree(path, ignore_errors=True)
                path.mkdir()
        dist.barrier()
        # Shuffle the order in every round: previous writes affect the speed of the disk.
        order = random.Random(index)
        saves, loads = [name for name in ways if "load" not in name], [name for name in ways if "load" in name]
        # cp goes last because it copies the saved files.
        first = order.sample(saves, len(saves))
        first.sort(key=lambda name: name == "cp_and_sync")
        for name in (*first, *order.sample(loads, len(loads))):
            sample = _timed(ways[name])
            if index:  # the first round warms up
                samples[name].append(sample)
    return bytes_here, samples


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        LlamaForCausalLM(CONFIG).save_pretrained(source)
        ranks = run_ranks(_on_rank, 2, source, Path(folder), arguments.rounds, timeout=3600)
    size = sum(here for here, _ in ranks)
    rows, seconds = {}, {}
    for name in ranks[0][1]:
        seconds[name] = [
            max(one[0] for one in both) for both in zip(*(samples[name] for _, samples in ranks), strict=True)
        ]
        extra = [max(one[1] for one in both) for both in zip(*(samples[name] for _, samples in ranks), strict=True)]
        rows[name] = {
            "seconds": round(statistics.median(seconds[name]), 3),
            "gb_per_s": round(size / 1e9 / statistics.median(seconds[name]), 3),
            "extra_resident_per_rank_gib": round(statistics.median(extra) / 2**30, 3),
        }

    def ratio(one, other):
        return round(statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)), 3)

    result = {
        "bytes": size,
        "ways": rows,
        "save_over_plain_write": ratio("hf_megatron_save", "plain_write"),
        "save_over_dcp": ratio("hf_megatron_save", "dcp_save"),
        "save_over_cp": ratio("hf_megatron_save", "cp_and_sync"),
        "load_over_dcp": ratio("hf_megatron_load", "dcp_load"),
        "unverified_load_over_dcp": ratio("hf_megatron_load_unverified", "dcp_load"),
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "versions": {name: metadata.version(name) for name in ("torch", "transformers", "safetensors", "hf_megatron")},
    }
    print(json.dumps(result, indent=2))
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
