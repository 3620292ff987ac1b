"""Tests of third-party checkpoints: metadata checked against configs and other metadata, and hostile files."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from huggingface_hub import ModelCard
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from typer.testing import CliRunner

from hf_megatron import CheckpointError
from hf_megatron.cli import app
from hf_megatron.conversion import compare, convert
from hf_megatron.conversion.megatron.arguments import check_arguments
from hf_megatron.conversion.torch_files.safe_pickle import unpickle
from hf_megatron.conversion.torch_files.weight_file import PickledFile, read_saved
from hf_megatron.core.text import safe_repr
from hf_megatron.errors import sanitize
from hf_megatron.model_cards import CardData, check_card, write_card

MEGATRON = ("megatron_core", "megatron_legacy")


def nested(depth: int = 60) -> bytes:
    """Returns the opcodes that leave nested pairs of one object on the stack."""
    return b"K\x01" + b"".join(b"q%ch%c\x86" % (level, level) for level in range(depth))


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def llama(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Folder with `hf` and its conversion to each of Megatron's formats."""
    place = tmp_path_factory.mktemp("strangers")
    llama().save_pretrained(place / "hf")
    for to in MEGATRON:
        convert(place / "hf", place / to, to)
    return place


def copy_with_config(folder: Path, target: Path, **changes) -> Path:
    shutil.copytree(folder, target)
    file = target / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")
    return target


# Config changes that keep all shapes, but define another model.
OTHER_MODELS = {
    "num_attention_heads is 8, but 4": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    "rotary_base": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "norm_epsilon": {"rms_norm_eps": 1e-3},
}


@pytest.mark.parametrize("to", MEGATRON)
@pytest.mark.parametrize("named", OTHER_MODELS)
def test_arguments_must_match_config(folders, tmp_path, to, named):
    """A config with the same shapes could silently permute heads or change the rotary positions."""
    source = copy_with_config(folders / to, tmp_path / "source", **OTHER_MODELS[named])
    with pytest.raises(CheckpointError, match=rf"{named}.*Use the config\.json that the model was trained with"):
        convert(source, tmp_path / "hf", "hf")
    assert not (tmp_path / "hf").exists()
    shutil.copy(folders / "hf" / "config.json", source)
    convert(source, tmp_path / "hf", "hf", checksums=False)
    assert compare(tmp_path / "hf", folders / "hf", logits=True).equal


@pytest.mark.parametrize("to", MEGATRON)
def test_shape_preserving_arguments_are_checked(folders, tmp_path, to):
    """A Llama with zero-centered norms and interleaved rotary positions has the same tensors as one without."""
    source = tmp_path / "source"
    shutil.copytree(folders / to, source)
    for file in (*source.rglob("common.pt"), *source.rglob("model_optim_rng.pt")):
        content = torch.load(file, weights_only=False)
        content["args"].apply_layernorm_1p = content["args"].rotary_interleaved = True
        torch.save(content, file)
    with pytest.raises(CheckpointError, match=r"apply_layernorm_1p is True, but False .*; rotary_interleaved is True"):
        convert(source, tmp_path / "hf", "hf", checksums=False)


def test_all_differences_are_reported(folders, tmp_path):
    source = copy_with_config(
        folders / MEGATRON[0], tmp_path / "source", **OTHER_MODELS["num_attention_heads is 8, but 4"]
    )
    with pytest.raises(CheckpointError) as raised:
        convert(source, tmp_path / "hf", "hf")
    for name in ("num_attention_heads", "num_query_groups", "kv_channels"):
        assert name in str(raised.value)


