"""Tests of all launch commands in README, docs and examples, mostly with a probe instead of the script."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.documented import list_documented_commands

ROOT = Path(__file__).parents[4]
MAIN_LAUNCH = "accelerate launch --config_file examples/accelerate_tp2_cpu.yaml"
PROBE = """
import os
import hf_megatron, torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
config = hf_megatron.config_from_environment()
if config.tp_size == 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
    config = hf_megatron.MegatronConfig(tp_size=2)
model = AutoModelForCausalLM.from_pretrained({stories!r}, megatron_config=config)
arguments = TrainingArguments({output!r}, save_strategy="no", report_to=[])
trainer = Trainer(model, arguments)
probe = [trainer.args.world_size, config.layout(), getattr(model, "_tp_size", None)]
open({output!r} + f"/{{os.environ.get('RANK', 0)}}.probe", "w").write(repr(probe))
"""


def list_documented_launches():
    """Returns each distinct documented launch (up to the script), without the main example and `-m hf_megatron`."""
    pages = {}
    for start in ("accelerate launch ", "torchrun ", "python "):
        for page, command in list_documented_commands(start):
            # Launches that differ only in the folder of train.py are equal.
            launch = command.partition("train.py")[0].rpartition(" ")[0]
            if "train.py" in command and "-m hf_megatron" not in command and MAIN_LAUNCH not in command:
                pages.setdefault(f"{launch} examples/train.py", page)
    return [pytest.param(command, id=f"{page}: {command}") for command, page in pages.items()]


def run(words, tmp_path, cwd=ROOT):
    environment = dict(os.environ, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False)


def read_probes(folder):
    """Returns the probe of each rank and removes the files; lines on a shared stdout could interleave."""
    files = sorted(folder.glob("*.probe"))
    assert [file.stem for file in files] == [str(rank) for rank in range(len(files))]
    texts = [file.read_text() for file in files]
    for file in files:
        file.unlink()
    return [ast.literal_eval(text) for text in texts]


@pytest.mark.parametrize("command", list_documented_launches())
def test_documented_launch_has_expected_ranks(command, stories, tmp_path):
    if "gpu.yaml" in command:
        # The GPU file differs in precision only; on this machine it starts CPU ranks.
        assert "num_processes: 2" in (ROOT / "examples" / "accelerate_tp2_gpu.yaml").read_text()
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE.format(stories=str(stories), output=str(tmp_path)))
    # Replace the script, and the name of the reader's configuration file.
    replaced = {"examples/train.py": str(probe), "megatron.yaml": "examples/accelerate_tp2_cpu.yaml"}
    words = [replaced.get(word, word) for word in shlex.split(command)]
    # Any free port, because several test suites may run on one machine.
    if words[0] == "torchrun":
        words[1:1] = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    elif words[:2] == ["accelerate", "launch"]:
        words[2:2] = ["--main_process_port", "0"]
    result = run(words, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    reports = read_probes(tmp_path)
    ranks = 1 if words[0] == "python" else 4 if "dp2" in command else 2
    if "--nproc_per_node" in words:
        ranks = int(words[words.index("--nproc_per_node") + 1])
    assert len(reports) == ranks
    replicas, expected_tp_size = (1, None) if ranks == 1 else (ranks // 2, 2)
    assert all(processes == replicas and tp_size == expected_tp_size for processes, _, tp_size in reports)


def test_main_example(tmp_path):
    """Short run of examples/train.py: the loss falls, the merged checkpoint is reloaded, text is generated."""
    result = run(
        [
            *MAIN_LAUNCH.split(),
            "--main_process_port",
            "0",
            "examples/train.py",
            "--max_steps",
            "12",
            "--output_dir",
            str(tmp_path / "out"),
            "--logging_steps",
            "2",
        ],
        tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    first, last = re.search(r"Training loss ([\d.]+) -> ([\d.]+)", result.stdout).groups()
    assert float(last) < float(first)
    assert "Generated:" in result.stdout and "equal within" in result.stdout
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "tokenizer.json").exists()


def test_main_example_in_single_process_with_other_data(stories, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"Story {i}. Once upon a time there was a dog named {i}." * 20 for i in range(60)))
    result = run(
        [
            sys.executable,
            "examples/train.py",
            "--model",
            str(stories),
            "--data",
            str(text),
            "--max_steps",
            "3",
            "--output_dir",
            str(tmp_path / "out"),
            "--sequence_length",
            "64",
        ],
        tmp_path,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "equal within" in result.stdout


@pytest.mark.parametrize("quantization", ["none", "nf4-double", "int8"])
def test_lora_example(quantization, tmp_path):
    """Short run of examples/lora.py: base model, adapter, equal loss in plain PEFT, generated text."""
    output = tmp_path / "out"
    launch = [*MAIN_LAUNCH.split(), "--main_process_port", "0", "examples/lora.py", "--output_dir", str(output)]
    short = ["--base_steps", "6", "--max_steps", "8", "--save_steps", "4", "--quantization", quantization]
    result = run([*launch, *short], tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    before, after = re.search(r"Evaluation loss ([\d.]+) -> ([\d.]+)", result.stdout).groups()
    assert float(after) < float(before)
    assert "Generated:" in result.stdout and "in plain PEFT: equal within" in result.stdout
    assert (output / "adapter_model.safetensors").exists() and not (output / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_post_training_examples(name, tmp_path):
    """Short runs of examples/dpo.py and grpo.py: base model and post-training, saved for plain transformers."""
    output = tmp_path / "out"
    launch = [*MAIN_LAUNCH.split(), "--main_process_port", "0", f"examples/{name}.py", "--output_dir", str(output)]
    result = run([*launch, "--base_steps", "20", "--max_steps", "12", "--logging_steps", "4"], tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    patterns = {"dpo": r"Margin of rewards 0.00 -> 0\.\d+", "grpo": r"Mean reward [\d.]+ -> [\d.]+"}
    assert re.search(patterns[name], result.stdout), result.stdout
    assert (output / "model.safetensors").exists()


RECIPE = """
model_name_or_path: {stories}
dtype: float32
datasets:
  - path: json
    data_files: {{train: {rows}}}
