"""Check of a release: `check_archives.py DIST VERSION` prints what is in its archives; exits with 1 on a problem."""

import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

# Present in the wheel, relative to its root.
REQUIRED = (
    "hf_megatron/py.typed",
    "hf_megatron/models/verified.json",
    "hf_megatron/conversion/__init__.py",
    "hf_megatron/model_cards/template.md",
    "hf_megatron/planner/devices.json",
    "hf_megatron_autoload.py",
)
# Top-level names of the wheel and of the sdist.
IN_WHEEL = {"hf_megatron", "hf_megatron_autoload.py"}
IN_SDIST = IN_WHEEL | {
    *("conversion", "model_cards", "hf_megatron.egg-info", "pyproject.toml", "setup.cfg", "PKG-INFO", "MANIFEST.in"),
    *("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff"),
}


def find_problems(dist: Path, version: str) -> list[str]:
    """Returns what is wrong with the archives in a folder; prints the number of files per folder."""
    wheels, sdists = sorted(dist.glob("*.whl")), sorted(dist.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        return [f"{dist}: expected one wheel and one sdist, there are {len(wheels)} and {len(sdists)}"]
    with zipfile.ZipFile(wheels[0]) as archive:
        in_wheel = [name for name in archive.namelist() if not name.endswith("/")]
    with tarfile.open(sdists[0]) as archive:
        in_sdist = [member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()]
    info = f"hf_megatron-{version}.dist-info"
    problems = []
    for path, names, allowed in (wheels[0], in_wheel, {*IN_WHEEL, info}), (sdists[0], in_sdist, IN_SDIST):
        counts = Counter(name.partition("/")[0] for name in names)
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB, {len(names)} files")
        for name, count in sorted(counts.items()):
            print(f"  {name}: {count}")
        problems += [f"{path.name} contains {name}" for name in sorted(counts.keys() - allowed)]
        if f"-{version}" not in path.name:
            problems.append(f"{path.name} is not version {version}")
    problems += [f"{wheels[0].name} lacks {name}" for name in REQUIRED if name not in in_wheel]
    return problems


if __name__ == "__main__":
    problems = find_problems(Path(sys.argv[1]), sys.argv[2])
    print("\n".join(problems), file=sys.stderr)
    sys.exit(1 if problems else 0)
