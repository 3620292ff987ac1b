"""Distributed checkpoints of torch without torch's loaders: all ways they are written, and ways they are damaged."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hf_megatron.conversion import data_file
from hf_megatron.conversion.blob_writer import write_object, write_tensor
from hf_megatron.conversion.blobs import Blob, StoredTensor, read_saved
from hf_megatron.conversion.chunks import check_cover
from hf_megatron.conversion.data_file import DataFile
from hf_megatron.conversion.output import HashedFile, Output
from hf_megatron.conversion.torch_store import StoreReader
from hf_megatron.conversion.torch_store_writer import StoreWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_megatron import CheckpointError
from hf_megatron.checkpoint.pieces import Box
from hf_megatron.verify.ranks import run_ranks

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def some(shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 10).to(dtype)


def save(folder: Path, state: dict, **options) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


# --- blobs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blobs_are_those_of_torch_save(tmp_path, dtype):
    tensors = [some(shape, dtype) for shape in ((), (0,), (5,), (3, 4), (2, 3, 4, 5), (0, 7))]
    tensors += [some((4, 6), dtype).t(), some((8, 4), dtype)[2:5, 1:3]]
    file = HashedFile(tmp_path / "blobs")
    file.write(b"before")
    places = [write_tensor(file, tensor) for tensor in tensors] + [write_object(file, [None])]
    file.close()
    data = (tmp_path / "blobs").read_bytes()
    with DataFile(tmp_path / "blobs") as opened:
        assert Blob(opened, *places.pop()).value == [None]
        for tensor, (offset, length) in zip(tensors, places, strict=True):
            own = data[offset : offset + length]
            loaded = torch.load(io.BytesIO(own), weights_only=True)
            assert loaded.dtype == dtype
            assert torch.equal(loaded, tensor)
            # The checksums are right too.
            assert zipfile.ZipFile(io.BytesIO(own)).testzip() is None
            blob = Blob(opened, offset, length)
            assert torch.equal(blob.read(blob.tensor()), tensor)


def test_boxes_of_any_view(tmp_path):
    whole = some((6, 8, 10))
    views = [whole, whole.transpose(0, 2), whole[1:5, ::2, 3:], whole.permute(1, 2, 0), whole[:1].expand(6, 8, 10)]
    for view in views:
        with open(tmp_path / "view", "wb") as file:
            torch.save(view, file)
        starts = [1 if length > 3 else 0 for length in view.shape]
        lengths = [length - 2 if length > 3 else length for length in view.shape]
        box = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
        with DataFile(tmp_path / "view") as file:
            blob = Blob(file)
            out = torch.empty(lengths)
            blob.read_into(blob.tensor(), starts, out)
            assert torch.equal(out, view[box])
            # Into a part of something larger.
            frame = torch.zeros([length + 1 for length in lengths])
            target = frame[tuple(slice(1, None) for _ in lengths)]
            blob.read_into(blob.tensor(), starts, target)
            assert torch.equal(target, view[box])


def test_what_megatron_saves_beside_tensors(tmp_path):
    from argparse import Namespace

    torch.save({"args": Namespace(a=1, dtype=torch.bfloat16), "t": torch.arange(3), "n": [1.5]}, tmp_path / "common.pt")
    found = read_saved(tmp_path / "common.pt")
    assert found["args"].state == {"a": 1, "dtype": torch.bfloat16}
    assert isinstance(found["t"], StoredTensor)


def test_float8_is_read(tmp_path):
    tensor = some((4, 4)).to(torch.float8_e4m3fn)
    torch.save(tensor, tmp_path / "t")
    with DataFile(tmp_path / "t") as file:
        blob = Blob(file)
        assert torch.equal(blob.read(blob.tensor()).view(torch.uint8), tensor.view(torch.uint8))


def rezip(source: Path, target: Path, compression: int = zipfile.ZIP_STORED, **replaced: bytes) -> None:
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for info in old.infolist():
            content = replaced.get(Path(info.filename).name.replace(".", "_"), old.read(info))
            new.writestr(info.filename, content)


def refused(read, *needles: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read()
    for needle in needles:
        assert needle in str(caught.value), caught.value


def read_blob(path: Path) -> torch.Tensor:
    with DataFile(path) as file:
        blob = Blob(file)
        return blob.read(blob.tensor())


def test_hostile_blobs(tmp_path):
    good, bad, canary = tmp_path / "good", tmp_path / "bad", tmp_path / "canary"
    torch.save(some((4, 4)), good)

    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {canary}",)

    rezip(good, bad, data_pkl=pickle.dumps(Bomb(), 2))
    refused(lambda: read_blob(bad), str(bad), "system")
    rezip(good, bad, zipfile.ZIP_DEFLATED)
    refused(lambda: read_blob(bad), str(bad), "compressed")
    rezip(good, bad, byteorder=b"big")
    refused(lambda: read_blob(bad), "byte order")
    with zipfile.ZipFile(good) as archive:
        pickled = archive.read("good/data.pkl") if "good/data.pkl" in archive.namelist() else None
        pickled = pickled or archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))
    sixteen, four = b"K\x10", b"K\x04K\x04\x86"
    assert pickled.count(sixteen) == 1
    # A storage, a shape and strides that claim more than there is.
    rezip(good, bad, data_pkl=pickled.replace(sixteen, b"J\xff\xff\xff\x7f"))
    refused(lambda: read_blob(bad), str(bad), "64 bytes")
    for shape in (
        b"K\x04K\x05\x86",
        b"J\xff\xff\xff\x7fJ\xff\xff\xff\x7f\x86",
        b"J\xff\xff\xff\xffK\x04\x86",
        b"NK\x04\x86",
    ):
        rezip(good, bad, data_pkl=pickled.replace(four, shape, 1))
        refused(lambda: read_blob(bad), str(bad), "damaged")
    rezip(good, bad, data_pkl=pickled.replace(b"K\x04K\x01\x86", b"K\x00K\x00\x86"))
    assert read_blob(bad).shape == (4, 4)
    # A shape of which every entry is the same one is not worth the memory it claims.
    huge = pickled.replace(four, b"J\x00\x00\x00\x40J\x00\x00\x00\x40\x86", 1).replace(
        b"K\x04K\x01\x86", b"K\x00K\x00\x86"
    )
    rezip(good, bad, data_pkl=huge)
    refused(lambda: read_blob(bad), "repeat")
    data = good.read_bytes()
    for end in range(0, len(data), 7):
        bad.write_bytes(data[:end])
        refused(lambda: read_blob(bad), str(bad))
    # The directory leads elsewhere: a wrong size, a wrong place.
    start = data.index(b"PK\1\2")
    for field in (24, 42):
        for value in (1, 1000, 0x7FFFFFFF):
            changed = bytearray(data)
            entry = next(
                place
                for place in range(start, len(data))
                if data[place : place + 4] == b"PK\1\2" and b"/data/0" in data[place : place + 64]
            )
            struct.pack_into("<I", changed, entry + field, value)
            bad.write_bytes(changed)
            refused(lambda: read_blob(bad), str(bad))
    bad.unlink()
    os.mkfifo(bad)
    refused(lambda: read_blob(bad), "not a regular file")
    assert not canary.exists()


# --- chunks ---------------------------------------------------------------------------------------------------------


def test_covers():
    def boxes(*pairs):
        return [Box(tuple(offset), tuple(shape)) for offset, shape in pairs]

    check_cover("t", (4, 4), boxes(((0, 0), (4, 4))))
    check_cover("t", (), boxes(((), ())))
    check_cover("t", (0, 3), [])
    check_cover(
        "t", (3, 3), boxes(((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1)))
    )
    grid = [Box((row, column), (1, 1)) for row in range(200) for column in range(150)]
    check_cover("t", (200, 150), grid)
    refused(lambda: check_cover("t", (200, 150), grid[1:]), "t:", "gaps")
    refused(lambda: check_cover("t", (200, 150), [*grid, grid[7]]), "t:", "overlap")
    refused(lambda: check_cover("t", (200, 150), [*grid[1:], grid[7]]), "overlap")
    refused(lambda: check_cover("t", (4,), boxes(((0,), (3,)), ((2,), (1,)))), "overlap")
    refused(lambda: check_cover("t", (4,), boxes(((1,), (4,)))), "leaves")
    refused(lambda: check_cover("t", (4,), boxes(((-1,), (5,)))), "leaves")
    # Many that all overlap are not compared pair by pair.
    refused(lambda: check_cover("t", (40_000, 2), [Box((at, 0), (20_000, 1)) for at in range(4)]), "overlap")
    many = [Box((at,), (10_000,)) for at in range(10_000)]
    refused(lambda: check_cover("t", (100_000_000,), many), "overlap")


# --- stores ---------------------------------------------------------------------------------------------------------

STATE = {
    "a.weight": some((6, 8), seed=1),
    "deep": {"b": some((3,), torch.bfloat16), "step": torch.tensor(3.0)},
    "lr": 1e-3,
}


def test_plain_stores(tmp_path):
    store = StoreReader(save(tmp_path / "s", STATE, thread_count=2))
    assert {name: (entry.shape, entry.dtype) for name, entry in store.entries.items()} == {
        "a.weight": ((6, 8), torch.float32),
        "deep.b": ((3,), torch.bfloat16),
        "deep.step": ((), torch.float32),
    }
    assert torch.equal(store.read("a.weight"), STATE["a.weight"])
    assert torch.equal(store.read_box("a.weight", (2, 3), (3, 4)), STATE["a.weight"][2:5, 3:7])
    assert store.read_box("a.weight", (2, 3), (0, 4)).shape == (0, 4)
    assert (store.read("deep.step").item(), store.objects, store.read_object("lr")) == (3.0, {"lr"}, 1e-3)
    assert store.paths["deep.b"] == ("deep", "b")
    refused(lambda: store.read_box("a.weight", (2, 3), (5, 4)), "a.weight", "leaves")


def _save_sharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    state = {
        "rows": distribute_tensor(some((10, 6)), mesh, [Shard(0)]),
        "columns": distribute_tensor(some((6, 10)), mesh, [Shard(1)]),
        "few": distribute_tensor(some((2, 3)), mesh, [Shard(0)]),
    }
    dcp.save(state, checkpoint_id=folder)
    square = init_device_mesh("cpu", (2, 2))
    dcp.save({"both": distribute_tensor(some((7, 9)), square, [Shard(0), Shard(1)])}, checkpoint_id=folder + "2")


def test_stores_of_several_ranks(tmp_path):
    run_ranks(_save_sharded, 4, str(tmp_path / "s"))
    store, other = StoreReader(tmp_path / "s"), StoreReader(tmp_path / "s2")
    for name, shape in (("rows", (10, 6)), ("columns", (6, 10)), ("few", (2, 3))):
        whole = some(shape)
        assert torch.equal(store.read(name), whole)
        for row in range(shape[0]):
            box = store.read_box(name, (row, 1), (shape[0] - row, shape[1] - 2))
            assert torch.equal(box, whole[row:, 1:-1])
    assert torch.equal(other.read("both"), some((7, 9)))
    assert torch.equal(other.read_box("both", (2, 3), (4, 4)), some((7, 9))[2:6, 3:7])


def test_one_layer_of_a_stacked_tensor_is_read_alone(tmp_path, monkeypatch):
    stacked = some((16, 64, 96))
    store = StoreReader(save(tmp_path / "s", {"layers": stacked}))
    counts: list[int] = []
    read_at = data_file.read_at

    def counting(descriptor, buffer, offset, path):
        counts.append(len(buffer))
        read_at(descriptor, buffer, offset, path)

    monkeypatch.setattr(data_file, "read_at", counting)
    layer = store.read_box("layers", (5, 0, 0), (1, 64, 96))[0]
    assert torch.equal(layer, stacked[5])
    # The layer, and the few records of the blob around it.
    assert layer.nbytes <= sum(counts) < layer.nbytes + 6000
    counts.clear()
    part = store.read_box("layers", (5, 10, 0), (1, 20, 96))[0]
    assert torch.equal(part, stacked[5, 10:30])
    assert sum(counts) < part.nbytes + 6000
    # Columns come with what lies between them, within one row of the layer.
    counts.clear()
    columns = store.read_box("layers", (5, 0, 7), (1, 64, 3))[0]
    assert torch.equal(columns, stacked[5, :, 7:10])
    assert sum(counts) < layer.nbytes + 6000


def test_written_stores(tmp_path):
    weight, vector = some((3, 8, 6)), some((5,), torch.bfloat16)
    with Output(tmp_path / "s") as output:
        store = StoreWriter(output, "inner/", file_size=1000)
        for layer in (2, 0, 1):
            store.write_chunk("layers.weight", (3, 8, 6), (layer, 0, 0), weight[layer])
        store.write_chunk("v", (5,), (0,), vector)
        store.write_chunk("s", (), (), torch.tensor(2.0))
        store.write_object("object/shard_0_1", [None])
        store.write_object("nested.lr", 0.5)
        store.finish({"nested.lr": ("nested", "lr")})
    folder = tmp_path / "s" / "inner"
    assert len(list(folder.glob("__0_*.distcp"))) > 2
    assert str(tmp_path).encode() not in (folder / ".metadata").read_bytes()
    state = {"layers.weight": torch.empty(3, 8, 6), "v": torch.empty(5, dtype=torch.bfloat16), "s": torch.empty(())}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["layers.weight"], weight)
    assert torch.equal(state["v"], vector)
    own = StoreReader(folder)
    assert torch.equal(own.read_box("layers.weight", (1, 2, 0), (2, 3, 6)), weight[1:, 2:5])
    assert (own.read_object("object/shard_0_1"), own.read_object("nested.lr")) == ([None], 0.5)
    nested = {"nested": {"lr": 0.0}}
    dcp.load(nested, checkpoint_id=folder, no_dist=True)
    assert nested["nested"]["lr"] == 0.5
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    nested = torch.load(tmp_path / "whole.pt")
    assert nested["nested"]["lr"] == 0.5
    assert torch.equal(nested["layers.weight"], weight)


def test_a_store_is_not_finished_with_gaps(tmp_path):
    def write(*chunks):
        with Output(tmp_path / "s") as output:
            store = StoreWriter(output)
            for offset in chunks:
                store.write_chunk("w", (3, 2), (offset, 0), torch.zeros(1, 2))
            store.finish()

    refused(lambda: write(0, 1), "w:", "gaps")
    refused(lambda: write(0, 1, 1, 2), "w at [1, 0] came twice")
    assert not list(tmp_path.iterdir())


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path):
    """Rewrites the metadata of a small store, and says how it is refused."""
    folder = save(tmp_path / "store", {"w": some((4, 6)), "v": some((3,))})

    def change(edit, *needles):
        path = folder / ".metadata"
        before = path.read_bytes()
        metadata = pickle.loads(before)
        edit(metadata)
        path.write_bytes(pickle.dumps(metadata))
        refused(lambda: [store.read(name) for store in [StoreReader(folder)] for name in store.entries], *needles)
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

    damaged(to("../outside.distcp"), ".metadata", "../outside.distcp", "outside")
    damaged(to(str(tmp_path / "outside.distcp")), "outside")
    damaged(to("inner/../../outside.distcp"), "outside")
    damaged(to("missing.distcp"), "missing.distcp")
    damaged(to("nul\0.distcp"), "outside")
    damaged(to("."), "regular file")
    damaged(to(7), ".metadata")
    (folder / "link.distcp").symlink_to(tmp_path / "outside.distcp")
    damaged(to("link.distcp"), "leads out of the folder")
    (folder / "up").symlink_to(tmp_path)
    damaged(to("up/outside.distcp"), "leads out of the folder")
    (folder / "inside.distcp").symlink_to("__0_0.distcp")
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    to("inside.distcp")(metadata)
    path.write_bytes(pickle.dumps(metadata))
    assert torch.equal(StoreReader(folder).read("w"), some((4, 6)))


def test_the_cache_of_the_hub_is_made_of_links(tmp_path):
    source = save(tmp_path / "store", {"w": some((4, 6))})
    blobs, snapshot = tmp_path / "models--x--y" / "blobs", tmp_path / "models--x--y" / "snapshots" / "abc" / "dcp"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(source.iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../../blobs/{number}")
    assert torch.equal(StoreReader(snapshot).read("w"), some((4, 6)))


def test_places_beyond_a_file_and_chunks_that_do_not_fit(damaged):
    index = MetadataIndex("w", (0, 0))

    def place(**changes):
        return lambda metadata: metadata.storage_data[index].__dict__.update(changes)

    def tensor(edit):
        return lambda metadata: edit(metadata.state_dict_metadata["w"])

    damaged(place(offset=10**12), "__0_0.distcp", "w should lie")
    damaged(place(length=10**12), "__0_0.distcp")
    damaged(place(offset=-5), "__0_0.distcp")
    damaged(place(length=20), "w has a chunk")
    damaged(place(offset=1), "no file of torch.save")
    damaged(place(transform_descriptors=["zstd"]), "w is stored in a transformed way")
    damaged(lambda metadata: metadata.storage_data.pop(index), ".metadata")
    damaged(lambda metadata: metadata.storage_data.clear(), ".metadata")
    damaged(lambda metadata: metadata.__dict__.pop("state_dict_metadata"), ".metadata")
    damaged(tensor(lambda item: item.chunks.clear()), "w:", "gaps")
    damaged(tensor(lambda item: setattr(item, "size", torch.Size((5, 6)))), "w:", "gaps")
    damaged(tensor(lambda item: setattr(item, "size", torch.Size((10**9, 10**9)))), "w:", "gaps")
    damaged(tensor(lambda item: setattr(item, "size", torch.Size((3, 6)))), "w", "leaves")
    damaged(tensor(lambda item: setattr(item.properties, "dtype", torch.float16)), "float16 should be")
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

    def planted(where):
        return lambda metadata: metadata.__dict__.update({where: pickle.loads(pickle.dumps("x"))})

    damaged(planted("storage_data"), ".metadata")
    for where in ("planner_data", "storage_meta", "extra"):
        path = folder / ".metadata"
        before = path.read_bytes()
        metadata = pickle.loads(before)
        metadata.__dict__[where] = Bomb()
        path.write_bytes(pickle.dumps(metadata))
        refused(lambda: StoreReader(folder), str(path), "system")
        path.write_bytes(before)
    for end in (0, 10, len(before) // 2, len(before) - 1):
        path.write_bytes(before[:end])
        refused(lambda: StoreReader(folder), str(path))
    path.write_bytes(before)
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    refused(lambda: StoreReader(folder), str(data))
    place = pickle.loads(before).storage_data[MetadataIndex("w", (0, 0))]
    for position in range(place.offset, place.offset + 30):
        changed = bytearray(whole)
        changed[position] ^= 0x10
        data.write_bytes(changed)
        try:
            assert torch.equal(StoreReader(folder).read("w"), some((4, 6)))
        except CheckpointError as error:
            assert str(data) in str(error)
    with zipfile.ZipFile(tmp_path / "z.zip", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(), 2))
    bomb = (tmp_path / "z.zip").read_bytes()
    data.write_bytes(whole[: place.offset] + bomb.ljust(place.length, b"\0") + whole[place.offset + place.length :])
    refused(lambda: StoreReader(folder).read("w"), str(data))
    assert not canary.exists()


def test_properties_are_read_in_both_forms(tmp_path):
    """Older files keep a table of attributes where newer ones have a tuple."""
    folder = save(tmp_path / "s", {"w": some((4, 6))}, single_file_per_rank=False)
    assert isinstance(TensorProperties().__getstate__(), tuple)
    assert StoreReader(folder).entries["w"].dtype == torch.float32
    json.dumps(sorted(os.listdir(folder)))
    dcp.save({"w": some((4, 6))}, checkpoint_id=tmp_path / "flat", planner=DefaultSavePlanner(False), no_dist=True)
    assert torch.equal(StoreReader(tmp_path / "flat").read("w"), some((4, 6)))
