"""Private symbols of Accelerate, TRL, PEFT, sentence-transformers and tokenizers."""

import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import ConfigError


def adapter_prefix(model: Any) -> str | None:
    """Returns the prefix of adapter parameter names in a `PeftModel`; `None` for other models."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    return "prompt_encoder" if model.active_peft_config.is_prompt_learning else str(model.base_model.prefix)


def name_without_tuners(name: str) -> str:
    """Returns a parameter's name without the parts that PEFT's wrappers insert."""
    return re.sub(r"(token_adapter\.)?base_layer\.|original_module\.|modules_to_save\.[^.]+\.", "", name)


def is_sentence_transformer(module: Any) -> bool:
    """Returns whether a module is a sentence-transformers model, which saves the model it wraps itself."""
    library = sys.modules.get("sentence_transformers.base.model")
    return library is not None and isinstance(module, library.BaseModel)


def forget_accelerate_state() -> None:
    """Resets the state shared by a process's Accelerators; a fork inherits it from its parent."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trl_output(**fields: Any) -> Any:
    """Creates the forward output that TRL's trainers read (`FusedCausalLMOutput`, not exported)."""
    from trl.trainer.utils import FusedCausalLMOutput

    return FusedCausalLMOutput(**fields)


def trl_sums(loss: torch.Tensor, aux_loss: torch.Tensor | None, fields: Mapping[str, torch.Tensor]) -> Any:
    """Creates the output that TRL 1.14's `SFTTrainer` reads, from a loss `()` and fields `[batch, sequence]`."""
    from trl.trainer.sft_trainer import _ChunkedCELMHeadOutput  # type: ignore[attr-defined]

    return _ChunkedCELMHeadOutput(
        loss=loss,
        num_correct_tokens=fields["is_top1"].sum().float(),
        entropy_sum=fields["entropy"].detach().sum(),
        num_valid_tokens=fields["label_mask"].sum(),
        aux_loss=aux_loss,
    )


def enlarge_word_cache(tokenizer: Any, words: int) -> None:
    """Enlarges the word cache of a `tokenizers` tokenizer, if its model has one (private)."""
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is not None:
        resize(words)


def require_plots() -> None:
    """Raises `ConfigError` with the installation command if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise ConfigError('PNG pictures need matplotlib: pip install "hf_megatron[plots]"')


def strip_adapter_prefix(name: str) -> str:
    """Returns a parameter name in a `PeftModel` as it is in the base model and in the model's shardings."""
    return name.removeprefix("base_model.model.")
