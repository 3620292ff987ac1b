"""Tests of the sharded checkpoint format: resharding on load, pruning, background saves and discovery."""

import itertools
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hf_megatron.checkpoint.async_save import AsyncSaver
from hf_megatron.checkpoint.discovery import LATEST, committed, find, is_committed, latest, pointed_at
from hf_megatron.checkpoint.manifest import MANIFEST
from hf_megatron.checkpoint.reader import PARTIAL, Checkpoint, open_checkpoint, read_partial
from hf_megatron.checkpoint.tensor_chunks import LocalChunk, TensorChunk, local_boxes
from hf_megatron.checkpoint.transaction import Transaction, prune
from hf_megatron.core.axes import Axes
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.placement import Placement
from hf_megatron.errors import CheckpointError
from hf_megatron.integrations.trainer.resume import checkpoint_to_resume

# name -> global shape, dtype, placement
TENSORS = {
    "embedding": ((26, 8), torch.float32, Placement.split("tp", 0)),
    "gate_up": ((24, 8), torch.bfloat16, Placement.split("tp", 0, groups=2)),
    "fused": ((6, 24), torch.float32, Placement.split("tp", 1, groups=3)),
    "kv": ((4, 8), torch.float16, Placement.split("tp", 0, copies=2)),
    "norm": ((8,), torch.float32, Placement()),
    "scale": ((), torch.float64, Placement()),
    "mask": ((5,), torch.bool, Placement()),
    "empty": ((0, 4), torch.float32, Placement()),
    "step": ((), torch.int64, Placement()),
}


def make_full_tensor(name):
    shape, dtype, _ = TENSORS[name]
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return (torch.rand(shape, generator=generator) * 200 - 100).to(dtype)


def slice_shard(name, placement, axes):
    tensor = make_full_tensor(name)
    for split in placement.splits:
        intervals = split.intervals(tensor.shape[split.dim], axes)
        tensor = torch.cat([tensor.narrow(split.dim, start, stop - start) for start, stop in intervals], split.dim)
    return tensor.reshape(-1)


def pieces(tp, dp, rank):
    """Yields the chunks of `rank` in a tp x dp grid; dp splits each shard unevenly, as a sharded optimizer does."""
    axes = Axes.from_sizes(rank, tp=tp, dp=dp)
    for name, (shape, _, placement) in TENSORS.items():
        if any(tp % split.copies for split in placement.splits):
            placement = Placement.split("tp", placement.splits[0].dim)
        data = slice_shard(name, placement, axes)
        borders = [data.numel() * index * index // (dp * dp) for index in range(dp + 1)]
        start, stop = borders[axes.rank("dp")], borders[axes.rank("dp") + 1]
        yield LocalChunk(name, shape, local_boxes(shape, placement, axes, start, stop), data[start:stop])


def check_reads(path, tp, dp):
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    for rank in range(tp * dp):
        for chunk in pieces(tp, dp, rank):
            out = torch.zeros_like(chunk.data)
            checkpoint.read(chunk.name, chunk.boxes, out)
            assert torch.equal(out, chunk.data), (chunk.name, tp, dp, rank)


def save_grid(path, tp, dp):
    with Transaction(path, {"tp": tp}, expected_bytes=10_000) as transaction:
        (transaction.directory / f"rng-{dist.get_rank()}.json").write_text("{}")
        transaction.write(pieces(tp, dp, dist.get_rank()))
    open_checkpoint(path)
    return sorted(path.parent.iterdir())


@pytest.mark.parametrize("tp,dp", [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (3, 1)])
def test_checkpoint_loads_in_any_layout(tmp_path, tp, dp):
    path = tmp_path / "checkpoint-3"
    saved = run_ranks(save_grid, tp * dp, path, tp, dp)
    assert saved == [[path, tmp_path / "latest"]] * (tp * dp)
    assert latest(tmp_path) == path == find(tmp_path, "checkpoint-3")
    checkpoint = Checkpoint(path)
    assert checkpoint.metadata == {"tp": tp}
    assert sorted(checkpoint.names()) == sorted(TENSORS)
    assert sum(name.startswith("rng-") for name in checkpoint.manifest.files) == tp * dp
    for name, (shape, dtype, _) in TENSORS.items():
        assert checkpoint.shape(name) == shape and checkpoint.dtype(name) == dtype
    for other_tp, other_dp in itertools.product((1, 2, 4), (1, 3)):
        check_reads(path, other_tp, other_dp)


def save_checkpoint(path, value=1.0, **arguments):
    with Transaction(path, **arguments) as transaction:
        transaction.write([LocalChunk("x", (4,), (TensorChunk((0,), (4,)),), torch.full((4,), value))])


def test_strided_chunks_with_equal_names(tmp_path):
    with Transaction(tmp_path / "one") as transaction:
        halves = torch.arange(8.0).view(4, 2)
        transaction.write(
            [LocalChunk("x", (8,), (TensorChunk((at,), (4,)),), halves[:, column]) for column, at in ((0, 0), (1, 4))]
        )
        transaction.write([LocalChunk("y", (2,), (TensorChunk((0,), (2,)),), torch.ones(2))], file="more.safetensors")
    out = torch.zeros(8)
    Checkpoint(tmp_path / "one").read("x", [TensorChunk((0,), (8,))], out)
    assert out.tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    assert "more.safetensors" in Checkpoint(tmp_path / "one").manifest.files


def test_existing_target_is_rejected_and_unchanged(tmp_path):
    save_checkpoint(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match="step-1 exists; give a folder that does not"):
        save_checkpoint(tmp_path / "step-1", 2.0)
    Checkpoint(tmp_path / "step-1").verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]


