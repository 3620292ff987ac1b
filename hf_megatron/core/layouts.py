"""Parallel layouts as text: `tp2+sp+pp2+dp2+zero1`, the inverse of `MegatronConfig.layout`."""

from typing import Any

from ..config import MegatronConfig
from ..errors import ConfigError

_FIELDS = {
    "tp": "tp_size",
    "pp": "pp_size",
    "mb": "num_microbatches",
    "dp": "dp_size",
    "zero": "zero_stage",
    "replicas": "dp_replicate_size",
    "cp": "cp_size",
    "ep": "ep_size",
    "etp": "etp_size",
}
_CP_COMM_TYPES = {"a2a": "a2a", "gather": "all_gather"}


def parse_fields(text: str) -> dict[str, Any]:
    """Parses one layout into the fields of `MegatronConfig` that it names.

    Args:
        text (`str`): sizes joined by `+`, such as `"tp2+sp+pp4"`.

    Raises:
        ConfigError: an unknown word, or a field that occurs twice.
    """
    fields: dict[str, Any] = {}
    for word in text.strip().split("+"):
        name = word.rstrip("0123456789")
        value: bool | str | int
        if word == "sp":
            field, value = "sequence_parallel", True
        elif word in _CP_COMM_TYPES:
            field, value = "cp_comm_type", _CP_COMM_TYPES[word]
        elif name in _FIELDS and name != word:
            field, value = _FIELDS[name], int(word[len(name) :])
        else:
            raise ConfigError(
                f"layout {text.strip()!r}: {word!r} is not one of tpN, sp, cpN, a2a, gather, ppN, mbN (microbatches), "
                "dpN, zeroN, replicasN, epN, etpN. Join them by +, such as tp2+sp+pp2."
            )
        if field in fields:
            raise ConfigError(f"layout {text.strip()!r} sets {field} twice.")
        fields[field] = value
    if "cp_size" in fields:
        fields.setdefault("cp_comm_type", "p2p")
    return fields


def parse_layout(text: str) -> MegatronConfig:
    """Parses one layout, such as `"tp2+sp"`; raises `ConfigError` for an unknown word or an invalid size."""
    return MegatronConfig(**parse_fields(text))


def parse_layouts(text: str) -> list[MegatronConfig]:
    """Parses comma-separated layouts, such as `"tp2,tp2+dp2+zero3"`; raises `ConfigError` like `parse_layout`."""
    return [parse_layout(layout) for layout in text.split(",")]
