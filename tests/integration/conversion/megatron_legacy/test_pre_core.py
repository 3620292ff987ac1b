"""Tests of pre-Megatron-Core checkpoints: every historical layout converts to its source model."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForPreTraining

from hf_megatron.conversion import convert
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import CheckpointError
from tests.helpers.megatron_pre_core import (
    extract_bert_weights,
    extract_gpt2_weights,
    extract_llama_weights,
    write_checkpoint,
)
from tests.helpers.tiny_models import build_tiny_model

PARTS = {"gpt2": extract_gpt2_weights, "megatron_bert": extract_bert_weights, "llama": extract_llama_weights}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, object]]:
    """Hugging Face folder and model of each family."""
    pairs = {}
    for case in PARTS:
        folder = tmp_path_factory.mktemp(case) / "hf"
        model = build_tiny_model(case)
        model.save_pretrained(folder)
        pairs[case] = folder, model
    return pairs


def find_mismatches(found: Path, expected: Path) -> list[str]:
    """Returns the names of weights that are not bit-equal."""
    one, other = load_file(found / "model.safetensors"), load_file(expected / "model.safetensors")
    assert one.keys() == other.keys()
    assert {name: tensor.dtype for name, tensor in one.items()} == {name: other[name].dtype for name in one}
    return [name for name in one if not torch.equal(one[name], other[name])]


GPT2 = [(era, version) for era in ("2019", "2020", "2021") for version in (0, 1.0, 2.0)] + [("2023", 3.0)]
BERT = [("2020", 0), ("2020", 1.0), ("2020", 2.0), ("2021", 0), ("2021", 2.0), ("2023", 3.0)]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("case", "era", "version"),
    [("gpt2", *each) for each in GPT2] + [("megatron_bert", *each) for each in BERT] + [("llama", "2023", 3.0)],
)
def test_every_layout_converts_to_source_model(models, tmp_path, case, era, version, tp):
    expected, model = models[case]
    source = write_checkpoint(tmp_path / "megatron", PARTS[case](model), era, version, tp=tp)
    convert(source, tmp_path / "hf", "hf", config=str(expected))
    assert find_mismatches(tmp_path / "hf", expected) == []


@pytest.mark.parametrize(("case", "version"), [("gpt2", 0), ("megatron_bert", 1.0), ("llama", 3.0)])
def test_pipeline_stages_with_embedding_copy(models, tmp_path, case, version):
    expected, model = models[case]
    source = write_checkpoint(tmp_path / "megatron", PARTS[case](model), "2021", version, tp=2, pp=2)
    convert(source, tmp_path / "hf", "hf", config=str(expected))
    assert find_mismatches(tmp_path / "hf", expected) == []


def test_logits_match_source_model(models, tmp_path):
    tokens = torch.arange(32)[None]
    for case, model_class in (("gpt2", AutoModelForCausalLM), ("megatron_bert", AutoModelForPreTraining)):
        folder, model = models[case]
        source = write_checkpoint(tmp_path / case, PARTS[case](model), "2020", 0)
        convert(source, tmp_path / f"{case}-hf", "hf", config=str(folder))
        converted_model = model_class.from_pretrained(tmp_path / f"{case}-hf", attn_implementation="eager").eval()
        with torch.no_grad():
            one, other = converted_model(tokens), model(tokens)
        for name in ("logits",) if case == "gpt2" else ("prediction_logits", "seq_relationship_logits"):
            assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", ["gpt2", "megatron_bert"])
def test_wrong_version_changes_only_attention(models, tmp_path, case, tp):
    """All versions have the same shapes and differ only in the row order of query, key and value."""
    expected, model = models[case]
    for version, stated in ((0, 2.0), (0, 1.0), (1.0, 2.0), (1.0, 0), (2.0, 0), (2.0, 1.0)):
        folder = tmp_path / f"{version}-{stated}"
        write_checkpoint(folder, PARTS[case](model), "2020", version, stated=stated, tp=tp)
        convert(folder, tmp_path / f"hf-{version}-{stated}", "hf", config=str(expected))
        wrong = find_mismatches(tmp_path / f"hf-{version}-{stated}", expected)
        assert wrong and all("attn.c_attn" in name or "attention.self" in name for name in wrong)


def test_version_0_is_packed_by_rank(models, tmp_path):
    """The concatenated rows of two ranks differ from the rows that a single rank writes."""
    expected, model = models["gpt2"]
    parts = extract_gpt2_weights(model)
    source = write_checkpoint(tmp_path / "two", parts, "2020", 0, tp=2)
    write_checkpoint(tmp_path / "one", parts, "2020", 0)
    name = "layers.0.attention.query_key_value.weight"
    ranks = [torch.load(path, weights_only=False) for path in sorted(source.rglob("*.pt"))]
    one = torch.load(next((tmp_path / "one").rglob("*.pt")), weights_only=False)
    tables = [content["model"]["language_model"]["transformer"] for content in (*ranks, one)]
    assert not torch.equal(torch.cat([table[name] for table in tables[:2]]), tables[2][name])
    assert find_mismatches(_convert_to_hf(tmp_path / "one", expected), expected) == []


def _convert_to_hf(source: Path, config: Path) -> Path:
    target = source.with_name(f"{source.name}-hf")
    convert(source, target, "hf", config=str(config))
    return target


@pytest.mark.parametrize("archive", [False, True], ids=["before torch 1.6", "zip"])
def test_old_and_zip_torch_files_in_half_precision(tmp_path, archive):
    """Covers the first GPT-2 345M release: fp16, no arguments, no version, with or without the tracker file."""
    model = build_tiny_model("gpt2", torch.float16)
    model.save_pretrained(tmp_path / "hf")
    source = write_checkpoint(tmp_path / "megatron", extract_gpt2_weights(model), "2020", 0, archive=archive)
    first = next(source.rglob("*.pt"))
    assert (first.read_bytes()[:2] == b"PK") is archive
    assert find_mismatches(_convert_to_hf(source, tmp_path / "hf"), tmp_path / "hf") == []
    (source / "latest_checkpointed_iteration.txt").unlink()
    release = source / "release"
    convert(release, tmp_path / "again", "hf", config=str(tmp_path / "hf"))
    assert find_mismatches(tmp_path / "again", tmp_path / "hf") == []
    with pytest.raises(CheckpointError, match="config.json.*--config"):
        convert(release, tmp_path / "never", "hf")


def test_missing_pooler_and_binary_head(models, tmp_path):
    """Covers `--bert-no-binary-head`: MegatronBertForMaskedLM has neither and reports surplus ones by name."""
    folder, model = models["megatron_bert"]
    config = AutoConfig.from_pretrained(folder)
    config.architectures = ["MegatronBertForMaskedLM"]
    config.save_pretrained(tmp_path / "masked")
    parts = extract_bert_weights(model)
    source = write_checkpoint(tmp_path / "with", parts, "2021", 2.0)
    with pytest.raises(CheckpointError, match="does not fit MegatronBertForMaskedLM: 4 surplus .*bert.pooler.dense"):
        convert(source, tmp_path / "never", "hf", config=str(tmp_path / "masked"))
    parts.pooler = parts.binary_head = None
    source = write_checkpoint(tmp_path / "without", parts, "2021", 2.0)
    convert(source, tmp_path / "out", "hf", config=str(tmp_path / "masked"))
    with pytest.raises(CheckpointError, match="does not fit MegatronBertForPreTraining: 4 missing"):
        convert(source, tmp_path / "never", "hf", config=str(folder))


def compute_logits(folder: Path) -> torch.Tensor:
    from hf_megatron import MegatronConfig

    model = AutoModelForCausalLM.from_pretrained(folder, megatron_config=MegatronConfig(tp_size=2)).eval()
    with torch.no_grad():
        return model(torch.arange(16)[None]).logits


def test_from_pretrained_reads_pre_core_on_two_ranks(models, tmp_path):
    expected, model = models["gpt2"]
    source = write_checkpoint(tmp_path / "megatron", extract_gpt2_weights(model), "2020", 0)
    shutil.copy(expected / "config.json", source)
    logits, expected_logits = run_ranks(compute_logits, 2, source), run_ranks(compute_logits, 2, expected)
    assert all(torch.equal(one, other) for one, other in zip(logits, expected_logits, strict=True))


def test_pre_core_converts_to_megatron_core_formats(models, tmp_path):
    for case in ("gpt2", "megatron_bert"):
        expected, model = models[case]
        source = write_checkpoint(tmp_path / case, PARTS[case](model), "2020", 1.0, tp=2)
        for to in ("torch_dist", "torch"):
            convert(source, tmp_path / f"{case}-{to}", to, config=str(expected))
            assert find_mismatches(_convert_to_hf(tmp_path / f"{case}-{to}", expected), expected) == []
