"""Tests of the check of models without a recorded result, which runs while they are loaded."""

import importlib
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch
from huggingface_hub import constants
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama import modeling_llama

from hf_megatron import MegatronConfig, UnverifiedLayoutError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models import automatic_check, verified
from hf_megatron.testing.tiny_config import tiny_config

IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))


class CappedLlama(LlamaForCausalLM):
    """A class with the layers of Llama and other logits."""

    def forward(self, input_ids, labels=None, **kwargs):
        outputs = super().forward(input_ids, labels=labels, **kwargs)
        outputs.logits = 5 * torch.tanh(outputs.logits / 5)
        return outputs


class CenteredMLP(modeling_llama.LlamaMLP):
    """An MLP that subtracts a mean over the intermediate size, which tp shards."""

    def forward(self, x):
        hidden = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(hidden - hidden.mean(-1, keepdim=True))


class CenteredLlama(LlamaForCausalLM):
    """A class that no tensor-parallel layout can train equally."""

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = CenteredMLP(config)
        self.post_init()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A Llama checkpoint, and an empty cache of checks."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "home"))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["llama"]())).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def train_step(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2}, {"cp_size": 2}], ids=lambda sizes: next(iter(sizes)))
def test_class_of_a_script_is_checked_once(folder, sizes, monkeypatch, capfd):
    expected = train_step(CappedLlama.from_pretrained(folder))

    def on_rank():
        return train_step(CappedLlama.from_pretrained(folder, megatron_config=MegatronConfig(**sizes)))

    assert run_ranks(on_rank, 2, timeout=300) == pytest.approx([expected] * 2, rel=1e-6)
    printed = capfd.readouterr().err
    assert re.search(r"CappedLlama on .*: equal to a single process, checked in \d+\.\d s\.", printed)
    [record] = automatic_check.cache_folder().iterdir()
    # A second run reads the result.
    monkeypatch.setattr(automatic_check.sys, "executable", "/bin/false")
    assert run_ranks(on_rank, 2) == pytest.approx([expected] * 2, rel=1e-6)
    assert "checked in" not in capfd.readouterr().err
    # Other code, versions or layouts need another check.
    content = record.read_text("utf-8")
    record.unlink()
    with pytest.raises(Exception, match="UnverifiedLayoutError"):
        run_ranks(on_rank, 2)
    # An error of the first rank alone is raised on all ranks.
    record.write_text(content[:-1], "utf-8")

    def raise_on_rank():
        with pytest.raises(UnverifiedLayoutError, match="The check could not run: JSONDecodeError"):
            on_rank()

    run_ranks(raise_on_rank, 2)


