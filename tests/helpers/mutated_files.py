"""Conversion of damaged checkpoints: `python -m tests.helpers.mutated_files --cases 10000 --resume LOG`.

A case is a checkpoint with one file changed, either its raw bytes or its content in the file's format. It depends only
on the seed and the case number. A case passes if the conversion raises a one-line error, writes the original weights,
or writes the weights that another library reads from the damaged files. It is a finding if the conversion raises
anything else, exceeds the time or memory limit, or writes other weights. Reordered heads count as other weights, and
so does any change if a checksum covers the damaged file.
"""

import argparse
import collections
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hf_megatron import MegatronError
from hf_megatron.conversion import convert
from hf_megatron.model_cards import MARKER
from tests.helpers.mutated_sources import SourceCheckpoint, Tensors, make_checkpoints, read_converted, tensors_equal
from tests.helpers.mutations import change_tree, flip_bits, insert_bytes, list_format_mutations, move_bytes, truncate

SECONDS, BYTES = 20.0, 2 << 30
RECORD = "conversion.json"
FINDINGS = ("unclear", "raised", "wrong", "hang", "died", "untrue")


@dataclass(frozen=True)
class Case:
    """Damaged copy of a checkpoint, with the options of its conversion.

    Attributes:
        name: Name of the source checkpoint.
        what: Damaged file and the kind of change.
        covered: Whether a verified checksum covers the damaged file.
        to: Target format.
    """

    name: str
    what: str
    covered: bool
    to: str
    checksums: bool
    verify: bool


