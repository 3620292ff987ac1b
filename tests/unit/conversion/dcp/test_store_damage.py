"""Tests that damaged and hostile distributed checkpoints are rejected by file and tensor and run no code."""

import os
import pickle
import shutil
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from hf_megatron import CheckpointError
from hf_megatron.conversion.dcp.store_reader import StoreReader
from tests.helpers.torch_stores import assert_rejected, make_tensor, save_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def damaged(tmp_path):
    """Function that edits the metadata of a small store and checks how it is rejected."""
    folder = save_store(tmp_path / "store", {"w": make_tensor((4, 6)), "v": make_tensor((3,))})

    def change(edit, *needles):
        path = folder / ".metadata"
        before = path.read_bytes()
        metadata = pickle.loads(before)
        edit(metadata)
        path.write_bytes(pickle.dumps(metadata))
        assert_rejected(
            lambda: [store.read(name) for store in [StoreReader(folder)] for name in store.entries], *needles
        )
        path.write_bytes(before)

    change.folder = folder
    return change


def test_paths_outside_the_folder_are_rejected(damaged, tmp_path):
    folder = damaged.folder
    (tmp_path / "outside.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())

    def redirect_to(name):
        def edit(metadata):
            for info in metadata.storage_data.values():
                info.relative_path = name

        return edit

    damaged(redirect_to("../outside.distcp"), "../outside.distcp", "outside")
    damaged(redirect_to(str(tmp_path / "outside.distcp")), "outside")
    damaged(redirect_to("inner/../../outside.distcp"), "outside")
    damaged(redirect_to("missing.distcp"), "missing.distcp")
    damaged(redirect_to("nul\0.distcp"), "outside")
    damaged(redirect_to("."), "regular file")
    damaged(redirect_to(7), ".metadata")
    (folder / "link.distcp").symlink_to(tmp_path / "outside.distcp")
    damaged(redirect_to("link.distcp"), "leads out of the checkpoint")
    (folder / "up").symlink_to(tmp_path)
    damaged(redirect_to("up/outside.distcp"), "leads out of the checkpoint")
    (folder / "inside.distcp").symlink_to("__0_0.distcp")
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    redirect_to("inside.distcp")(metadata)
    path.write_bytes(pickle.dumps(metadata))
    assert torch.equal(StoreReader(folder).read("w"), make_tensor((4, 6)))


def test_symlinks_in_hub_cache_are_followed(tmp_path):
    source = save_store(tmp_path / "store", {"w": make_tensor((4, 6))})
    blobs, snapshot = tmp_path / "models--x--y" / "blobs", tmp_path / "models--x--y" / "snapshots" / "abc" / "dcp"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for index, file in enumerate(source.iterdir()):
        shutil.copy(file, blobs / str(index))
        (snapshot / file.name).symlink_to(f"../../../blobs/{index}")
    assert torch.equal(StoreReader(snapshot).read("w"), make_tensor((4, 6)))


def test_bad_offsets_and_chunk_shapes_are_rejected(damaged):
    index = MetadataIndex("w", (0, 0))

    def set_storage(**changes):
        return lambda metadata: metadata.storage_data[index].__dict__.update(changes)

    def edit_tensor(edit):
        return lambda metadata: edit(metadata.state_dict_metadata["w"])

    damaged(set_storage(offset=10**12), "__0_0.distcp", "w is at bytes")
    damaged(set_storage(length=10**12), "__0_0.distcp")
    damaged(set_storage(offset=-5), "__0_0.distcp")
    damaged(set_storage(length=20), "w has a chunk")
    damaged(set_storage(offset=1), "not a torch.save file")
    damaged(set_storage(transform_descriptors=["zstd"]), "w is stored with transforms")
    damaged(lambda metadata: metadata.storage_data.pop(index), ".metadata")
    damaged(lambda metadata: metadata.storage_data.clear(), ".metadata")
    damaged(lambda metadata: metadata.__dict__.pop("state_dict_metadata"), ".metadata")
    damaged(edit_tensor(lambda item: item.chunks.clear()), "w:", "gaps")
    damaged(edit_tensor(lambda item: setattr(item, "size", torch.Size((5, 6)))), "w:", "gaps")
    damaged(edit_tensor(lambda item: setattr(item, "size", torch.Size((10**9, 10**9)))), "w:", "gaps")
    damaged(edit_tensor(lambda item: setattr(item, "size", torch.Size((3, 6)))), "w", "exceeds")
    damaged(edit_tensor(lambda item: setattr(item.properties, "dtype", torch.float16)), " torch.float16.")
    damaged(edit_tensor(lambda item: setattr(item.properties, "dtype", torch.float64)), "w has a chunk")
    duplicate_chunk = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 6)))

    def add_overlap(metadata):
        metadata.state_dict_metadata["w"].chunks.append(duplicate_chunk)

    damaged(add_overlap, "w:", "overlap")

    def transpose_shape(metadata):
        item = metadata.state_dict_metadata["w"]
        item.size = torch.Size((6, 4))
        item.chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((6, 4)))

    damaged(transpose_shape, "w has a chunk of [4, 6]")

    def enlarge_shape(metadata):
        item = metadata.state_dict_metadata["w"]
        item.size = torch.Size((10**9, 10**9))
        item.chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), item.size)

    damaged(enlarge_shape, "w has a chunk")


