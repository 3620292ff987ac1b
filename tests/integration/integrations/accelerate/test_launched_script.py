"""Tests of `python -m hf_megatron` with scripts that do not import this library."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTModel,
)

from hf_megatron import MegatronConfig, UnsupportedError, config_from_environment
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.runtime import RUNTIME
from hf_megatron.integrations.accelerate.environment import export_layout
from hf_megatron.integrations.accelerate.launched_script import Launch, run_script
from hf_megatron.parallel_state import parallel_state

TP2, PP2 = MegatronConfig(tp_size=2), MegatronConfig(pp_size=2)
SCRIPT = """
import json
import sys
from transformers import AutoModelForCausalLM

path, *rest = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(path)
reference = AutoModelForCausalLM.from_pretrained(path).requires_grad_(False)
local = sum(getattr(p, "_local_tensor", p).numel() for p in model.parameters())
own = [n for n, m in (("model", model), ("reference", reference)) if "DTensor" in str(type(m.lm_head.weight))]
with open(f"{rest[0]}.{__import__('os').environ.get('RANK', 0)}", "w") as file:
    json.dump({"name": __name__, "argv": rest, "place": sys.path[0], "split": own, "local": local}, file)
"""


def run_launched_script(tmp_path, stories, *start, **environment):
    """Runs the script; returns the report of each rank and stderr."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "its_own.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", *start, str(stories), str(tmp_path / "seen"), "--its", "own flags"]
    result = subprocess.run(
        command, cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(file.read_text("utf-8")) for file in sorted(tmp_path.glob("seen.*"))], result.stderr


YAML = """
compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
megatron_lm_config:
  megatron_lm_tp_degree: 2
  megatron_lm_sequence_parallelism: true
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: true
"""


def test_accelerate_launches_unmodified_script(tmp_path, stories):
    (tmp_path / "megatron.yaml").write_text(YAML, encoding="utf-8")
    launcher = ("accelerate.commands.launch", "--config_file", "megatron.yaml", "-m", "hf_megatron")
    reports, stderr = run_launched_script(tmp_path, stories, *launcher, "scripts/its_own.py")
    for rank in reports:
        assert rank["name"] == "__main__" and rank["argv"][1:] == ["--its", "own flags"]
        assert rank["place"] == str(tmp_path / "scripts") and rank["split"] == ["model", "reference"]
    assert stderr.count("hf_megatron: LlamaForCausalLM is parallelized: tp2+sp.") == 1


def test_torchrun_launches_a_module(tmp_path, stories):
    launcher = ("torch.distributed.run", "--nproc_per_node", "2", "-m", "hf_megatron", "-m", "scripts.its_own")
    reports, stderr = run_launched_script(tmp_path, stories, *launcher, HF_MEGATRON_TP_SIZE="2")
    assert [rank["split"] for rank in reports] == [["model", "reference"]] * 2
    assert stderr.count("hf_megatron: LlamaForCausalLM is parallelized: tp2.") == 1


def test_single_process_is_not_parallelized(tmp_path, stories):
    [report], stderr = run_launched_script(tmp_path, stories, "hf_megatron", "scripts/its_own.py")
    assert report["split"] == [] and "parallelized" not in stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py"], "SCRIPT = 'nothing.py': there is no such file."),
        (["--config", "nothing.yaml", "its_own.py"], "nothing.yaml"),
        (["--config", "tp2.yaml", "its_own.py"], "needs tp_size=2 x cp_size=1 x pp_size=1 = 2 ranks, the job has 1"),
    ],
)
def test_start_errors_are_one_line(tmp_path, arguments, said):
    (tmp_path / "its_own.py").write_text("raise SystemExit('was run')", encoding="utf-8")
    (tmp_path / "tp2.yaml").write_text("tp_size: 2", encoding="utf-8")
    command = [sys.executable, "-m", "hf_megatron", *arguments]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 2 and said in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "layout",
    [
        MegatronConfig(),
        MegatronConfig(tp_size=2, sequence_parallel=True, timeout=7.5, recompute="full"),
        MegatronConfig(pp_size=2, pipeline_partition=(1, 3), num_microbatches=4, zero_stage=0),
    ],
)
def test_layout_round_trips_through_environment(layout, monkeypatch):
    monkeypatch.setattr(os, "environ", {"HF_MEGATRON_TP_SIZE": "8", "HOME": "/"})
    export_layout(layout)
    assert config_from_environment() == layout


