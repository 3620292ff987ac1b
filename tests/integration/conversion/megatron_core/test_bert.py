"""Tests of BERT conversion: megatron-core's BertModel matches transformers' logits, from older checkpoints too."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_megatron.conversion import TargetOptions, convert
from tests.helpers.megatron_pre_core import extract_bert_weights, write_checkpoint
from tests.helpers.tiny_models import VOCABULARY, build_tiny_model

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize("tp", [1, 2])
def test_logits_match_megatron_core(tmp_path, tp):
    model, hf = build_tiny_model("megatron_bert"), tmp_path / "hf"
    model.save_pretrained(hf)
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    types = (torch.arange(24) >= 12).long().expand(2, 24).contiguous()
    save_file({"ids": ids, "mask": torch.ones_like(ids), "types": types}, hf / "inputs.safetensors")
    source = write_checkpoint(tmp_path / "older", extract_bert_weights(model), "2020", 0, tp=2)
    options = TargetOptions(tp_size=tp)
    convert(source, tmp_path / "core", "megatron_core", config=str(hf), options=options)
    options = TargetOptions(tp_size=tp, local_names=True)
    convert(source, tmp_path / "legacy", "megatron_legacy", config=str(hf), options=options)
    folders = [str(tmp_path / name / "release") for name in ("core", "legacy")]
    command = [sys.executable, "-m", "tests.megatron_peer.bert", str(hf), str(tmp_path / "out"), str(tp), *folders]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    outputs = load_file(tmp_path / "out")
    with torch.no_grad():
        expected = model(ids, token_type_ids=types)
    for index in range(len(folders)):
        head = outputs[f"{index}.head"][..., :VOCABULARY]
        assert (head - expected.prediction_logits).abs().max() < 1e-6
        assert torch.equal(head.argmax(-1), expected.prediction_logits.argmax(-1))
        assert (outputs[f"{index}.binary_head"] - expected.seq_relationship_logits).abs().max() < 1e-6
