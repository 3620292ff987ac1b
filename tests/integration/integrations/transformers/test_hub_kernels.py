"""Tests of `use_kernels=True` with a local mapping, in a process where transformers accepts the installed `kernels`."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

METADATA = {
    "id": "norm_kernel",
    "name": "norm-kernel",
    "version": 1,
    "license": "Apache-2.0",
    "python-depends": [],
    "backend": {"type": "cpu"},
}
KERNEL = """
import torch
from torch import nn


class layers:
    class Norm(nn.Module):
        has_backward = True

        def forward(self, hidden_states):
            hidden = hidden_states.float()
            inverse = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
            return self.weight * (hidden * inverse).to(hidden_states.dtype)
"""

SCRIPT = """
import importlib.metadata
import sys

known = importlib.metadata.version
importlib.metadata.version = lambda name: "0.18.2" if name == "kernels" else known(name)

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, CONFIG_MAPPING, KernelConfig
from transformers.utils import kernel_config

import hf_megatron
from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.testing.parity import check_tiny_model, make_tiny_model

torch.set_num_threads(1)
# transformers has no mapping for CPUs.
kernel_config.KERNELS_SUPPORTED_DEVICE_TYPES.append("cpu")
folder = sys.argv[1]


def mapping(layer="RMSNorm"):
    return KernelConfig({layer: f"{folder}:Norm"}, use_local_kernel=True, inherit_mapping=False)


tiny_model = make_tiny_model(CONFIG_MAPPING["llama"](), task="causal", microbatches=2)
load = tiny_model.load


def check(text, faulty=False):
    def prepare(model):
        # The mapping holds in training.
        model.train()
        norms = [module for module in model.modules() if type(module).__name__ == "LlamaRMSNorm"]
        kernels = [module for module in norms if "forward" in vars(module)]
        files = {vars(module)["forward"].__func__.__code__.co_filename for module in kernels}
        assert kernels and len(files) == 1 and "norm_kernel" in files.pop()
        if faulty:
            kernels[0].variance_epsilon = 0.5

    tiny_model.load = lambda **kwargs: load(use_kernels=True, kernel_config=mapping(), **kwargs)
    return check_tiny_model(tiny_model, parse_layouts(text)[0], prepare=prepare)


for text in ("tp2", "tp2+sp", "pp2", "cp2", "dp2"):
    comparison = check(text)
    assert comparison.passed, comparison.report()
    print(text, "equal")
assert not check("tp2+sp", faulty=True).passed
print("fault detected")


def reject():
    layout = MegatronConfig(tp_size=2)
    with pytest.raises(UnsupportedError, match="kernel_config maps 'Linear'"):
        load(megatron_config=layout, kernel_config=mapping("Linear"))
    with pytest.raises(UnsupportedError, match="use_kernels=True .*Pass kernel_config=KernelConfig"):
        load(megatron_config=layout, use_kernels=True)


run_ranks(reject, 2)
print("rejected")
"""


@pytest.mark.skipif(find_spec("kernels") is None, reason="needs kernels")
def test_local_mapping(tmp_path):
    folder = tmp_path / "norm_kernel" / "build" / "torch-universal"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(KERNEL)
    (folder / "metadata.json").write_text(json.dumps(METADATA))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(script), str(tmp_path / "norm_kernel")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stderr[-4000:]
    assert result.stdout.split("\n")[-3:] == ["fault detected", "rejected", ""]
