"""Tests of LLaVA conversion: megatron-core's LLaVAModel matches the logits of transformers for images and text."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_megatron.conversion import TargetOptions, convert
from tests.helpers.tiny_models import VOCABULARY, build_tiny_model

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(("case", "tp"), [("llava", 1), ("llava", 2), ("llava_tied", 2)])
def test_logits_match_megatron_core(tmp_path, case, tp):
    model, hf = build_tiny_model(case), tmp_path / "hf"
    model.save_pretrained(hf)
    generator = torch.Generator().manual_seed(1)
    image, patches = model.config.image_token_id, model.config.image_seq_length
    before, after = (torch.randint(10, VOCABULARY, (1, length), generator=generator) for length in (5, 11))
    pixels = torch.randn(1, 3, 8, 8, generator=generator)
    # LLaVAModel replaces one token by an image; transformers replaces one token per patch.
    ids, spread = (
        torch.cat([before, torch.full((1, length), image), after], 1).contiguous() for length in (1, patches)
    )
    save_file({"ids": ids, "pixels": pixels}, hf / "inputs.safetensors")
    convert(hf, tmp_path / "core", "megatron_core", options=TargetOptions(tp_size=tp))
    # Seeded fault: the query rows of the vision encoder's first layer in another order.
    with torch.no_grad():
        weight = model.model.vision_tower.encoder.layers[0].self_attn.q_proj.weight
        weight.copy_(weight.roll(weight.shape[0] // 2, 0))
    model.save_pretrained(tmp_path / "faulty")
    convert(tmp_path / "faulty", tmp_path / "faulty-core", "megatron_core", options=TargetOptions(tp_size=tp))
    model = build_tiny_model(case)
    folders = [str(tmp_path / name / "release") for name in ("core", "faulty-core")]
    command = [sys.executable, "-m", "tests.megatron_peer.llava", str(hf), str(tmp_path / "out"), str(tp), *folders]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    outputs = load_file(tmp_path / "out")
    with torch.no_grad():
        expected = model(input_ids=spread, pixel_values=pixels).logits
    difference = (outputs["0"][..., :VOCABULARY] - expected).abs().max()
    assert difference < 2e-6, difference
    assert (outputs["1"][..., :VOCABULARY] - expected).abs().max() > 1e-4
