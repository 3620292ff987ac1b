"""Wheel and sdist: built, installed beside nothing else of the checkout, and imported from."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Both archives, made from a copy of the tracked files so that no build folder appears in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, files):
        if (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl")), next(out.glob("*.tar.gz"))


def require_imports(folder):
    code = (
        "import hf_megatron, hf_megatron.conversion, hf_megatron.model_cards, hf_megatron.cli\n"
        "from hf_megatron.models.verified import records\n"
        f"assert len(records()) > 100 and hf_megatron.__file__.startswith({str(folder)!r}), hf_megatron.__file__\n"
        "from hf_megatron.models.registry import registered_types; assert 'gpt2' in registered_types()\n"
        "from hf_megatron.conversion.families import known_families; assert 'gpt2' in known_families()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(folder), "PATH": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr


def test_wheel(built, tmp_path):
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
        names = wheel.namelist()
    folders = {ROOT / "hf_megatron": ROOT / "hf_megatron", ROOT / "conversion": ROOT, ROOT / "model_cards": ROOT}
    data = {
        path.relative_to(base).as_posix()
        for folder, base in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert {"py.typed", "models/verified.json", "model_cards/template.md", "planner/devices.json"} <= data
    assert {f"hf_megatron/{name}" for name in data} <= set(names)
    assert not any(name.startswith(("tests", "conversion", "model_cards", "benchmarks")) for name in names)
    require_imports(tmp_path)


def test_installed_package_type_checks(built, tmp_path):
    """The mapped packages are where the type checker finds them in a wheel alone."""
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(tmp_path)
    # Apart from a run over the checkout, where the mapped packages have other places.
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache" / "installed")]
    command = [sys.executable, "-m", "mypy", *options]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout[-3000:]


def test_every_package_is_listed():
    """`find:` misses mapped packages, so the list is explicit; a new folder must be added to it."""
    listed = set((ROOT / "pyproject.toml").read_text().split("packages = [")[1].split("]")[0].replace('"', "").split())
    listed = {name.strip(",") for name in listed}
    expected = {
        ".".join(("hf_megatron", *file.parent.relative_to(root).parts))
        for root, package in ((ROOT / "hf_megatron", "."), (ROOT, "conversion"), (ROOT, "model_cards"))
        for file in (root / package).rglob("__init__.py")
    }
    assert listed == expected


def test_sdist(built, tmp_path):
    with tarfile.open(built[1]) as sdist:
        sdist.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    assert (folder / "LICENSE").exists() and (folder / "conversion" / "__init__.py").exists()
    require_imports(link_mapped_packages(folder))


def link_mapped_packages(folder):
    (folder / "hf_megatron" / "conversion").symlink_to(folder / "conversion")
    (folder / "hf_megatron" / "model_cards").symlink_to(folder / "model_cards")
    return folder
