"""Tests of reading and writing torch distributed checkpoints without torch's loaders."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hf_megatron.checkpoint.tensor_chunks import TensorChunk
from hf_megatron.conversion.chunks import check_cover
from hf_megatron.conversion.dcp.store_reader import StoreReader
from hf_megatron.conversion.dcp.store_writer import StoreWriter
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.io.random_access_file import DataFile
from tests.helpers.torch_stores import assert_rejected, make_tensor, save_store

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_check_cover():
    def make_boxes(*pairs):
        return [TensorChunk(tuple(offset), tuple(shape)) for offset, shape in pairs]

    check_cover("t", (4, 4), make_boxes(((0, 0), (4, 4))))
    check_cover("t", (), make_boxes(((), ())))
    check_cover("t", (0, 3), [])
    check_cover(
        "t",
        (3, 3),
        make_boxes(((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))),
    )
    grid = [TensorChunk((row, column), (1, 1)) for row in range(200) for column in range(150)]
    check_cover("t", (200, 150), grid)
    assert_rejected(lambda: check_cover("t", (200, 150), grid[1:]), "t:", "gaps")
    assert_rejected(lambda: check_cover("t", (200, 150), [*grid, grid[7]]), "t:", "overlap")
    assert_rejected(lambda: check_cover("t", (200, 150), [*grid[1:], grid[7]]), "overlap")
    assert_rejected(lambda: check_cover("t", (4,), make_boxes(((0,), (3,)), ((2,), (1,)))), "overlap")
    assert_rejected(lambda: check_cover("t", (4,), make_boxes(((1,), (4,)))), "exceeds")
    assert_rejected(lambda: check_cover("t", (4,), make_boxes(((-1,), (5,)))), "exceeds")
    # Many mutually overlapping chunks are not compared pairwise, which would take quadratic time.
    assert_rejected(
        lambda: check_cover("t", (40_000, 2), [TensorChunk((at, 0), (20_000, 1)) for at in range(4)]), "overlap"
    )
    many = [TensorChunk((at,), (10_000,)) for at in range(10_000)]
    assert_rejected(lambda: check_cover("t", (100_000_000,), many), "overlap")


STATE = {
    "a.weight": make_tensor((6, 8), seed=1),
    "deep": {"b": make_tensor((3,), torch.bfloat16), "step": torch.tensor(3.0)},
    "lr": 1e-3,
}


def test_read_unsharded_store(tmp_path):
    store = StoreReader(save_store(tmp_path / "s", STATE, thread_count=2))
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
    assert_rejected(lambda: store.read_box("a.weight", (2, 3), (5, 4)), "a.weight", "exceeds")


def _save_sharded(folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    state = {
        "rows": distribute_tensor(make_tensor((10, 6)), mesh, [Shard(0)]),
        "columns": distribute_tensor(make_tensor((6, 10)), mesh, [Shard(1)]),
        "few": distribute_tensor(make_tensor((2, 3)), mesh, [Shard(0)]),
    }
    dcp.save(state, checkpoint_id=folder)
    square = init_device_mesh("cpu", (2, 2))
    dcp.save({"both": distribute_tensor(make_tensor((7, 9)), square, [Shard(0), Shard(1)])}, checkpoint_id=folder + "2")


def test_read_sharded_store(tmp_path):
    run_ranks(_save_sharded, 4, str(tmp_path / "s"))
    store, other = StoreReader(tmp_path / "s"), StoreReader(tmp_path / "s2")
    for name, shape in (("rows", (10, 6)), ("columns", (6, 10)), ("few", (2, 3))):
        unsharded = make_tensor(shape)
        assert torch.equal(store.read(name), unsharded)
        for row in range(shape[0]):
            box = store.read_box(name, (row, 1), (shape[0] - row, shape[1] - 2))
            assert torch.equal(box, unsharded[row:, 1:-1])
    assert torch.equal(other.read("both"), make_tensor((7, 9)))
    assert torch.equal(other.read_box("both", (2, 3), (4, 4)), make_tensor((7, 9))[2:6, 3:7])


def test_reading_one_stacked_layer_skips_the_others(tmp_path, monkeypatch):
    stacked = make_tensor((16, 64, 96))
    store = StoreReader(save_store(tmp_path / "s", {"layers": stacked}))
    counts: list[int] = []
    read_into = DataFile.read_into

    def count_reads(self, buffer, offset):
        counts.append(len(buffer))
        read_into(self, buffer, offset)

    monkeypatch.setattr(DataFile, "read_into", count_reads)
    layer = store.read_box("layers", (5, 0, 0), (1, 64, 96))[0]
    assert torch.equal(layer, stacked[5])
    # Only the layer and the few records of its blob are read.
    assert layer.nbytes <= sum(counts) < layer.nbytes + 6000
    counts.clear()
    block = store.read_box("layers", (5, 10, 0), (1, 20, 96))[0]
    assert torch.equal(block, stacked[5, 10:30])
    assert sum(counts) < block.nbytes + 6000
    # Columns are read together with the bytes between them, but not beyond the layer.
    counts.clear()
    columns = store.read_box("layers", (5, 0, 7), (1, 64, 3))[0]
    assert torch.equal(columns, stacked[5, :, 7:10])
    assert sum(counts) < layer.nbytes + 6000


def test_written_store_loads_in_torch(tmp_path):
    weight, vector = make_tensor((3, 8, 6)), make_tensor((5,), torch.bfloat16)
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
    reader = StoreReader(folder)
    assert torch.equal(reader.read_box("layers.weight", (1, 2, 0), (2, 3, 6)), weight[1:, 2:5])
    assert (reader.read_object("object/shard_0_1"), reader.read_object("nested.lr")) == ([None], 0.5)
    nested = {"nested": {"lr": 0.0}}
    dcp.load(nested, checkpoint_id=folder, no_dist=True)
    assert nested["nested"]["lr"] == 0.5
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(folder, tmp_path / "whole.pt")
    nested = torch.load(tmp_path / "whole.pt")
    assert nested["nested"]["lr"] == 0.5
    assert torch.equal(nested["layers.weight"], weight)


def test_store_with_gaps_is_rejected(tmp_path):
    def write(*chunks):
        with Output(tmp_path / "s") as output:
            store = StoreWriter(output)
            for offset in chunks:
                store.write_chunk("w", (3, 2), (offset, 0), torch.zeros(1, 2))
            store.finish()

    assert_rejected(lambda: write(0, 1), "w:", "gaps")
    assert_rejected(lambda: write(0, 1, 1, 2), "w at offset [1, 0] was written twice")
    assert not list(tmp_path.iterdir())
