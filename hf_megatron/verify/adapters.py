"""PEFT's adapters on tiny twins: each method with settings that leave none of its parameters without a gradient."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..expert_modules import find_experts, names_inside
from ..spec import ModelSpec
from .parity import Twin, best_draw, measured
from .twin import draw_parameters


def _lora(model: Any, **settings: Any) -> Any:
    from peft import LoraConfig

    # Small beside the base: a steep model makes round-off of every number.
    return LoraConfig(r=4, lora_alpha=1, target_modules=linears_of(model), **settings)


def _ia3(model: Any) -> Any:
    from peft import IA3Config

    linears = linears_of(model)
    return IA3Config(target_modules=linears, feedforward_modules=linears[::2])


def _norms(model: Any) -> Any:
    from peft import LNTuningConfig

    return LNTuningConfig(target_modules=norms_of(model))


def _experts(model: Any) -> Any:
    inside = names_inside(model, experts_of(model))
    # PEFT takes a bias of all experts for one matrix.
    names = sorted({name.rpartition(".")[2] for name in inside if model.get_parameter(name).dim() == 3})
    return _lora(model, target_parameters=[f"experts.{name}" for name in names])


def _saved(model: Any) -> Any:
    return _lora(model, modules_to_save=norms_of(model))


# Name of a case -> what makes PEFT's config for a model.
METHODS: Mapping[str, Callable[[Any], Any]] = {
    "lora": _lora,
    "rslora": functools.partial(_lora, use_rslora=True),
    "lora_bias": functools.partial(_lora, lora_bias=True),
    "patterns": functools.partial(_lora, rank_pattern={r"layers\.0.*": 6}, alpha_pattern={r".*(q_proj|down_proj)": 12}),
    "biases": functools.partial(_lora, bias="all"),
    "dora": functools.partial(_lora, use_dora=True),
    "pissa": functools.partial(_lora, init_lora_weights="pissa"),
    "olora": functools.partial(_lora, init_lora_weights="olora"),
    "experts": _experts,
    "saved": _saved,
    "ia3": _ia3,
    "ln_tuning": _norms,
}


# PEFT takes these for the experts', of mixtures that had a module for each expert once.
_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


def linears_of(model: Any) -> list[str]:
    """Names the linears of a model but the head, as far as they are modules of their own and no expert's."""
    head, is_mixture = model.get_output_embeddings(), bool(experts_of(model))
    return [
        name
        for name, module in model.named_modules()
        if module is not head and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        if not (is_mixture and name.rpartition(".")[2] in _OF_EXPERTS)
    ]


def experts_of(model: Any) -> dict[str, int]:
    """Maps the modules of experts in a model to how many they hold."""
    return find_experts(model, ModelSpec(model.config.model_type))


def norms_of(model: Any) -> list[str]:
    """Names the modules of a model that hold vectors alone, as norms do."""
    return [
        name
        for name, module in model.named_modules()
        if (own := list(module._parameters.values())) and all(p is None or p.dim() == 1 for p in own)
    ]


def adapted(twin: Twin, method: str) -> Twin:
    """Returns a twin with an adapter whose parameters are drawn at random, and its one-process numbers.

    Raises:
        ConfigError: for a method that is not in `METHODS`.
    """
    from peft import PeftModel, get_peft_model

    if method not in METHODS:
        raise ConfigError(f"adapter {method!r}: valid are {', '.join(METHODS)}.")
    model = twin.load()
    wrapped = get_peft_model(model, METHODS[method](model))

    def drawn(seed: int) -> Twin:
        folder = Path(twin.directory, f"{method}_{seed}")
        draw_parameters(wrapped, seed, trained_only=True)
        wrapped.save_pretrained(folder)

        def load(model: Any) -> Any:
            return PeftModel.from_pretrained(model, folder, is_trainable=True).get_base_model()

        return measured(replace(twin, adapt=load))

    return best_draw(drawn)[0]
