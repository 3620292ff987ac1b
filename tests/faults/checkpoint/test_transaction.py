"""Tests of sharded checkpoints under kills, full disks, corruption and malicious files.

The numbers refer to the list of faults that the checkpoint design was checked against.
"""

import contextlib
import ctypes
import errno
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from blake3 import blake3

from hf_megatron.checkpoint.async_save import AsyncSaver
from hf_megatron.checkpoint.discovery import find, is_committed, latest
from hf_megatron.checkpoint.manifest import MANIFEST
from hf_megatron.checkpoint.reader import Checkpoint, open_checkpoint
from hf_megatron.checkpoint.tensor_chunks import LocalChunk, TensorChunk
from hf_megatron.checkpoint.transaction import Transaction
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import CheckpointError, RankError

ENTRIES = 3000
SHARDS = ["shard-00000-of-00002.safetensors", "shard-00001-of-00002.safetensors"]
# I/O steps of a save, in order; rank 0 continues after the last step of the other ranks.
WRITER_STEPS = ["probe", "open", "header", "tensor exponential", "tensor weight", "fsync", "commit"]
FIRST_RANK_STEPS = ["leftovers", "directory", *WRITER_STEPS, "further files", "manifest", "manifest durable"]
FIRST_RANK_STEPS += ["rename", "rename durable", "pointer written", "pointer", "pointer durable"]


# A hang fails the test instead of blocking the run.
pytestmark = pytest.mark.timeout(300)


def make_values(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(2 * ENTRIES, generator=generator)


def pieces(step, rank, ranks=2):
    width = 2 * ENTRIES // ranks
    data, box = make_values(step)[rank * width : (rank + 1) * width], (TensorChunk((rank * width,), (width,)),)
    return [
        LocalChunk("weight", (2 * ENTRIES,), box, data),
        LocalChunk("exponential", (2 * ENTRIES,), box, data.double().exp()),
    ]


def save(parent, step, on_step=None):
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with Transaction(parent / f"step-{step}", {"step": step}, on_step=on_step) as transaction:
        transaction.write(pieces(step, rank, ranks))


def load(path):
    """Returns the step of a checkpoint after comparing its content with the saved values."""
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    step = checkpoint.metadata["step"]
    expected = {"weight": make_values(step), "exponential": make_values(step).double().exp()}
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        out = torch.empty_like(tensor)
        checkpoint.read(name, [TensorChunk((0,), (2 * ENTRIES,))], out)
        assert torch.equal(out, tensor)
    return step


def leftovers(parent):
    return [path.name for path in parent.iterdir() if path.name.startswith(".tmp-")]


def list_leftover_folders(parent):
    """Lists leftover folders without their lock files, which show the next save whether a writer is still alive."""
    return [name for name in leftovers(parent) if not name.endswith(".lock")]


def save_and_die(parent, step, victim, point):
    def die(name):
        if name == point and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)

    save(parent, step, on_step=die)


def run_killed_save(parent, step, victim, point):
    with pytest.raises(RankError, match=f"rank {victim} died without a result") as caught:
        run_ranks(save_and_die, 2, parent, step, victim, point)
    assert "stuck" not in str(caught.value)


@pytest.fixture
def parent(tmp_path):
    """A directory with the complete checkpoint `step-1` of two ranks."""
    run_ranks(save, 2, tmp_path, 1)
    assert load(latest(tmp_path)) == 1
    return tmp_path


def check_kill_before_commit(parent, victim, point):
    run_killed_save(parent, 2, victim, point)
    # Discovery removes nothing; if rank 0 was killed, the next save removes its leftovers.
    left = leftovers(parent)
    assert len(list_leftover_folders(parent)) == (1 if victim == 0 else 0)
    assert latest(parent).name == "step-1" and load(latest(parent)) == 1
    assert leftovers(parent) == left
    save(parent, 2)
    assert leftovers(parent) == [] and load(latest(parent)) == 2


def test_fault_01_kill_mid_shard(parent):
    check_kill_before_commit(parent, victim=1, point="tensor exponential")


def test_fault_02_kill_between_shards_and_manifest(parent):
    check_kill_before_commit(parent, victim=0, point="further files")


def test_fault_03_kill_between_manifest_and_rename(parent):
    check_kill_before_commit(parent, victim=0, point="manifest durable")