def test_functions_of_the_same_folder_belong_to_the_checked_code(tmp_path, monkeypatch):
    (tmp_path / "capping.py").write_text("LIMIT = 5\n", "utf-8")
    (tmp_path / "capped_model.py").write_text(
        "from transformers import LlamaForCausalLM\n\nimport capping\n\n\nclass Capped(LlamaForCausalLM):\n"
        "    limit = capping.LIMIT\n",
        "utf-8",
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("capped_model")
    with torch.device("meta"):
        model = module.Capped(tiny_config(CONFIG_MAPPING["llama"]()))
    before = automatic_check._hash_sources(model)
    assert before == automatic_check._hash_sources(model)
    (tmp_path / "capping.py").write_text("LIMIT = 6\n", "utf-8")
    assert before != automatic_check._hash_sources(model)


def test_class_that_differs_raises_and_can_be_allowed(folder):
    # Large weights, so that the means matter.
    config = tiny_config(CONFIG_MAPPING["llama"]())
    config.initializer_range = 0.2
    CenteredLlama(config).save_pretrained(folder)

    def on_rank():
        with pytest.raises(UnverifiedLayoutError) as error:
            CenteredLlama.from_pretrained(folder, megatron_config=MegatronConfig(tp_size=2))
        layout = MegatronConfig(tp_size=2, unverified="allow")
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            loss = train_step(CenteredLlama.from_pretrained(folder, megatron_config=layout))
        return str(error.value), loss

    for message, loss in run_ranks(on_rank, 2, timeout=300):
        assert "The parity check did not pass. Use another layout, or accept differences with" in message
        assert "CenteredLlama is not a class of transformers" in message and "x the limit" in message
        # The comparison was right: the values do differ.
        assert abs(loss - train_step(CenteredLlama.from_pretrained(folder))) > 1e-4


def test_modules_replaced_by_the_script_cannot_be_checked(folder, monkeypatch):
    """The subprocess builds the class without the script's replacements."""

    def on_rank():
        monkeypatch.setattr(modeling_llama, "LlamaMLP", CenteredMLP)
        with pytest.raises(UnverifiedLayoutError) as error:
            AutoModelForCausalLM.from_pretrained(folder, megatron_config=MegatronConfig(tp_size=2))
        return str(error.value)

    for message in run_ranks(on_rank, 2, timeout=300):
        assert "The loaded model has modules that LlamaForCausalLM does not create" in message


def test_module_with_the_name_of_a_stock_class_is_not_verified(folder, monkeypatch):
    same_name = type("LlamaMLP", (CenteredMLP,), {"__module__": __name__})

    def on_rank():
        monkeypatch.setattr(modeling_llama, "LlamaMLP", same_name)
        layout = MegatronConfig(tp_size=2, unverified="raise")
        with pytest.raises(UnverifiedLayoutError, match=r"test_automatic_check\.LlamaMLP"):
            AutoModelForCausalLM.from_pretrained(folder, megatron_config=layout)

    run_ranks(on_rank, 2)


def test_class_with_the_name_of_a_stock_class_is_not_verified(folder):
    same_name = type("LlamaForCausalLM", (CappedLlama,), {"__module__": __name__})

    def on_rank():
        layout = MegatronConfig(tp_size=2, unverified="raise")
        with pytest.raises(UnverifiedLayoutError, match="is not a class of transformers") as error:
            same_name.from_pretrained(folder, megatron_config=layout)
        assert 'Pass MegatronConfig(unverified="check")' in str(error.value)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"suppress_tokens": [1, 2]},
        {"suppress_tokens": None},
        {"suppress_tokens": [], "begin_suppress_tokens": [3, 4]},
        {"begin_suppress_tokens": None},
    ],
)
def test_fields_read_by_generation_only_do_not_count(fields):
    """Regression: public checkpoints of Whisper have such fields, and were not verified."""
    config = tiny_config(CONFIG_MAPPING["whisper"]())
    for name, value in fields.items():
        setattr(config, name, value)

    def on_rank():
        from transformers import AutoModelForSpeechSeq2Seq

        layout = MegatronConfig(tp_size=2, unverified="raise")
        model = AutoModelForSpeechSeq2Seq.from_config(config, megatron_config=layout)
        return {name: getattr(model.config, name) for name in fields}

    assert run_ranks(on_rank, 2) == [fields] * 2


def test_model_without_tokens_says_why_it_cannot_be_checked():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = ViTConfig(**sizes, image_size=8, patch_size=4)

    def on_rank():
        with pytest.raises(UnverifiedLayoutError, match="draws tokens, and ViTForImageClassification takes pixel_val"):
            ViTForImageClassification._from_config(config, megatron_config={"tp_size": 2})

    run_ranks(on_rank, 2, timeout=200)


def test_unrecorded_layout_of_a_stock_class_is_checked(folder, monkeypatch):
    records = tuple(row for row in verified.records() if row["model_type"] != "llama")
    monkeypatch.setattr(verified, "records", lambda: records)
    expected = train_step(AutoModelForCausalLM.from_pretrained(folder))

    def on_rank():
        layout = MegatronConfig(tp_size=2, sequence_parallel=True, timeout=5.0)
        return train_step(AutoModelForCausalLM.from_pretrained(folder, megatron_config=layout))

    # The check takes longer than a collective may.
    assert run_ranks(on_rank, 2, timeout=300) == pytest.approx([expected] * 2, rel=1e-6)


SCRIPT = """
import sys
import torch
import hf_megatron
from hf_megatron import MegatronConfig
from transformers import LlamaForCausalLM

class Scaled(LlamaForCausalLM):
    def forward(self, input_ids, labels=None, **kwargs):
        outputs = super().forward(input_ids, labels=labels, **kwargs)
        outputs.loss = None if outputs.loss is None else 2 * outputs.loss
        return outputs

layout = {} if sys.argv[2] == "plain" else {"megatron_config": MegatronConfig(tp_size=2)}
model = Scaled.from_pretrained(sys.argv[1], **layout)
ids = torch.arange(3, 27).view(2, 12)
sys.stdout.write(f"loss {model(input_ids=ids, labels=ids).loss.item():.4f}\\n")
"""


def test_class_of_the_main_script_is_checked(folder, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, "utf-8")
    environment = os.environ | {"HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}

    def run(*command):
        process = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=400
        )
        assert process.returncode == 0, process.stderr
        return re.findall(r"^loss .*", process.stdout, re.MULTILINE)

    [expected] = run(str(script), str(folder), "plain")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(script), str(folder), "tp2")
    assert run(*launch) == [expected] * 2
    assert len(list((tmp_path / "home" / "hf_megatron" / "checks").iterdir())) == 1
