"""Checkpoints of Megatron-LM before Megatron-Core: each layout of its history becomes the model it was made of."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForPreTraining

from hf_megatron.conversion import convert
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import CheckpointError
from tests.helpers.megatron_pre_core import bert_parts, gpt2_parts, llama_parts, write_checkpoint
from tests.helpers.tiny_models import tiny_model

PARTS = {"gpt2": gpt2_parts, "megatron_bert": bert_parts, "llama": llama_parts}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, object]]:
    """Folder of the config and weights, and the model, of each family."""
    found = {}
    for case in PARTS:
        folder = tmp_path_factory.mktemp(case) / "hf"
        model = tiny_model(case)
        model.save_pretrained(folder)
        found[case] = folder, model
    return found


def differing(found: Path, expected: Path) -> list[str]:
    """Names of weights that are not the same bit for bit."""
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
def test_every_layout_is_the_model_it_was_made_of(models, tmp_path, case, era, version, tp):
    expected, model = models[case]
    source = write_checkpoint(tmp_path / "megatron", PARTS[case](model), era, version, tp=tp)
    convert(source, tmp_path / "hf", "hf", config=str(expected))
    assert differing(tmp_path / "hf", expected) == []


@pytest.mark.parametrize(("case", "version"), [("gpt2", 0), ("megatron_bert", 1.0), ("llama", 3.0)])
def test_stages_of_a_pipeline_with_a_copy_of_the_embeddings(models, tmp_path, case, version):
    expected, model = models[case]
    source = write_checkpoint(tmp_path / "megatron", PARTS[case](model), "2021", version, tp=2, pp=2)
    convert(source, tmp_path / "hf", "hf", config=str(expected))
    assert differing(tmp_path / "hf", expected) == []


def test_logits_are_those_of_the_model(models, tmp_path):
    tokens = torch.arange(32)[None]
    for case, model_class in (("gpt2", AutoModelForCausalLM), ("megatron_bert", AutoModelForPreTraining)):
        folder, model = models[case]
        source = write_checkpoint(tmp_path / case, PARTS[case](model), "2020", 0)
        convert(source, tmp_path / f"{case}-hf", "hf", config=str(folder))
        found = model_class.from_pretrained(tmp_path / f"{case}-hf", attn_implementation="eager").eval()
        with torch.no_grad():
            one, other = found(tokens), model(tokens)
        for name in ("logits",) if case == "gpt2" else ("prediction_logits", "seq_relationship_logits"):
            assert torch.equal(one[name], other[name])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", ["gpt2", "megatron_bert"])
def test_another_order_than_the_file_says_is_seen(models, tmp_path, case, tp):
    """Every order has the same shapes, so that only its rows tell one from another."""
    expected, model = models[case]
    for version, stated in ((0, 2.0), (0, 1.0), (1.0, 2.0), (1.0, 0), (2.0, 0), (2.0, 1.0)):
        folder = tmp_path / f"{version}-{stated}"
        write_checkpoint(folder, PARTS[case](model), "2020", version, stated=stated, tp=tp)
        convert(folder, tmp_path / f"hf-{version}-{stated}", "hf", config=str(expected))
        wrong = differing(tmp_path / f"hf-{version}-{stated}", expected)
        assert wrong and all("attn.c_attn" in name or "attention.self" in name for name in wrong)


def test_version_0_is_packed_by_rank(models, tmp_path):
    """Rows of two ranks, put into one file as they lie, are not what one rank would have written."""
    expected, model = models["gpt2"]
    parts = gpt2_parts(model)
    source = write_checkpoint(tmp_path / "two", parts, "2020", 0, tp=2)
    write_checkpoint(tmp_path / "one", parts, "2020", 0)
    name = "layers.0.attention.query_key_value.weight"
    ranks = [torch.load(path, weights_only=False) for path in sorted(source.rglob("*.pt"))]
    one = torch.load(next((tmp_path / "one").rglob("*.pt")), weights_only=False)
    tables = [content["model"]["language_model"]["transformer"] for content in (*ranks, one)]
    assert not torch.equal(torch.cat([table[name] for table in tables[:2]]), tables[2][name])
    assert differing(_converted(tmp_path / "one", expected), expected) == []


def _converted(source: Path, config: Path) -> Path:
    target = source.with_name(f"{source.name}-hf")
    convert(source, target, "hf", config=str(config))
    return target


@pytest.mark.parametrize("archive", [False, True], ids=["before torch 1.6", "zip"])
def test_formats_of_torch_and_half_precision(tmp_path, archive):
    """The first GPT-2 345M: fp16, no arguments, no version, a folder with or without the tracker file."""
    model = tiny_model("gpt2", torch.float16)
    model.save_pretrained(tmp_path / "hf")
    source = write_checkpoint(tmp_path / "megatron", gpt2_parts(model), "2020", 0, archive=archive)
    first = next(source.rglob("*.pt"))
    assert (first.read_bytes()[:2] == b"PK") is archive
    assert differing(_converted(source, tmp_path / "hf"), tmp_path / "hf") == []
    (source / "latest_checkpointed_iteration.txt").unlink()
    release = source / "release"
    convert(release, tmp_path / "again", "hf", config=str(tmp_path / "hf"))
    assert differing(tmp_path / "again", tmp_path / "hf") == []
    with pytest.raises(CheckpointError, match="config.json.*--config"):
        convert(release, tmp_path / "never", "hf")


def test_a_model_without_pooler_and_binary_head(models, tmp_path):
    """`--bert-no-binary-head`: MegatronBertForMaskedLM has no place for them, and says which ones where they are."""
    folder, model = models["megatron_bert"]
    config = AutoConfig.from_pretrained(folder)
    config.architectures = ["MegatronBertForMaskedLM"]
    config.save_pretrained(tmp_path / "masked")
    parts = bert_parts(model)
    source = write_checkpoint(tmp_path / "with", parts, "2021", 2.0)
    with pytest.raises(CheckpointError, match="does not fit MegatronBertForMaskedLM: 4 surplus .*bert.pooler.dense"):
        convert(source, tmp_path / "never", "hf", config=str(tmp_path / "masked"))
    parts.pooler = parts.binary_head = None
    source = write_checkpoint(tmp_path / "without", parts, "2021", 2.0)
    convert(source, tmp_path / "out", "hf", config=str(tmp_path / "masked"))
    with pytest.raises(CheckpointError, match="does not fit MegatronBertForPreTraining: 4 missing"):
        convert(source, tmp_path / "never", "hf", config=str(folder))


def loaded_logits(folder: Path) -> torch.Tensor:
    from hf_megatron import MegatronConfig

    model = AutoModelForCausalLM.from_pretrained(folder, megatron_config=MegatronConfig(tp_size=2)).eval()
    with torch.no_grad():
        return model(torch.arange(16)[None]).logits


def test_from_pretrained_reads_it_on_two_ranks(models, tmp_path):
    expected, model = models["gpt2"]
    source = write_checkpoint(tmp_path / "megatron", gpt2_parts(model), "2020", 0)
    shutil.copy(expected / "config.json", source)
    found, wanted = run_ranks(loaded_logits, 2, source), run_ranks(loaded_logits, 2, expected)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_it_goes_on_as_a_checkpoint_of_megatron_core(models, tmp_path):
    for case in ("gpt2", "megatron_bert"):
        expected, model = models[case]
        source = write_checkpoint(tmp_path / case, PARTS[case](model), "2020", 1.0, tp=2)
        for to in ("torch_dist", "torch"):
            convert(source, tmp_path / f"{case}-{to}", to, config=str(expected))
            assert differing(_converted(tmp_path / f"{case}-{to}", expected), expected) == []
