"""Runs the quick suite on the ends of the supported ranges, each in a fresh virtual environment.

    python tests/matrix.py                                   # lowest and highest torch, with the one transformers
    python tests/matrix.py --pairs 2.12.0:5.23.0 --keep DIR  # one pair; environments are kept in DIR and used again

Results go to tests/matrix.json, which is committed.
"""

import argparse
import json
import os
import re
import subprocess
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests" / "matrix.json"
PAIRS = ("2.11.0:5.23.0", "2.13.0:5.23.0")
QUICK = [
    "tests/unit",
    "tests/faults",
    "tests/parity/test_families.py",
    "tests/parity/test_data_parallel.py",
    "tests/integration/test_state.py",
    "tests/integration/test_recompute.py",
    "tests/integration/test_trainer.py",
    "tests/integration/test_accelerate.py",
    "tests/integration/test_save_load.py",
    "tests/integration/test_generate.py",
    "tests/integration/test_surface.py",
    "tests/integration/test_import.py",
    "tests/integration/test_compile.py",
]


def run_pair(torch: str, transformers: str, folder: Path) -> dict[str, object]:
    """Installs one pair and runs the quick suite; returns the row of the results file."""
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
    install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    index = ["--retries", "0", "--extra-index-url", "https://download.pytorch.org/whl/cpu"]
    subprocess.run([*install, *index, f"torch=={torch}"], check=True)
    subprocess.run([*install, f"transformers=={transformers}", "-e", f"{ROOT}[test]"], check=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [str(python), "-m", "pytest", "-n", "auto", "-m", "", *QUICK]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(result.stdout[-3000:])
    summary = re.findall(
        r"\d+ (?:passed|failed|error|skipped)\b", result.stdout.splitlines()[-1] if result.stdout else ""
    )
    versions = subprocess.run(
        [str(python), "-m", "hf_megatron.cli", "env"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return {"passed": result.returncode == 0, "summary": ", ".join(summary), "versions": json.loads(versions.stdout)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", nargs="+", default=PAIRS, help="torch:transformers")
    parser.add_argument("--keep", type=Path, help="folder for the environments; by default a temporary one")
    arguments = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as temporary:
        for pair in arguments.pairs:
            torch, _, transformers = pair.partition(":")
            folder = (arguments.keep or Path(temporary)) / pair.replace(":", "-")
            results[f"torch {torch}, transformers {transformers}"] = run_pair(torch, transformers, folder)
            RESULTS.write_text(json.dumps(results, indent=2, sort_keys=True) + "\n")
    if not all(row["passed"] for row in results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
