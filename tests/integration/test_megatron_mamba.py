"""megatron-core's MambaModel computes what transformers' Mamba2 and Nemotron-H do, and what it saves comes back.

Its mixer runs on a definition of mamba_ssm's kernels in torch (`tests/megatron_peer/state_space.py`).
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_megatron.conversion import TargetOptions, convert
from tests.twins import VOCABULARY, twin

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", ["nemotron_h", "mamba2_tied", "mamba2"])
def test_megatron_core_computes_the_same_logits(tmp_path, case, tp):
    model, hf = twin(case), tmp_path / "hf"
    model.save_pretrained(hf)
    ids = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    save_file({"ids": ids}, hf / "inputs.safetensors")
    convert(hf, tmp_path / "core", "megatron_core", options=TargetOptions(tp_size=tp))
    convert(hf, tmp_path / "legacy", "megatron_legacy", options=TargetOptions(tp_size=tp, local_names=True))
    folders = [str(tmp_path / name / "release") for name in ("core", "legacy")]
    command = [sys.executable, "-m", "tests.megatron_peer.mamba", str(hf), str(tmp_path / "out"), str(tp), *folders]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    found = load_file(tmp_path / "out")
    with torch.no_grad():
        expected = model(ids).logits
    for index in range(len(folders)):
        logits = found[str(index)][..., :VOCABULARY]
        assert (logits - expected).abs().max() < 1e-6 * max(1.0, float(expected.abs().max()))
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    before = load_file(hf / "model.safetensors")
    for form in ("core", "legacy"):
        convert(tmp_path / f"out-{form}", tmp_path / f"{form}-hf", "hf", config=str(hf))
        after = load_file(tmp_path / f"{form}-hf" / "model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
