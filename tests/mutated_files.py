"""Damaged checkpoints of every format, converted: `python -m tests.mutated_files --cases 10000 --resume LOG`.

A case is a checkpoint with one file changed, by bytes or by what the file's format means by them, drawn from a seed
and its number alone. It ends well if the conversion is refused in one line, or writes the weights that were there
before. It is a finding if it raises anything else, takes longer than a time or more memory than an allowance, or writes
other weights where the change was of bytes that a check covers.
"""

import argparse
import collections
import json
import os
import pickle
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from hf_megatron import MegatronError
from hf_megatron.conversion import convert
from hf_megatron.conversion.tensors import TargetOptions

SECONDS, BYTES = 20.0, 2 << 30
FORMATS = ("hf", "bin", "old_bin", "megatron_core", "megatron_legacy", "dcp", "shards", "sharded")
# What a field of a table may turn into.
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 7, 2**31, 2**63, 2**64 + 1, 10**400, 1e308, float("nan"), "", "x", "../../etc/passwd"),
    *("\x1b[2J\x07", "a" * 5000, [], {}, [[[[[]]]]], {"a": {"b": [1]}}, "F32", "BF16", [0, 0], [2**62, 2**62]),
)


def make_checkpoints(folder: Path) -> None:
    """The same tiny Llama in every format."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    model.save_pretrained(folder / "hf", max_shard_size="20KB")
    for name, is_zip in (("bin", True), ("old_bin", False)):
        (folder / name).mkdir()
        shutil.copy(folder / "hf" / "config.json", folder / name)
        weights = {key: tensor.clone() for key, tensor in model.state_dict().items()}
        torch.save(weights, folder / name / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    for name in FORMATS[3:]:
        options = TargetOptions(tp_size=2) if name == "megatron_legacy" else None
        convert(folder / "hf", folder / name, name, options=options)


# Changes: each takes a file's content and returns another, or nothing where it does not apply


def flip_bits(content: bytes, draw: random.Random) -> bytes | None:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 4, 64))):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def cut(content: bytes, draw: random.Random) -> bytes | None:
    place = draw.choice((0, 1, 7, 8, 9, len(content) // 2, len(content) - 1, draw.randrange(len(content) + 1)))
    return content[: max(place, 0)]


def put_in(content: bytes, draw: random.Random) -> bytes | None:
    place = draw.randrange(len(content) + 1)
    what = draw.choice((b"\0", b"\xff" * 9, draw.randbytes(16), content[:64], b"[" * 4000, b"\x80\x04("))
    return content[:place] + what + content[place:]


def move(content: bytes, draw: random.Random) -> bytes | None:
    if len(content) < 32:
        return None
    first, second, size = draw.randrange(len(content) - 16), draw.randrange(len(content) - 16), draw.randrange(1, 16)
    changed = bytearray(content)
    changed[first : first + size] = content[second : second + size]
    return bytes(changed)


def change_table(table: Any, draw: random.Random) -> Any:
    """Changes one field of a table of JSON, at any depth."""
    places = list(_places(table))
    if not places:
        return draw.choice(VALUES)
    holder, key = draw.choice(places)
    kind = draw.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, dict):
        holder[draw.choice((f"{key}x", "", "__metadata__", "\x1b[31m", key.replace("0", "1")))] = holder.pop(key)
    elif kind == 2 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = draw.choice(
            (holder[key] + 1, holder[key] - 1, -holder[key], holder[key] * 2, holder[key] * 10**9)
        )
    elif kind == 3:
        holder[key] = draw.choice(list(_places(table)))[0]
        holder[key] = json.loads(json.dumps(VALUES[-2])) if holder[key] is holder else holder[key]
    else:
        holder[key] = draw.choice(VALUES)
    return table


def _places(table: Any) -> Iterator[tuple[Any, Any]]:
    keys = table.keys() if isinstance(table, dict) else range(len(table)) if isinstance(table, list) else ()
    for key in keys:
        yield table, key
        yield from _places(table[key])


def change_json(content: bytes, draw: random.Random) -> bytes | None:
    try:
        return json.dumps(change_table(json.loads(content), draw)).encode()
    except (ValueError, RecursionError):
        return None


def change_header(content: bytes, draw: random.Random) -> bytes | None:
    length = int.from_bytes(content[:8], "little")
    if draw.random() < 0.3:
        other = draw.choice((length - 1, length + 1, length + 8, 0, 2**63, len(content), len(content) - 8))
        return other.to_bytes(8, "little") + content[8:]
    header = change_json(content[8 : 8 + length], draw)
    if header is None:
        return None
    return len(header).to_bytes(8, "little") + header + content[8 + length :]


def change_archive(content: bytes, draw: random.Random, folder: Path) -> bytes | None:
    """Writes a zip anew with a record left out, doubled, cut, renamed or, of pickles, with other operations."""
    old, new = folder / "old.zip", folder / "new.zip"
    old.write_bytes(content)
    with zipfile.ZipFile(old) as source, zipfile.ZipFile(new, "w") as target:
        names = source.namelist()
        chosen = draw.choice([name for name in names if name.endswith(".pkl")] if draw.random() < 0.6 else names)
        kind = draw.randrange(5)
        for name in names:
            record = source.open(name)
            # torch leaves some at zero.
            record._expected_crc = None
            data = record.read()
            if name == chosen:
                if kind == 0:
                    continue
                if kind == 1:
                    name = draw.choice((f"{name}x", "../outside", name.upper(), "archive/data.pkl"))
                elif kind == 2:
                    data = cut(data, draw) or b""
                elif name.endswith(".pkl"):
                    data = change_pickle(data, draw)
                else:
                    data = flip_bits(data, draw) or b""
            target.writestr(name, data)
    return new.read_bytes()


def change_pickle(content: bytes, draw: random.Random) -> bytes:
    kind = draw.randrange(5)
    if kind == 0:
        return pickle.dumps(draw.choice(VALUES), protocol=2)
    if kind == 1:
        return content[:-1] + draw.choice((b"0.", b"..", b"(.", b"}.", b"cos\nsystem\n(S'true'\ntR."))
    if kind == 2:
        nested = b"".join(b"q%ch%c\x86" % (level, level) for level in range(60))
        return content[:-1] + nested + b"."
    return (flip_bits if kind == 3 else move)(content, draw) or content


def drawn(seed: int, number: int, sources: Path, place: Path) -> tuple[str, bool]:
    """Copies a checkpoint to `place` and damages it; returns how, and whether a check covers what was changed."""
    draw = random.Random(f"{seed}/{number}")
    name = draw.choice(FORMATS)
    shutil.copytree(sources / name, place)
    files = sorted(path for path in place.rglob("*") if path.is_file())
    file = draw.choice(files)
    label = f"{name}/{file.relative_to(place)}"
    if draw.random() < 0.08:
        return f"{label}: {_change_tree(draw, file, files)}", False
    content = file.read_bytes()
    changes: list[Callable[[bytes, random.Random], bytes | None]] = [flip_bits, cut, put_in, move]
    # Bytes that a checksum covers: of a record, of a zip, or of what a conversion has written down.
    covered = name not in ("hf", "old_bin") and file.name != "config.json"
    change = draw.choice(changes)
    if draw.random() < 0.6:
        if file.suffix == ".json":
            change, covered = change_json, False
        elif file.suffix == ".safetensors":
            change = change_header
        elif content[:2] == b"PK":
            changed = change_archive(content, draw, place.parent)
            file.write_bytes(changed or b"")
            return f"{label}: change_archive", False
    file.write_bytes(change(content, draw) or b"")
    return f"{label}: {change.__name__}", covered


def _change_tree(draw: random.Random, file: Path, files: list[Path]) -> str:
    kind = draw.choice(("deleted", "a folder", "exchanged", "a link to itself", "a link outside", "a fifo"))
    other = draw.choice(files)
    content = file.read_bytes()
    file.unlink()
    if kind == "a folder":
        file.mkdir()
    elif kind == "exchanged" and other != file:
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "a link to itself":
        file.symlink_to(file.name)
    elif kind == "a link outside":
        file.symlink_to("/etc/passwd")
    elif kind == "a fifo":
        os.mkfifo(file)
    return kind


def outcome(source: Path, target: Path, expected: dict[str, torch.Tensor], covered: bool) -> tuple[str, str]:
    """Converts in this process; returns a verdict and its reason."""
    try:
        convert(source, target, "hf")
    except MegatronError as error:
        text = str(error)
        bad = "\n" in text.strip() or len(text) > 4000 or not text.replace("\n", "").isprintable()
        return ("unclear", repr(text[:300])) if bad else ("refused", text[:200])
    except BaseException as error:  # noqa: BLE001 - what a user would see as a traceback
        return "raised", f"{type(error).__name__}: {error}"[:300] + traceback.format_exc()[-900:]
    found: dict[str, torch.Tensor] = {}
    for file in target.glob("*.safetensors"):
        found |= load_file(file)
    same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    return ("same", "") if same else ("wrong" if covered else "other", "other weights")


def in_a_fork(function: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Runs a case in a fork of bounded memory, and ends it when its time is over."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        # What is mapped already counts.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(writing, json.dumps(function()).encode())
        os._exit(0)
    os.close(writing)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(process, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    began = time.monotonic()
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    os.waitpid(process, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    if answer:
        verdict, reason = json.loads(answer)
        return verdict, reason
    seconds = time.monotonic() - began
    return ("hang", f"over {SECONDS:.0f} s") if seconds >= SECONDS else ("died", f"after {seconds:.1f} s")


FINDINGS = ("unclear", "raised", "wrong", "hang", "died")


def run(seed: int, cases: int, log: Path, minutes: float) -> collections.Counter[str]:
    """Runs the cases that the log does not have yet; returns how all of its cases of this seed ended."""
    torch.set_num_threads(1)
    rows = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
    done = {row["number"] for row in rows if row["seed"] == seed}
    counts = collections.Counter(row["verdict"] for row in rows if row["seed"] == seed)
    end = time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as directory, log.open("a", encoding="utf-8") as file:
        folder = Path(directory)
        make_checkpoints(folder / "made")
        expected = {}
        for part in (folder / "made" / "hf").glob("*.safetensors"):
            expected |= load_file(part)
        for number in range(cases):
            if number in done or time.monotonic() > end:
                continue
            case = folder / "case"
            case.mkdir()
            what, covered = drawn(seed, number, folder / "made", case / "source")
            source, target = case / "source", case / "target"
            verdict, reason = in_a_fork(lambda s=source, t=target, c=covered: outcome(s, t, expected, c))
            left = [path.name for path in case.iterdir() if path.name not in ("source", "target", "old.zip", "new.zip")]
            if left:
                verdict, reason = "unclear", f"{left} were left behind"
            shutil.rmtree(case)
            counts[verdict] += 1
            row = {"seed": seed, "number": number, "what": what, "verdict": verdict, "reason": reason}
            file.write(json.dumps(row) + "\n")
            file.flush()
            if verdict in FINDINGS:
                print(f"case {number}: {what}: {verdict}: {reason}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=1e9, help="when to stop; --resume goes on")
    parser.add_argument("--resume", type=Path, required=True, metavar="LOG", help="one line of JSON for each case")
    given = parser.parse_args()
    counts = run(given.seed, given.cases, given.resume, given.minutes)
    print(f"{counts.total()} cases: {', '.join(f'{count} {verdict}' for verdict, count in counts.most_common())}")
    sys.exit(any(counts[verdict] for verdict in FINDINGS))


if __name__ == "__main__":
    main()
