"""Folders that are complete or absent, and writers beside one another in one folder."""

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


def piece(value):
    return LocalChunk("weight", (4,), (TensorChunk((0,), (4,)),), torch.full((4,), float(value)))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed_in_the_middle(target):
    """A writer of the target that was killed before it could clean up."""
    child = os.fork()
    if not child:
        stage = StagedFolder(target)
        stage.open()
        (stage.path / "half").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)


def test_a_save_leaves_a_running_save_alone(tmp_path):
    with Transaction(tmp_path / "lr1") as first:
        first.write([piece(1)])
        with Transaction(tmp_path / "lr2") as second:
            second.write([piece(2)])
    for name, value in (("lr1", 1), ("lr2", 2)):
        out = torch.zeros(4)
        Checkpoint(tmp_path / name).read("weight", [TensorChunk((0,), (4,))], out)
        assert out.tolist() == [value] * 4
    assert names(tmp_path) == ["latest", "lr1", "lr2"]


def test_a_save_and_a_conversion_leave_each_other_alone(tmp_path):
    with Output(tmp_path / "converted") as output:
        output.add("config.json", "{}")
        with Transaction(tmp_path / "checkpoint-1") as save:
            save.write([piece(1)])
            with Output(tmp_path / "other") as other:
                other.add("config.json", "{}")
        output.add("more.json", "{}")
    Checkpoint(tmp_path / "checkpoint-1").verify()
    assert names(tmp_path) == ["checkpoint-1", "converted", "latest", "other"]
    assert names(tmp_path / "converted") == ["config.json", "more.json"]


@pytest.mark.parametrize("target", ["run", "another"])
def test_what_was_interrupted_is_removed_by_the_next(target, tmp_path):
    killed_in_the_middle(tmp_path / "run")
    assert len(names(tmp_path)) == 2
    with Output(tmp_path / target) as output:
        output.add("config.json", "{}")
    assert names(tmp_path) == [target]


def test_a_folder_of_an_older_version_is_removed(tmp_path):
    (tmp_path / f".tmp-run-{'0' * 32}").mkdir()
    (tmp_path / f".tmp-run-{'0' * 31}").mkdir()
    StagedFolder(tmp_path / "next").open()
    assert f".tmp-run-{'0' * 32}" not in names(tmp_path) and f".tmp-run-{'0' * 31}" in names(tmp_path)


def test_where_there_are_no_locks_only_the_own_target_is_swept(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", refuse)
    killed_in_the_middle(tmp_path / "mine")
    killed_in_the_middle(tmp_path / "theirs")
    stage = StagedFolder(tmp_path / "mine")
    stage.open()
    assert [name for name in names(tmp_path) if "theirs" in name] and len(names(tmp_path)) == 4
    stage.publish()
    assert (tmp_path / "mine").is_dir() and len(names(tmp_path)) == 3


def test_what_another_user_left_is_theirs(tmp_path, monkeypatch):
    killed_in_the_middle(tmp_path / "theirs")
    opening = os.open

    def refuse(path, flags, *mode):
        if "theirs" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return opening(path, flags, *mode)

    monkeypatch.setattr("os.open", refuse)
    stage = StagedFolder(tmp_path / "mine")
    stage.open()
    stage.publish()
    assert len(names(tmp_path)) == 3 and (tmp_path / "mine").is_dir()


def test_a_lock_that_another_took_for_a_leftovers_is_made_anew(tmp_path, monkeypatch):
    """Between the making and the locking of the file, another writer removes it."""
    import fcntl

    lock, calls = fcntl.flock, []

    def once_removed(descriptor, flags):
        calls.append(flags)
        if len(calls) == 1:
            next(tmp_path.glob("*.lock")).unlink()
        lock(descriptor, flags)

    monkeypatch.setattr("fcntl.flock", once_removed)
    stage = StagedFolder(tmp_path / "run")
    stage.open()
    assert len(calls) == 2 and len(list(tmp_path.glob("*.lock"))) == 1
    stage.discard()
    assert names(tmp_path) == []


def test_a_target_that_exists_or_comes_to_exist(tmp_path):
    (tmp_path / "run").mkdir()
    with pytest.raises(CheckpointError, match="run exists"):
        StagedFolder(tmp_path / "run").open()
    stage = StagedFolder(tmp_path / "later")
    stage.open()
    (tmp_path / "later").mkdir()
    with pytest.raises(CheckpointError, match="later was created by another process"):
        stage.publish()
    stage.discard()
    assert names(tmp_path) == ["later", "run"]


def test_removal_leaves_nothing(tmp_path):
    for step in (1, 2, 3):
        with Transaction(tmp_path / f"checkpoint-{step}") as save:
            save.write([piece(step)])
    assert [path.name for path in prune(tmp_path, 2)] == ["checkpoint-1"]
    remove_folder(tmp_path / "checkpoint-2")
    assert names(tmp_path) == ["checkpoint-3", "latest"]


def test_a_checkpoint_may_have_the_name_of_the_pointer(tmp_path):
    with Transaction(tmp_path / "latest") as save:
        save.write([piece(1)])
    Checkpoint(tmp_path / "latest").verify()
    with Transaction(tmp_path / "checkpoint-2") as save:
        save.write([piece(2)])
    assert names(tmp_path) == ["checkpoint-2", "latest"] and (tmp_path / "latest").is_dir()
