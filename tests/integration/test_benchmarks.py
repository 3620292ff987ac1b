"""The benchmarks run, and every variant starts with one process's loss; megatron-core in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_train_step_with_megatron_core(tmp_path):
    out = tmp_path / "result.json"
    variants = ["transformers_tp", "megatron_core", "plain_megatron", "hf_megatron", "hf_megatron_chunked"]
    command = [sys.executable, "benchmarks/train_step.py", "--models", "tiny", "--dtypes", "fp32", "--rounds", "1"]
    result = subprocess.run(
        [*command, "--variants", *variants, "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    [run] = json.loads(out.read_text())["runs"]
    assert run["skipped"] == {}
    assert run["variants"].keys() == {"one_process_2_threads", *variants}
    losses = [entry["first_loss"] for entry in run["variants"].values()]
    assert max(losses) - min(losses) < 1e-5 * losses[0]
