"""Tests of `import hf_megatron` in fresh interpreters."""

import subprocess
import sys

import pytest


def run_python(code):
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@pytest.mark.parametrize(
    "order", ["hf_megatron, transformers", "transformers, hf_megatron", "transformers.trainer, hf_megatron"]
)
def test_patches_apply_in_any_import_order(order):
    run_python(
        f"""
import {order}
from transformers import PreTrainedModel, Trainer
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
PATCH_REGISTRY.activate()
for name in ("transformers.modeling_utils:PreTrainedModel.from_pretrained", "transformers.trainer:Trainer.__init__"):
    assert PATCH_REGISTRY.targets[name].applied, name
assert PreTrainedModel.from_pretrained.__func__.__code__.co_filename.endswith("patch_registry.py")
"""
    )


def test_import_loads_no_torch_or_optional_packages():
    run_python(
        """
import sys, hf_megatron
assert not {"torch", "transformers", "peft", "trl", "datasets", "megatron"} & set(sys.modules)
assert hf_megatron.MegatronConfig(tp_size=2).tp_size == 2
"""
    )


def test_disable_restores_originals_and_is_idempotent():
    run_python(
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
    run_python(
        """
import importlib, hf_megatron
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
from hf_megatron.compat.versions import is_for_other_version
PATCH_REGISTRY.activate()
for target in list(PATCH_REGISTRY.targets.values()):
    importlib.import_module(target.module_name)
    assert bool(target.applied) != is_for_other_version(target.target), target.target
"""
    )


def test_missing_patch_target_is_rejected():
    run_python(
        """
import transformers.trainer, pytest
from hf_megatron import MegatronError
from hf_megatron.compat.patch_registry import PATCH_REGISTRY, Patch
target = "transformers.trainer:Trainer.train_backwards"
with pytest.raises(MegatronError, match=f"{target} does not exist in the installed transformers"):
    PATCH_REGISTRY.declare(Patch(target, "hf_megatron.integrations.trainer.trainer:init", "", "", "", True))
"""
    )


def test_untested_version_warns_once(stories, tmp_path):
    # Metadata of another version, which precedes the installed version on `sys.path`.
    for name in ("transformers", "peft"):
        folder = tmp_path / f"{name}-99.1.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 99.1\n")
    run_python(
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
texts = [str(warning.message) for warning in caught if "not tested" in str(warning.message)]
imported = [name for name in ("transformers", "peft") if name in sys.modules]
expected = ["hf_megatron was not tested with " + name + " 99.1" for name in imported]
assert [text.partition(" (")[0] for text in texts] == expected
assert all(f"{{name}} {{first}} to {{last}}" in texts[0] for name, (first, last) in CHECKED.items())
assert all("Install a tested version, or compare with `hf-megatron check`." in text for text in texts)
from typer.testing import CliRunner
from hf_megatron.cli import app
result = CliRunner().invoke(app, ["check", "llama", "--layout", "tp2"])
assert result.exit_code == 0, result.output
"""
    )


def test_models_without_megatron_config_are_untouched(stories):
    run_python(
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


def test_too_many_ranks_raise_before_loading():
    run_python(
        """
import hf_megatron, pytest
from transformers import AutoModelForCausalLM
with pytest.raises(hf_megatron.ConfigError, match="torchrun --nproc_per_node 2"):
    AutoModelForCausalLM.from_pretrained("no/such/model", megatron_config={"tp_size": 2})
"""
    )


def test_import_adds_few_modules_to_transformers():
    """Import cost in modules, not seconds: only this library and modules that transformers loads anyway."""
    run_python(
        """
import sys, transformers.modeling_utils, accelerate
before = set(sys.modules)
import hf_megatron, hf_megatron.integrations.transformers.loading
new = {name.split(".")[0] for name in set(sys.modules) - before}
assert new <= {"hf_megatron", "torch", "huggingface_hub", "yaml", "transformers", "_yaml", "blake3"}, new
"""
    )


# Imports every patched library and defines helpers that list the patched targets of a process.
_PATCHED = """
import os
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
import importlib
import hf_megatron
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
from hf_megatron.integrations.patch_table import ENTRY_POINTS, PATCHES

for name in dict.fromkeys(patch.module_name for patch in PATCHES):
    importlib.import_module(name)
stock = {}

def value(target):
    owner, attribute = PATCH_REGISTRY.targets[target]._owner()
    return importlib.import_module("hf_megatron.compat.patch_registry")._attributes(owner).get(attribute)

def is_patched(function):
    function = getattr(function, "fget", getattr(function, "__func__", function))
    return getattr(getattr(function, "__code__", None), "co_filename", "").endswith("compat/patch_registry.py")

def patched():
    return {target for target in PATCH_REGISTRY.targets if is_patched(value(target))}
"""


def test_import_patches_entry_points_and_first_model_the_rest():
    run_python(
        _PATCHED
        + """
hf_megatron.disable()
stock = {target: value(target) for target in PATCH_REGISTRY.targets}
assert not patched()
hf_megatron.enable()
assert patched() == ENTRY_POINTS and len(ENTRY_POINTS) <= 12
assert not any(target.startswith("torch") for target in ENTRY_POINTS)
assert not any(hook.handle for hook in PATCH_REGISTRY.hooks.values())

from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
LlamaForCausalLM._from_config(config)
assert patched() == ENTRY_POINTS
LlamaForCausalLM._from_config(config, megatron_config={})
declared = {patch.target for patch in PATCHES}
from hf_megatron.compat.versions import is_for_other_version
assert declared - patched() == {target for target in declared if is_for_other_version(target)}
assert all(hook.handle for hook in PATCH_REGISTRY.hooks.values())

hf_megatron.disable()
assert not patched() and not any(hook.handle for hook in PATCH_REGISTRY.hooks.values())
assert all(value(target) is function for target, function in stock.items())
hf_megatron.enable()
assert declared <= patched() | {target for target in declared if is_for_other_version(target)}
"""
    )


def test_stock_model_runs_only_upstream_code(tmp_path):
    """Profiles every function called by Trainer's training and evaluation and by `generate`."""
    run_python(
        f"""
import sys, torch, hf_megatron
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32)
model = LlamaForCausalLM(config)
rows = Dataset.from_list([{{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}}] * 4)
args = TrainingArguments({str(tmp_path)!r}, use_cpu=True, save_strategy="no", report_to=[], max_steps=2, eval_steps=1)
own = set()

def run():
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    sys.setprofile(look)
    trainer.train()
    trainer.evaluate()
    model.generate(torch.tensor([[1, 2]]), max_new_tokens=2)
    sys.setprofile(None)

def look(frame, event, argument):
    if "hf_megatron" in frame.f_code.co_filename.replace({str(tmp_path)!r}, ""):
        own.add(frame.f_code.co_qualname)

run()
own.clear()
run()
# Optional modules that are not installed are looked for in every run, and pass through the import hook.
assert own <= {{"_EditableFinder.find_spec", "ImportFinder.find_spec", "PatchRegistry.watches"}}, own
import hf_megatron.compat.patch_registry
assert not hf_megatron.compat.patch_registry.PATCH_REGISTRY.is_active
"""
    )


def test_model_init_before_first_model_is_rejected(stories, tmp_path):
    run_python(
        f"""
import hf_megatron, pytest
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

def make():
    return AutoModelForCausalLM.from_pretrained({str(stories)!r}, megatron_config={{"tp_size": 1}})

args = TrainingArguments({str(tmp_path)!r}, use_cpu=True, report_to=[])
with pytest.raises(hf_megatron.ConfigError, match="Load the model first and pass it instead of model_init"):
    Trainer(args=args, model_init=make)
Trainer(model=make(), args=args)
"""
    )


def test_loading_imports_no_trainer(stories):
    """The trainer brings datasets, PEFT and more: 150 MiB in every process of a loop without it.

    The model is loaded inside a constructor, which may be a trainer's.
    """
    run_python(
        f"""
import sys, hf_megatron
from transformers import AutoModelForCausalLM

class Loop:
    def __init__(self):
        self.model = AutoModelForCausalLM.from_pretrained({str(stories)!r}, megatron_config={{"tp_size": 1}})

Loop()
assert not {{"transformers.trainer", "datasets"}} & set(sys.modules)
"""
    )


def test_trl_model_init_kwargs_apply_all_patches(tmp_path):
    run_python(
        f"""
import hf_megatron
from trl import SFTConfig, SFTTrainer
from hf_megatron.compat.patch_registry import PATCH_REGISTRY

SFTConfig({str(tmp_path)!r}, use_cpu=True, report_to=[])
assert not PATCH_REGISTRY.is_active
SFTConfig({str(tmp_path)!r}, use_cpu=True, report_to=[], model_init_kwargs={{"megatron_config": {{"tp_size": 2}}}})
assert PATCH_REGISTRY.is_active and SFTTrainer.__init__.__qualname__ == "SFTTrainer.__init__[trl.base]"
"""
    )


def test_chained_patches_show_features_in_stack_traces():
    run_python(
        """
import traceback, transformers.trainer
from transformers import Trainer
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
import hf_megatron
PATCH_REGISTRY.activate()
features = [patch.feature for patch in PATCH_REGISTRY.targets["transformers.trainer:Trainer.training_step"].patches]
assert features == ["trainer.ramp_up", "trainer.padded_batches", "trainer.pipeline"]
function, names = Trainer.training_step, []
while hasattr(function, "__wrapped__"):
    names.append(function.__qualname__)
    function = function.__wrapped__
assert names == [f"Trainer.training_step[{feature}]" for feature in features]
try:
    Trainer.training_step(None, None, None)
except AttributeError as error:
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
assert "training_step[trainer.ramp_up]" in frames, frames
"""
    )


def test_functions_are_replaced_under_every_name():
    run_python(
        """
import hf_megatron
from peft import get_peft_model_state_dict
import peft.utils, peft.peft_model

def names():
    modules = (peft, peft.utils, peft.peft_model, peft.utils.save_and_load)
    return {module.get_peft_model_state_dict for module in modules}

assert names() == {get_peft_model_state_dict}
assert get_peft_model_state_dict.__code__.co_name == "get_peft_model_state_dict[peft.injection]"
hf_megatron.disable()
assert names() == {get_peft_model_state_dict.__wrapped__}
hf_megatron.enable()
(replaced,) = names()
assert replaced.__wrapped__ is get_peft_model_state_dict.__wrapped__ and replaced is not replaced.__wrapped__
"""
    )


def test_user_patch_joins_chain_and_is_restored(tmp_path):
    (tmp_path / "own_patch.py").write_text(
        "calls = []\n\ndef log(original, self, logs):\n    calls.append(logs)\n\ndef never(self):\n    return False\n"
    )
    run_python(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import own_patch, transformers.trainer
from transformers import Trainer
stock = Trainer.log
import hf_megatron
from hf_megatron.compat.patch_registry import PATCH_REGISTRY, Patch
target = "transformers.trainer:Trainer.log"
PATCH_REGISTRY.activate()
outer = Trainer.log
assert outer is not stock
PATCH_REGISTRY.declare(Patch(target, "own_patch:log", "", "", "own_patch:never"))
PATCH_REGISTRY.declare(Patch(target, "own_patch:log", "", "always"))
names = [Trainer.log.__qualname__, Trainer.log.__wrapped__.__qualname__]
assert names == ["Trainer.log[trainer.callbacks.base]", "Trainer.log[own_patch]"]
Trainer.log.__wrapped__(None, {{"loss": 1.0}})
assert own_patch.calls == [{{"loss": 1.0}}]
hf_megatron.disable()
assert Trainer.log is stock
"""
    )


def test_partially_imported_module_is_patched_later():
    """Covers TRL's own script, which imports TRL, which imports torch, which imports this library."""
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
assert GRPOConfig.__post_init__.__code__.co_name == "__post_init__[trl.generation_sizes]"
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
