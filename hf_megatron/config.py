"""`MegatronConfig`: every knob of a run, validated with errors that name the field, its value and the valid choices."""

import dataclasses
import difflib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError, UnsupportedError

# Megatron-LM's argument names, without the leading dashes, and the field each one sets.
MEGATRON_ARGUMENTS: Mapping[str, str] = {
    "tensor_model_parallel_size": "tp_size",
    "pipeline_model_parallel_size": "pp_size",
    "context_parallel_size": "cp_size",
    "expert_model_parallel_size": "ep_size",
    "data_parallel_size": "dp_size",
    "sequence_parallel": "sequence_parallel",
}
SIZES = ("tp_size", "cp_size", "pp_size", "dp_size", "ep_size")


@dataclass(frozen=True)
class MegatronConfig:
    """How one model is laid out over the ranks of a job.

    The sizes follow Hugging Face's names; a size of 1 means the axis is not used.

    Args:
        tp_size (`int`, defaults to 1): ranks that share each layer's weights (tensor parallel).
        sequence_parallel (`bool`, defaults to `False`): split the sequence over the tp ranks wherever weights are
            replicated (norms, dropout, residual stream).
        dp_size (`int`, *optional*): ranks that see different batches; derived from the world size by default.
            Only 1 is supported so far.
        pp_size, cp_size, ep_size (`int`, defaults to 1): pipeline, context and expert parallel sizes. Only 1 is
            supported so far.
        loss_chunk_size (`int`, *optional*): tokens per chunk of the fused head and cross entropy; the local logits of
            one chunk are all that exists at a time. By default all tokens are one chunk.
        strict_loading (`bool`, defaults to `True`): missing, surplus or mis-shaped weights raise. With `False` missing
            weights are drawn as in training from scratch, for example a new classification head.
        allow_unverified (`bool`, defaults to `False`): run a model type and layout without a recorded parity result,
            after the parity check of its tiny twin passed on this machine.
        seed (`int`, defaults to 0): seed of weights that are drawn rather than read; the same seed gives the same
            global weights on every layout.
        timeout (`float`, defaults to 1800): seconds a collective may take before the job is aborted.

    Raises:
        ConfigError: a value out of range, naming the field.
        UnsupportedError: a size this version does not support.
    """

    tp_size: int = 1
    sequence_parallel: bool = False
    dp_size: int | None = None
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    loss_chunk_size: int | None = None
    strict_loading: bool = True
    allow_unverified: bool = False
    seed: int = 0
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        for name in (*SIZES, "loss_chunk_size"):
            value = getattr(self, name)
            if name in ("dp_size", "loss_chunk_size") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"MegatronConfig.{name} = {value!r}: expected an integer of 1 or more.")
        for name in ("sequence_parallel", "strict_loading", "allow_unverified"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ConfigError(f"MegatronConfig.{name} = {value!r}: expected True or False.")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ConfigError(f"MegatronConfig.seed = {self.seed!r}: expected an integer.")
        if not isinstance(self.timeout, int | float) or not math.isfinite(self.timeout) or self.timeout <= 0:
            raise ConfigError(f"MegatronConfig.timeout = {self.timeout!r}: expected seconds, more than 0.")
        for name in ("pp_size", "cp_size", "ep_size"):
            if getattr(self, name) > 1:
                raise UnsupportedError(
                    f"MegatronConfig.{name} = {getattr(self, name)}: not supported yet, valid: 1. Use tp_size and "
                    "sequence_parallel to spread a model over more ranks."
                )
        if self.dp_size is not None and self.dp_size > 1:
            raise UnsupportedError(
                f"MegatronConfig.dp_size = {self.dp_size}: data parallelism is not supported yet, valid: 1. Start as "
                "many ranks as tp_size."
            )
        if self.sequence_parallel and self.tp_size == 1:
            raise ConfigError(
                "MegatronConfig.sequence_parallel = True: needs tp_size of 2 or more, the sequence is split over the "
                "tp ranks (tp_size = 1)."
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "MegatronConfig":
        """Builds a config from a mapping of field names; an unknown field raises `ConfigError` with near matches."""
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=3) or known
                raise ConfigError(
                    f"MegatronConfig has no field {name!r} (value {values[name]!r}); valid: {', '.join(near)}."
                )
        return cls(**values)

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> "MegatronConfig":
        """Reads a YAML file that holds a mapping of field names."""
        import yaml

        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{os.fspath(path)}: expected a mapping of MegatronConfig fields, got {type(values).__name__}."
            )
        return cls.from_dict(values)

    @classmethod
    def from_megatron_args(cls, arguments: Mapping[str, Any]) -> "MegatronConfig":
        """Builds a config from Megatron-LM's argument names, with or without leading dashes (`--sequence-parallel`)."""
        values = {}
        for name, value in arguments.items():
            key = name.lstrip("-").replace("-", "_")
            if key not in MEGATRON_ARGUMENTS:
                near = difflib.get_close_matches(key, MEGATRON_ARGUMENTS, n=3) or list(MEGATRON_ARGUMENTS)
                raise ConfigError(
                    f"Megatron argument {name!r} (value {value!r}) has no counterpart; valid: {', '.join(near)}."
                )
            values[MEGATRON_ARGUMENTS[key]] = value
        return cls.from_dict(values)

    @classmethod
    def coerce(cls, value: "MegatronConfig | Mapping[str, Any] | str | os.PathLike[str]") -> "MegatronConfig":
        """Accepts what `megatron_config=` accepts: a config, a mapping, or the path of a YAML file."""
        if isinstance(value, cls):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict(value)
        if isinstance(value, str | os.PathLike):
            return cls.from_yaml(value)
        raise ConfigError(
            f"megatron_config = {value!r}: expected a MegatronConfig, a dict or the path of a YAML file, got "
            f"{type(value).__name__}."
        )

    @property
    def is_parallel(self) -> bool:
        """Whether any axis has more than one rank."""
        return self.ranks_per_replica > 1

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that work on one batch: tp x cp x pp."""
        return self.tp_size * self.cp_size * self.pp_size

    def layout(self) -> str:
        """The short name of the layout, for example `tp2+sp`."""
        return f"tp{self.tp_size}" + ("+sp" if self.sequence_parallel else "")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, sort_keys=True) + "\n"