def test_pickle_bombs_and_damaged_files_are_rejected(damaged, tmp_path):
    folder, canary = damaged.folder, tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    for field in ("planner_data", "storage_meta", "extra"):
        path = folder / ".metadata"
        before = path.read_bytes()
        metadata = pickle.loads(before)
        metadata.__dict__[field] = Bomb()
        path.write_bytes(pickle.dumps(metadata))
        assert_rejected(lambda: StoreReader(folder), str(path), "system")
        path.write_bytes(before)
    for end in (0, 10, len(before) // 2, len(before) - 1):
        path.write_bytes(before[:end])
        assert_rejected(lambda: StoreReader(folder), str(path))
    path.write_bytes(before)
    data = folder / "__0_0.distcp"
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    assert_rejected(lambda: StoreReader(folder), str(data))
    storage_info = pickle.loads(before).storage_data[MetadataIndex("w", (0, 0))]
    for position in range(storage_info.offset, storage_info.offset + 30):
        changed = bytearray(content)
        changed[position] ^= 0x10
        data.write_bytes(changed)
        try:
            assert torch.equal(StoreReader(folder).read("w"), make_tensor((4, 6)))
        except CheckpointError as error:
            assert str(data) in str(error)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(), 2))
    bomb = (tmp_path / "z.zip").read_bytes()
    data.write_bytes(
        content[: storage_info.offset]
        + bomb.ljust(storage_info.length, b"\0")
        + content[storage_info.offset + storage_info.length :]
    )
    assert_rejected(lambda: StoreReader(folder).read("w"), str(data))
    assert not canary.exists()


def test_tensor_properties_from_older_torch(tmp_path):
    """Older files pickle the attributes as a dict, newer ones as a tuple."""
    folder = save_store(tmp_path / "s", {"w": make_tensor((4, 6))})
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if isinstance(value, TensorProperties):
                return TensorProperties, (), {"dtype": value.dtype, "requires_grad": False}
            return NotImplemented

    # torch cannot read this file without the class's `__setstate__`, but older files have this form.
    with open(path, "wb") as file:
        Pickler(file).dump(metadata)
    assert torch.equal(StoreReader(folder).read("w"), make_tensor((4, 6)))


def test_too_many_tensors_are_rejected(tmp_path):
    """The number of tensors is checked before each is examined, which would take half a minute."""
    limit = 1000
    folder = tmp_path / "store"
    save_store(folder, {f"t{index}": torch.zeros(()) for index in range(limit + 1)})
    assert len(StoreReader(folder).entries) == len(StoreReader(folder, limit + 1).entries) == limit + 1
    assert_rejected(
        lambda: StoreReader(folder, limit), str(folder / ".metadata"), "is rejected", "more than 1000 tensors"
    )