def make_case(seed: int, number: int, sources: Mapping[str, SourceCheckpoint], place: Path) -> Case:
    """Copies a randomly chosen checkpoint to `place` and damages it."""
    draw = random.Random(f"{seed}/{number}")
    name = draw.choice(sorted(sources))
    checkpoint = sources[name]
    shutil.copytree(checkpoint.folder, place)
    to = draw.choice(sorted(checkpoint.expected))
    checksums, verify = draw.random() < 0.3, draw.random() < 0.1
    record, recorded = place / RECORD, {}
    if record.exists():
        if checksums:
            recorded = json.loads(record.read_bytes())["files"]
        else:
            record.unlink()
    files = sorted(path for path in place.rglob("*") if path.is_file())
    file = draw.choice(files)
    path = str(file.relative_to(place))
    label = f"{name}/{path}"
    if draw.random() < 0.1:
        kind = change_tree(draw, place, file, files)
        return Case(name, f"{label}: {kind}", False, to, checksums, verify)
    content = file.read_bytes()
    format_mutations = list_format_mutations(file, content)
    change = draw.choice(
        format_mutations
        if format_mutations and draw.random() < 0.7
        else [flip_bits, truncate, insert_bytes, move_bytes]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = change(content, draw)
    file.write_bytes(changed)
    covered = path in recorded and changed != content
    return Case(name, f"{label}: {change.__name__}", covered, to, checksums, verify)


def judge_conversion(case: Case, made: SourceCheckpoint, source: Path, target: Path) -> tuple[str, str]:
    """Converts in this process; returns a judgment and its reason."""
    try:
        convert(source, target, case.to, checksums=case.checksums, verify=case.verify)
    except MegatronError as error:
        text = str(error)
        bad = "\n" in text.strip() or len(text) > 4000 or not text.replace("\n", "").isprintable()
        return ("unclear", repr(text[:300])) if bad else ("refused", text[:200])
    except BaseException as error:  # noqa: BLE001 - what a user would see as a traceback
        return "raised", f"{type(error).__name__}: {error}"[:300] + traceback.format_exc()[-900:]
    weights = read_converted(target, case.to)
    judgment, reason = judge_weights(case, made, source, weights)
    if judgment in ("same", "followed") and "README.md" not in case.what:
        difference = find_metadata_difference(source, target, weights)
        return ("untrue", difference) if difference else (judgment, reason)
    return judgment, reason


def judge_weights(case: Case, made: SourceCheckpoint, source: Path, found: Tensors) -> tuple[str, str]:
    """Compares the written weights with the original ones, and with what another library reads from the source."""
    same = tensors_equal(found, made.expected[case.to])
    if case.covered and not same:
        return "wrong", "other weights in spite of a checksum"
    try:
        content = made.peer(source)
    except BaseException as error:  # noqa: BLE001 - whatever the other library raises
        return ("same", "") if same else ("wrong", f"another library refuses it: {error!r}"[:300])
    expected = made.wanted(content, case.to)
    if expected is not None:
        # Another library may miss weights that are still readable.
        if same or tensors_equal(found, expected):
            return ("same" if same else "followed"), ""
        different = [name for name in found if name not in expected or not found[name].equal(expected[name])]
        return "wrong", f"another library reads other weights: {different[:3]} of {len(different)}"
    if same or all(name in content and tensors_equal({name: found[name]}, {name: content[name]}) for name in found):
        return "same" if same else "followed", ""
    return "wrong", "other weights, of parts that do not fit together"


def find_metadata_difference(source: Path, target: Path, found: Tensors) -> str:
    """Returns the first difference in auxiliary files of the target, such as config and model card, or ""."""
    config, before = (json.loads((folder / "config.json").read_text("utf-8-sig")) for folder in (target, source))
    for table in (config, before):
        table.pop("dtype", None)
        table.pop("torch_dtype", None)
    if json.dumps(config, sort_keys=True) != json.dumps(before, sort_keys=True):
        return "another config"
    for name in ("tokenizer_config.json", "generation_config.json"):
        old, new = source / name, target / name
        if old.is_file() and (not new.is_file() or new.read_bytes() != old.read_bytes()):
            return f"another {name}"
    return _find_card_difference(source, target, found)


def _find_card_difference(source: Path, target: Path, found: Tensors) -> str:
    before, card = (
        (folder / "README.md").read_bytes() if (folder / "README.md").is_file() else b"" for folder in (source, target)
    )
    if MARKER.encode() not in card:
        return "" if card == before else "a card of others that is another"
    weights = {name: tensor for name, tensor in found.items() if not name.startswith("optimizer.")}
    numel, dtypes = sum(map(Tensor.numel, weights.values())), [str(tensor.dtype)[6:] for tensor in weights.values()]
    for row in (f"| parameters | {numel:,} |", f"| dtype | `{max(dtypes, key=dtypes.count)}` |"):
        if row not in card.decode():
            return f"a card without {row}"
    return ""


def run_in_fork(function: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Runs a case in a fork with limits on memory and time."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            # RLIMIT_AS includes memory that is already mapped.
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + BYTES
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            for stream in (1, 2):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
            os.write(writing, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    start = time.monotonic()
    with os.fdopen(reading, "rb") as pipe:
        output = pipe.read()
    os.waitpid(process, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if output:
        judgment, reason = json.loads(output)
        return judgment, reason
    seconds = time.monotonic() - start
    return ("hang", f"over {SECONDS:.0f} s") if seconds >= SECONDS else ("died", f"after {seconds:.1f} s")


def run_case(seed: int, number: int, sources: Mapping[str, SourceCheckpoint], folder: Path) -> tuple[Case, str, str]:
    """Returns a case, its judgment and the reason; `folder` is empty before and afterwards."""
    source, target = folder / "source", folder / "target"
    case = make_case(seed, number, sources, source)
    judgment, reason = run_in_fork(lambda: judge_conversion(case, sources[case.name], source, target))
    if judgment == "hang":
        # Retried, since a busy machine or a fork of a multithreaded process may hang once.
        shutil.rmtree(target, ignore_errors=True)
        judgment, reason = run_in_fork(lambda: judge_conversion(case, sources[case.name], source, target))
    leftovers = [path.name for path in folder.iterdir() if path.name not in ("source", "target")]
    if leftovers or (judgment == "refused" and target.exists()):
        judgment, reason = "unclear", f"{leftovers or target} was left behind"
    for path in folder.iterdir():
        # A killed conversion also leaves a lock file.
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return case, judgment, reason


def run_cases(seed: int, cases: int, log: Path, minutes: float) -> collections.Counter[str]:
    """Runs the cases missing from the log; returns the judgment counts of all logged cases of this seed."""
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    done = {row["number"] for row in rows if row["seed"] == seed}
    counts = collections.Counter(row["judgment"] for row in rows if row["seed"] == seed)
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as directory, log.open("a", encoding="utf-8") as file:
        sources = make_checkpoints(Path(directory) / "made")
        folder = Path(directory) / "case"
        folder.mkdir()
        for number in range(cases):
            if number in done or time.monotonic() > end:
                continue
            case, judgment, reason = run_case(seed, number, sources, folder)
            counts[judgment] += 1
            row = {"seed": seed, "number": number, "what": case.what, "judgment": judgment, "reason": reason}
            file.write(json.dumps(row) + "\n")
            file.flush()
            if judgment in FINDINGS:
                print(f"case {number}: {case.what}: {judgment}: {reason}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=1e9, help="when to stop; --resume goes on")
    parser.add_argument("--resume", type=Path, required=True, metavar="LOG", help="one line of JSON for each case")
    args = parser.parse_args()
    counts = run_cases(args.seed, args.cases, args.resume, args.minutes)
    print(f"{counts.total()} cases: {', '.join(f'{count} {judgment}' for judgment, count in counts.most_common())}")
    sys.exit(any(counts[judgment] for judgment in FINDINGS))


if __name__ == "__main__":
    main()