def test_fault_03_kill_between_rename_and_latest(parent):
    run_killed_save(parent, 2, 0, "rename")
    assert list_leftover_folders(parent) == []
    assert load(latest(parent)) == 1 and load(find(parent, "step-2")) == 2
    (parent / "latest").unlink()
    with pytest.warns(UserWarning, match="falling back to step-2"):
        assert load(latest(parent)) == 2


def test_fault_04_sigkill_at_every_point(parent):
    expected = 1
    points = [(0, point) for point in FIRST_RANK_STEPS] + [(1, point) for point in WRITER_STEPS]
    for step, (victim, point) in enumerate(points, start=2):
        run_killed_save(parent, step, victim, point)
        if point in ("pointer", "pointer durable"):
            expected = step
        assert latest(parent).name == f"step-{expected}" and load(latest(parent)) == expected, (victim, point)
        for path in parent.glob("step-*"):
            load(path)
    save(parent, 100)
    assert leftovers(parent) == [] and load(latest(parent)) == 100


def test_fault_04_error_at_every_point(parent):
    steps = []
    save(parent, 2, on_step=steps.append)
    assert steps == FIRST_RANK_STEPS
    for number, point in enumerate(FIRST_RANK_STEPS, start=3):

        def fail(name, point=point):
            if name == point:
                raise OSError(errno.EIO, "injected")

        before = latest(parent)
        with pytest.raises(CheckpointError, match=f"Saving .*step-{number} failed on rank 0: .*injected"):
            save(parent, number, on_step=fail)
        assert leftovers(parent) == []
        after = latest(parent)
        assert after == before or (after.name == f"step-{number}" and point.startswith("pointer"))
        load(after)


def test_fault_04_exit_inside_with_block(parent):
    def leave():
        with Transaction(parent / "step-2") as transaction:
            transaction.write(pieces(2, 0, 1))
            sys.exit(3)

    with pytest.raises(CheckpointError, match="SystemExit: 3"):
        leave()
    assert leftovers(parent) == [] and load(latest(parent)) == 1


def save_twice(parent):
    with pytest.raises(CheckpointError, match="step-1 exists"):
        save(parent, 1)
    return True


def test_fault_05_saving_existing_step_raises(parent):
    before = {path.name: path.read_bytes() for path in (parent / "step-1").iterdir()}
    assert run_ranks(save_twice, 2, parent) == [True, True]
    assert {path.name: path.read_bytes() for path in (parent / "step-1").iterdir()} == before
    assert leftovers(parent) == [] and load(latest(parent)) == 1


def save_on_full_disk(parent, limit):
    """Saves with an optional file size limit on rank 1; returns the error and the result of a later all-reduce."""
    if limit and dist.get_rank() == 1:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    message = None
    try:
        save(parent, 2)
    except CheckpointError as error:
        message = str(error)
    total = torch.ones(1)
    dist.all_reduce(total)
    if limit and dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        save(parent, 3)
    elif limit:
        save(parent, 3)
    return message, total.item()


def test_fault_06_file_size_limit_on_one_rank(parent):
    """The kernel rejects writes beyond the limit on rank 1 (`RLIMIT_FSIZE`)."""
    (first, total), second = run_ranks(save_on_full_disk, 2, parent, 20_000)
    assert second == (first, 2.0) and total == 2.0
    assert first.startswith(f"Saving {parent}/step-2 failed on rank 1: ")
    assert SHARDS[1] in first and f"Errno {errno.EFBIG}" in first
    assert not (parent / "step-2").exists() and leftovers(parent) == []
    assert load(find(parent, "step-1")) == 1 and load(latest(parent)) == 3


def run_in_private_mounts(function, *args):
    """Runs a function in a fork with private mounts; returns its result, or `None` if mounting is not permitted."""
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        status = 1
        try:
            allowed = ctypes.CDLL(None, use_errno=True).unshare(0x00020000) == 0
            allowed = allowed and subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True).returncode == 0
            os.write(sender, json.dumps(function(*args) if allowed else None).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(sender)
    with os.fdopen(receiver) as file:
        text = file.read()
    assert os.waitpid(process, 0)[1] == 0
    return json.loads(text)


def mount_tmpfs(options, directory):
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(directory)]
    return subprocess.run(command, capture_output=True).returncode == 0


