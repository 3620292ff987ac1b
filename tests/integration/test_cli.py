"""`hf-megatron`: exit codes and output, of the command itself and in this process."""

import json
import subprocess
import sys
from dataclasses import replace

from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.registry import derive_spec
from hf_megatron.registry.lookup import REGISTRY


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_check_equal_and_recorded(stories, tmp_path):
    file = tmp_path / "results.json"
    command = ["hf-megatron", "check", str(stories), "--layouts", "tp2,tp2+sp", "--record", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 cases equal one process" in result.stdout
    rows = json.loads(file.read_text())["results"]
    assert [row["layout"] for row in rows] == ["tp", "tp+sp"] and all(row["passed"] for row in rows)
    assert rows[0]["model_type"] == "llama" and "tied embeddings" in rows[0]["features"]


def test_check_mismatch_names_the_worst_tensor(monkeypatch):
    """A plan that splits what must stay whole: the model still runs, the gradient is wrong."""

    def broken(model):
        spec = derive_spec(model)
        plan = {name: style for name, style in spec.plan.items() if not name.endswith(("q_norm", "k_norm"))}
        return replace(spec, plan=plan)

    monkeypatch.setitem(REGISTRY, "qwen3", broken)
    result = run("check", "qwen3", "--tp", "2")
    assert result.exit_code == 1, result.output
    assert "DIFFERS" in result.stdout and "_norm.weight" in result.stdout


def test_usage_errors():
    assert run("check", "no-such-model").exit_code == 2
    assert run("check", "llama", "--layouts", "rr2").exit_code == 2
    assert run("check", "llama", "--task", "poetry").exit_code == 2
    assert run("check").exit_code == 2
    result = run("check", "llama", "--tp", "3")
    assert result.exit_code == 1 and "heads" in result.stdout


def test_plan_needs_no_weights():
    result = run("plan", "llama", "--tp", "4", "--sp")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith(("model.", "lm_head"))}
    assert "split dim 0" in rows["model.layers.31.self_attn.q_proj.weight"]
    assert "split dim 1" in rows["model.layers.31.mlp.down_proj.weight"]
    assert "sum over tp" in rows["model.layers.0.input_layernorm.weight"]


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_megatron.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['env']).exit_code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
