"""Damaged and hostile distributed checkpoints: each is refused with the file and the tensor, and nothing runs."""

import os
import pickle
import shutil
import zipfile

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

from hf_megatron import CheckpointError
from hf_megatron.conversion.dcp.store_reader import StoreReader
from tests.helpers.torch_stores import assert_rejected, save_store, make_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def damaged(tmp_path):
    """Rewrites the metadata of a small store, and says how it is refused."""
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


def test_places_outside_of_the_folder(damaged, tmp_path):
    folder = damaged.folder
    (tmp_path / "outside.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())

    def to(name):
        def edit(metadata):
            for info in metadata.storage_data.values():
                info.relative_path = name

        return edit

    damaged(to("../outside.distcp"), "../outside.distcp", "outside")
    damaged(to(str(tmp_path / "outside.distcp")), "outside")
    damaged(to("inner/../../outside.distcp"), "outside")
    damaged(to("missing.distcp"), "missing.distcp")
    damaged(to("nul\0.distcp"), "outside")
    damaged(to("."), "regular file")
    damaged(to(7), ".metadata")
    (folder / "link.distcp").symlink_to(tmp_path / "outside.distcp")
    damaged(to("link.distcp"), "leads out of the checkpoint")
    (folder / "up").symlink_to(tmp_path)
    damaged(to("up/outside.distcp"), "leads out of the checkpoint")
    (folder / "inside.distcp").symlink_to("__0_0.distcp")
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    to("inside.distcp")(metadata)
    path.write_bytes(pickle.dumps(metadata))
    assert torch.equal(StoreReader(folder).read("w"), make_tensor((4, 6)))


def test_the_cache_of_the_hub_is_made_of_links(tmp_path):
    source = save_store(tmp_path / "store", {"w": make_tensor((4, 6))})
    blobs, snapshot = tmp_path / "models--x--y" / "blobs", tmp_path / "models--x--y" / "snapshots" / "abc" / "dcp"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(source.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../../blobs/{number}")
    assert torch.equal(StoreReader(snapshot).read("w"), make_tensor((4, 6)))


def test_places_beyond_a_file_and_chunks_that_do_not_fit(damaged):
    index = MetadataIndex("w", (0, 0))

    def place(**changes):
        return lambda metadata: metadata.storage_data[index].__dict__.update(changes)

    def tensor(edit):
        return lambda metadata: edit(metadata.state_dict_metadata["w"])

    damaged(place(offset=10**12), "__0_0.distcp", "w is at bytes")
    damaged(place(length=10**12), "__0_0.distcp")
    damaged(place(offset=-5), "__0_0.distcp")
    damaged(place(length=20), "w has a chunk")
    damaged(place(offset=1), "not a torch.save file")
    damaged(place(transform_descriptors=["zstd"]), "w is stored with transforms")
    damaged(lambda metadata: metadata.storage_data.pop(index), ".metadata")
    damaged(lambda metadata: metadata.storage_data.clear(), ".metadata")
    damaged(lambda metadata: metadata.__dict__.pop("state_dict_metadata"), ".metadata")
    damaged(tensor(lambda item: item.chunks.clear()), "w:", "gaps")
    damaged(tensor(lambda item: setattr(item, "size", torch.Size((5, 6)))), "w:", "gaps")
    damaged(tensor(lambda item: setattr(item, "size", torch.Size((10**9, 10**9)))), "w:", "gaps")
    damaged(tensor(lambda item: setattr(item, "size", torch.Size((3, 6)))), "w", "exceeds")
    damaged(tensor(lambda item: setattr(item.properties, "dtype", torch.float16)), " torch.float16.")
    damaged(tensor(lambda item: setattr(item.properties, "dtype", torch.float64)), "w has a chunk")
    twice = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 6)))

    def overlap(metadata):
        metadata.state_dict_metadata["w"].chunks.append(twice)

    damaged(overlap, "w:", "overlap")

    def other_shape(metadata):
        item = metadata.state_dict_metadata["w"]
        item.size = torch.Size((6, 4))
        item.chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((6, 4)))

    damaged(other_shape, "w has a chunk of [4, 6]")

    def huge(metadata):
        item = metadata.state_dict_metadata["w"]
        item.size = torch.Size((10**9, 10**9))
        item.chunks[0] = ChunkStorageMetadata(torch.Size((0, 0)), item.size)

    damaged(huge, "w has a chunk")


def test_bombs_and_cut_files(damaged, tmp_path):
    folder, canary = damaged.folder, tmp_path / "canary"

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    for where in ("planner_data", "storage_meta", "extra"):
        path = folder / ".metadata"
        before = path.read_bytes()
        metadata = pickle.loads(before)
        metadata.__dict__[where] = Bomb()
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
    place = pickle.loads(before).storage_data[MetadataIndex("w", (0, 0))]
    for position in range(place.offset, place.offset + 30):
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
    data.write_bytes(content[: place.offset] + bomb.ljust(place.length, b"\0") + content[place.offset + place.length :])
    assert_rejected(lambda: StoreReader(folder).read("w"), str(data))
    assert not canary.exists()


def test_properties_of_older_files(tmp_path):
    """They keep a table of attributes where newer ones have a tuple."""
    folder = save_store(tmp_path / "s", {"w": make_tensor((4, 6))})
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())

    class Pickler(pickle.Pickler):
        def reducer_override(self, value):
            if isinstance(value, TensorProperties):
                return TensorProperties, (), {"dtype": value.dtype, "requires_grad": False}
            return NotImplemented

    # Without the class's own way of setting its state the file cannot be read by torch, but it is what such files have.
    with open(path, "wb") as file:
        Pickler(file).dump(metadata)
    assert torch.equal(StoreReader(folder).read("w"), make_tensor((4, 6)))


def test_more_tensors_than_any_model_has(tmp_path):
    """Each was looked at, which took half a minute."""
    most = 1000
    folder = tmp_path / "store"
    save_store(folder, {f"t{number}": torch.zeros(()) for number in range(most + 1)})
    assert len(StoreReader(folder).entries) == len(StoreReader(folder, most + 1).entries) == most + 1
    assert_rejected(
        lambda: StoreReader(folder, most), str(folder / ".metadata"), "is rejected", "more than 1000 tensors"
    )