def fill_small_disk(parent):
    if not mount_tmpfs("size=128k", parent):
        return None
    run_ranks(save, 2, parent, 1)
    messages = [message for message, _ in run_ranks(save_on_full_disk, 2, parent, 0)]
    return messages, load(latest(parent)), leftovers(parent)


def test_fault_06_disk_full(tmp_path):
    """Uses a 128 KiB file system if mounting is permitted, and `/dev/full` in any case."""
    result = run_in_private_mounts(fill_small_disk, tmp_path)
    if result is not None:
        (first, second), step, left = result
        assert first == second and step == 1 and left == []
        assert f"Errno {errno.ENOSPC}" in first and f"{tmp_path}/.tmp-step-2" in first and "failed on rank " in first

    def write_to_full_device(name):
        if name == "header":
            Path("/dev/full").write_text("x")

    with pytest.raises(CheckpointError, match=f"failed on rank 0: writing .*{errno.ENOSPC}"):
        save(tmp_path, 4, on_step=write_to_full_device)
    assert list(tmp_path.iterdir()) == []


def save_without_permission(parent):
    """Opens a transaction without write permission on rank 1, which drops its root privileges meanwhile."""
    root = os.geteuid() == 0
    if root and dist.get_rank() == 1:
        os.seteuid(65534)
    try:
        Transaction(parent / "step-1")
    except CheckpointError as error:
        return str(error)
    finally:
        if root:
            os.seteuid(0)


def test_fault_07_permission_denied(tmp_path):
    tmp_path.chmod(0o555)
    first, second = run_ranks(save_without_permission, 2, tmp_path)
    assert first == second and "Permission denied" in first and str(tmp_path) in first
    assert f"failed on rank {1 if os.geteuid() == 0 else 0}" in first
    tmp_path.chmod(0o755)
    assert list(tmp_path.iterdir()) == []


def save_read_only(parent):
    if not mount_tmpfs("ro", parent):
        return None
    try:
        Transaction(parent / "step-1")
    except CheckpointError as error:
        return str(error)


def test_fault_07_directory_cannot_be_created(tmp_path):
    message = run_in_private_mounts(save_read_only, tmp_path)
    assert message is None or ("Read-only file system" in message and str(tmp_path) in message)
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match=f"{tmp_path}/file"):
        Transaction(tmp_path / "file" / "step-1")


def get_open_error(path):
    try:
        open_checkpoint(path)
    except CheckpointError as error:
        return str(error)


def get_open_error_on_ranks(path):
    first, second = run_ranks(get_open_error, 2, path)
    assert first == second
    return first


@pytest.mark.parametrize("file", SHARDS)
def test_fault_08_bit_flip(parent, file):
    path = parent / "step-1" / file
    content = bytearray(path.read_bytes())
    content[-1000] ^= 4
    path.write_bytes(content)
    message = get_open_error_on_ranks(parent / "step-1")
    assert "checksum" in message and file in message


def test_fault_09_truncated_shard(parent):
    path = parent / "step-1" / SHARDS[1]
    size = path.stat().st_size
    os.truncate(path, size - 10)
    assert f"{SHARDS[1]} has {size - 10} bytes instead of {size}" in get_open_error_on_ranks(parent / "step-1")


def test_fault_10_missing_shards(parent):
    for file in SHARDS:
        (parent / "step-1" / file).unlink()
    message = get_open_error_on_ranks(parent / "step-1")
    assert f"2 files are missing: {SHARDS[0]}, {SHARDS[1]}" in message


GARBAGE = [b"", b"\0" * 100, b"{", b"[]", b"null", b"{}", b'{"format_version": 2}', b"[" * 100_000, b"\xff\xfe"]


@pytest.mark.parametrize("garbage", GARBAGE, ids=range(len(GARBAGE)))
def test_fault_11_garbage_manifest(parent, garbage):
    save(parent, 2)
    (parent / "step-2" / MANIFEST).write_bytes(garbage)
    assert not is_committed(parent / "step-2")
    with pytest.warns(UserWarning, match="'step-2', which is not a complete checkpoint; falling back to step-1"):
        assert load(latest(parent)) == 1
    with pytest.raises(CheckpointError, match="step-2/manifest.json"):
        find(parent, "step-2")