def run_in_launch(function, layout, *args):
    """Runs a function as if it were a launched script."""
    PATCH_REGISTRY.activate()
    RUNTIME.launch = Launch(layout)
    try:
        return function(*args)
    finally:
        RUNTIME.launch = None


def make_vit_config():
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTConfig(**sizes, image_size=8, patch_size=4)


def make_models(path, output):
    model, info = AutoModelForCausalLM.from_pretrained(path, device_map="auto", output_loading_info=True)
    assert parallel_state(model) is not None and not info["missing_keys"]
    drawn = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    assert parallel_state(drawn) is not None
    config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=9)
    encoder_decoder = EncoderDecoderModel(config=EncoderDecoderConfig.from_encoder_decoder_configs(config, config))
    assert parallel_state(encoder_decoder.encoder) is None and parallel_state(encoder_decoder.decoder) is None
    vit = ViTModel._from_config(make_vit_config())
    assert parallel_state(vit) is None
    vit.save_pretrained(f"{output}/vit{torch.distributed.get_rank()}")
    # A frozen model is only used for inference.
    vit.requires_grad_(False)(torch.zeros(1, 3, 8, 8))
    assert Accelerator(cpu=True).prepare_model(vit) is vit
    return True


def test_models_are_parallelized_or_replicated(stories, tmp_path, capfd):
    assert run_ranks(run_in_launch, 2, make_models, TP2, stories, tmp_path) == [True, True]
    stderr = capfd.readouterr().err
    assert stderr.count("hf_megatron: LlamaForCausalLM is parallelized: tp2.") == 1
    assert stderr.count("hf_megatron: ViTModel was not parallelized (replicated on every rank): ") == 1


def train_unparallelized_models(path, output):
    arguments = TrainingArguments(str(output), use_cpu=True, report_to=[])
    by_hand = LlamaForCausalLM(AutoConfig.from_pretrained(path))
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM was not parallelized and cannot be trained: it was"):
        Trainer(by_hand, arguments)
    vit = ViTModel._from_config(make_vit_config())
    with pytest.raises(
        UnsupportedError,
        match="ViTModel was not parallelized and cannot be trained: ViTModel .* has no matching parity",
    ):
        Accelerator(cpu=True).prepare(vit)
    return True


def test_unparallelized_models_are_not_trained(stories, tmp_path):
    assert run_ranks(run_in_launch, 2, train_unparallelized_models, TP2, stories, tmp_path) == [True, True]


def step_by_hand(path, wrapped):
    """Trains a model of a class in a plain loop; returns whether the weights are unchanged after the rejected step."""
    model = LlamaForCausalLM(AutoConfig.from_pretrained(path))
    if wrapped:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(3, 11)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    before = [weight.detach().clone() for weight in model.parameters()]
    with pytest.raises(UnsupportedError, match="LlamaForCausalLM was not parallelized and cannot be trained: it was"):
        optimizer.step()
    return all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize(("layout", "wrapped"), [(TP2, False), (MegatronConfig(dp_size=2), True)])
def test_plain_loops_do_not_train_models_of_a_class(stories, layout, wrapped):
    assert run_ranks(run_in_launch, 2, step_by_hand, layout, stories, wrapped) == [True, True]


def step_in_plain_loops(path):
    """Trains a parallelized model and another module by unprepared optimizers in one script."""
    model, head = AutoModelForCausalLM.from_pretrained(path), torch.nn.Linear(2, 1)
    ids = torch.arange(3, 11)[None]
    for module, loss in ((model, model(input_ids=ids, labels=ids).loss), (head, head(torch.ones(1, 2)).sum())):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        loss.backward()
        optimizer.step()
        optimizer.step()
    return True


@pytest.mark.parametrize("layout", [TP2, PP2])
def test_plain_loops_train_parallelized_models(stories, layout):
    assert run_ranks(run_in_launch, 2, step_in_plain_loops, layout, stories) == [True, True]


def run_failing_script(script, layout):
    sys.path.insert(0, "")
    with pytest.raises(ValueError, match="of the script"):
        run_script(str(script), [], layout)
    assert RUNTIME.launch is None
    return True


def test_script_errors_propagate(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(textwrap.dedent("raise ValueError('of the script')"), encoding="utf-8")
    assert run_ranks(run_failing_script, 2, script, PP2) == [True, True]
