"""Recorded parity results: the model classes and parts that passed on each kind of layout."""

import json
import os
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..compat.versions import installed_version
from ..config import MegatronConfig
from .fingerprint import ENDS, Features, Part

FILE = "verified.json"
_VERSIONS = ("torch", "transformers", "accelerate", "hf_megatron")


@cache
def records() -> tuple[dict[str, Any], ...]:
    """Reads the results in `verified.json`, written by `hf-megatron check --record`."""
    return read_results(resources.files(__package__).joinpath(FILE).read_text(encoding="utf-8"))


def read_results(text: str) -> tuple[dict[str, Any], ...]:
    """Parses a results file, in which results refer to shared tables of versions, parts and their lines."""
    file = json.loads(text)
    lines = file["lines"]
    parts = {
        digest: Part(name, frozenset(lines[number] for number in line_indices))
        for digest, (name, line_indices) in file["parts"].items()
    }
    return tuple(
        row | {"parts": [parts[digest] for digest in row["parts"]], "versions": file["versions"][row["versions"]]}
        for row in file["results"]
    )


def write_results(path: str | os.PathLike[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Merges results into a results file; a result replaces the one with the same class, changes, layout and sizes.

    If both passed with the same parts and versions, the modalities of the replaced result are kept in the new one.
    """
    file = Path(path)
    old = read_results(file.read_text(encoding="utf-8")) if file.exists() else ()
    merged: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in (*old, *rows):
        merged[_key(row)] = _with_modalities(row, merged.get(_key(row)))
    ordered = [merged[name] for name in sorted(merged)]
    parts = {part.digest: part for row in ordered for part in row["parts"]}
    versions = list({json.dumps(row["versions"], sort_keys=True): row["versions"] for row in ordered}.values())
    lines = sorted(set().union(*(part.lines for part in parts.values())))
    number = {line: index for index, line in enumerate(lines)}
    content = {
        "versions": _listed(versions),
        "lines": _listed(lines),
        "parts": _named({name: [p.name, sorted(number[line] for line in p.lines)] for name, p in parts.items()}),
        "results": _listed(
            {**row, "parts": sorted(p.digest for p in row["parts"]), "versions": versions.index(row["versions"])}
            for row in ordered
        ),
    }
    temporary = file.with_suffix(".tmp")
    temporary.write_text("{" + ",\n".join(f'"{name}": {text}' for name, text in content.items()) + "}\n", "utf-8")
    temporary.replace(file)


def _with_modalities(row: Mapping[str, Any], old: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if old is None or not (old["passed"] and row["passed"] and "modalities" in row):
        return row
    is_same = old["versions"] == row["versions"] and set(old["parts"]) == set(row["parts"])
    return {**row, "modalities": sorted({*row["modalities"], *(old.get("modalities", ()) if is_same else ())})}


def _listed(items: Iterable[Any]) -> str:
    return "[\n" + ",\n".join("  " + json.dumps(item, sort_keys=True) for item in items) + "\n]"


def _named(items: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(items[name])}" for name in sorted(items)) + "\n}"


def _key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    changes = json.dumps(row["changes"], sort_keys=True)
    sizes = row.get("tp_size", 0), row.get("pp_size", 1), row.get("cp_size", 1), row.get("ep_size", 1)
    return row["model_type"], row["class"], changes, row["layout"], *sizes


def layout_kinds(config: MegatronConfig) -> list[str]:
    """Returns the kinds that a layout consists of, each with its own result: `tp` or `tp+sp`, `cp`, `ep`, `pp`.

    Context parallelism with an all-to-all of heads is `cp+a2a`. If experts are unsharded on tp ranks (`etp_size=1`),
    the kind is `tp+ep` or `tp+sp+ep`, and `ep` is added if the experts also span ranks outside the tp group.
    """
    within_layers = "tp+sp" if config.sequence_parallel else "tp"
    are_replicated = config.ep_size > 1 and (config.etp_size or 1) == 1
    within_layers += "+ep" if are_replicated else ""
    beyond = config.ep_size if not are_replicated or config.ep_size > config.tp_size else 1
    kinds = {
        within_layers: config.tp_size,
        get_context_layout_kind(config): config.cp_size,
        "ep": beyond,
        "pp": config.pp_size,
    }
    return [kind for kind, size in kinds.items() if size > 1]


def get_context_layout_kind(config: MegatronConfig) -> str:
    """Returns the kind of a layout's context parallelism: `cp` or `cp+a2a`."""
    return "cp+a2a" if config.cp_comm_type in ("a2a", "a2a+p2p") else "cp"


def splits_weights(kind: str) -> bool:
    """Returns whether a kind of layout shards weights, so that each rank computes a share of every token."""
    return kind.startswith("tp")


def layout_kind(config: MegatronConfig) -> str:
    """Returns the kind of a layout, such as `tp+sp` or `tp+pp`; `dp` if modules are replicated on every rank."""
    return "+".join(layout_kinds(config)) or "dp"


def differences(
    class_name: str, model_type: str, kind: str, features: Features, base_prefix: str | None = None
) -> list[str] | None:
    """Returns the features of a model that lack a passed result on a kind of layout; `None` if its class has no result.

    A part is covered if a passed result contains it. If the layout shards weights, a site that draws random numbers is
    covered if replicated weights stayed equal across ranks while it drew.

    Args:
        base_prefix (`str`, *optional*): for a base model, its name inside classes with a head, whose results count too.
    """
    of_type = [row for row in records() if (row["model_type"], row["layout"]) == (model_type, kind) and row["passed"]]
    passed = [row for row in of_type if row["class"] == class_name]
    if base_prefix:
        passed += [_without_head(row, f"{base_prefix}.") for row in of_type if row["class"] != class_name]
    if not passed:
        return None
    compared = {part for row in passed for part in row["parts"]}
    unmatched = []
    for part in sorted(features.parts - compared, key=lambda part: part.name):
        same_name = [other.lines for other in compared if other.name == part.name]
        by_distance = sorted(same_name, key=lambda lines: (len(lines ^ part.lines), sorted(lines)))
        nearest = by_distance[0] if by_distance else frozenset()
        unmatched += [f"{part.name}: {text}" for text in _changed(part.lines, nearest)]
    drawn = {site for row in passed for site in row["draws"]}
    if splits_weights(kind):
        unmatched += [f"random numbers drawn at {site}" for site in sorted(features.draws - drawn)]
    return unmatched


def _without_head(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns a result of a class with a head as one of its base model, with the names relative to the base model."""
    parts = [
        Part(ENDS, _inside(part.lines, prefix))
        if part.name == ENDS
        else Part(part.name.removeprefix(prefix), part.lines)
        for part in row["parts"]
    ]
    return {**row, "parts": parts, "draws": [site.removeprefix(prefix) for site in row["draws"]]}


def _inside(lines: frozenset[str], prefix: str) -> frozenset[str]:
    named = prefix.removesuffix(".") + ": "
    matching = {line.removeprefix(named) for line in lines if line.startswith(named)}
    return frozenset(matching | {line.removeprefix(prefix) for line in lines if line.startswith(prefix)})


def failed(class_name: str, model_type: str, config: MegatronConfig, kind: str, features: Features) -> str | None:
    """Returns the error of a failed result for the same class, parts, kind of layout and sizes, or `None`."""
    sizes = [name for name in ("tp_size", "cp_size", "pp_size", "ep_size") if name[:2] in kind]
    for row in records():
        is_same = (row["model_type"], row["class"], row["layout"]) == (model_type, class_name, kind)
        has_sizes = all(row.get(name, 1) == getattr(config, name) for name in sizes)
        if is_same and has_sizes and not row["passed"] and set(row["parts"]) == features.parts:
            return str(row["worst"])
    return None


def compared_modalities(class_name: str, model_type: str, kind: str) -> frozenset[str]:
    """Returns the modalities besides text that a class passed with on a kind of layout: `images`, `videos`, `audio`."""
    return frozenset(
        medium
        for row in records()
        if (row["model_type"], row["class"], row["layout"]) == (model_type, class_name, kind) and row["passed"]
        for medium in row.get("modalities", ())
    )


def _changed(lines: frozenset[str], compared: frozenset[str]) -> list[str]:
    """Returns texts for the differences to the nearest verified part, pairing modules of the same name."""
    before = {line.partition(":")[0]: line for line in sorted(compared - lines)}
    texts = []
    for line in sorted(lines - compared):
        other = before.pop(line.partition(":")[0], None)
        texts.append(line if other is None else f"{line}; compared was {other.partition(': ')[2] or other}")
    return texts + [f"without {line}" for line in before.values()]


def recorded_draw(model_type: str, changes: Mapping[str, Any], made_of: Mapping[str, Any]) -> int | None:
    """Returns the recorded draw of a tiny model's parameters for the installed torch and transformers, or `None`.

    Args:
        changes: changes of its config.
        made_of: task, number of layers and batch size of the tiny model.
    """
    versions = tested_versions()
    for row in records():
        if row["model_type"] == model_type and "draw" in row and row["changes"] == changes:
            same_versions = all(row["versions"].get(name) == versions[name] for name in ("torch", "transformers"))
            if same_versions and row["draw"] == {**made_of, "number": row["draw"]["number"]}:
                return row["draw"]["number"]
    return None


def tested_versions() -> dict[str, str]:
    """Returns the installed versions, which are recorded with a result."""
    return {name: installed_version(name) for name in _VERSIONS}
