"""Mutations of a checkpoint file, of raw bytes or of the content in the file's format."""

import dataclasses
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

# Replacement values of a field.
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2, 7, 2**31, 2**63, 2**64 + 1, 10**400, 1e308, float("nan"), "", "x", "../../etc/passwd"),
    *(
        "\x1b[2J\x07",
        "two\nlines",
        "\u202ereversed",
        "\ud800",
        "a" * 5000,
        [],
        {},
        [[[[[]]]]],
        {"a": {"b": [1]}},
        "F32",
        "BF16",
    ),
    *([0, 0], [2**62, 2**62], ["\x1b[2J" * 400] * 400, {"\x1b[2J" * 400: "a" * 5000}, "rope", "float16", 10**10),
)
Draw = random.Random


# Byte mutations: each returns a changed copy of a file's content


def flip_bits(content: bytes, draw: Draw) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 4, 64))):
        if changed:
            changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def truncate(content: bytes, draw: Draw) -> bytes:
    offset = draw.choice((0, 1, 7, 8, 9, len(content) // 2, len(content) - 1, draw.randrange(len(content) + 1)))
    return content[: max(offset, 0)]


def insert_bytes(content: bytes, draw: Draw) -> bytes:
    offset = draw.randrange(len(content) + 1)
    inserted = draw.choice((b"\0", b"\xff" * 9, draw.randbytes(16), content[:64], b"[" * 4000, b"\x80\x04("))
    return content[:offset] + inserted + content[offset:]


def move_bytes(content: bytes, draw: Draw) -> bytes:
    size = draw.choice((1, 4, 16, 64, 1024))
    if len(content) < 2 * size:
        return b""
    first, second = draw.randrange(len(content) - size), draw.randrange(len(content) - size)
    changed = bytearray(content)
    changed[first : first + size] = content[second : second + size]
    if draw.random() < 0.5:
        changed[second : second + size] = content[first : first + size]
    return bytes(changed)


# Format-aware mutations


def change_value(value: Any, draw: Draw) -> Any:
    """Changes one field of nested dicts, lists and objects, at any depth; often it swaps two fields."""
    places = list(_list_fields(value))
    if not places:
        return draw.choice(VALUES)
    holder, key = draw.choice(places)
    old = holder[key]
    same_type = [(table, name) for table, name in places if type(table[name]) is type(old) and table[name] is not old]
    kind = draw.choice(("delete", "rename", "tweak", "exchange", "exchange", "copy", "replace", "thin"))
    if kind == "delete":
        del holder[key]
    elif kind == "rename" and isinstance(holder, dict):
        holder[_make_other_name(key, draw, places)] = holder.pop(key)
    elif kind in ("exchange", "copy") and same_type:
        other, name = draw.choice(same_type)
        new = other[name]
        if kind == "exchange":
            other[name] = old
        if not isinstance(new, dict | list):
            holder[key] = new
    elif kind == "thin" and isinstance(old, dict | list):
        holder[key] = dict(list(old.items())[::2]) if isinstance(old, dict) else old[: len(old) // 2]
    elif isinstance(old, Tensor):
        holder[key] = _make_other_tensor(old, draw)
    elif isinstance(old, int | float) and not isinstance(old, bool) and kind != "replace":
        holder[key] = draw.choice((old + 1, old - 1, -old, old * 2, old // 2, old * 10**9))
    elif isinstance(old, torch.Size | tuple):
        holder[key] = type(old)([*old[1:], *draw.choice(([], [0], [1], [7], [2**62]))])
    elif isinstance(old, torch.dtype):
        holder[key] = draw.choice((torch.float16, torch.int32, torch.float64, torch.complex64))
    else:
        holder[key] = draw.choice(VALUES)
    return value


def _list_fields(value: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:
    if not isinstance(value, dict | list | type) and hasattr(value, "__dict__") and not isinstance(value, Tensor):
        value = vars(value)
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys if depth < 12 else ():
        yield value, key
        yield from _list_fields(value[key], depth + 1)


def _make_other_name(key: Any, draw: Draw, places: list[tuple[Any, Any]]) -> Any:
    if dataclasses.is_dataclass(key) and not isinstance(key, type):
        changes = {"fqn": f"{key.fqn}x"} if draw.random() < 0.5 else {"offset": torch.Size([1, 0]), "index": 3}
        return dataclasses.replace(key, **changes)
    if not isinstance(key, str):
        return draw.choice(("x", 0, 99, None))
    others = [name for _, name in places if isinstance(name, str)]
    zero_one = key.replace("0", "2") if draw.random() < 0.5 else key.replace("1", "0")
    return draw.choice((f"{key}x", "", "__metadata__", "\x1b[31m", zero_one, f"module.{key}", draw.choice(others)))


def _make_other_tensor(tensor: Tensor, draw: Draw) -> Any:
    tensor = tensor.detach()
    kind = draw.randrange(12)
    if kind == 0:
        return tensor.t() if tensor.dim() == 2 else tensor.flip(0)
    if kind == 1:
        # The same entries in another memory layout.
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.clone()
    if kind == 2:
        return torch.cat([torch.zeros(5, dtype=tensor.dtype), tensor.flatten()])[5:].view(tensor.shape)
    if kind == 3:
        return tensor.flatten()[:1].expand(tensor.shape)
    return (
        tensor[:-1] if tensor.dim() else tensor,
        tensor.half(),
        tensor.to(torch.complex64),
        torch.nn.Parameter(tensor.float()),
        tensor.to_sparse(),
        tensor.to("meta"),
        tensor[None],
        torch.empty(0),
    )[kind - 4]


def change_json(content: bytes, draw: Draw) -> bytes:
    if draw.random() < 0.15:
        text = content.decode()
        first = text.partition("{")[2].partition(",")[0]
        twice = text.replace("{", "{" + first.partition(":")[0] + ': "x",', 1)
        return draw.choice((text.encode("utf-16"), b"\xef\xbb\xbf" + content, twice.encode(), b"[" + content + b"]"))
    return json.dumps(change_value(json.loads(content), draw)).encode()


def change_header(content: bytes, draw: Draw) -> bytes:
    length = int.from_bytes(content[:8], "little")
    if draw.random() < 0.2:
        other = draw.choice((length - 1, length + 1, length + 8, 0, 2**63, len(content), len(content) - 8))
        return other.to_bytes(8, "little") + content[8:]
    header = json.loads(content[8 : 8 + length])
    inner = header.get("__metadata__", {})
    if "DCP_SHARDING_INFO" in inner and draw.random() < 0.5:
        inner["DCP_SHARDING_INFO"] = json.dumps(change_value(json.loads(inner["DCP_SHARDING_INFO"]), draw))
        text = json.dumps(header).encode()
    else:
        text = json.dumps(change_value(header, draw)).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def change_torch_file(content: bytes, draw: Draw) -> bytes:
    """Changes a value in a file of `torch.save`."""
    value = torch.load(io.BytesIO(content), weights_only=False)
    buffer = io.BytesIO()
    changed = change_value(value, draw)
    torch.save(changed, buffer, _use_new_zipfile_serialization=draw.random() < 0.7)
    return buffer.getvalue()


def change_dcp_metadata(content: bytes, draw: Draw) -> bytes:
    """Changes the `.metadata` of a distributed checkpoint."""
    changed = change_value(pickle.loads(content), draw)
    try:
        return pickle.dumps(changed, protocol=draw.choice((2, 4, 5)))
    except (AttributeError, TypeError, RuntimeError):
        # TensorProperties fail to pickle if a field is missing or invalid.
        return change_pickle(content, draw)


def change_pickle(content: bytes, draw: Draw) -> bytes:
    kind = draw.randrange(5)
    if kind == 0:
        return pickle.dumps(draw.choice(VALUES), protocol=2)
    if kind == 1:
        return content[:-1] + draw.choice((b"0.", b"..", b"(.", b"}.", b"cos\nsystem\n(S'true'\ntR."))
    if kind == 2:
        nested = b"".join(b"q%ch%c\x86" % (level, level) for level in range(60))
        return content[:-1] + nested + b"."
    return (flip_bits if kind == 3 else move_bytes)(content, draw)


def change_archive(content: bytes, draw: Draw) -> bytes:
    """Rewrites a zip with a record removed, duplicated, truncated, renamed, swapped or changed."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(buffer, "w") as target:
        records = []
        for name in source.namelist():
            record = source.open(name)
            # torch leaves some checksums at zero, so they are not verified.
            record._expected_crc = None
            records.append((name, record.read()))
        pickles = [index for index, (name, _) in enumerate(records) if name.endswith(".pkl")]
        chosen = draw.choice(pickles if draw.random() < 0.5 else range(len(records)))
        name, data = records[chosen]
        kind = draw.choice(("left out", "doubled", "renamed", "cut", "exchanged", "changed", "changed"))
        other = draw.randrange(len(records))
        records[chosen] = {
            "renamed": (draw.choice((f"{name}x", "../outside", name.upper(), records[other][0])), data),
            "cut": (name, truncate(data, draw)),
            "exchanged": (records[other][0], data),
        }.get(kind, (name, (change_pickle if name.endswith(".pkl") else flip_bits)(data, draw)))
        if kind == "left out":
            del records[chosen]
        elif kind == "doubled":
            records.append((name, data))
        elif kind == "exchanged":
            records[other] = (name, records[other][1])
        compression = zipfile.ZIP_DEFLATED if draw.random() < 0.1 else zipfile.ZIP_STORED
        for name, data in records:
            target.writestr(zipfile.ZipInfo(name), data, compression)
    return buffer.getvalue()


def change_card(content: bytes, draw: Draw) -> bytes:
    _, front, body = content.decode().split("---\n", 2)
    if draw.random() < 0.2:
        return draw.choice(
            (b"---\n&a [*a]\n---\n", b"---\n" + front.encode(), b"---\nlicense: !!python/name:os.system\n---\n")
        )
    front = yaml.safe_dump(change_value(yaml.safe_load(front), draw), allow_unicode=True)
    return f"---\n{front}---\n{body}".encode("utf-8", "surrogatepass")


def change_text(content: bytes, draw: Draw) -> bytes:
    return str(draw.choice((*VALUES, "0", "00", "1 ", "-0", "٣", "../release", "latest"))).encode(
        "utf-8", "surrogatepass"
    )


def list_format_mutations(file: Path, content: bytes) -> list[Callable[[bytes, Draw], bytes]]:
    """Returns the format-aware mutations of a file."""
    if content[:2] == b"PK" and file.suffix != ".distcp":
        return [change_torch_file, change_torch_file, change_archive]
    by_name = {".metadata": [change_dcp_metadata, change_dcp_metadata, change_pickle]}
    by_suffix: dict[str, list[Callable[[bytes, Draw], bytes]]] = {
        ".json": [change_json],
        ".safetensors": [change_header],
        ".bin": [change_torch_file],
        ".pt": [change_torch_file],
        ".md": [change_card],
        ".txt": [change_text],
    }
    return by_name.get(file.name) or by_suffix.get(file.suffix, [])


def change_tree(draw: Draw, folder: Path, file: Path, files: list[Path]) -> str:
    """Deletes, adds, renames, swaps or replaces a file; returns the kind of change."""
    kind = draw.choice(
        (
            "deleted",
            "a folder",
            "exchanged",
            "a link to itself",
            "a link outside",
            "a fifo",
            "renamed",
            "one more",
            "moved",
        )
    )
    other = draw.choice(files)
    content = file.read_bytes()
    if kind in ("renamed", "one more"):
        # Rank and iteration numbers are part of file and folder names.
        path = draw.choice([file, *(parent for parent in file.parents if folder in parent.parents)])
        new = path.with_name(
            draw.choice((path.name.replace("1", "2"), path.name.replace("0", "9", 1), f"{path.name}x"))
        )
        if not os.path.lexists(new):
            if kind == "renamed":
                path.rename(new)
            else:
                (shutil.copytree if path.is_dir() else shutil.copy)(path, new)
        return f"{kind} to {new.name}"
    file.unlink()
    if kind == "a folder":
        file.mkdir()
    elif kind == "exchanged" and other != file:
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)
    elif kind == "moved":
        (folder / file.name).write_bytes(content)
    elif kind == "a link to itself":
        file.symlink_to(file.name)
    elif kind == "a link outside":
        file.symlink_to("/etc/passwd")
    elif kind == "a fifo":
        os.mkfifo(file)
    return kind
