"""Tests of the commands in README and docs: `hf-megatron` commands run here, others in the files of `OTHER_TESTS`."""

import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.conversion import convert
from tests.helpers.documented import ROOT, list_documented_commands, list_unrecognized_commands
from tests.helpers.megatron_pre_core import extract_gpt2_weights, write_checkpoint
from tests.helpers.tiny_models import build_tiny_model
from tests.readme_command import find_readme_command

_LAUNCH = "tests/integration/integrations/accelerate/test_launch.py"
_LAUNCHED_SCRIPT = "tests/integration/integrations/accelerate/test_launched_script.py"

# Documented argument -> test argument.
SUBSTITUTIONS = {
    "meta-llama/Llama-3.1-8B": "{model}",
    "/runs/megatron-lm/checkpoints": "{megatron}",
    "megatron_lm_345m": "{before_core}",
    "openai-community/gpt2-medium": "{gpt2}",
    "outputs/megatron-llama/checkpoint-100": "{checkpoint}",
    "hf_megatron/models/verified.json": "verified.json",
    "CHECKPOINT": "{checkpoint}",
    "MODEL": "{model}",
    "meta-llama/Llama-3.1-70B": "{model}",
    "SRC": "{model}",
    "TYPE": "llama",
    # GPT-2 has the fewest variants.
    "gemma2": "gpt2",
    "DST": "converted",
    "OUT": "merged",
    "DIR": "timeline",
    # Sizes that tiny models support.
    "8": "4",
    "tp8": "tp4",
    # Checking every model type takes 15 minutes.
    "all": "gpt2",
}
OTHER_TESTS = {
    r"hf-megatron data .*": "tests/integration/cli/test_data.py",
    r"hf-megatron debug compare .*": "tests/integration/diagnostics/test_divergence.py",
    r"hf-megatron debug trace .*": "tests/integration/diagnostics/test_step_trace.py",
    r"hf-megatron debug memory .*": "tests/integration/diagnostics/test_step_memory.py",
    r"hf-megatron debug hang .*": "tests/faults/core/communication/test_hangs.py",
    r"hf-megatron debug report .*": "tests/integration/diagnostics/test_run_report.py",
    r"(HF_MEGATRON\S+ )?(accelerate|torchrun|python) (.* )?-m hf_megatron( .*)?": _LAUNCHED_SCRIPT,
    r"(accelerate launch|torchrun|python) .*train\.py.*": _LAUNCH,
    r"(accelerate launch|torchrun) .*examples/lora\.py.*": _LAUNCH,
    r"(accelerate launch|torchrun) .*examples/(dpo|grpo)\.py.*": _LAUNCH,
    r"trl grpo --config recipe\.yaml": _LAUNCH,
    r"(torchrun|python) .*examples/pretrain\.py.*": _LAUNCH,
    r"accelerate launch( --cpu --num_processes 2)?": _LAUNCH,
    # Command of the page with ten models.
    r"hf-megatron plan \S+ --num-gpus 64 --gpu h100 --seq-length 8192 .*": "tests/integration/test_benchmarks.py",
    r"hf-megatron dry-run meta-llama.*": "tests/integration/planner/test_rank_predictions.py",
    r"hf-megatron convert (llava-hf|llava-core).*": "tests/integration/conversion/test_multimodal.py",
    r"hf-megatron convert-adapter .*": "tests/integration/conversion/adapters/test_convert.py",
    r"hf-megatron (push|pull) .*": "tests/integration/integrations/hub/test_hub.py",
    r"python -m pytest .*|ruff check \.": ".ci/run",
    r"python benchmarks/.*": "tests/integration/test_benchmarks.py",
    r"python -m tests\.matrix .*": "tests/matrix.json",
    r"python -m tests\.upgrade.*": "tests/unit/test_upgrade.py",
    r"python -m tests\.where .*": "tests/unit/test_suite.py",
    r"python -m tests\.generated_docs": "tests/integration/test_docs.py",
    r"python -m tests\.helpers\.loop_patterns.*": "tests/integration/fuzz/test_patterns.py",
    r"python -m tests\.helpers\.mutated_files .*": "tests/integration/conversion/test_mutated_files.py",
    r"python -m tests\.helpers\.flips.*": "tests/integration/models/test_verification_gate.py",
    r"python -m tests\.helpers\.third_party_scripts.*": "tests/integration/integrations/test_third_party_scripts.py",
    r"python -m tests.fuzz.*": "tests/integration/fuzz/test_campaign.py",
    r"hf-megatron check .* --device cuda": "tests/integration/cli/test_cli.py",
    r"(PYTORCH_\w+=1 )?python -m pytest tests/integration/test_gpu.py.*": "tests/integration/test_gpu.py",
    r"python -m tests.helpers.trajectories": "tests/helpers/trajectories.py",
    r"pip install -e \.": ".ci/run",
    r"pip install .*(hf_megatron\[(plots|quantized)\]|megatron-core).*": "tests/integration/test_packaging.py",
}


@pytest.fixture(scope="module")
def places(stories, tmp_path_factory):
    folder = tmp_path_factory.mktemp("documented")
    convert(stories, folder / "checkpoint", "sharded")
    convert(stories, folder / "megatron", "megatron_legacy")
    (folder / "megatron" / "config.json").unlink()
    model = build_tiny_model("gpt2")
    model.save_pretrained(folder / "gpt2")
    write_checkpoint(folder / "before_core", extract_gpt2_weights(model), "2020", 0)
    folders = {name: str(folder / name) for name in ("checkpoint", "megatron", "before_core", "gpt2")}
    return {"model": str(stories), **folders}


def find_other_test(command):
    return next((place for pattern, place in OTHER_TESTS.items() if re.fullmatch(pattern, command)), None)


def list_page_commands():
    """Returns the commands of each page, which run in order."""
    pages = {}
    for page, command in list_documented_commands("hf-megatron "):
        if not find_other_test(command):
            pages.setdefault(page, []).append(command)
    return [pytest.param(commands, id=page) for page, commands in pages.items()]


@pytest.mark.parametrize("commands", list_page_commands())
def test_page_commands_run(commands, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = [SUBSTITUTIONS.get(word, word).format(**places) for word in shlex.split(command)[1:]]
        # A command mentioned with no arguments.
        words += ["--help"] * (len(words) == 1 or words[1:2] == ["--to"])
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (command, result.output, result.exception)


def test_remaining_commands_have_tests():
    for place in OTHER_TESTS.values():
        assert (ROOT / place).exists()
    install = [part for name in ("run", "test", "test everything") for part in find_readme_command(name).split(" && ")]
    cli_commands = [command for _, command in list_documented_commands("hf-megatron ")]
    launch_commands = [
        command
        for start in ("accelerate ", "torchrun ", "python", "pip ", "ruff ")
        for _, command in list_documented_commands(start)
    ] + list_unrecognized_commands()
    run_below = {" ".join(command.split()[:3]) for command in HELPERS}
    unknown = [
        command
        for command in launch_commands
        if command not in install and not find_other_test(command) and " ".join(command.split()[:3]) not in run_below
    ]
    assert cli_commands and unknown == []


HELPERS = (
    "python -m tests.structure",
    "python -m tests.helpers.costs costs.json",
    "python -m tests.support_table docs.md",
)


@pytest.mark.parametrize("command", HELPERS)
def test_documented_helpers_run(command, tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"test.py::test": {"call": [1.0, 1.0, 0.0]}}))
    shutil.copy(ROOT / "docs" / "supported_models.md", tmp_path / "docs.md")
    words = [sys.executable, *command.split()[1:]]
    words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
