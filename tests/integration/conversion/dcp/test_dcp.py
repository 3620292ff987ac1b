"""Tests of torch distributed checkpoints (DCP) under model names, as torch, Accelerate and transformers write them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_megatron import CheckpointError
from hf_megatron.conversion.dcp.reader import DcpReader
from hf_megatron.conversion.dcp.writer import DcpWriter
from hf_megatron.conversion.interfaces import EXP_AVG, EXP_AVG_SQ, MAIN_WEIGHT, WEIGHT, Key, OptimizerState
from hf_megatron.conversion.output_folder import Output
from hf_megatron.conversion.shards.format import ShardsWriter
from hf_megatron.conversion.shards.reader import ShardFolder
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.io.safetensors import TensorMeta
from tests.helpers.tiny_models import build_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def make_adamw(model, groups: int = 2, lr: float = 1e-3) -> torch.optim.AdamW:
    if groups == 1:
        return torch.optim.AdamW(model.parameters(), lr=lr)
    kinds = [[p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False)]
    return torch.optim.AdamW([{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}], lr)


def _train_and_save(folder: str) -> None:
    """Saves every format that several ranks write, and the tensors that each should contain."""
    from transformers.distributed.checkpoint import _save_model_checkpoint_distributed, save_optimizer_distributed

    path = Path(folder)
    model = build_tiny_model("qwen2")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_adamw(model)
    ids = torch.arange(24)[None]
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dcp.save(model.state_dict(), checkpoint_id=path / "plain")
    # accelerate/utils/fsdp_utils.py: save_fsdp_model and save_fsdp_optimizer.
    weights, state = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": weights}, checkpoint_id=path / "accelerate" / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": state}, checkpoint_id=path / "accelerate" / "optimizer_0")
    everything = {"model": weights, "optimizer": state, "epoch": 3, "rng": torch.zeros(5, dtype=torch.uint8)}
    dcp.save(everything, checkpoint_id=path / "together")
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({"model": weights, "optimizer": flat}, checkpoint_id=path / "flat")
    save_optimizer_distributed(model, optimizer, path / "optimizer")
    _save_model_checkpoint_distributed(model, path / "shards")
    expected = {(WEIGHT, name): value.full_tensor() for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for kind in (EXP_AVG, EXP_AVG_SQ):
            expected[kind, name] = optimizer.state[parameter][kind].full_tensor()
    if dist.get_rank() == 0:
        torch.save(expected, path / "expected.pt")


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[Key, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("dcp")
    run_ranks(_train_and_save, 2, str(folder))
    return folder, {Key(*key): tensor for key, tensor in torch.load(folder / "expected.pt").items()}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(
    "form", ["plain", "accelerate", "accelerate/pytorch_model_fsdp_0", "together", "flat", "shards"]
)
def test_every_format_is_read(saved, form, named):
    folder, expected = saved
    with_moments = form in ("accelerate", "together", "flat")
    names = [key.name for key in expected if key.kind == WEIGHT]
    if form == "together" and not named:
        # Without the model's names, `rng` counts as a weight.
        names.append("rng")
    with DcpReader(folder / form, names if named else None) as reader:
        expected_keys = [key for key in expected if with_moments or key.kind == WEIGHT]
        assert {*expected_keys, *(Key(WEIGHT, name) for name in names)} == set(reader.entries)
        for key in expected_keys:
            assert torch.equal(reader.read(key), expected[key]), key
        assert reader.optimizer_unsupported_reason is None
        if not with_moments:
            assert reader.optimizer is None
            return
        assert reader.optimizer is not None
        assert (reader.optimizer.step, reader.iteration) == (2, 2)
        assert [group["weight_decay"] for group in reader.optimizer.hyperparameters] in ([0.1, 0.0], [0.0, 0.1])


def test_mismatched_names_are_rejected(saved):
    folder, expected = saved
    names = [key.name for key in expected if key.kind == WEIGHT]
    with pytest.raises(CheckpointError, match=r"k_proj\.weight, which the model does not have"):
        DcpReader(folder / "together", [name for name in names if "k_proj" not in name])
    with pytest.raises(CheckpointError, match=r"missing.*other\.weight"):
        DcpReader(folder / "plain", [*names, "other.weight"])
    with pytest.raises(CheckpointError, match="neither"):
        DcpReader(folder, names)


def test_tied_weights(tmp_path):
    model = build_tiny_model("llama")
    state = dict(model.state_dict())
    state["head"] = state["model.embed_tokens.weight"]

    def resolve_tied_name(name):
        return "model.embed_tokens.weight" if name == "head" else name

    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    names = list(model.state_dict())
    reader = DcpReader(tmp_path / "a", names, resolve_tied_name)
    assert {key.name for key in reader.entries} == set(names)
    assert torch.equal(reader.read(Key(WEIGHT, "model.embed_tokens.weight")), state["head"])
    state["head"] = state["head"] + 1
    dcp.save(state, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(CheckpointError, match="differ"):
        DcpReader(tmp_path / "b", names, resolve_tied_name).read(Key(WEIGHT, "model.embed_tokens.weight"))
    del state["model.embed_tokens.weight"]
    dcp.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    reader = DcpReader(tmp_path / "c", names, resolve_tied_name)
    assert torch.equal(reader.read(Key(WEIGHT, "model.embed_tokens.weight")), state["head"])


def test_unsupported_optimizers_are_reported(tmp_path):
    model = build_tiny_model("llama")
    names = list(model.state_dict())

    def get_unsupported_reason(name, optimizer, edit=None):
        model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        if edit:
            edit(state["optimizer"]["state"])
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        reader = DcpReader(tmp_path / name, names)
        assert {key.kind for key in reader.entries} == {WEIGHT}
        return str(reader.optimizer_unsupported_reason)

    assert "momentum_buffer" in get_unsupported_reason("sgd", torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert "max_exp_avg_sq" in get_unsupported_reason("amsgrad", torch.optim.AdamW(model.parameters(), amsgrad=True))
    norm = "model.norm.weight"
    assert "step counts" in get_unsupported_reason(
        "steps", make_adamw(model), lambda state: state[norm]["step"].add_(1)
    )
    assert norm in get_unsupported_reason("half", make_adamw(model), lambda state: state[norm].pop("exp_avg"))


def write(folder: Path, tensors: dict[Key, torch.Tensor], optimizer: OptimizerState | None) -> None:
    with Output(folder) as output:
        writer = DcpWriter(output, {key: TensorMeta.of(tensor) for key, tensor in tensors.items()}, optimizer)
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        writer.finish()


def _load(folder: str) -> None:
    from transformers.distributed.checkpoint import load_optimizer_distributed

    expected = {Key(*key): tensor for key, tensor in torch.load(Path(folder) / "expected.pt").items()}
    model = build_tiny_model("qwen2")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{folder}/written")

    def check(optimizer, decays):
        for name, parameter in model.named_parameters():
            moments = optimizer.state[parameter]
            assert torch.equal(parameter.full_tensor(), expected[Key(WEIGHT, name)])
            assert torch.equal(moments["exp_avg"].full_tensor(), expected[Key(EXP_AVG, name)])
            assert torch.equal(moments["exp_avg_sq"].full_tensor(), expected[Key(EXP_AVG_SQ, name)])
            assert moments["step"] == 2
        assert [group["weight_decay"] for group in optimizer.param_groups] == decays
        assert {group["lr"] for group in optimizer.param_groups} == {1e-3}

    optimizer = make_adamw(model, lr=0.5)
    load_optimizer_distributed(model, optimizer, f"{folder}/written")
    check(optimizer, [0.1, 0.0])
    # The steps of Accelerate's load_fsdp_optimizer.
    optimizer = make_adamw(model, lr=0.5)
    nested = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(nested, checkpoint_id=f"{folder}/written")
    set_optimizer_state_dict(model, optimizer, nested["optimizer"])
    check(optimizer, [0.1, 0.0])


def test_ranks_load_written_checkpoint(saved):
    folder, expected = saved
    with DcpReader(folder / "accelerate", [key.name for key in expected if key.kind == WEIGHT]) as reader:
        write(folder / "written", {key: reader.read(key) for key in reader.entries}, reader.optimizer)
    again = DcpReader(folder / "written")
    assert set(again.entries) == set(expected)
    run_ranks(_load, 2, str(folder))


def test_unsupported_tensors_are_rejected(tmp_path):
    weight, moment = torch.zeros(3), torch.zeros(3)
    state = OptimizerState(1)
    with pytest.raises(CheckpointError, match="main_weight"):
        write(tmp_path / "a", {Key(WEIGHT, "w"): weight, Key(MAIN_WEIGHT, "w"): moment}, state)
    with pytest.raises(CheckpointError, match="step"):
        write(tmp_path / "b", {Key(WEIGHT, "w"): weight, Key(EXP_AVG, "w"): moment}, None)
    with pytest.raises(CheckpointError, match="weights only"), Output(tmp_path / "c") as output:
        ShardsWriter(output, {Key(EXP_AVG, "w"): TensorMeta.of(moment)})
    assert not list(tmp_path.iterdir())


def test_from_pretrained_reads_written_shards(tmp_path):
    model = build_tiny_model("qwen3_moe")
    tensors = {Key(WEIGHT, name): tensor for name, tensor in model.state_dict().items()}
    with Output(tmp_path / "out") as output:
        writer = ShardsWriter(output, {key: TensorMeta.of(tensor) for key, tensor in tensors.items()})
        for key, tensor in tensors.items():
            writer.write(key, tensor)
        writer.finish()
    model.config.save_pretrained(tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out")
    folder = ShardFolder(tmp_path / "out")
    for key, tensor in tensors.items():
        assert torch.equal(loaded.state_dict()[key.name], tensor)
        assert torch.equal(folder.read(key.name), tensor)


def test_damaged_shards_are_rejected(saved, tmp_path):
    import shutil

    folder, _ = saved
    shutil.copytree(folder / "shards", tmp_path / "shards")
    (second,) = (tmp_path / "shards").glob("shard-00002-*.safetensors")
    data = second.read_bytes()
    for changed in (data[:40], data.replace(b"saved_offsets", b"taved_offsets"), data.replace(b"[32", b"[31")):
        assert changed != data
        second.write_bytes(changed)
        with pytest.raises(CheckpointError, match="shard"):
            DcpReader(tmp_path / "shards")
    second.unlink()
    # A missing file shows only when compared with the model's names, not in the remaining files.
    assert DcpReader(tmp_path / "shards").entries != DcpReader(folder / "shards").entries
