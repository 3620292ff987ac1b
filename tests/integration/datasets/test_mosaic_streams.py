"""Tests of MosaicML streaming datasets: resumed at the next sample on any layout, without reading earlier samples."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_megatron.datasets.streams import SampleStream
from hf_megatron.errors import DataError
from tests.integration.datasets.test_streams import (
    LAYOUTS,
    LENGTH,
    LLAMA,
    ROWS,
    merge_replicas,
    split_by_replica,
    train,
)


def get_stream(folder, ranks):
    import streaming

    return SampleStream(
        streaming.StreamingDataset(
            local=str(folder / "set"), shuffle=True, shuffle_seed=3, batch_size=1, num_canonical_nodes=1,
            replication=ranks,
        )
    )  # fmt: skip


def test_resumed_runs_read_each_sample_once(tmp_path):
    """Runs torchrun jobs: the shared memory of `streaming` belongs to a job and does not support forked ranks."""
    # Its requirements exclude transformers 5: install it without dependencies (`pip install --no-deps`).
    streaming = pytest.importorskip("streaming")
    rng = np.random.default_rng(0)
    columns = {"input_ids": "ndarray:int64", "labels": "ndarray:int64"}
    with streaming.MDSWriter(out=str(tmp_path / "set"), columns=columns, size_limit=600) as writer:
        for number in range(ROWS):
            row = np.concatenate([[number], rng.integers(0, 64, LENGTH - 1)])
            writer.write({"input_ids": row, "labels": row})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LLAMA).save_pretrained(tmp_path / "model")
    stream = iter(get_stream(tmp_path, None))
    samples = [next(stream)["input_ids"].tolist() for _ in range(60)]
    assert sorted(row[0] for row in samples[:ROWS]) == list(range(ROWS)) != [row[0] for row in samples[:ROWS]]
    # Restarts at earlier and at later positions.
    restarted = get_stream(tmp_path, None)
    for begin in (0, 30, 7):
        restarted.begin = begin
        assert [row["input_ids"].tolist() for row in itertools.islice(restarted, 25)] == samples[begin : begin + 25]
    with pytest.raises(DataError, match="num_canonical_nodes is not set"):
        SampleStream(streaming.StreamingDataset(local=str(tmp_path / "set"), batch_size=1))
    done, first = 0, 0
    for layout, rows, accumulate, steps in (("tp2", 2, 2, 2), ("tp2+dp2", 3, 1, 2), ("dp2", 4, 2, 2), ("cp2", 4, 1, 1)):
        ranks, replicas, done = 4 if "+" in layout else 2, LAYOUTS[layout].get("dp_size", 1), done + steps
        job = [str(ranks), str(tmp_path), layout, str(rows), str(accumulate), str(done), str(first and done - steps)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", job[0]]
        subprocess.run(
            [*launch, "-m", __name__, *job], check=True, timeout=60, cwd=Path(__file__).parents[3],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        read = [json.loads((tmp_path / f"{done}-{rank}.json").read_text()) for rank in range(ranks)]
        samples_by_step = merge_replicas(
            [({int(step): ids for step, ids in steps.items()}, rank, None) for steps, rank in read]
        )
        for step in range(done - steps + 1, done + 1):
            step_size = replicas * rows * accumulate
            assert samples_by_step[step] == split_by_replica(samples[first : first + step_size], replicas, rows)
            first += step_size
    assert first > 1.5 * ROWS


def main(ranks, folder, layout, rows, accumulate, done, begun):
    folder = Path(folder)
    if not int(begun):
        message = f"Set replication={ranks}, the number of ranks: Trainer itself distributes the samples over"
        with pytest.raises(DataError, match=message):
            train(folder, folder / "out", LAYOUTS[layout], rows=1, steps=1, data=lambda: get_stream(folder, None))
    steps, rank, _ = train(
        folder, folder / "out", LAYOUTS[layout], rows=int(rows), accumulate=int(accumulate), steps=int(done) + 1,
        stop=int(done), resume=str(folder / "out" / f"checkpoint-{begun}") if int(begun) else None,
        data=lambda: get_stream(folder, int(ranks)),
    )  # fmt: skip
    (folder / f"{done}-{os.environ['RANK']}.json").write_text(json.dumps([steps, rank]))


if __name__ == "__main__":
    main(*sys.argv[1:])
