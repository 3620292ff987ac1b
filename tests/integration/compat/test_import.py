"""What `import hf_megatron` does and does not do, in fresh interpreters."""

import subprocess
import sys

import pytest


def python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize(
    "order", ["hf_megatron, transformers", "transformers, hf_megatron", "transformers.trainer, hf_megatron"]
)
def test_either_order_patches(order):
    python(
        f"""
import {order}
from transformers import PreTrainedModel, Trainer
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
for name in ("transformers.modeling_utils:PreTrainedModel.from_pretrained", "transformers.trainer:Trainer.__init__"):
    assert PATCH_REGISTRY.patches[name].applied, name
assert PreTrainedModel.from_pretrained.__func__.__code__.co_filename.endswith("patch_registry.py")
"""
    )


def test_imports_no_optional_package_and_no_torch():
    python(
        """
import sys, hf_megatron
assert not {"torch", "transformers", "peft", "trl", "datasets", "megatron"} & set(sys.modules)
assert hf_megatron.MegatronConfig(tp_size=2).tp_size == 2
"""
    )


def test_disable_restores_the_identical_objects_and_twice_is_once():
    python(
        """
import transformers.trainer, accelerate.accelerator, transformers.generation.utils, torch.nn.parallel.distributed
from transformers.modeling_utils import PreTrainedModel
from accelerate import Accelerator
from transformers import Trainer
before = [dict(vars(c)) for c in (PreTrainedModel, Trainer, Accelerator)]
import hf_megatron
patched = dict(vars(PreTrainedModel))
assert patched["from_pretrained"] is not before[0]["from_pretrained"]
hf_megatron.enable()
assert dict(vars(PreTrainedModel)) == patched
hf_megatron.disable()
hf_megatron.disable()
for cls, old in zip((PreTrainedModel, Trainer, Accelerator), before):
    assert all(vars(cls)[name] is value for name, value in old.items()), cls
hf_megatron.enable()
assert vars(PreTrainedModel)["from_pretrained"] is not before[0]["from_pretrained"]
"""
    )


def test_every_patch_target_exists():
    python(
        """
import importlib, hf_megatron
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
from hf_megatron.compat.versions import is_of_other_versions
for patch in PATCH_REGISTRY.patches.values():
    importlib.import_module(patch.module_name)
    assert patch.applied != is_of_other_versions(patch.target), patch.target
"""
    )


def test_a_target_that_is_missing_is_refused_by_name():
    python(
        """
import transformers.trainer, pytest
from hf_megatron import MegatronError
from hf_megatron.compat.patch_registry import Patch
target = "transformers.trainer:Trainer.train_backwards"
with pytest.raises(MegatronError, match=f"{target} does not exist in the installed transformers"):
    Patch(target, "hf_megatron.integrations.trainer.trainer:init", "", "").apply()
"""
    )


def test_a_version_outside_of_what_was_checked_warns_once(stories, tmp_path):
    # What pip would say of another version, in front of what it says of the installed one.
    for name in ("transformers", "peft"):
        folder = tmp_path / f"{name}-99.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.1\n")
    python(
        f"""
import sys, warnings
from transformers import LlamaForCausalLM
from hf_megatron.compat.versions import CHECKED
sys.path.insert(0, {str(tmp_path)!r})
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    LlamaForCausalLM.from_pretrained({str(stories)!r})
    assert not caught
    for _ in range(2):
        LlamaForCausalLM.from_pretrained({str(stories)!r}, megatron_config={{}})
texts = [str(warning.message) for warning in caught if "not checked" in str(warning.message)]
imported = [name for name in ("transformers", "peft") if name in sys.modules]
expected = ["hf_megatron was not checked with " + name + " 99.1" for name in imported]
assert [text.partition(", ")[0] for text in texts] == expected
assert all(f"{{name}} {{first}} to {{last}}" in texts[0] for name, (first, last) in CHECKED.items())
"""
    )


def test_models_without_the_argument_are_untouched(stories):
    python(
        f"""
import hf_megatron, torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM
model = AutoModelForCausalLM.from_pretrained({str(stories)!r})
assert type(model) is LlamaForCausalLM and type(model.lm_head) is torch.nn.Linear
assert not torch.distributed.is_initialized() and not model._forward_pre_hooks
one = AutoModelForCausalLM.from_pretrained({str(stories)!r}, megatron_config=hf_megatron.MegatronConfig())
assert type(one.lm_head) is torch.nn.Linear and not torch.distributed.is_initialized()
"""
    )


def test_more_ranks_than_the_job_has_raises_before_anything_is_read():
    python(
        """
import hf_megatron, pytest
from transformers import AutoModelForCausalLM
with pytest.raises(hf_megatron.ConfigError, match="torchrun --nproc_per_node 2"):
    AutoModelForCausalLM.from_pretrained("no/such/model", megatron_config={"tp_size": 2})
"""
    )


def test_time_of_import_on_top_of_transformers():
    """Counted in modules, not seconds: nothing outside the library and what transformers loads anyway."""
    python(
        """
import sys, transformers.modeling_utils, accelerate
before = set(sys.modules)
import hf_megatron, hf_megatron.integrations.transformers.loading
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert new <= {"hf_megatron", "torch", "huggingface_hub", "yaml", "transformers", "_yaml", "blake3"}, new
"""
    )


def test_a_module_that_is_being_imported_is_patched_afterwards():
    """As where TRL's own script imports TRL, which imports torch, which imports this library."""
    program = """
import importlib.abc, sys

class Late(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "trl.trainer.base_config" and "hf_megatron" not in sys.modules:
            assert "trl.trainer.grpo_config" in sys.modules
            import hf_megatron

sys.meta_path.insert(0, Late())
from trl.trainer.grpo_config import GRPOConfig
assert "hf_megatron" in sys.modules
assert GRPOConfig.__post_init__.__code__.co_name == "replacement"
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
