"""Tests of `hf-megatron convert` and `compare`: every family through every format, and rejected inputs."""

import json
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from typer.testing import CliRunner

from hf_megatron import CheckpointError, ConfigError, RankError, UnsupportedError
from hf_megatron.cli import app
from hf_megatron.conversion import TargetOptions, compare, convert, plan_conversion
from hf_megatron.conversion.families import check_config
from hf_megatron.conversion.formats import FORMATS
from hf_megatron.conversion.interfaces import WEIGHT, Key
from hf_megatron.conversion.output_folder import Output
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.tiny_models import FAMILIES, build_tiny_model

OTHERS = [name for name in FORMATS if name != "hf"]


def split(to: str, **sizes: int) -> TargetOptions:
    """Returns options for two tensor-parallel ranks, if the format supports them."""
    return TargetOptions(tp_size=2, **sizes) if to.startswith("megatron") else TargetOptions()


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors


def assert_equal(first: Path, second: Path) -> None:
    """Asserts equal names, dtypes and bytes of all tensors."""
    one, other = load_tensors(first), load_tensors(second)
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype, name
        assert torch.equal(one[name].view(torch.uint8), other[name].view(torch.uint8)), name


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "hf"
    build_tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.mark.parametrize("case", FAMILIES)
def test_every_format_round_trips_bit_equal(case, tmp_path):
    source = tmp_path / "hf"
    model = build_tiny_model(case, torch.bfloat16)
    model.save_pretrained(source, max_shard_size="100KB")
    for to in OTHERS:
        # Encoder and decoder must be on one pipeline stage.
        even = model.config.num_hidden_layers == 2 and not model.config.is_encoder_decoder
        pipeline = 2 if to == "megatron_legacy" and even else 1
        convert(source, tmp_path / to, to, options=split(to, pp_size=pipeline))
        convert(tmp_path / to, tmp_path / f"{to}-hf", "hf")
        assert_equal(source, tmp_path / f"{to}-hf")


@pytest.mark.parametrize("first", OTHERS)
@pytest.mark.parametrize("second", OTHERS)
def test_conversion_between_any_two_formats(llama, tmp_path, first, second):
    convert(llama, tmp_path / "first", first, options=split(first))
    convert(tmp_path / "first", tmp_path / "second", second, options=split(second, make_vocab_size_divisible_by=32))
    report = convert(tmp_path / "second", tmp_path / "hf", "hf", verify=True, logits=True)
    assert report.comparison is not None
    assert (report.comparison.equal, report.comparison.logits) == (True, 0.0)
    assert_equal(llama, tmp_path / "hf")


def compute_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    from hf_megatron import MegatronConfig

    model = AutoModelForCausalLM.from_pretrained(folder, megatron_config=MegatronConfig(tp_size=2)).eval()
    with torch.no_grad():
        return model(torch.arange(16)[None]).logits


@pytest.mark.parametrize("to", OTHERS)
def test_from_pretrained_reads_every_format(llama, tmp_path, to):
    convert(llama, tmp_path / "made", to, options=split(to))
    expected = run_ranks(compute_logits, 2, llama)
    logits = run_ranks(compute_logits, 2, tmp_path / "made")
    assert all(torch.equal(one, other) for one, other in zip(logits, expected, strict=True))
    # Every rank raises the same error.
    largest = max((path for path in (tmp_path / "made").rglob("*") if path.is_file()), key=os.path.getsize)
    os.truncate(largest, 100)
    with pytest.raises(RankError, match="(?s)rank 0.*Opening.*rank 1.*Opening"):
        run_ranks(compute_logits, 2, tmp_path / "made")


def test_vocabulary_padding_is_zero(llama, tmp_path):
    report = convert(llama, tmp_path / "core", "megatron_core", options=TargetOptions(tp_size=2))
    (row,) = [row for row in report.rows if row[0] == "model.embed_tokens.weight"]
    assert row[1] == "embedding.word_embeddings.weight"
    from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader

    with MegatronCoreReader(tmp_path / "core") as reader:
        embedding = reader.read(Key(WEIGHT, "embedding.word_embeddings.weight"))
    assert embedding.shape == (256, 64)
    assert not embedding[250:].any()


