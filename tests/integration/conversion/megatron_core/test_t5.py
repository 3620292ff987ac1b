"""Tests of T5 conversion: megatron-core's T5Model matches transformers' T5 1.1 and mT5, and its saves convert back.

Its attention takes the relative position bias as TransformerEngine's does (`tests/megatron_peer/t5.py`).
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from hf_megatron import CheckpointError, UnsupportedError
from hf_megatron.conversion import TargetOptions, convert
from hf_megatron.conversion.export import export
from hf_megatron.conversion.families import check_config
from tests.helpers.tiny_models import VOCABULARY, build_tiny_model

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", ["t5", "t5_tied", "mt5"])
def test_logits_match_megatron_core(tmp_path, case, tp):
    model, hf = build_tiny_model(case), tmp_path / "hf"
    model.save_pretrained(hf)
    generator = torch.Generator().manual_seed(1)
    ids, decoder_ids = (torch.randint(0, VOCABULARY, (2, length), generator=generator) for length in (24, 20))
    mask = torch.ones_like(ids)
    mask[0, 18:] = 0
    save_file({"ids": ids, "decoder_ids": decoder_ids, "mask": mask}, hf / "inputs.safetensors")
    convert(hf, tmp_path / "core", "megatron_core", options=TargetOptions(tp_size=tp))
    convert(hf, tmp_path / "legacy", "megatron_legacy", options=TargetOptions(tp_size=tp, local_names=True))
    folders = [str(tmp_path / name / "release") for name in ("core", "legacy")]
    command = [sys.executable, "-m", "tests.megatron_peer.t5", str(hf), str(tmp_path / "out"), str(tp), *folders]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    outputs = load_file(tmp_path / "out")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, decoder_input_ids=decoder_ids).logits
    for index in range(len(folders)):
        logits = outputs[str(index)][..., :VOCABULARY]
        assert (logits - expected).abs().max() < 1e-6 * max(1.0, float(expected.abs().max()))
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    before = load_file(hf / "model.safetensors")
    for form in ("core", "legacy"):
        convert(tmp_path / f"out-{form}", tmp_path / f"{form}-hf", "hf", config=str(hf))
        after = load_file(tmp_path / f"{form}-hf" / "model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("to", ["megatron_core", "megatron_legacy", "sharded", "dcp"])
def test_untied_head_round_trips(tmp_path, to):
    """T5 1.1 has an untied head that its config cannot express: transformers detects it in the files."""
    build_tiny_model("t5").save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "made", to)
    report = convert(tmp_path / "made", tmp_path / "back", "hf", verify=True, logits=True)
    assert report.comparison.equal and report.comparison.logits == 0.0
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "back"))
    assert "lm_head.weight" in before and before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("to", ["megatron_core", "sharded"])
def test_export_keeps_untied_head(tmp_path, to):
    model = build_tiny_model("t5")
    model.config.architectures = [type(model).__name__]
    export(model, tmp_path / "made", to, None, model.config.save_pretrained)
    convert(tmp_path / "made", tmp_path / "back", "hf")
    after = load_file(tmp_path / "back" / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], model.lm_head.weight)
    assert torch.equal(after["shared.weight"], model.shared.weight)


def test_mismatched_tied_weights_are_rejected(tmp_path):
    """This config can express an untied head but ties it, so either the config or the weights are wrong."""
    build_tiny_model("llama_tied").save_pretrained(tmp_path / "hf")
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    save_file(
        {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1},
        tmp_path / "hf" / "model.safetensors",
        {"format": "pt"},
    )
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.* are tied in the model but differ"):
        convert(tmp_path / "hf", tmp_path / "core", "megatron_core")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"feed_forward_proj": "gated-gelu"}, "scale_decoder_outputs \\(T5 1.0\\)"),
        ({"tie_word_embeddings": False, "feed_forward_proj": "relu"}, "feed_forward_proj=relu: expected a gated one"),
    ],
)
def test_unsupported_t5_configs_are_rejected(changes, reason):
    with pytest.raises(UnsupportedError, match=f"t5: {reason}"):
        check_config(AutoConfig.for_model("t5", **changes))


def test_encoder_decoder_pipeline_is_rejected(tmp_path):
    build_tiny_model("t5").save_pretrained(tmp_path / "hf")
    message = r"pp_size 2: encoder and decoder must be on one pipeline stage\. Use pp_size 1\."
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "hf", tmp_path / "legacy", "megatron_legacy", options=TargetOptions(pp_size=2))
    options = TargetOptions(tp_size=2, pp_size=1)
    assert convert(tmp_path / "hf", tmp_path / "legacy", "megatron_legacy", options=options, verify=True).comparison
