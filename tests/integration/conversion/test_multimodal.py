"""Tests of vision-language models: round trips through Megatron's formats by the CLI, and rejected inputs."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from hf_megatron import CheckpointError, UnsupportedError
from hf_megatron.cli import app
from hf_megatron.conversion import TargetOptions, compare, convert, plan_conversion
from hf_megatron.conversion.families import check_config, get_family
from hf_megatron.conversion.interfaces import WEIGHT
from hf_megatron.conversion.megatron.names import is_encoder_weight
from hf_megatron.conversion.megatron.splits import tensor_parallel_split
from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader
from hf_megatron.conversion.megatron_core.writer import MegatronCoreWriter
from hf_megatron.conversion.output_folder import Output
from tests.helpers.tiny_models import MULTIMODAL, VOCABULARY, build_tiny_model, make_config
from tests.integration.conversion.test_convert import assert_equal, load_tensors

LAYOUTS = {
    "core": ("torch_dist",),
    "core-tp2": ("torch_dist", "--layout", "tp2"),
    "legacy": ("torch",),
    "legacy-tp2": ("torch", "--layout", "tp2"),
    "legacy-pp2": ("torch", "--layout", "pp2"),
    "legacy-tp2-pp2": ("torch", "--layout", "tp2+pp2"),
    "legacy-local": ("torch", "--layout", "tp2", "--local-names"),
}
EXPERTS = {"core-ep2": ("torch_dist", "--layout", "ep2"), "legacy-ep2": ("torch", "--layout", "ep2")}


def command(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == code, result.output
    return result.output


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """Hugging Face folders of all cases."""
    root = tmp_path_factory.mktemp("multimodal")
    for case in MULTIMODAL:
        build_tiny_model(case, torch.bfloat16).save_pretrained(root / case, max_shard_size="100KB")
    return root


def load_rank_files(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the tensors that Megatron-LM would load on each rank."""
    tensors_by_rank = {}
    for path in sorted(folder.glob("*/mp_rank_*/model_optim_rng.pt")):
        content = torch.load(path, weights_only=False)["model"]
        tensors_by_rank[path.parent.name] = {name: tensor for name, tensor in content.items() if tensor is not None}
    return tensors_by_rank


@pytest.mark.parametrize("case", MULTIMODAL)
def test_every_layout_round_trips_bit_equal(case, sources, tmp_path):
    layouts = {**LAYOUTS, **(EXPERTS if "moe" in case else {})}
    for name, (to, *sizes) in layouts.items():
        command("convert", sources / case, tmp_path / name, "--to", to, *sizes, "--verify")
        command("convert", tmp_path / name, tmp_path / f"{name}-hf", "--to", "hf")
        assert_equal(sources / case, tmp_path / f"{name}-hf")
        output = command("compare", sources / case, tmp_path / name)
        assert " 0 different" in output


@pytest.mark.parametrize("case", MULTIMODAL)
def test_encoder_weights_are_on_first_stage(case, sources, tmp_path):
    convert(sources / case, tmp_path / "one", "megatron_legacy")
    convert(sources / case, tmp_path / "four", "megatron_legacy", options=TargetOptions(tp_size=2, pp_size=2))
    (one,), four = load_rank_files(tmp_path / "one").values(), load_rank_files(tmp_path / "four")
    encoder_weights = {name for name in one if is_encoder_weight(name)}
    assert encoder_weights
    for rank, tensors in four.items():
        tp, stage = int(rank[8:10]), int(rank[11:14])
        assert {name for name in tensors if is_encoder_weight(name)} == (encoder_weights if stage == 0 else set())
        for name in encoder_weights if stage == 0 else ():
            split = tensor_parallel_split(name)
            expected = one[name] if split is None else one[name].chunk(2, split.dim)[tp]
            assert torch.equal(tensors[name], expected), name
    replicated = case.startswith(("qwen2_5", "gemma3"))
    named = [name for name in encoder_weights if name.startswith(("visual.", "vision_tower."))]
    assert bool(named) is replicated
    # The last pipeline stage of the language model has the head, or a copy of the tied embeddings.
    assert "language_model.output_layer.weight" in four["mp_rank_00_001"]
    assert ("language_model.output_layer.weight" in one) is not make_config(case).tie_word_embeddings