accelerate_config: {launcher}
output_dir: {output}
max_steps: 2
logging_steps: 1
per_device_train_batch_size: 4
bf16: false
use_cpu: true
report_to: none
"""
COMMANDS = {
    "sft": ("", {"prompt": "Once upon a time", "completion": " there was a dog."}),
    "dpo": ("", {"prompt": "Once upon a time", "chosen": " there was a dog.", "rejected": " a a a."}),
    "grpo": (
        "reward_funcs: [hf_megatron_test_rewards.vowels]\nnum_generations: 4\nmax_completion_length: 4\n",
        {"prompt": "Once upon a time"},
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_trl_cli_commands(name, stories, tmp_path):
    """Commands such as `trl sft --config recipe.yaml`, whose scripts do not import this library."""
    more, row = COMMANDS[name]
    (tmp_path / "rows.jsonl").write_text("\n".join([json.dumps(row)] * 16))
    (tmp_path / "hf_megatron_test_rewards.py").write_text(
        "def vowels(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"
    )
    paths = {"stories": stories, "rows": tmp_path / "rows.jsonl", "output": tmp_path / "out"}
    recipe = RECIPE.format(**paths, launcher=ROOT / "examples" / "accelerate_tp2_cpu.yaml") + more
    (tmp_path / "recipe.yaml").write_text(recipe)
    command = [sys.executable, "-m", "trl.cli.main", name, "--config", str(tmp_path / "recipe.yaml")]
    result = run([*command, "--main_process_port", "0"], tmp_path, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "hf_megatron: LlamaForCausalLM is parallelized: tp2+sp" in result.stderr
    assert (tmp_path / "out" / "model.safetensors").exists()


STAGES = """
compute_environment: LOCAL_MACHINE
distributed_type: MEGATRON_LM
num_machines: 1
num_processes: 2
machine_rank: 0
mixed_precision: "no"
use_cpu: true
megatron_lm_config:
  megatron_lm_tp_degree: 1
  megatron_lm_pp_degree: 2
  megatron_lm_num_micro_batches: 3
  megatron_lm_gradient_clipping: 1.0
  megatron_lm_use_distributed_optimizer: true