def test_metadata_links_and_file_names_are_checked(tmp_path):
    with pytest.raises(CheckpointError, match="metadata"):
        save_checkpoint(tmp_path / "step-1", metadata={"x": object()})
    with pytest.raises(CheckpointError, match="plain files"), Transaction(tmp_path / "step-1") as transaction:
        (transaction.directory / "link").symlink_to("/etc/passwd")
    for name in (MANIFEST, "back\\slash"):
        with pytest.raises(CheckpointError, match="is not the name"), Transaction(tmp_path / "step-1") as transaction:
            (transaction.directory / name).write_text("{}")
    assert list(tmp_path.iterdir()) == []


def test_free_space_is_checked_first(tmp_path):
    with pytest.raises(CheckpointError, match=r"needed and [\d,]+ are free"):
        Transaction(tmp_path / "step-1", expected_bytes=1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_prune_keeps_newest_and_latest_pointer_target(tmp_path):
    for step in (5, 10, 15, 20):
        save_checkpoint(tmp_path / f"checkpoint-{step}")
    save_checkpoint(tmp_path / "other-1", pointer=None)
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "latest").write_text("checkpoint-5\n")
    assert [path.name for path in prune(tmp_path, 3)] == ["checkpoint-10"]
    # Two checkpoints remain: the newest, and the target of `latest`.
    assert [path.name for path in prune(tmp_path, 2)] == ["checkpoint-15"]
    remaining = ["checkpoint-1", "checkpoint-20", "checkpoint-5", "latest", "other-1"]
    assert sorted(path.name for path in tmp_path.iterdir()) == remaining
    with pytest.raises(CheckpointError, match="keep=0"):
        prune(tmp_path, 0)


def test_checkpoint_removed_during_listing_is_skipped(tmp_path, monkeypatch):
    """Removes the checkpoint before each `stat` call of the listing in turn."""
    save_checkpoint(tmp_path / "run" / "checkpoint-1")
    shutil.copytree(tmp_path / "run", tmp_path / "before")
    looks, stat = [], os.stat

    def remove_before_look(count, path, **arguments):
        if "checkpoint-1" in Path(path).parts:
            looks.append(path)
            if len(looks) == count:
                shutil.rmtree(tmp_path / "run" / "checkpoint-1")
        return stat(path, **arguments)

    for count in range(1, 100):
        looks.clear()
        shutil.rmtree(tmp_path / "run")
        shutil.copytree(tmp_path / "before", tmp_path / "run")
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", lambda path, count=count, **kwargs: remove_before_look(count, path, **kwargs))
            checkpoints = committed(tmp_path / "run")
        if len(looks) < count:
            break
        assert checkpoints == []
    assert checkpoints == [tmp_path / "run" / "checkpoint-1"] and count > 4


def test_latest_without_any_checkpoint(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "nowhere") is None
    assert not is_committed(tmp_path)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        find(tmp_path, "checkpoint-1")
    with pytest.raises(CheckpointError, match="not the name"):
        find(tmp_path, "../elsewhere")