def test_equivalent_arguments_are_accepted():
    """Megatron-LM's defaults and other spellings of the same value are no difference."""
    dense = {"num_attention_heads": 4, "num_query_groups": 4, "position_embedding_type": "rope", "rotary_percent": 1.0}
    check_arguments({"group_query_attention": False, "num_query_groups": 1, "rotary_percent": None}, dense, "here")
    check_arguments({"max_position_embeddings": 5}, dense, "here")
    sparse = {
        "num_layers": 4,
        "num_experts": 2,
        "moe_layer_freq": [1, 0, 1, 0],
        "moe_router_topk_scaling_factor": 2.5,
    }
    check_arguments({"moe_layer_freq": 2}, sparse, "here")
    check_arguments({"moe_layer_freq": "([1,0]*2)"}, sparse, "here")
    for wrong in ({"moe_layer_freq": 1}, {"moe_router_topk_scaling_factor": None}):
        with pytest.raises(CheckpointError, match=next(iter(wrong))):
            check_arguments(wrong, sparse, "here")
    with pytest.raises(CheckpointError, match="swiglu"):
        check_arguments({"swiglu": 1}, {"swiglu": True}, "here")


@pytest.mark.parametrize("to", MEGATRON)
def test_token_dropping_is_reported(tmp_path, to):
    """No transformers config can express token dropping, so it is reported and not rejected."""
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2, sliding_window=None)).save_pretrained(
        tmp_path / "hf"
    )
    convert(tmp_path / "hf", tmp_path / "there", to)
    for factor, is_said in ((1.25, True), (None, False)):
        for file in (*(tmp_path / "there").rglob("common.pt"), *(tmp_path / "there").rglob("model_optim_rng.pt")):
            content = torch.load(file, weights_only=False)
            content["args"].moe_expert_capacity_factor = factor
            torch.save(content, file)
        report = convert(tmp_path / "there", tmp_path / f"back{factor}", "hf", checksums=False)
        assert any("each expert's moe_expert_capacity_factor=1.25" in note for note in report.notes) is is_said


@pytest.mark.parametrize(("name", "is_said"), [("gelu", True), ("silu", False)])
def test_unnamed_gated_activations_are_reported(tmp_path, name, is_said):
    llama(hidden_act=name).save_pretrained(tmp_path / "hf")
    report = convert(tmp_path / "hf", tmp_path / "there", "megatron_core")
    assert any("a gated gelu; set gated_linear_unit" in note for note in report.notes) is is_said


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 1e-2}, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}]
)
def test_compare_checks_both_configs(folders, tmp_path, change):
    other = copy_with_config(folders / "hf", tmp_path / "other", **change)
    comparison = compare(folders / "hf", other, logits=True)
    assert not comparison.equal and not comparison.different and comparison.logits
    assert next(iter(change)) in comparison.summary()
    assert compare(folders / "hf", folders / "hf", logits=True).equal
    # An explicit config does not replace an existing one.
    assert compare(folders / "hf", other, config=str(folders / "hf"), logits=True).summary() == comparison.summary()


@pytest.mark.parametrize("to", [*MEGATRON, "hf"])
def test_written_config_has_weight_dtype(folders, tmp_path, to):
    """Regression: the model card's own command rounded fp32 weights under a bf16 config."""
    source = copy_with_config(folders / "hf", tmp_path / "source", dtype="bfloat16")
    convert(source, tmp_path / "there", to)
    assert json.loads((tmp_path / "there" / "config.json").read_text("utf-8"))["dtype"] == "float32"
    convert(tmp_path / "there", tmp_path / "back", "sharded" if to == "hf" else "hf")
    assert json.loads((tmp_path / "back" / "config.json").read_text("utf-8"))["dtype"] == "float32"


NARROW = {"bf16": torch.bfloat16, "float8": torch.float8_e4m3fn}


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize(("dtype", "written"), [("float32", "float32"), ("bfloat16", "bfloat16"), (None, "float32")])
def test_mixed_dtypes_keep_config_dtype(folders, tmp_path, narrow, dtype, written):
    """Regression: fp32 norms among narrower matrices were rounded to the dtype of most elements."""
    source = copy_with_config(folders / "hf", tmp_path / "source", dtype=dtype)
    weights = safetensors.torch.load_file(source / "model.safetensors")
    weights = {name: weight.to(NARROW[narrow]) if weight.dim() > 1 else weight for name, weight in weights.items()}
    safetensors.torch.save_file(weights, source / "model.safetensors", {"format": "pt"})
    convert(source, tmp_path / "out", "hf")
    assert json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))["dtype"] == written
    if narrow == "bf16":
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "out")
        assert str(loaded.model.norm.weight.dtype) == f"torch.{written}"


