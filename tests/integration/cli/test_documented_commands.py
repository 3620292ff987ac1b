"""Every command that README and docs show is run by a test: those of `hf-megatron` here, the others where it says."""

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
from tests.helpers.documented import ROOT, documented_commands, other_commands
from tests.helpers.megatron_pre_core import gpt2_parts, write_checkpoint
from tests.helpers.tiny_models import tiny_model
from tests.readme_command import readme_command

_LAUNCH = "tests/integration/integrations/accelerate/test_launch.py"
_LAUNCHED_SCRIPT = "tests/integration/integrations/accelerate/test_launched_script.py"

# What stands in the documents -> what it is here.
HERE = {
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
    # It has the fewest variants.
    "gemma2": "gpt2",
    "DST": "converted",
    "OUT": "merged",
    "DIR": "timeline",
    # The sizes of a model for tests.
    "8": "4",
    # Every type there is takes a quarter of an hour.
    "all": "gpt2",
}
ELSEWHERE = {
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
    # The page of ten models.
    r"hf-megatron plan \S+ --num-gpus 64 --gpu h100 .*256": "tests/integration/test_benchmarks.py",
    r"hf-megatron dry-run meta-llama.*": "tests/integration/planner/test_rank_predictions.py",
    r"hf-megatron convert (llava-hf|llava-core).*": "tests/integration/conversion/test_multimodal.py",
    r"hf-megatron convert-adapter .*": "tests/integration/conversion/adapters/test_convert.py",
    r"hf-megatron (push|pull) .*": "tests/integration/integrations/hub/test_hub.py",
    r"python -m pytest .*|ruff check \.": ".ci/run",
    r"python benchmarks/.*": "tests/integration/test_benchmarks.py",
    r"python -m tests\.matrix .*": "tests/matrix.json",
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
    r"pip install .*(hf_megatron\[(plots|quantized)\]|megatron-core).*": "tests/integration/test_packaging.py",
}


@pytest.fixture(scope="module")
def places(stories, tmp_path_factory):
    folder = tmp_path_factory.mktemp("documented")
    convert(stories, folder / "checkpoint", "sharded")
    convert(stories, folder / "megatron", "megatron_legacy")
    (folder / "megatron" / "config.json").unlink()
    model = tiny_model("gpt2")
    model.save_pretrained(folder / "gpt2")
    write_checkpoint(folder / "before_core", gpt2_parts(model), "2020", 0)
    made = {name: str(folder / name) for name in ("checkpoint", "megatron", "before_core", "gpt2")}
    return {"model": str(stories), **made}


def needs_other_machine(command):
    return next((place for pattern, place in ELSEWHERE.items() if re.fullmatch(pattern, command)), None)


def sequences():
    """The commands of each page, which follow one another."""
    pages = {}
    for page, command in documented_commands("hf-megatron "):
        if not needs_other_machine(command):
            pages.setdefault(page, []).append(command)
    return [pytest.param(commands, id=page) for page, commands in pages.items()]


@pytest.mark.parametrize("commands", sequences())
def test_commands_of_a_page_run(commands, places, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in commands:
        words = [HERE.get(word, word).format(**places) for word in shlex.split(command)[1:]]
        # A mention without arguments.
        words += ["--help"] * (len(words) == 1 or words[1:2] == ["--to"])
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, (command, result.output, result.exception)


def test_the_others_run_elsewhere():
    for place in ELSEWHERE.values():
        assert (ROOT / place).exists()
    install = [part for name in ("run", "test", "test everything") for part in readme_command(name).split(" && ")]
    here = [command for _, command in documented_commands("hf-megatron ")]
    all_of_them = [
        command
        for start in ("accelerate ", "torchrun ", "python", "pip ", "ruff ")
        for _, command in documented_commands(start)
    ] + other_commands()
    run_below = {" ".join(command.split()[:3]) for command in HELPERS}
    unknown = [
        command
        for command in all_of_them
        if command not in install
        and not needs_other_machine(command)
        and " ".join(command.split()[:3]) not in run_below
    ]
    assert here and unknown == []


HELPERS = (
    "python -m tests.structure",
    "python -m tests.helpers.costs costs.json",
    "python -m tests.support_table docs.md",
)


@pytest.mark.parametrize("command", HELPERS)
def test_helpers_of_the_documents_run(command, tmp_path):
    (tmp_path / "costs.json").write_text(json.dumps({"test.py::test": {"call": [1.0, 1.0, 0.0]}}))
    shutil.copy(ROOT / "docs" / "supported_models.md", tmp_path / "docs.md")
    words = [sys.executable, *command.split()[1:]]
    words = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