def test_dry_run_writes_nothing(llama, tmp_path):
    result = CliRunner().invoke(app, ["convert", str(llama), str(tmp_path / "out"), "--to", "torch_dist", "--dry-run"])
    assert result.exit_code == 0, result.output
    assert (
        "model.layers.1.self_attn.q_proj.weight -> decoder.layers.1.self_attention.linear_qkv.weight" in result.output
    )
    assert "21 tensors" in result.output
    assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == []


def test_convert_and_compare_commands(llama, tmp_path):
    run = CliRunner().invoke
    result = run(app, ["convert", str(llama), str(tmp_path / "core"), "--to", "torch_dist", "--verify", "--logits"])
    assert result.exit_code == 0, result.output
    assert "0 different" in result.output
    assert "largest difference of logits 0.000e+00" in result.output
    assert run(app, ["compare", str(llama), str(tmp_path / "core"), "--logits"]).exit_code == 0
    again = run(app, ["convert", str(llama), str(tmp_path / "core"), "--to", "hf"])
    assert (again.exit_code, "exists" in again.output) == (1, True)
    wrong = run(app, ["convert", str(llama), str(tmp_path / "x"), "--to", "zarr"])
    assert (wrong.exit_code, "megatron_core" in wrong.output) == (2, True)


def test_compare_finds_one_changed_value(llama, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    comparison = compare(llama, other, logits=True)
    assert [str(key) for key in comparison.different] == ["model.layers.1.mlp.up_proj.weight"]
    assert comparison.logits > 0
    result = CliRunner().invoke(app, ["compare", str(llama), str(other)])
    assert result.exit_code == 1
    assert "model.layers.1.mlp.up_proj.weight" in result.output


def test_unknown_and_missing_tensors_are_reported(llama, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(llama, other)
    tensors = load_file(other / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors["model.layers.0.mlp.side_proj.weight"] = torch.zeros(2)
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 missing \(model.layers.0.mlp.up_proj.weight\).*side_proj"):
        convert(other, tmp_path / "out", "sharded")
    convert(llama, tmp_path / "core", "megatron_core")
    config = json.loads((tmp_path / "core" / "config.json").read_text())
    config["num_hidden_layers"] = 1
    (tmp_path / "core" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_layers is 2, but 1 in the config"):
        convert(tmp_path / "core", tmp_path / "out", "hf")
    common = tmp_path / "core" / "release" / "common.pt"
    torch.save({"iteration": torch.load(common, weights_only=False)["iteration"]}, common)
    with pytest.raises(CheckpointError, match="decoder.layers.1"):
        convert(tmp_path / "core", tmp_path / "out", "hf", checksums=False)
    assert not (tmp_path / "out").exists()


def test_mismatched_config_is_rejected(llama, tmp_path):
    convert(llama, tmp_path / "core", "megatron_core")
    config = json.loads((tmp_path / "core" / "config.json").read_text())
    config["num_key_value_heads"] = 4
    (tmp_path / "core" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="num_query_groups is 2, but 4 in the config"):
        convert(tmp_path / "core", tmp_path / "out", "hf")
    (tmp_path / "core" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="--config"):
        convert(tmp_path / "core", tmp_path / "out", "hf")
    convert(tmp_path / "core", tmp_path / "out", "hf", config=str(llama))
    assert_equal(llama, tmp_path / "out")


def test_families_without_name_rules_are_rejected(tmp_path):
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 32}
    config = OPTConfig(hidden_size=32, ffn_dim=32, word_embed_proj_dim=32, **sizes)
    OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    with pytest.raises(UnsupportedError, match="'opt'.*llama"):
        plan_conversion(tmp_path / "opt", tmp_path / "out", "megatron_core")
    # Formats that keep Hugging Face names need no name rules.
    convert(tmp_path / "opt", tmp_path / "sharded", "sharded", verify=True)


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("bert", {}, "norms before attention and MLP, BERT after them; .* is megatron-bert"),
        ("umt5", {}, "one relative position bias for all layers, .*UMT5 one per layer"),
        ("mamba", {}, "MambaMixer is Mamba2's"),
        ("megatron-bert", {"is_decoder": True}, "is_decoder: Megatron's BertModel has bidirectional attention"),
        ("mamba2", {"conv_kernel": 3}, "conv_kernel=3: Megatron-Core's MambaMixer has 4"),
        ("mamba2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon=1e-06: Megatron-Core's MambaMixer has 1e-05"),
        ("mamba2", {"use_bias": True}, "use_bias=True: Megatron-Core's MambaMixer has False"),
        ("nemotron_h", {"mlp_bias": True}, "mlp_bias: Megatron-Core's add_bias_linear would add biases to attention"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act=silu: expected relu2"),
        ("nemotron_h", {"norm_topk_prob": False}, "norm_topk_prob: Megatron-Core normalizes expert weights"),
    ],
)
def test_unsupported_computations_are_rejected(model_type, changes, reason):
    with pytest.raises(UnsupportedError, match=reason):
        check_config(AutoConfig.for_model(model_type, **changes))


def convert_with_file_size_limit(source: Path, target: Path) -> None:
    """Converts under a file size limit, beyond which the system fails every write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    convert(source, target, "sharded")


def test_interrupted_conversion_leaves_nothing(llama, tmp_path):
    with pytest.raises(RankError, match="cannot be written.*File too large"):
        run_ranks(convert_with_file_size_limit, 1, llama, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    # The temporary folder of a killed process is removed by the next conversion to the same target.
    (tmp_path / f".tmp-out-{'0' * 32}").mkdir()
    convert(llama, tmp_path / "out", "sharded")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_disk_space_is_checked_first(tmp_path):
    with pytest.raises(CheckpointError, match="1,152,921,504,606,846,976 bytes are needed and [0-9,]+ are free"):
        Output(tmp_path / "out", 1 << 60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", FORMATS)
def test_flipped_bit_is_detected(llama, tmp_path, to):
    convert(llama, tmp_path / "made", to)
    largest = max((path for path in (tmp_path / "made").rglob("*") if path.is_file()), key=os.path.getsize)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CheckpointError, match=largest.name):
        convert(tmp_path / "made", tmp_path / "out", "hf" if to != "hf" else "sharded")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_truncation_is_detected_without_checksums(llama, tmp_path, to):
    convert(llama, tmp_path / "made", to)
    largest = max((path for path in (tmp_path / "made").rglob("*") if path.is_file()), key=os.path.getsize)
    os.truncate(largest, largest.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=largest.name):
        target = "hf" if to != "hf" else "sharded"
        convert(tmp_path / "made", tmp_path / "out", target, checksums=False)
    assert not (tmp_path / "out").exists()


class Bomb:
    def __init__(self, command: str):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_pickles_and_outside_paths_are_rejected(llama, tmp_path):
    canary, folder = tmp_path / "canary", tmp_path / "bad"
    folder.mkdir()
    shutil.copy(llama / "config.json", folder)
    torch.save({"model.norm.weight": Bomb(f"touch {canary}")}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pytorch_model.bin"):
        convert(folder, tmp_path / "out", "sharded")
    (folder / "pytorch_model.bin").unlink()
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../hf/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"\.\./hf"):
        convert(folder, tmp_path / "out", "sharded")
    (folder / "model.safetensors.index.json").unlink()
    os.symlink(llama / "model.safetensors", folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="leads out"):
        convert(folder, tmp_path / "out", "sharded")
    (folder / "model.safetensors").unlink()
    (folder / "latest_checkpointed_iteration.txt").write_text("../hf")
    with pytest.raises(CheckpointError, match=r"'\.\./hf'"):
        convert(folder, tmp_path / "out", "hf")
    assert not canary.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def test_links_and_large_files_are_rejected(llama, tmp_path):
    folder = tmp_path / "linked"
    shutil.copytree(llama, folder)
    (tmp_path / "secret").write_text("token")
    os.symlink(tmp_path / "secret", folder / "notes.txt")
    with pytest.raises(CheckpointError, match="notes.txt leads out"):
        convert(folder, tmp_path / "out", "sharded")
    (folder / "notes.txt").unlink()
    with open(folder / "data.parquet", "wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(CheckpointError, match="data.parquet"):
        convert(folder, tmp_path / "out", "sharded")
    assert not (tmp_path / "out").exists()


def save_with_moments(source: Path, target: Path, frozen: str, **options) -> None:
    """Saves a sharded checkpoint with optimizer state after one step that trains every weight except `frozen`."""
    from accelerate import Accelerator
    from transformers import AutoModelForCausalLM

    from hf_megatron import MegatronConfig

    model = AutoModelForCausalLM.from_pretrained(source, megatron_config=MegatronConfig(dp_size=2))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name != frozen)
    accelerator = Accelerator(cpu=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(trained, lr=1e-3, **options))
    ids = torch.arange(16)[None]
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    optimizer.step()
    accelerator.save_state(target)


def test_incomplete_moments_are_rejected(llama, tmp_path):
    run_ranks(save_with_moments, 2, llama, tmp_path / "state", "model.layers.1.self_attn.v_proj.weight")
    for action in (plan_conversion, convert):
        with pytest.raises(CheckpointError, match="exp_avg of model.layers.1.self_attn.q_proj.weight.*frozen"):
            action(tmp_path / "state", tmp_path / "core", "megatron_core")
    convert(tmp_path / "state", tmp_path / "core", "megatron_core", optimizer=False, verify=True)
    convert(tmp_path / "state", tmp_path / "dcp", "dcp", verify=True)


def test_unsupported_optimizer_state_is_rejected(llama, tmp_path):
    run_ranks(save_with_moments, 2, llama, tmp_path / "state", "", amsgrad=True)
    with pytest.raises(
        CheckpointError, match=r"max_exp_avg_sq.*Use --no-optimizer \(optimizer=False\) to convert the we"
    ):
        convert(tmp_path / "state", tmp_path / "core", "megatron_core")
    arguments = ["convert", str(tmp_path / "state"), str(tmp_path / "core"), "--to", "megatron_core"]
    result = CliRunner().invoke(app, [*arguments, "--no-optimizer", "--verify"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("to", OTHERS)
def test_shapes_must_match_config(llama, tmp_path, to):
    convert(llama, tmp_path / "made", to)
    other = tmp_path / "other"
    other.mkdir()
    config = json.loads((llama / "config.json").read_text())
    config["intermediate_size"] = 64
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="ffn_hidden_size|gate_proj|down_proj"):
        convert(tmp_path / "made", tmp_path / "out", "hf", config=str(other))


def test_running_conversion_is_not_removed(llama, tmp_path):
    running = Output(tmp_path / "out")
    Output(tmp_path / "out")
    assert running.directory.is_dir()


def test_bin_files_and_old_names_are_read(llama, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    shutil.copy(llama / "config.json", folder)
    tensors = load_file(llama / "model.safetensors")
    # Base-model checkpoints lack the prefix; old checkpoints have buffers that are no longer stored.
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    torch.save(tensors, folder / "pytorch_model.bin")
    convert(folder, tmp_path / "hf", "hf")
    assert_equal(llama, tmp_path / "hf")


def test_tied_weight_stored_twice(tmp_path):
    build_tiny_model("llama_tied").save_pretrained(tmp_path / "tied")
    tensors = load_file(tmp_path / "tied" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "tied" / "model.safetensors", {"format": "pt"})
    convert(tmp_path / "tied", tmp_path / "core", "megatron_core")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, tmp_path / "tied" / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="lm_head.weight.*differ"):
        convert(tmp_path / "tied", tmp_path / "other", "megatron_core")


def test_round_trip_only_note_is_reported(tmp_path):
    build_tiny_model("gemma2").save_pretrained(tmp_path / "gemma2")
    arguments = ["convert", str(tmp_path / "gemma2"), str(tmp_path / "core"), "--to", "torch_dist"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "format checked by round trip only" in result.output
    assert "format checked by round trip only" in (tmp_path / "core" / "README.md").read_text()
    assert "round trip only" in json.loads((tmp_path / "core" / "conversion.json").read_text())["notes"][0]


def test_parallel_sizes_are_checked(llama, tmp_path):
    with pytest.raises(ConfigError, match="tp_size=0"):
        TargetOptions(tp_size=0)
    with pytest.raises(ConfigError, match="pp_size=3 has no effect on megatron_core.*tp_size"):
        plan_conversion(llama, tmp_path / "out", "megatron_core", options=TargetOptions(pp_size=3))
    with pytest.raises(ConfigError, match="tp_size=2 has no effect on sharded.*none"):
        convert(llama, tmp_path / "out", "sharded", options=TargetOptions(tp_size=2))
    with pytest.raises((CheckpointError, ConfigError), match="3"):
        convert(llama, tmp_path / "out", "megatron_legacy", options=TargetOptions(pp_size=3))
    assert list(tmp_path.iterdir()) == []