def test_omitted_adapters_are_reported(folders, tmp_path):
    """Regression: an adapter config without its weights made a folder that transformers cannot load."""
    source = tmp_path / "source"
    shutil.copytree(folders / "hf", source)
    safetensors.torch.save_file({"a": torch.ones(2)}, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text('{"peft_type": "LORA"}', "utf-8")
    report = convert(source, tmp_path / "out", "hf")
    assert any("adapter_config.json, adapter_model.safetensors" in note for note in report.notes)
    assert not list((tmp_path / "out").glob("adapter_*"))
    LlamaForCausalLM.from_pretrained(tmp_path / "out")


def test_file_names_are_sanitized(folders, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folders / "hf", source)
    (source / "adapter_\x1b[2Jmodel.bin").write_bytes(b"")
    (source / "tokenizer\x1b]0;t\x07.model").write_bytes(b"")
    shutil.copytree(folders / "hf", tmp_path / "config")
    report = convert(source, tmp_path / "out", "hf", config=tmp_path / "config")
    assert len([note for note in report.notes if "adapter_" in note or "tokenizer" in note]) == 2
    assert all(note.isprintable() for note in report.notes)
    assert "\x1b" not in (tmp_path / "out" / "README.md").read_text("utf-8")


@pytest.mark.parametrize("to", MEGATRON)
def test_checksums_cover_inner_folders(folders, tmp_path, to):
    shutil.copytree(folders / to, tmp_path / "source")
    largest = max((tmp_path / "source").rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else 0)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    inner = next(path for path in (tmp_path / "source").iterdir() if path.is_dir())
    for number, source in enumerate((tmp_path / "source", inner)):
        with pytest.raises(CheckpointError, match=largest.name):
            convert(source, tmp_path / f"out{number}", "hf")


def read_card(folder: Path) -> str:
    return (folder / "README.md").read_text("utf-8")


@pytest.mark.parametrize("trained", [True, False])
def test_cards_are_correct_after_conversion_chain(folders, tmp_path, trained):
    shutil.copytree(folders / "hf", tmp_path / "hf")
    if trained:
        facts = {"architecture": "LlamaForCausalLM", "model_type": "llama", "base_model": "tests/base", "steps": 1234}
        write_card(tmp_path / "hf", CardData(**facts, library_name="transformers"))
    source = tmp_path / "hf"
    for number, to in enumerate(("megatron_core", "megatron_legacy", "sharded", "hf")):
        convert(source, tmp_path / str(number), to)
        source, text = tmp_path / str(number), read_card(tmp_path / str(number))
        assert text.count("## Conversion") == text.count("- from: ") == 1, text
        assert ("AutoModelForCausalLM.from_pretrained(folder)" in text) == (to == "hf")
        assert ("library_name: transformers" in text) == (not to.startswith("megatron"))
        assert ("1,234" in text and "tests/base" in text) == trained
        assert f"{sum(p.numel() for p in llama().parameters()):,}" in text or trained
        check_card(ModelCard.load(tmp_path / str(number) / "README.md"))
    assert "Megatron-Core" not in text and "legacy" not in text, "how the files were made two conversions ago"


# Invalid values and contents of config.json that must be reported in one line.
BAD_CONFIGS = [
    {"hidden_size": -5},
    {"hidden_size": "64"},
    {"architectures": 5},
    {"architectures": ["../x"]},
    {"num_hidden_layers": 100_000},
    {"num_hidden_layers": 2001},
    {"rope_parameters": {"rope_type": "linear", "factor": "x", "rope_theta": 1e4}},
    {"num_attention_heads": 0},
    {"vocab_size": 2**62},
    {"vocab_size": 10**30},
    {"model_type": 7},
    {"dtype": 5},
    {"hidden_act": "nosuch"},
]
BAD_FILES = ["[]", "5", "{", "null", "", "[" * 100_000, '{"a":' * 100_000]


@pytest.mark.parametrize("change", BAD_CONFIGS, ids=lambda change: "-".join(change))
def test_invalid_configs_report_one_line(folders, tmp_path, change):
    source = copy_with_config(folders / "hf", tmp_path / "source", **change)
    with pytest.raises(CheckpointError) as raised:
        convert(source, tmp_path / "out", "sharded")
    assert len(str(raised.value).splitlines()) == 1 and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "conversion.json"])