@pytest.mark.parametrize("case", MULTIMODAL)
def test_torch_dist_stacks_layers_like_megatron(case, sources, tmp_path):
    convert(sources / case, tmp_path / "core", "megatron_core")
    with MegatronCoreReader(tmp_path / "core") as reader:
        stored = {name: tuple(entry.shape) for name, entry in reader._store.entries.items()}
    config, name = make_config(case), "language_model.decoder.layers.self_attention.linear_proj.weight"
    if "moe" in case:
        # With a per-layer list of experts (`moe_layer_freq`), every block stores its layers separately.
        assert name not in stored
        assert "vision_model.decoder.deepstack_merger_list.1.linear_fc1.weight" in stored
        assert "vision_model.decoder.layers.1.mlp.linear_fc1.weight" in stored
        return
    assert stored[name] == (config.text_config.num_hidden_layers, 64, 64)
    if "qwen3" in case:
        assert stored["vision_model.decoder.layers.mlp.linear_fc1.weight"] == (2, 48, 32)
        assert stored["vision_model.decoder.deepstack_merger_list.linear_fc1.weight"] == (2, 128, 128)
    if "llava" in case:
        assert stored["vision_model.decoder.layers.mlp.linear_fc1.weight"] == (3, 48, 32)
        assert stored["vision_model.class_token"] == (1, 1, 32)
    if "gemma3" in case:
        assert "vision_tower.vision_model.encoder.layers.1.mlp.fc1.weight" in stored


@pytest.mark.parametrize("case", ["qwen2_5_vl", "qwen3_vl", "llava", "gemma3_vl_tied"])
def test_wrong_order_and_changed_encoder_are_detected(case, sources, tmp_path, monkeypatch):
    convert(sources / case, tmp_path / "core", "megatron_core")
    weights = build_tiny_model(case, torch.bfloat16)
    with torch.no_grad():
        name, tensor = next((n, p) for n, p in weights.named_parameters() if "language_model" not in n)
        tensor.view(-1)[0] += 1
    weights.save_pretrained(tmp_path / "other")
    comparison = compare(tmp_path / "other", tmp_path / "core")
    assert not comparison.equal
    assert name in comparison.summary()
    command("compare", tmp_path / "other", tmp_path / "core", code=1)
    # Seeded fault: the rows of query, key and value stay in the order of transformers.
    from hf_megatron.conversion.megatron.rules import GroupedQKV

    monkeypatch.setattr(GroupedQKV, "to_megatron", lambda self, tensors, memory=None: [torch.cat(list(tensors))])
    with pytest.raises(CheckpointError, match="could not be verified against its source"):
        convert(sources / case, tmp_path / "wrong", "megatron_core", verify=True)
    assert not (tmp_path / "wrong").exists()


def write_without_tensors(source: Path, target: Path, case: str, start: str) -> Path:
    """Copies a Megatron-Core checkpoint except for the tensors whose names begin with `start`."""
    with MegatronCoreReader(source) as reader:
        plan = {key: entry for key, entry in reader.entries.items() if not key.name.startswith(start)}
        assert len(plan) < len(reader.entries)
        config = make_config(case)
        with Output(target, 1 << 20) as output:
            writer = MegatronCoreWriter(output, plan, get_family(config).model(config))
            for key in plan:
                writer.write(key, reader.read(key))
            writer.finish()
    shutil.copy(source / "config.json", target)
    return target


@pytest.mark.parametrize(
    ("case", "start", "said"),
    [
        ("qwen2_5_vl", "visual.", r"has no visual\.\*, but the config"),
        ("qwen2_5_vl", "visual.merger.mlp.0.bias", r"1 missing \(model\.visual\.merger\.mlp\.0\.bias\)"),
        ("qwen3_vl", "vision_model.decoder.deepstack", r"missing \(model\.visual\.deepstack_merger_list\.0"),
        ("llava", "vision_projection.", r"has no vision_projection\.\*"),
        ("gemma3_vl_tied", "vision_tower.", r"has no vision_tower\.\*"),
    ],
)
def test_missing_encoder_is_rejected(case, start, said, sources, tmp_path):
    convert(sources / case, tmp_path / "core", "megatron_core")
    part = write_without_tensors(tmp_path / "core", tmp_path / "part", case, start)
    with pytest.raises(CheckpointError, match=said):
        convert(part, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["megatron_core", "megatron_legacy"])
def test_text_and_vision_checkpoints_do_not_mix(to, sources, tmp_path):
    build_tiny_model("qwen2", torch.bfloat16).save_pretrained(tmp_path / "text")
    convert(tmp_path / "text", tmp_path / "core", to)
    (tmp_path / "core" / "config.json").unlink()
    message = r"has no language_model\.\*, visual\.\*, .*Check that this is not the checkpoint of a text model"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "core", tmp_path / "out", "hf", config=str(sources / "qwen2_5_vl"))
    convert(tmp_path / "core", tmp_path / "text again", "hf", config=str(tmp_path / "text"))
    assert compare(tmp_path / "text again", tmp_path / "text").equal
    # A text config rejects a vision-language checkpoint too.
    convert(sources / "qwen2_5_vl", tmp_path / "images", to)
    message = (
        r"has language_model\.\*, visual\.\*, which the config does not describe\. Check that this is not the config"
    )
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "images", tmp_path / "out", "hf", config=str(tmp_path / "text"))
    assert not (tmp_path / "out").exists()
    convert(tmp_path / "images", tmp_path / "out", "hf", config=str(sources / "qwen2_5_vl"))
    assert compare(tmp_path / "out", sources / "qwen2_5_vl").equal


