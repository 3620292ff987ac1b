"""`hf-megatron`: exit codes and output, in processes of their own."""

import json
import subprocess
import sys


def run(*arguments, **kwargs):
    command = [sys.executable, "-m", "hf_megatron.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, **kwargs)


def test_check_equal_and_recorded(stories, tmp_path):
    file = tmp_path / "results.json"
    result = run("check", str(stories), "--layouts", "tp2,tp2+sp", "--record", str(file))
    assert result.returncode == 0, result.stderr
    assert "2 of 2 cases equal one process" in result.stdout
    rows = json.loads(file.read_text())["results"]
    assert [row["layout"] for row in rows] == ["tp", "tp+sp"] and all(row["passed"] for row in rows)
    assert rows[0]["model_type"] == "llama" and "tied embeddings" in rows[0]["features"]


def test_check_mismatch_names_the_worst_tensor(tmp_path):
    """A plan that splits what must stay whole: the model still runs, the gradient is wrong."""
    script = tmp_path / "broken.py"
    script.write_text(
        "import sys, hf_megatron\n"
        "from dataclasses import replace\n"
        "from hf_megatron.registry import derive_spec\n"
        "def broken(model):\n"
        "    spec = derive_spec(model)\n"
        "    plan = {k: v for k, v in spec.plan.items() if not k.endswith(('q_norm', 'k_norm'))}\n"
        "    return replace(spec, plan=plan)\n"
        "hf_megatron.register_model('qwen3', broken)\n"
        "from hf_megatron.cli import app\n"
        "app(['check', 'qwen3', '--tp', '2'])\n"
    )
    result = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "DIFFERS" in result.stdout and "_norm.weight" in result.stdout


def test_usage_errors():
    assert run("check", "no-such-model").returncode == 2
    assert run("check", "llama", "--layouts", "rr2").returncode == 2
    assert run("check", "llama", "--task", "poetry").returncode == 2
    assert run("check").returncode == 2
    result = run("check", "llama", "--tp", "3")
    assert result.returncode == 1 and "heads" in result.stdout


def test_plan_needs_no_weights():
    result = run("plan", "llama", "--tp", "4", "--sp")
    assert result.returncode == 0, result.stderr
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