def test_invalid_json_files_are_reported(folders, tmp_path, name):
    for number, content in enumerate(BAD_FILES):
        source = tmp_path / str(number)
        shutil.copytree(folders / "hf", source)
        (source / name).write_text(content, "utf-8")
        with pytest.raises(CheckpointError, match=name):
            convert(source, tmp_path / "out", "sharded")


@pytest.mark.parametrize("weight_map", [[], {"a": 5}, {"a": "../x"}, {"a": "\x1b[31m.safetensors"}])
def test_invalid_indexes_are_reported(folders, tmp_path, weight_map):
    shutil.copytree(folders / "hf", tmp_path / "source")
    (tmp_path / "source" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), "utf-8")
    with pytest.raises(CheckpointError, match="model.safetensors.index.json") as raised:
        convert(tmp_path / "source", tmp_path / "out", "sharded")
    assert "\x1b" not in str(raised.value)


def save_old_format(content: object, path: Path) -> Path:
    """Saves in the format of torch before 1.6."""
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def test_pre_1_6_torch_files_are_read(folders, tmp_path):
    shutil.copytree(folders / "hf", tmp_path / "old")
    (tmp_path / "old" / "model.safetensors").unlink()
    save_old_format(llama().state_dict(), tmp_path / "old" / "pytorch_model.bin")
    convert(tmp_path / "old", tmp_path / "hf", "hf")
    assert compare(tmp_path / "hf", folders / "hf").equal


def test_damaged_old_files_are_rejected(tmp_path):
    good = save_old_format({"a": torch.arange(6.0), "b": torch.ones(2, 2)}, tmp_path / "good.bin").read_bytes()
    assert PickledFile(tmp_path / "good.bin").read("a").tolist() == [0, 1, 2, 3, 4, 5]
    for length in range(0, len(good), 7):
        (tmp_path / "bad.bin").write_bytes(good[:length])
        with pytest.raises(CheckpointError, match="bad.bin"):
            PickledFile(tmp_path / "bad.bin")
    (tmp_path / "bad.bin").write_bytes(good + b"\0")
    with pytest.raises(CheckpointError, match="bad.bin"):
        PickledFile(tmp_path / "bad.bin")


def wrap_pickle(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


# Small pickles that take exponential time or gigabytes of memory if they are loaded without limits.
HOSTILE = {
    "nested": wrap_pickle(nested()),
    "nested_in_a_table": wrap_pickle(b"}X\x01\0\0\0a" + nested() + b"s"),
    "nested_shape": wrap_pickle(
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\x07\0\0\0storagectorch\nFloatStorage\nX\x01\0\0\0aX\x03\0\0\0cpuK\x04tQK\0"
        + nested()
        + b"K\x01\x85\x89}tR"
    ),
    "own_part": wrap_pickle(b"]q\x00h\x00a"),
    "encoded_again": wrap_pickle(
        b"X" + (10**6).to_bytes(4, "little") + b"x" * 10**6 + b"q\0X\x06\0\0\0latin1q\x01c_codecs\nencode\nq\x02"
        b"](" + b"h\x02h\0h\x01\x86R" * 20_000 + b"e"
    ),
    "sizes_again": wrap_pickle(
        b"(" + b"K\1" * 10**5 + b"tq\0\x85q\x01ctorch\nSize\nq\x02](" + b"h\x02h\x01R" * 50_000 + b"e"
    ),
    "empty_tables": wrap_pickle(b"](" + b"}" * 2 * 10**7 + b"e"),
    "long_key": wrap_pickle(b"(" + b"K\1" * 10**5 + b"tq\0}(" + b"h\0N" * 10**5 + b"u"),
}


def get_allowed_names():
    from hf_megatron.conversion.torch_files.torch_save import OBJECTS, TENSORS, parse_storage

    return {**OBJECTS, **TENSORS}, parse_storage


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_rejected(name):
    names, persistent = get_allowed_names()
    with pytest.raises(CheckpointError) as raised:
        unpickle(HOSTILE[name], "here", names, persistent)
    assert len(str(raised.value)) < 20_000


def test_negative_bit_tensor_is_rejected(tmp_path):
    weight = torch.complex(torch.ones(4), -torch.ones(4)).conj().imag
    assert weight.is_neg()
    torch.save({"weight": weight}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="its values differ from the stored ones"):
        read_saved(tmp_path / "pytorch_model.bin")


def test_hostile_bin_is_rejected(folders, tmp_path):
    for number, body in enumerate((HOSTILE["nested_in_a_table"], HOSTILE["own_part"])):
        folder = tmp_path / str(number)
        shutil.copytree(folders / "hf", folder)
        (folder / "model.safetensors").unlink()
        head = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}))
        (folder / "pytorch_model.bin").write_bytes(head + body + pickle.dumps([], 2))
        with pytest.raises(CheckpointError, match="pytorch_model.bin"):
            convert(folder, tmp_path / "out", "hf")