@pytest.mark.parametrize("garbage", [b"", b"../step-1", b"/etc", b"\xff", b"step-7", b".", b"a\nb"], ids=str)
def test_fault_11_garbage_latest(parent, garbage):
    save(parent, 2)
    (parent / "latest").write_bytes(garbage)
    with pytest.warns(UserWarning, match="falling back to step-2"):
        assert load(latest(parent)) == 2
    with pytest.raises(CheckpointError, match="step-7 is not a complete checkpoint"):
        find(parent, "step-7")


def test_fault_12_extra_and_missing_names(parent):
    checkpoint = Checkpoint(parent / "step-1")
    with pytest.raises(CheckpointError, match=r"missing tensors: \['bias'\]; unexpected tensors: \['exponential'\]"):
        checkpoint.compare(["weight", "bias"])
    assert checkpoint.compare(["weight", "bias"], strict=False) == (["bias"], ["exponential"])
    assert checkpoint.compare(["weight", "exponential"]) == ([], [])
    with pytest.raises(CheckpointError, match="no tensor 'bias'"):
        checkpoint.read("bias", [], torch.empty(0))


def test_fault_12_missing_entries(tmp_path):
    with Transaction(tmp_path / "step-1") as transaction:
        for number in range(2):
            transaction.write(
                [LocalChunk("x", (9,), (TensorChunk((0,), (5,)),), torch.ones(5))], file=f"{number}.safetensors"
            )
    out = torch.zeros(9)
    with pytest.raises(CheckpointError, match="x: 4 of 9 entries are missing"):
        Checkpoint(tmp_path / "step-1").read("x", [TensorChunk((0,), (9,))], out)
    assert out.sum() == 0


def test_fault_13_shape_and_dtype_mismatch(parent):
    checkpoint, size = Checkpoint(parent / "step-1"), 2 * ENTRIES
    with pytest.raises(CheckpointError, match=r"weight is \[6000\], expected \[5999\]"):
        checkpoint.compare({"weight": (5999,), "exponential": (6000,)})
    for boxes in ([TensorChunk((1,), (size,))], [TensorChunk((0, 0), (size, 1))], [TensorChunk((-1,), (size,))]):
        with pytest.raises(CheckpointError, match="weight: the chunk"):
            checkpoint.read("weight", boxes, torch.empty(size))
    out = torch.zeros(size, dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match="weight is torch.float32 and torch.bfloat16 was asked for; pass cast"):
        checkpoint.read("weight", [TensorChunk((0,), (size,))], out)
    assert out.sum() == 0
    checkpoint.read("weight", [TensorChunk((0,), (size,))], out, cast=True)
    assert torch.equal(out, make_values(1).bfloat16())


def test_fault_13_ranks_disagree_on_dtype(tmp_path):
    with (
        pytest.raises(CheckpointError, match="x is .*float32 on one rank and .*float64"),
        Transaction(tmp_path / "step-1") as transaction,
    ):
        transaction.write([LocalChunk("x", (1,), (TensorChunk((0,), (1,)),), torch.ones(1))], file="a.safetensors")
        transaction.write(
            [LocalChunk("x", (1,), (TensorChunk((0,), (1,)),), torch.ones(1).double())], file="b.safetensors"
        )
    assert list(tmp_path.iterdir()) == []


def edit_manifest(path, edit):
    content = json.loads((path / MANIFEST).read_text())
    edit(content)
    (path / MANIFEST).write_text(json.dumps(content))


def rename_file(content, old, new):
    content["files"][new] = content["files"].pop(old)
    for tensor in content["tensors"].values():
        for chunk in tensor["pieces"]:
            chunk["file"] = new if chunk["file"] == old else chunk["file"]


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{outside}", "a/../../outside.safetensors", "a//b", "", "."]
)
def test_fault_24_file_names_outside_checkpoint(parent, name):
    outside = parent / "outside.safetensors"
    (parent / "step-1" / SHARDS[0]).rename(outside)
    edit_manifest(
        parent / "step-1", lambda content: rename_file(content, SHARDS[0], name.format(outside=outside.absolute()))
    )
    with pytest.raises(CheckpointError, match="is not the name of a file inside the checkpoint"):
        Checkpoint(parent / "step-1")


@pytest.mark.parametrize("file", [*SHARDS, MANIFEST])
def test_fault_24_symlink_outside_checkpoint(parent, file):
    inside, outside = parent / "step-1" / file, parent / "outside"
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(CheckpointError, match=f"{file} leads out of the checkpoint"):
        Checkpoint(parent / "step-1")