def test_missing_unused_weights_are_filled_and_reported(sources, tmp_path):
    """Megatron's CLIP has no norm after the vision encoder, and LLaVA does not use it."""
    convert(sources / "llava", tmp_path / "core", "megatron_core")
    part = write_without_tensors(tmp_path / "core", tmp_path / "part", "llava", "vision_model.ln_post")
    output = command("convert", part, tmp_path / "out", "--to", "hf")
    assert "unused weights" in output
    expected, tensors = load_tensors(sources / "llava"), load_tensors(tmp_path / "out")
    differing = {name for name in expected if not torch.equal(expected[name], tensors[name])}
    assert {name.rpartition("post_layernorm.")[2] for name in differing} == {"weight", "bias"}
    for name in differing:
        assert tensors[name].unique().tolist() == [1.0 if name.endswith("weight") else 0.0]


def test_indivisible_encoder_sizes_are_rejected(sources, tmp_path):
    with pytest.raises(CheckpointError, match=r"num_attention_heads 4 is not divisible by tp_size 8"):
        convert(sources / "llava", tmp_path / "out", "megatron_core", options=TargetOptions(tp_size=8))
    model = build_tiny_model("llava")
    model.config.vision_config.num_attention_heads = 2
    model.save_pretrained(tmp_path / "few")
    message = r"vision_config\.num_attention_heads 2 is not divisible by tp_size 4\. Valid sizes: 1, 2"
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "few", tmp_path / "out", "megatron_core", options=TargetOptions(tp_size=4))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda config: setattr(config, "vision_feature_layer", [-2, -1]), "projects the output of a single layer"),
        (lambda config: setattr(config.text_config, "model_type", "gpt2"), "text model type 'gpt2' is not supported"),
        (
            lambda config: setattr(config.vision_config, "model_type", "siglip_vision_model"),
            "vision encoder type 'siglip",
        ),
    ],
)
def test_unsupported_llava_components_are_rejected(change, said):
    config = make_config("llava")
    change(config)
    with pytest.raises(UnsupportedError, match=re.escape(said)):
        check_config(config)


def test_wrong_mrope_sections_are_rejected(sources, tmp_path):
    """The sections of rotary positions change no tensor shape."""
    convert(sources / "qwen2_5_vl", tmp_path / "core", "megatron_core")
    config = make_config("qwen2_5_vl")
    config.text_config.rope_parameters["mrope_section"] = [4, 2, 2]
    config.architectures = ["Qwen2_5_VLForConditionalGeneration"]
    config.save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"mrope_section is \[2, 3, 3\], but \[4, 2, 2\] in the config"):
        convert(tmp_path / "core", tmp_path / "out", "hf", config=str(tmp_path / "other"))


def test_plan_reports_encoder_names_and_notes(sources, tmp_path):
    report = plan_conversion(sources / "qwen3_vl", tmp_path / "out", "megatron_core")
    names = {name: other for name, other, _ in report.rows}
    assert names["model.visual.merger.norm.weight"] == "vision_model.merger.patch_norm.weight"
    assert names["model.language_model.norm.weight"] == "language_model.decoder.final_layernorm.weight"
    assert any("mrope_interleaved" in note for note in report.notes)
    assert any("round trip only" in note for note in report.notes)
    config = make_config("llava")
    config.vision_feature_layer = -2
    assert any("vision_feature_layer=-2" in what for what in get_family(config).unstored(config))


def compute_logits(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForImageTextToText

    from hf_megatron import MegatronConfig

    model = AutoModelForImageTextToText.from_pretrained(folder, megatron_config=MegatronConfig(tp_size=1)).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(10, 26)[None] % VOCABULARY).logits


@pytest.mark.parametrize("to", ["megatron_core", "megatron_legacy"])
def test_from_pretrained_reads_vision_checkpoints(sources, tmp_path, to):
    from hf_megatron.core.fork_harness import run_ranks

    convert(sources / "qwen2_5_vl", tmp_path / "made", to)
    (expected,), (logits,) = (run_ranks(compute_logits, 1, at) for at in (sources / "qwen2_5_vl", tmp_path / "made"))
    assert torch.equal(expected, logits)


def test_entries_are_only_weights(sources, tmp_path):
    convert(sources / "qwen3_vl", tmp_path / "core", "megatron_core")
    with MegatronCoreReader(tmp_path / "core") as reader:
        assert {key.kind for key in reader.entries} == {WEIGHT}
        objects = set(reader._store.objects)
    assert "vision_model.decoder.layers.self_attention.linear_qkv._extra_state/shard_1_2" in objects
    assert "vision_model.decoder.deepstack_merger_list.linear_fc1._extra_state/shard_0_2" in objects
    assert not any(name.startswith("vision_model.patch_embed") for name in objects)
