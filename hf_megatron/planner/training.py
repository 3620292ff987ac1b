"""What of a model is trained: all of it, what is not frozen, or adapters beside a base that may be in few bits."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..errors import ConfigError

# Bytes of an entry's code, and entries of a scale of four bytes; of eight bits, a row's.
_CODES = {"nf4": (0.5, 64), "int8": (1.0, None)}
_SCALE = 4


@dataclass(frozen=True)
class Training:
    """What of a model is trained.

    Args:
        lora_rank (`int`, defaults to 0): of adapters beside all linears but the head (PEFT's `all-linear`), with the
            model itself frozen; 0: the model is trained.
        frozen: patterns that `re.search` finds in the names of parameters that are not trained.
        quantized (`str`, *optional*): `"nf4"` (blocks of 64, scales of fp32) or `"int8"` (a scale for each row): how
            the weights of a frozen base's linears are kept.

    Raises:
        ConfigError: a value out of its range, weights in few bits that are trained, or LoRA without PEFT.
    """

    lora_rank: int = 0
    frozen: tuple[str, ...] = ()
    quantized: str | None = None

    def __post_init__(self) -> None:
        if self.lora_rank < 0:
            raise ConfigError(f"Training.lora_rank = {self.lora_rank}: expected 0 or more.")
        if self.quantized not in (None, *_CODES):
            raise ConfigError(f"Training.quantized = {self.quantized!r}: expected one of {', '.join(_CODES)}.")
        if self.quantized is not None and not self.lora_rank:
            raise ConfigError(
                f"Training.quantized = {self.quantized!r}: weights in few bits are not trained; needs LoRA."
            )
        if self.lora_rank and find_spec("peft") is None:
            raise ConfigError(f"Training.lora_rank = {self.lora_rank}: adapters are PEFT's: pip install peft.")
        for pattern in self.frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"Training.frozen = {pattern!r}: no regular expression: {error}.") from error

    def freeze(self, model: nn.Module) -> None:
        """Freezes what is not trained of a model before it has adapters.

        Raises:
            ConfigError: a pattern is in no parameter's name, or nothing is left to train.
        """
        for pattern in self.frozen:
            named = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
            if not named:
                raise ConfigError(f"Training.frozen = {pattern!r}: no parameter of {type(model).__name__} is named so.")
            for parameter in named:
                parameter.requires_grad_(False)
        if self.lora_rank:
            model.requires_grad_(False)
        elif not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(f"Training.frozen = {list(self.frozen)}: nothing of {type(model).__name__} is trained.")

    def adapt(self, model: Any) -> Any:
        """Returns a model that is to be trained so, adapters and all; quantised weights stay as they are."""
        self.freeze(model)
        if not self.lora_rank:
            return model
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=self.lora_rank, target_modules="all-linear"))

    def quantized_weights(self, model: Any) -> Iterator[str]:
        """Yields the names of the weights that are kept in few bits."""
        if self.quantized is not None:
            head = model.get_output_embeddings()
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and module is not head:
                    yield f"{name}.weight"

    def code_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of a weight's part `[rows, columns]` in few bits, scales and all."""
        assert self.quantized is not None
        size, block = _CODES[self.quantized]
        entries = rows * columns
        return int(entries * size) + _SCALE * (rows if block is None else -(-entries // block))


# All of a model, in the type that it is loaded in.
WHOLE = Training()