def replace_shard(path, content):
    """Replaces the content of a shard and updates its size and checksum in the manifest."""
    (path / SHARDS[0]).write_bytes(content)
    entry = {"size": len(content), "blake3": blake3(content).hexdigest()}
    edit_manifest(path, lambda manifest: manifest["files"].update({SHARDS[0]: entry}))


def make_shard(entry):
    text = json.dumps({"weight": entry}).encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 30_000


BAD_SHARDS = {
    "empty": b"\0" * 40_000,
    "short": b"abc",
    "giant header": (1 << 60).to_bytes(8, "little") + b"{" * 40_000,
    "header beyond the file": (40_001).to_bytes(8, "little") + b"{" * 40_000,
    "deep header": (40_000).to_bytes(8, "little") + b"[" * 40_000,
    "offsets beyond the file": make_shard({"dtype": "F32", "shape": [3000], "data_offsets": [90_000, 102_000]}),
    "negative offset": make_shard({"dtype": "F32", "shape": [3000], "data_offsets": [-12_000, 0]}),
    "more entries than bytes": make_shard({"dtype": "F32", "shape": [1 << 62, 4], "data_offsets": [0, 12_000]}),
    "another dtype": make_shard({"dtype": "F16", "shape": [6000], "data_offsets": [0, 12_000]}),
    "unknown dtype": make_shard({"dtype": "X", "shape": [3000], "data_offsets": [0, 12_000]}),
    "no entry": make_shard(None),
    "fraction": make_shard({"dtype": "F32", "shape": [3000.0], "data_offsets": [0, 12_000]}),
}


@pytest.mark.parametrize("content", BAD_SHARDS.values(), ids=BAD_SHARDS)
def test_fault_24_malicious_shard(parent, content):
    replace_shard(parent / "step-1", content)
    with pytest.raises(CheckpointError, match=r"shard-00000|no tensor"):
        checkpoint = Checkpoint(parent / "step-1")
        checkpoint.verify()
        checkpoint.read("weight", [TensorChunk((0,), (2 * ENTRIES,))], torch.empty(2 * ENTRIES))


def make_malicious_edits(tensor):
    chunk = tensor["pieces"][0]
    run = chunk["boxes"][0]
    return {
        "endless boxes": lambda: chunk.update(boxes=[run | {"repeat": 1 << 60, "step": [0]}]),
        "endless nothing": lambda: chunk.update(boxes=[{"offset": [], "shape": [], "repeat": 1 << 60, "step": [0]}]),
        "half a million empty boxes": lambda: chunk.update(
            boxes=[{"offset": [[0]], "shape": [[0]], "repeat": 1 << 19, "step": [0]}]
        ),
        "an empty box beside": lambda: chunk.update(boxes=[run, {"offset": [[0]], "shape": [[0]]}]),
        "more boxes than bytes": lambda: chunk.update(
            boxes=[{"offset": [[0]], "shape": [[1]], "repeat": 1 << 19, "step": [0]}]
        ),
        "box outside": lambda: run.update(offset=[[5000]]),
        "negative box": lambda: run.update(offset=[[-1]]),
        "huge": lambda: (tensor.update(shape=[1 << 61]), run.update(shape=[[1 << 61]])),
        "file that is not listed": lambda: chunk.update(file="other"),
        "key that is not there": lambda: chunk.update(key="other"),
        "wrong type": lambda: chunk.update(boxes="boxes"),
        "wrong dtype": lambda: tensor.update(dtype="float16"),
        "unknown dtype": lambda: tensor.update(dtype="object"),
        "true as a size": lambda: run.update(shape=[[True]]),
    }


@pytest.mark.parametrize("name", list(make_malicious_edits({"pieces": [{"boxes": [{}]}]})))
def test_fault_24_malicious_manifest(parent, name):
    edit_manifest(parent / "step-1", lambda content: make_malicious_edits(content["tensors"]["weight"])[name]())
    with pytest.raises(CheckpointError):
        checkpoint = Checkpoint(parent / "step-1")
        checkpoint.read("weight", [TensorChunk((0,), (2 * ENTRIES,))], torch.empty(2 * ENTRIES))


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (os.mkdir, (str(self.marker),))