def test_shared_objects_are_read():
    shared = {"dtype": "float32", "shape": (1, 2, 3)}
    value = {f"layer.{number}": shared for number in range(2000)}
    assert unpickle(pickle.dumps(value, 2), "here", {}) == value


def test_messages_are_bounded_and_printable():
    deep: object = 1
    for _ in range(60):
        deep = (deep, deep)
    for value in (deep, "x" * 10**6, [1] * 10**6, {"\x1b[31m": "\x00"}, 10**100_000, b"x" * 100):
        text = safe_repr(value)
        assert len(text) <= 200 and text.isprintable(), text
    assert sanitize("a\x1b[2Jb\nc") == "a\\x1b[2Jb\\nc"
    error = CheckpointError("tensor \x1b]0;title\x07 is missing;\nsecond line")
    assert str(error) == "tensor \\x1b]0;title\\x07 is missing;\\nsecond line"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_encoder_decoder_logits_are_compared(tmp_path):
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    comparison = compare(tmp_path, tmp_path, logits=True)
    assert comparison.equal and comparison.logits == 0.0


def test_card_with_invalid_metadata_is_rewritten(folders, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folders / "megatron_core", source)
    card = (source / "README.md").read_text("utf-8")
    (source / "README.md").write_text(card.replace("---\n", "---\n: [[[ a: b: c\n", 1), "utf-8")
    convert(source, tmp_path / "hf", "hf")
    check_card(ModelCard.load(tmp_path / "hf" / "README.md"))


NAME = "model.layers.0.mlp.up_proj.weight"


