"""Private symbols of Accelerate, TRL, PEFT, sentence-transformers and tokenizers."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from ..errors import ConfigError


def adapter_prefix(model: Any) -> str | None:
    """Returns what the names of an adapter's parameters begin with in a `PeftModel`; `None` for any other model."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return None
    return "prompt_encoder" if model.active_peft_config.is_prompt_learning else str(model.base_model.prefix)


def is_sentence_transformer(module: Any) -> bool:
    """Tells whether a module is a model of sentence-transformers, which saves what it is made around by itself."""
    library = sys.modules.get("sentence_transformers.base.model")
    return library is not None and isinstance(module, library.BaseModel)


def forget_accelerate_state() -> None:
    """Drops the state that every Accelerator of a process shares; a fork inherits that of the process it came from."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trl_output(**fields: Any) -> Any:
    """Makes what TRL's trainers read of a forward (`FusedCausalLMOutput`, not exported)."""
    from trl.trainer.utils import FusedCausalLMOutput

    return FusedCausalLMOutput(**fields)


def trl_sums(loss: torch.Tensor, aux_loss: torch.Tensor | None, fields: Mapping[str, torch.Tensor]) -> Any:
    """Makes what TRL 1.14's `SFTTrainer` reads of a forward, of a loss `()` and fields `[batch, sequence]`."""
    from trl.trainer.sft_trainer import _ChunkedCELMHeadOutput  # type: ignore[attr-defined]

    return _ChunkedCELMHeadOutput(
        loss=loss,
        num_correct_tokens=fields["is_top1"].sum().float(),
        entropy_sum=fields["entropy"].detach().sum(),
        num_valid_tokens=fields["label_mask"].sum(),
        aux_loss=aux_loss,
    )


def enlarge_word_cache(tokenizer: Any, words: int) -> None:
    """Has a tokenizer of `tokenizers` remember the tokens of so many words, where its model does (private in 0.22)."""
    resize = getattr(tokenizer.model, "_resize_cache", None)
    if resize is not None:
        resize(words)


def require_plots() -> None:
    """Raises `ConfigError`, with the command that installs it, where matplotlib is absent."""
    if find_spec("matplotlib") is None:
        raise ConfigError('PNG pictures need matplotlib: pip install "hf_megatron[plots]"')


def strip_adapter_prefix(name: str) -> str:
    """Returns a name in a `PeftModel` as it is inside of the model that was loaded, by which claims know it."""
    return name.removeprefix("base_model.model.")
