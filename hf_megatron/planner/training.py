"""Training settings: the full model, its unfrozen parts, or adapters on a frozen and maybe quantized base."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from torch import nn

from ..errors import ConfigError

# Bytes per quantized entry, and entries per fp32 scale; `None`: one scale per output channel.
_CODES = {"nf4": (0.5, 64), "int8": (1.0, None)}
_SCALE = 4


@dataclass(frozen=True)
class Training:
    """Trained parts of a model.

    Args:
        lora_rank (`int`, defaults to 0): of adapters on all linears but the head (PEFT's `all-linear`), with the model
            itself frozen; 0: the model is trained.
        frozen: patterns that `re.search` finds in the names of parameters that are not trained.
        quantized (`str`, *optional*): format of the linear weights of a frozen base: `"nf4"` (blocks of 64, fp32
            scales) or `"int8"` (a scale per output channel).

    Raises:
        ConfigError: a value out of its range, quantized weights without LoRA, or LoRA without PEFT.
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
                f"Training.quantized = {self.quantized!r}: quantized weights cannot be trained. Set lora_rank above 0."
            )
        if self.lora_rank and find_spec("peft") is None:
            raise ConfigError(f"Training.lora_rank = {self.lora_rank}: adapters need PEFT: pip install peft.")
        for pattern in self.frozen:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"Training.frozen = {pattern!r}: not a valid regular expression: {error}.") from error

    def freeze(self, model: nn.Module) -> None:
        """Freezes the untrained parameters of a model that has no adapters yet.

        Raises:
            ConfigError: a pattern is in no parameter's name, or nothing is left to train.
        """
        for pattern in self.frozen:
            named = [parameter for name, parameter in model.named_parameters() if re.search(pattern, name)]
            if not named:
                raise ConfigError(f"Training.frozen = {pattern!r}: matches no parameter of {type(model).__name__}.")
            for parameter in named:
                parameter.requires_grad_(False)
        if self.lora_rank:
            model.requires_grad_(False)
        elif not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                f"Training.frozen = {list(self.frozen)}: leaves no trainable parameter in {type(model).__name__}."
            )

    def adapt(self, model: Any) -> Any:
        """Returns the model with frozen parameters and adapters; does not quantize its weights."""
        self.freeze(model)
        if not self.lora_rank:
            return model
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(r=self.lora_rank, target_modules="all-linear"))

    def quantized_weights(self, model: Any) -> Iterator[str]:
        """Yields the names of the weights that are quantized."""
        if self.quantized is not None:
            head = model.get_output_embeddings()
            for name, module in model.named_modules():
                if isinstance(module, nn.Linear) and module is not head:
                    yield f"{name}.weight"

    def code_bytes(self, rows: int, columns: int) -> int:
        """Returns the bytes of a quantized weight shard `[rows, columns]`, with its scales."""
        assert self.quantized is not None
        size, block = _CODES[self.quantized]
        entries = rows * columns
        return int(entries * size) + _SCALE * (rows if block is None else -(-entries // block))


# Full training, in the dtype in which the model is loaded.
WHOLE = Training()