def add_weight(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    safetensors.torch.save_file({**safetensors.torch.load_file(file), **tensors}, file, {"format": "pt"})


@pytest.mark.parametrize("place", ["another file of the index", "a single file beside them"])
def test_duplicate_weights_must_match(folders, tmp_path, place):
    """Loaders use either the indexed copy, the last copy, or the file without an index."""
    model = LlamaForCausalLM.from_pretrained(folders / "hf")
    weight = model.get_parameter(NAME).detach()
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    index = json.loads((tmp_path / "source" / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(name for name in index.values() if name != index[NAME])
    file = tmp_path / "source" / ("model.safetensors" if "single" in place else other)
    if "single" in place:
        shutil.copy(folders / "hf" / "model.safetensors", file)
    else:
        add_weight(file, {NAME: weight.clone()})
    convert(tmp_path / "source", tmp_path / "out", "hf", verify=True)
    assert compare(folders / "hf", tmp_path / "out").equal
    for wrong in (weight + 1, weight.half(), weight[:1]):
        add_weight(file, {NAME: wrong.contiguous()})
        with pytest.raises(CheckpointError, match=f"{file.name}.* both have {NAME}, but") as error_info:
            convert(tmp_path / "source", tmp_path / "wrong", "hf")
        assert len(str(error_info.value).splitlines()) == 1 and not (tmp_path / "wrong").exists()


def test_missing_tokenizer_is_reported(folders, tmp_path):
    """Regression: a folder without a tokenizer was converted without a note."""

    def get_tokenizer_notes(source: Path, **options) -> list[str]:
        target = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        command = ["convert", str(source), str(target), "--to", "hf", "--no-checksums"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        result = CliRunner().invoke(app, command)
        assert result.exit_code == 0, result.output
        card = (target / "README.md").read_text()
        check_card(ModelCard(card))
        tokenizer_notes = [line for line in result.output.splitlines() if line.startswith("no tokenizer")]
        assert all(line in card for line in tokenizer_notes) and str(tmp_path) not in card
        return tokenizer_notes

    assert get_tokenizer_notes(folders / "hf") == []
    source = copy_with_config(folders / "hf", tmp_path / "source", tokenizer_class="SomeTokenizer")
    assert get_tokenizer_notes(source) == [
        "no tokenizer is copied (the source names SomeTokenizer): there is none next to the config.json that was read"
    ]
    (source / "tokenizer.json").write_text("{}")
    assert get_tokenizer_notes(source) == []
    assert "tokenizer.json of the source" in get_tokenizer_notes(source, config=folders / "hf")[0]
    for to in MEGATRON:
        assert get_tokenizer_notes(folders / to) == []
        megatron = tmp_path / to
        shutil.copytree(folders / to, megatron)
        for file in [*megatron.rglob("common.pt"), *megatron.rglob("model_optim_rng.pt")]:
            content = torch.load(file, weights_only=False)
            content["args"].tokenizer_type, content["args"].vocab_file = "NullTokenizer", None
            torch.save(content, file)
        assert get_tokenizer_notes(megatron) == []
        for file in [*megatron.rglob("common.pt"), *megatron.rglob("model_optim_rng.pt")]:
            content = torch.load(file, weights_only=False)
            content["args"].tokenizer_model = str(tmp_path / "tokens" / "llama.model")
            torch.save(content, file)
        assert "(the source names llama.model)" in get_tokenizer_notes(megatron)[0]
        (megatron / "tokenizer.model").write_bytes(b"model")
        assert get_tokenizer_notes(megatron) == []


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "model.safetensors.index.json"])
def test_named_pipe_does_not_block(folders, tmp_path, name):
    """Opening a named pipe blocks until another process writes to it."""
    source = tmp_path / "source"
    shutil.copytree(folders / "hf", source)
    if name == "manifest.json":
        shutil.rmtree(source)
        convert(folders / "hf", source, "sharded")
        (source / "conversion.json").unlink()
    (source / name).unlink(missing_ok=True)
    os.mkfifo(source / name)
    call = "from hf_megatron.conversion import convert; import sys; convert(sys.argv[1], sys.argv[2], 'hf')"
    command = [sys.executable, "-c", call, str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    if "index" not in name:
        assert "CheckpointError" in done.stderr.splitlines()[-1], done.stderr


def test_non_text_values_are_truncated(folders, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(folders / "megatron_core", source)
    (source / "conversion.json").unlink()
    next(source.rglob("metadata.json")).write_bytes(bytes(range(128, 256)) * 400)
    with pytest.raises(CheckpointError, match="is not valid checkpoint metadata") as error_info:
        convert(source, tmp_path / "out", "hf")
    assert len(str(error_info.value)) < 1000


def test_replicated_shard_tensors_are_compared(folders, tmp_path):
    """Tensors that are not distributed are in every file; regression: the last copy was used unchecked."""
    weights = safetensors.torch.load_file(folders / "hf" / "model.safetensors")
    source = tmp_path / "source"
    source.mkdir()
    shutil.copy(folders / "hf" / "config.json", source)
    for rank in (1, 2):
        safetensors.torch.save_file(weights, source / f"shard-{rank:05d}-model-{rank:05d}-of-00002.safetensors")
    convert(source, tmp_path / "out", "hf")
    assert compare(folders / "hf", tmp_path / "out").equal
    add_weight(source / "shard-00002-model-00002-of-00002.safetensors", {NAME: weights[NAME] + 1})
    with pytest.raises(CheckpointError, match=f"shard-00002.*: {NAME} differs from its copy in shard-00001"):
        convert(source, tmp_path / "wrong", "hf")
    assert not (tmp_path / "wrong").exists()


def push_colliding_integers(count: int) -> bytes:
    """Returns the opcodes that push integers whose hashes are all 0, each followed by None."""
    numbers = ((2**61 - 1) * number for number in range(1, count + 1))
    return b"".join(b"\x8b\x0c\0\0\0" + number.to_bytes(12, "little") + b"N" for number in numbers)


def push_same_slot_integers(trailing: bytes = b"") -> bytes:
    """Returns the opcodes that push integers of the same slot in every hash table, each followed by `trailing`."""
    numbers = (number << 40 for number in range(1, 60_001))
    return b"".join(b"\x8a\x08" + number.to_bytes(8, "little") + trailing for number in numbers)


CHOSEN_KEYS = {
    "one hash": b"}(" + push_colliding_integers(60_000) + b"u",
    "one hash in tables of a few": b"](" + (b"}(" + push_colliding_integers(6000) + b"u") * 20 + b"e",
    "one place": b"}(" + push_same_slot_integers(b"N") + b"u",
    "one by one": b"}" + push_same_slot_integers(b"Ns"),
    "fractions": b"}(" + b"".join(b"G" + (number << 40).to_bytes(8, "big") + b"N" for number in range(60_000)) + b"u",
    "pairs": b"}(" + push_same_slot_integers(b"N\x86N") + b"u",
    "a set": b"\x8f(" + push_same_slot_integers() + b"\x90",
    "a frozen set": b"(" + push_same_slot_integers() + b"\x91",
    "a set that is called": b"cbuiltins\nset\n](" + push_same_slot_integers() + b"e\x85R",
    "an ordered table": b"ccollections\nOrderedDict\n](" + push_same_slot_integers(b"N\x86") + b"e\x85R",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", CHOSEN_KEYS)
def test_colliding_keys_are_limited(name):
    """Regression: all keys were compared pairwise, so that 1 MB took minutes and 10 MB took days."""
    names, persistent = get_allowed_names()
    with pytest.raises(CheckpointError, match="keys that are neither strings nor consecutive|bits as a dict key"):
        unpickle(wrap_pickle(CHOSEN_KEYS[name]), "here", names, persistent)


def test_regular_keys_are_read():
    """Optimizer state has one integer key per parameter, and a store has one record per chunk."""
    for content in (dict.fromkeys(range(50_000)), {f"a{number}": 1 for number in range(50_000)}):
        assert unpickle(pickle.dumps(content, 2), "here", {}) == content
    few = {number << 40: {-1: 1.5, (1, "a"): None} for number in range(2000)}
    assert unpickle(pickle.dumps(few, 2), "here", {}) == few


def test_hostile_keys_are_rejected_in_every_file(folders, tmp_path):
    body = wrap_pickle(CHOSEN_KEYS["one hash"])
    converted = tmp_path / "dcp"
    convert(folders / "hf", converted, "dcp")
    places = {
        folders / "hf": "model.safetensors",
        folders / "megatron_core": "common.pt",
        folders / "megatron_legacy": "model_optim_rng.pt",
        converted: ".metadata",
    }
    for number, (folder, name) in enumerate(places.items()):
        source = tmp_path / str(number)
        shutil.copytree(folder, source)
        (source / "conversion.json").unlink(missing_ok=True)
        [file] = source.rglob(name)
        if name == "model.safetensors":
            file.unlink()
            file = file.with_name("pytorch_model.bin")
        file.write_bytes(body)
        with pytest.raises(CheckpointError, match="bits as a dict key"):
            convert(source, tmp_path / "out", "sharded")


def test_colliding_chunk_offsets_are_rejected(folders, tmp_path):
    """Colliding chunk offsets are harmless for the reader, which looks nothing up by offset."""
    source = tmp_path / "source"
    convert(folders / "hf", source, "dcp")
    (source / "conversion.json").unlink()
    [file] = source.rglob(".metadata")
    metadata = torch.distributed.checkpoint.FileSystemReader(file.parent).read_metadata()
    entry = metadata.state_dict_metadata[NAME]
    chunk, [index] = entry.chunks[0], [index for index in metadata.storage_data if index.fqn == NAME]
    offsets = [torch.Size([(2**61 - 1) * number, 0]) for number in range(1, 4)]
    entry.chunks += [type(chunk)(offset, chunk.sizes) for offset in offsets]
    metadata.storage_data |= {type(index)(NAME, offset): metadata.storage_data[index] for offset in offsets}
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=NAME):
        convert(source, tmp_path / "out", "hf")


def copy_with_arguments(folder: Path, target: Path, change) -> Path:
    """Copies a Megatron checkpoint and applies `change` to the content of its files."""
    shutil.copytree(folder, target)
    (target / "conversion.json").unlink()
    for file in (*target.rglob("common.pt"), *target.rglob("model_optim_rng.pt")):
        content = torch.load(file, weights_only=False)
        change(content)
        torch.save(content, file)
    return target


@pytest.mark.parametrize("to", MEGATRON)
def test_missing_arguments_are_rejected_or_reported(folders, tmp_path, to):
    """Regression: such arguments were not compared with the config, without a note."""
    for number, args in enumerate(("a text", 5, [1], {}, {"num_layers": 2}, Path("/x"))):
        source = copy_with_arguments(
            folders / to, tmp_path / str(number), lambda found, args=args: found.update(args=args)
        )
        with pytest.raises(CheckpointError, match=r"\.pt: args is .*, expected a namespace with Megatron-LM's argum"):
            convert(source, tmp_path / "out", "hf")
    for name, change in (
        ("no", lambda found: found.pop("args")),
        ("none", lambda found: found.update(args=None)),
        ("empty", lambda found: found.update(args=Namespace())),
    ):
        source = copy_with_arguments(folders / to, tmp_path / name, change)
        report = convert(source, tmp_path / f"{name} out", "hf", verify=True)
        assert report.notes == ["the checkpoint has no Megatron arguments: only shapes were compared with the config"]


@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_unexpected_argument_files_are_reported(folders, tmp_path, kind):
    source = tmp_path / "source"
    shutil.copytree(folders / "megatron_core", source)
    (source / "conversion.json").unlink()
    [file] = source.rglob("common.pt")
    file.unlink()
    {"pipe": os.mkfifo, "folder": os.mkdir, "link": lambda path: path.symlink_to(path.name)}[kind](file)
    with pytest.raises(CheckpointError, match=r"common\.pt is .*: expected a file"):
        convert(source, tmp_path / "out", "hf")


OTHER_MODEL_KINDS = {
    "num_experts": 4,
    "num_moe_experts": 4,
    "is_hybrid_model": True,
    "hybrid_override_pattern": "M*",
    "hybrid_layer_pattern": "M*M*",
    "hybrid_attention_ratio": 0.5,
}


@pytest.mark.parametrize("to", MEGATRON)
def test_arguments_for_other_model_kinds_are_rejected(folders, tmp_path, to):
    for name, value in OTHER_MODEL_KINDS.items():
        change = {name: value}
        source = copy_with_arguments(
            folders / to, tmp_path / name, lambda found, change=change: vars(found["args"]).update(change)
        )
        with pytest.raises(CheckpointError, match=f"{name} is {str(value)[:1]}"):
            convert(source, tmp_path / "out", "hf")
    same = {"num_experts": None, "is_hybrid_model": False, "hybrid_attention_ratio": 0.0, "moe_layer_freq": 1}
    source = copy_with_arguments(folders / to, tmp_path / "same", lambda found: vars(found["args"]).update(same))
    assert convert(source, tmp_path / "out", "hf").notes == []