def test_manifest_states_versions_and_layout(tmp_path):
    save_checkpoint(tmp_path / "one", metadata={"config": [1, {"a": None}]})
    content = json.loads((tmp_path / "one" / MANIFEST).read_text())
    assert content["format_version"] == 1 and content["world_size"] == 1
    assert set(content["versions"]) == {"hf_megatron", "safetensors", "torch", "transformers"}
    assert content["tensors"]["x"]["pieces"][0]["boxes"] == [{"offset": [[0]], "shape": [[4]]}]
    from safetensors.torch import load_file

    assert load_file(tmp_path / "one" / "shard-00000-of-00001.safetensors")["x"].tolist() == [1.0] * 4


def save_in_background(parent):
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    saver, data, sums = AsyncSaver(group), torch.zeros(1000), []
    for step in range(1, 4):
        data.fill_(step)
        chunk = LocalChunk("x", (2000,), (TensorChunk((1000 * rank,), (1000,)),), data)
        saver.save([chunk], parent / f"step-{step}", files={f"state-{rank}": b"state"})
        data.fill_(-1)
        # Training collectives run during the save.
        total = torch.ones(1)
        dist.all_reduce(total)
        sums.append(total.item())
    saver.close()
    return sums


def test_background_saves_and_training_collectives_do_not_mix(tmp_path):
    assert run_ranks(save_in_background, 2, tmp_path) == [[2.0] * 3] * 2
    for step in range(1, 4):
        out = torch.empty(2000)
        checkpoint = Checkpoint(tmp_path / f"step-{step}")
        checkpoint.verify()
        checkpoint.read("x", [TensorChunk((0,), (2000,))], out)
        assert torch.equal(out, torch.full((2000,), float(step)))
        assert {"state-0", "state-1"} <= checkpoint.manifest.files.keys()
    assert latest(tmp_path) == tmp_path / "step-3"


def test_resume_picks_newest_stock_or_sharded_checkpoint(tmp_path):
    def make_stock_checkpoint(step, *files):
        (tmp_path / f"checkpoint-{step}").mkdir()
        for name in files:
            (tmp_path / f"checkpoint-{step}" / name).touch()

    def find_resumed(asked=True, *, is_parallelized=False):
        checkpoint = checkpoint_to_resume(asked, str(tmp_path), is_parallelized=is_parallelized)
        return Path(checkpoint).name if isinstance(checkpoint, str) else checkpoint

    assert find_resumed() is True and find_resumed(None) is None
    save_checkpoint(tmp_path / "checkpoint-8")
    make_stock_checkpoint(6, "trainer_state.json", "optimizer.pt")
    assert find_resumed() == find_resumed(is_parallelized=True) == "checkpoint-8"
    # Incomplete checkpoints: one from plain Trainer, one a partial copy of a sharded checkpoint.
    make_stock_checkpoint(10)
    make_stock_checkpoint(11, "trainer_state.json", "shard-00000-of-00002.safetensors")
    with pytest.warns(UserWarning, match="checkpoint-11 is passed over for .*checkpoint-8"):
        assert find_resumed(is_parallelized=True) == "checkpoint-8"
    make_stock_checkpoint(12, "trainer_state.json", "model.safetensors")
    assert find_resumed() == find_resumed(is_parallelized=True) == "checkpoint-12"
    make_stock_checkpoint(14, "trainer_state.json", "model.safetensors", "optimizer.pt")
    assert find_resumed() == "checkpoint-14"
    with pytest.raises(CheckpointError, match="checkpoint-14 was written by plain Trainer.*checkpoint-8'"):
        find_resumed(is_parallelized=True)
    with pytest.raises(CheckpointError, match="checkpoint-6 was written by plain Trainer"):
        find_resumed(str(tmp_path / "checkpoint-6"), is_parallelized=True)
    save_checkpoint(tmp_path / "checkpoint-14.1")
    assert find_resumed() == find_resumed(str(tmp_path / "checkpoint-14"), is_parallelized=True) == "checkpoint-14.1"


def test_named_pipes_do_not_block_readers(tmp_path):
    for name in (LATEST, PARTIAL):
        os.mkfifo(tmp_path / name)
    assert pointed_at(tmp_path) is None
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_partial(tmp_path)
