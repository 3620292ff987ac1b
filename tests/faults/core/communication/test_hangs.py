"""Tests of flight records of hanging ranks: the missing rank and collective, on groups of several axes."""

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.compat.shard_safe import shard_safe
from hf_megatron.config import MegatronConfig
from hf_megatron.core.communication.flight_recorder import write_flight_record
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.diagnostics.hang import find_discords, read_flight_records, tell_hang
from hf_megatron.errors import ConfigError
from hf_megatron.integrations.accelerate.process_group import ensure_process_group

LLAMA = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
LAYOUTS = {"tp": {"tp_size": 2}, "cp": {"cp_size": 2}}
# The stacks of the ranks are sampled in the last 15 % of a timeout.
DRAWS, TIMEOUT = 20, 10.0


def _has_recorder():
    import torch

    return tuple(map(int, torch.__version__.partition("+")[0].split(".")[:2])) >= (2, 13)


pytestmark = pytest.mark.skipif(not _has_recorder(), reason="gloo's collectives are recorded from torch 2.13 on")


@pytest.fixture(autouse=True)
def _recording(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "200")
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "records" / "nccl"))


def _skip_drawn_collectives(folder):
    """Makes a random rank skip one collective of a random axis; it catches up after all records are written."""
    ensure_process_group(60.0)
    mesh = {"tp": [[0, 1], [2, 3]], "dp": [[0, 2], [1, 3]]}
    groups = {
        name: [dist.new_group(ranks, group_desc=f"mesh_{name}") for ranks in lists] for name, lists in mesh.items()
    }
    draws = []
    for draw in range(DRAWS):
        rng = random.Random(draw)
        axis, missing, calls = rng.choice([*mesh]), rng.randrange(4), rng.randrange(1, 4)
        place = next(place for place, ranks in enumerate(mesh[axis]) if missing in ranks)
        members, group, rank = mesh[axis][place], groups[axis][place], dist.get_rank()
        size, works = rng.randrange(1, 9), []
        if rank in members:
            for _ in range(calls):
                dist.all_reduce(torch.ones(size, 3), group=group)
            if rank != missing:
                works.append(dist.all_reduce(torch.ones(size, 5), group=group, async_op=True))
        write_flight_record(folder / str(draw), draw, None if rank == missing else "all_reduce")
        # All records are written before any rank continues.
        dist.barrier()
        if rank == missing:
            works.append(dist.all_reduce(torch.ones(size, 5), group=group, async_op=True))
        for work in works:
            work.wait()
        draws.append((axis, members, missing, size))
    return draws


def test_missing_rank_is_identified(tmp_path):
    [draws, *_] = run_ranks(lambda: _skip_drawn_collectives(tmp_path), 4)
    for draw, (axis, members, missing, size) in enumerate(draws):
        records = read_flight_records(tmp_path / str(draw))
        # The barrier appears in records too: ranks that wrote early wait there for the others.
        discords = [discord for discord in find_discords(records) if discord.axis == axis]
        [discord] = discords
        assert (discord.ranks, discord.missing) == (tuple(members), (missing,))
        [call] = discord.called.values()
        assert (call.operation, call.sizes) == ("all_reduce", ((size, 5),))
        assert f"rank {missing} did not reach collective" in str(discord)
        assert f"all_reduce(Float[{size}, 5])" in str(discord)


def _call_different_collectives(folder):
    ensure_process_group(60.0)
    dist.all_reduce(torch.ones(2))
    # Collectives are recorded when called; their mismatched execution in gloo is not waited for.
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), async_op=True)
    else:
        dist.broadcast(torch.ones(4), 1, async_op=True)
    time.sleep(0.5)
    write_flight_record(folder, 0, None)


def test_differing_collectives_are_reported(tmp_path):
    run_ranks(lambda: _call_different_collectives(tmp_path), 2)
    text = tell_hang(read_flight_records(tmp_path))
    assert "differs: all_reduce(Float[4]) on rank 0; broadcast(Float[4]) on rank 1" in text
    result = CliRunner().invoke(app, ["debug", "hang", str(tmp_path)])
    assert result.exit_code == 1
    assert "differs" in result.output


@shard_safe
def _sleep(*args):
    time.sleep(TIMEOUT + 3)


def _train_until_hang(sizes):
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=MegatronConfig(**sizes, timeout=TIMEOUT)).train()
    ids = torch.zeros(2, 8, dtype=torch.int64)
    model(input_ids=ids, labels=ids).loss.backward()
    if dist.get_rank() == 1:
        model.model.layers[1].mlp.register_forward_hook(_sleep)
    # Both ranks raise: rank 0 times out, and has left the group when rank 1 wakes up.
    with pytest.raises(RuntimeError):
        model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("axis", LAYOUTS)
def test_hanging_ranks_write_flight_records(axis, tmp_path):
    run_ranks(lambda: _train_until_hang(LAYOUTS[axis]), 2, timeout=90)
    records = read_flight_records(tmp_path / "records")
    assert {record.rank for record in records} == {0, 1}
    [discord] = find_discords(records)
    assert discord.missing == (1,)
    text = tell_hang(records)
    assert "rank 1 did not reach collective" in text
    assert "rank 0: after 0 optimizer steps, in " in text


def test_disabled_recorder_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")

    def on_rank():
        ensure_process_group(60.0)
        dist.barrier()
        return write_flight_record(tmp_path, 0, None)

    assert run_ranks(on_rank, 2) == [None, None]
    with pytest.raises(ConfigError, match="has no file rank"):
        read_flight_records(tmp_path)


def test_missing_record_is_reported(tmp_path):
    entry = {
        "process_group": ["0", "default_pg"],
        "is_p2p": False,
        "collective_seq_id": 1,
        "profiling_name": "nccl:all_gather",
        "input_sizes": [[2]],
        "input_dtypes": ["Float"],
    }
    record = {
        "kind": "flight record",
        "rank": 0,
        "ranks": 2,
        "steps": 3,
        "waits": "all_gather",
        "groups": {"0": [0, 1]},
        "entries": [entry],
    }
    Path(tmp_path, "rank00000.json").write_text(json.dumps(record), encoding="utf-8")
    text = tell_hang(read_flight_records(tmp_path))
    assert "rank 1: no record" in text
    assert os.listdir(tmp_path) == ["rank00000.json"]