"""
STAGES_SCRIPT = """
import os
import hf_megatron, torch
from hf_megatron.models.verification_gate import ConfigUnderTest
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed
config = ConfigUnderTest(**hf_megatron.config_from_environment().to_dict())
set_seed(0)
model = AutoModelForCausalLM.from_pretrained({stories!r}, megatron_config=config)
ids = torch.randint(3, 512, (16, 20))
arguments = TrainingArguments(
    {output!r}, save_strategy="no", report_to=[], logging_steps=1, max_steps=2, max_grad_norm=1.0,
    gradient_accumulation_steps=2, per_device_train_batch_size=4, disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=[dict(input_ids=row, labels=row) for row in ids])
trainer.train()
numbers = [x for entry in trainer.state.log_history if "loss" in entry for x in (entry["loss"], entry["grad_norm"])]
probe = [config.layout(), config.num_microbatches, *numbers]
open({output!r} + f"/{{os.environ.get('RANK', 0)}}.probe", "w").write(repr(probe))
"""


def test_pipeline_stages_from_a_yaml(stories, tmp_path):
    """Trains with `megatron_lm_pp_degree` and `megatron_lm_num_micro_batches` against a single process."""
    (tmp_path / "stages.yaml").write_text(STAGES)
    (tmp_path / "stages.py").write_text(STAGES_SCRIPT.format(stories=str(stories), output=str(tmp_path)))
    options = ["--main_process_port", "0", "--config_file", str(tmp_path / "stages.yaml")]
    commands = [
        ["accelerate", "launch", *options, str(tmp_path / "stages.py")],
        [sys.executable, str(tmp_path / "stages.py")],
    ]
    results = []
    for command in commands:
        result = run(command, tmp_path)
        assert result.returncode == 0, result.stderr[-3000:]
        results.append(read_probes(tmp_path))
    parallel, expected = results
    assert [line[:2] for line in parallel] == [["tp1+pp2", 3]] * 2 and len(expected) == 1
    for line in parallel:
        assert line[2:] == pytest.approx(expected[0][2:], rel=2e-6)


LOADS_AND_SAVES = """
import hf_megatron
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained({stories!r}, megatron_config=hf_megatron.MegatronConfig({layout}))
model.save_pretrained({output!r})
"""


@pytest.mark.parametrize("layout", ["tp_size=2", "pp_size=2"])
def test_only_one_rank_shows_progress_bars(stories, tmp_path, layout):
    script = tmp_path / "script.py"
    script.write_text(LOADS_AND_SAVES.format(stories=str(stories), layout=layout, output=str(tmp_path / "saved")))
    result = run(["torchrun", "--nproc-per-node", "2", str(script)], tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("Loading weights: 100%") == 1, result.stderr
    assert result.stderr.count("Writing model shards: 100%") <= 1 and not re.search(r"(?<![\d.])0it", result.stderr), (
        result.stderr
    )


def test_pretraining_resumes_on_another_layout(tmp_path):
    """Short run of examples/pretrain.py: two tensor-parallel ranks, then two data-parallel ranks."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    script = [*launch, "examples/pretrain.py", "--output_dir", str(tmp_path / "out"), "--train_iters", "24"]
    result = run([*script, "--tp_size", "2"], tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    uninterrupted = re.search(r"evaluation loss ([\d.]+) after 24 steps", result.stdout).group(1)
    shutil.rmtree(tmp_path / "out" / "checkpoint-24")
    result = run([*script, "--resume"], tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    again = re.search(r"evaluation loss ([\d.]+) after 24 steps", result.stdout).group(1)
    assert float(again) == pytest.approx(float(uninterrupted), abs=2e-3)
