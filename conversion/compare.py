"""Comparison of two checkpoints of any formats, tensor by tensor and optionally by their models' logits."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..compat.transformers_loading import without_output
from ..core.text import error_summary, safe_repr
from ..errors import CheckpointError
from .architecture import Architecture, untie
from .interfaces import MAIN_WEIGHT, WEIGHT, Key, Reader, same_bytes
from .source import Source

_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


@dataclass
class Comparison:
    """Result of comparing two checkpoints.

    Attributes:
        compared: number of tensors that both have.
        only_first, only_second: tensors that only one of them has.
        different: description of the difference, by tensor.
        settings: config settings that differ, with both values.
        left_out: number of tensors of each that have no place in the model and were not compared.
        logits: largest absolute difference of the logits, if they were compared; NaN if there are non-finite logits,
            and infinite if the shapes differ.
    """

    compared: int = 0
    only_first: list[Key] = field(default_factory=list)
    only_second: list[Key] = field(default_factory=list)
    different: dict[Key, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    left_out: tuple[int, int] = (0, 0)
    logits: float | None = None

    @property
    def equal(self) -> bool:
        comparable = self.logits is None or math.isfinite(self.logits)
        return comparable and not (self.only_first or self.only_second or self.different or self.settings)

    def summary(self) -> str:
        """Returns a one-line summary of what was compared and what differs."""
        return "; ".join(self.summary_lines())

    def summary_lines(self) -> list[str]:
        """Returns what was compared, and a line for each kind of difference; long listings are shortened."""
        parts = [f"{self.compared} tensors compared, {len(self.different)} different"]
        if not self.compared and (self.only_first or self.only_second):
            parts = ["different models: no tensor is in both"]
        parts += [f"{key}: {what}" for key, what in list(self.different.items())[:20]]
        parts += [f"config.{name}: {what}" for name, what in list(self.settings.items())[:20]]
        for where, keys in (("first", self.only_first), ("second", self.only_second)):
            if keys:
                listing = ", ".join(map(str, keys[:5])) + (", ..." if len(keys) > 5 else "")
                parts.append(f"{len(keys)} only in the {where}: {listing}")
        for where, count in zip(("first", "second"), self.left_out, strict=True):
            if count:
                parts.append(f"{count} tensors of the {where} were not compared because the model does not have them")
        if self.logits is not None:
            parts.append(_format_logits_difference(self.logits))
        return parts


def _format_logits_difference(difference: float) -> str:
    if math.isnan(difference):
        return "logits are NaN or infinite and could not be compared"
    return (
        f"largest difference of logits {difference:.3e}"
        if math.isfinite(difference)
        else "logits have different shapes"
    )


def compare_readers(first: Reader, second: Reader, *, moments: bool, on_tensor: Callable[[int], object]) -> Comparison:
    """Compares two checkpoints of one model, one tensor at a time; equal means equal bytes.

    Args:
        moments: also compare optimizer state if both have it.
    """
    result = Comparison(left_out=(len(first.left_out), len(second.left_out)))

    def relevant(reader: Reader, other: Reader) -> set[Key]:
        keys = {key for key in reader.entries if key.kind == WEIGHT}
        if moments and first.optimizer is not None and second.optimizer is not None:
            # fp32 copies of fp32 weights are stored by some formats only.
            keys |= {key for key in reader.entries if key.kind != MAIN_WEIGHT or key in other.entries}
        return keys

    first_keys, there = relevant(first, second), relevant(second, first)
    for key in first.entries:
        if key not in first_keys:
            continue
        if key not in there:
            result.only_first.append(key)
            continue
        result.compared += 1
        one, other = first.entries[key], second.entries[key]
        if one != other:
            result.different[key] = f"{list(one.shape)} {one.dtype} and {list(other.shape)} {other.dtype}"
            continue
        a, b = first.read(key), second.read(key)
        if not same_bytes(a, b):
            result.different[key] = f"largest difference {_difference(a, b):.3e}"
        on_tensor(one.nbytes)
    result.only_second = [key for key in second.entries if key in there - first_keys]
    return result


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().max()) if a.numel() else 0.0


def differing_settings(first: Any, second: Any) -> dict[str, str]:
    """Returns the settings that differ between two configs, except those that affect no result, and the dtype."""
    one, other = first.to_dict(), second.to_dict()
    names = sorted((one.keys() | other.keys()) - _NOT_OF_THE_MODEL)
    pairs = {name: (one.get(name), other.get(name)) for name in names}
    return {name: f"{safe_repr(a)} and {safe_repr(b)}" for name, (a, b) in pairs.items() if a != b}


def compare_logits(first: Source, second: Source) -> float:
    """Returns the largest absolute difference of two checkpoints' logits, each with its own config.

    One model is in memory at a time; checksums are not compared.

    Raises:
        CheckpointError: a model computes no logits from tokens alone.
    """
    sizes = [getattr(one.architecture.config.get_text_config(), "vocab_size", 2) for one in (first, second)]
    tokens = torch.randint(0, min(sizes), (2, 16), generator=torch.Generator().manual_seed(0))
    one, other = (_logits(source.architecture, source.open, tokens) for source in (first, second))
    if {name: tensor.shape for name, tensor in one.items()} != {name: tensor.shape for name, tensor in other.items()}:
        return math.inf
    # torch's maximum propagates NaN, Python's may drop it.
    return float(torch.tensor([_difference(one[name], other[name]) for name in one]).max())


@torch.no_grad()
def _logits(
    architecture: Architecture, open_reader: Callable[[bool], Reader], tokens: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Computes the logits of the stock model in fp32, of any shapes; `tokens` are `[batch, sequence]`.

    A class may name its logits differently, have one output per head, or return only hidden states.
    """
    with without_output():
        model = type(architecture.model)._from_config(architecture.config, dtype=torch.float32).eval()
    with open_reader(False) as reader:
        untie(model, reader.architecture.untied)
        state = model.state_dict(keep_vars=True)
        for key in reader.entries:
            if key.kind == WEIGHT:
                state[key.name].data.copy_(reader.read(key))
    decoder = {"decoder_input_ids": tokens} if architecture.config.is_encoder_decoder else {}
    try:
        with without_output():
            # A config may request tuples, which have no names.
            output = dict(model(input_ids=tokens, return_dict=True, **decoder))
    except Exception as error:  # noqa: BLE001 - the class may need other inputs or another config
        raise CheckpointError(
            f"{type(model).__name__} cannot compute logits from token ids alone: {error_summary(error)}"
        ) from error
    tensors = {name: value for name, value in output.items() if isinstance(value, torch.Tensor)}
    logits = {name: tensor for name, tensor in tensors.items() if name.endswith("logits")} or tensors
    if not logits:
        raise CheckpointError(
            f"{type(model).__name__} cannot compute logits from token ids alone: it returns {safe_repr([*output])}."
        )
    return logits
