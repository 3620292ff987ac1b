"""Tests of atomic folder writes: all-or-nothing publication and concurrent writers in one parent folder."""

import os
import signal

import pytest
import torch

from hf_megatron import CheckpointError
from hf_megatron.checkpoint.reader import Checkpoint
from hf_megatron.checkpoint.tensor_chunks import LocalChunk, TensorChunk
from hf_megatron.checkpoint.transaction import Transaction, prune
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.io.atomic_folder import StagedFolder, remove_folder


def make_chunk(value):
    return LocalChunk("weight", (4,), (TensorChunk((0,), (4,)),), torch.full((4,), float(value)))


def list_names(folder):
    return sorted(path.name for path in folder.iterdir())


def kill_writer(target):
    """Runs a writer of `target` that is killed before it can clean up."""
    child = os.fork()
    if not child:
        stage = StagedFolder(target)
        stage.open()
        (stage.path / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_concurrent_saves_do_not_interfere(tmp_path):
    with Transaction(tmp_path / "lr1") as first:
        first.write([make_chunk(1)])
        with Transaction(tmp_path / "lr2") as second:
            second.write([make_chunk(2)])
    for name, value in (("lr1", 1), ("lr2", 2)):
        out = torch.zeros(4)
        Checkpoint(tmp_path / name).read("weight", [TensorChunk((0,), (4,))], out)
        assert out.tolist() == [value] * 4
    assert list_names(tmp_path) == ["latest", "lr1", "lr2"]


def test_concurrent_save_and_conversion_do_not_interfere(tmp_path):
    with Output(tmp_path / "converted") as output:
        output.add("config.json", "{}")
        with Transaction(tmp_path / "checkpoint-1") as save:
            save.write([make_chunk(1)])
            with Output(tmp_path / "other") as other:
                other.add("config.json", "{}")
        output.add("more.json", "{}")
    Checkpoint(tmp_path / "checkpoint-1").verify()
    assert list_names(tmp_path) == ["checkpoint-1", "converted", "latest", "other"]
    assert list_names(tmp_path / "converted") == ["config.json", "more.json"]


@pytest.mark.parametrize("target", ["run", "another"])
def test_interrupted_folder_is_removed_by_next_writer(target, tmp_path):
    kill_writer(tmp_path / "run")
    assert len(list_names(tmp_path)) == 2
    with Output(tmp_path / target) as output:
        output.add("config.json", "{}")
    assert list_names(tmp_path) == [target]


def test_temporary_folder_from_older_version_is_removed(tmp_path):
    (tmp_path / f".tmp-run-{'0' * 32}").mkdir()
    (tmp_path / f".tmp-run-{'0' * 31}").mkdir()
    StagedFolder(tmp_path / "next").open()
    assert f".tmp-run-{'0' * 32}" not in list_names(tmp_path) and f".tmp-run-{'0' * 31}" in list_names(tmp_path)


def test_without_locks_only_the_same_target_is_cleaned(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    kill_writer(tmp_path / "mine")
    kill_writer(tmp_path / "theirs")
    stage = StagedFolder(tmp_path / "mine")
    stage.open()
    assert [name for name in list_names(tmp_path) if "theirs" in name] and len(list_names(tmp_path)) == 4
    stage.publish()
    assert (tmp_path / "mine").is_dir() and len(list_names(tmp_path)) == 3


def test_inaccessible_folder_from_another_user_is_kept(tmp_path, monkeypatch):
    kill_writer(tmp_path / "theirs")
    original_open = os.open

    def refuse(path, flags, *mode):
        if "theirs" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return original_open(path, flags, *mode)

    monkeypatch.setattr("os.open", refuse)
    stage = StagedFolder(tmp_path / "mine")
    stage.open()
    stage.publish()
    assert len(list_names(tmp_path)) == 3 and (tmp_path / "mine").is_dir()


def test_removed_lock_file_is_recreated(tmp_path, monkeypatch):
    """Another writer removes the lock file after its creation and before it is locked."""
    import fcntl

    lock, calls = fcntl.flock, []

    def lock_after_removal(descriptor, flags):
        calls.append(flags)
        if len(calls) == 1:
            next(tmp_path.glob("*.lock")).unlink()
        lock(descriptor, flags)

    monkeypatch.setattr("fcntl.flock", lock_after_removal)
    stage = StagedFolder(tmp_path / "run")
    stage.open()
    assert len(calls) == 2 and len(list(tmp_path.glob("*.lock"))) == 1
    stage.discard()
    assert list_names(tmp_path) == []


def test_existing_target_is_rejected_on_open_and_publish(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="run exists"):
        StagedFolder(tmp_path / "run").open()
    stage = StagedFolder(tmp_path / "later")
    stage.open()
    (tmp_path / "later").mkdir()
    with pytest.raises(CheckpointError, match="later was created by another process"):
        stage.publish()
    stage.discard()
    assert list_names(tmp_path) == ["later", "run"]


def test_removal_leaves_nothing(tmp_path):
    for step in (1, 2, 3):
        with Transaction(tmp_path / f"checkpoint-{step}") as save:
            save.write([make_chunk(step)])
    assert [path.name for path in prune(tmp_path, 2)] == ["checkpoint-1"]
    remove_folder(tmp_path / "checkpoint-2")
    assert list_names(tmp_path) == ["checkpoint-3", "latest"]


def test_checkpoint_may_be_named_latest(tmp_path):
    with Transaction(tmp_path / "latest") as save:
        save.write([make_chunk(1)])
    Checkpoint(tmp_path / "latest").verify()
    with Transaction(tmp_path / "checkpoint-2") as save:
        save.write([make_chunk(2)])
    assert list_names(tmp_path) == ["checkpoint-2", "latest"] and (tmp_path / "latest").is_dir()