def record_opened_files(path):
    """Returns the names of all files opened while a checkpoint is loaded."""
    opened = []
    sys.addaudithook(lambda event, arguments: opened.append(str(arguments[0])) if event == "open" else None)
    load(path)
    return opened


def test_fault_24_pickles_are_never_opened(tmp_path):
    with Transaction(tmp_path / "step-1", {"step": 1}) as transaction:
        transaction.write(pieces(1, 0, 1))
        for name in (".metadata", "pytorch_model.bin", "optimizer.pt"):
            (transaction.directory / name).write_bytes(pickle.dumps(Bomb(tmp_path / "marker")))
    ((opened),) = run_ranks(record_opened_files, 1, tmp_path / "step-1")
    assert not (tmp_path / "marker").exists()
    inside = [name for name in opened if str(tmp_path) in name]
    assert {Path(name).name for name in inside} >= {MANIFEST, "shard-00000-of-00001.safetensors"}
    assert {Path(name).parent for name in inside} == {tmp_path / "step-1"}
    # Checksums cover the bytes of the pickles: a corrupted one is detected, never unpickled.
    (tmp_path / "step-1" / ".metadata").write_bytes(b"x" * (tmp_path / "step-1" / ".metadata").stat().st_size)
    with pytest.raises(CheckpointError, match="checksums of .metadata"):
        Checkpoint(tmp_path / "step-1").verify()


def test_fault_25_mutation_after_return(tmp_path):
    saver, tensors = AsyncSaver(), pieces(1, 0, 1)
    for step in (1, 2):
        for chunk, fresh in zip(tensors, pieces(step, 0, 1), strict=True):
            chunk.data.copy_(fresh.data)
        mutated = threading.Event()

        def on_step(name, mutated=mutated):
            assert mutated.wait(60)

        saver.save(tensors, tmp_path / f"step-{step}", {"step": step}, on_step=on_step)
        assert saver.busy
        for chunk in tensors:
            chunk.data.fill_(float("nan"))
        mutated.set()
    saver.close()
    assert load(tmp_path / "step-1") == 1 and load(latest(tmp_path)) == 2


def test_fault_25_saves_are_serialized(parent):
    events, saver = [], AsyncSaver()

    def observe(step):
        def on_step(name):
            events.append((step, name))
            time.sleep(0.01)
            durable = name in ("pointer", "pointer durable")
            assert (parent / "latest").read_text() == f"step-{step if durable else step - 1}\n"

        return on_step

    for step in (2, 3):
        saver.save(pieces(step, 0, 1), parent / f"step-{step}", {"step": step}, on_step=observe(step))
    saver.wait()
    assert events == [(step, name) for step in (2, 3) for name in FIRST_RANK_STEPS]
    assert load(latest(parent)) == 3
    saver.close()


def save_in_background(parent, point):
    def on_step(name):
        if name == point:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    saver = AsyncSaver()
    saver.save(pieces(2, 0, 1), parent / "step-2", {"step": 2}, on_step=on_step)
    saver.wait()


@pytest.mark.parametrize("point", FIRST_RANK_STEPS)
def test_fault_25_sigterm_during_save(parent, point):
    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(save_in_background, 1, parent, point)
    assert load(latest(parent)) == (2 if point in ("pointer", "pointer durable") else 1)
    for path in parent.glob("step-*"):
        load(path)
    save(parent, 3)
    assert leftovers(parent) == [] and load(latest(parent)) == 3


def fail_in_background(parent):
    def on_step(name):
        if name == "header" and dist.get_rank() == 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    saver = AsyncSaver(dist.new_group(backend="gloo"))
    saver.save(pieces(2, dist.get_rank()), parent / "step-2", {"step": 2}, on_step=on_step)
    message = None
    with contextlib.suppress(CheckpointError):
        try:
            saver.wait()
        except CheckpointError as error:
            message = str(error)
            raise
    saver.save(pieces(3, dist.get_rank()), parent / "step-3", {"step": 3})
    saver.close()
    return message


def test_fault_25_background_error_on_every_rank(parent):
    first, second = run_ranks(fail_in_background, 2, parent)
    assert first == second and "failed on rank 1: writing" in first and "No space left" in first
    assert not (parent / "step-2").exists() and load(latest(parent)) == 3


def test_no_warning_without_fault(parent):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load(latest(parent)) == 1
