"""PEFT adapters on tiny models: each method with settings in which all of its parameters get a gradient."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import ConfigError
from ..models.experts import find_experts, names_inside
from ..models.spec import ModelSpec
from .parity import TinyModel, best_draw, measured, run_in_fork
from .tiny_model import draw_parameters

# In MoE models, PEFT maps these module names to the experts' weights, as older classes had a module per expert.
_OF_EXPERTS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")

# Types whose mixers' output linear PEFT rejects, because a fused kernel reads its weight.
_OF_FUSED_KERNELS = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")


@dataclass(frozen=True)
class Targets:
    """Adapter targets of a model: names of modules and parameters.

    Attributes:
        linears: linears other than the head's and the experts'.
        norms: modules whose parameters are all 1-D.
        experts: parameters with one matrix per expert, as `experts.<name>`.
        ends: the embedding and the head.
        text: linears of the language model, without modality encoders and projectors.
    """

    linears: list[str]
    norms: list[str]
    experts: list[str]
    ends: list[str]
    text: list[str]


def find_targets(model: Any, tiny_model: TinyModel) -> Targets:
    """Finds the adapter targets of a model: modules that return a tensor and have a gradient in the reference.

    Modules that are never called, because another module reads their weights directly, are excluded: their adapters
    would not be called either.
    """
    reference, called = tiny_model.reference, _called(model, tiny_model.batches[0])
    vocabulary = model.config.get_text_config().vocab_size
    head, experts = model.get_output_embeddings(), find_experts(model, ModelSpec(model.config.model_type))
    unused = {name for name, gradient in reference.gradients.items() if gradient is None}
    used = {
        name: module
        for name, module in model.named_modules()
        if name in called and not any(f"{name}.{params}" in unused for params in module._parameters)
    }
    linears = [
        name
        for name, module in used.items()
        if module is not head and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        # Some classes do not return their head from `get_output_embeddings`; recognize it by its size.
        if getattr(module, "out_features", None) != vocabulary
        if not (experts and name.rpartition(".")[2] in _OF_EXPERTS)
        # PEFT 0.21 takes "weight" in a module's name for the end of a parameter's name and cannot load what it saved.
        if "weight" not in name
        if not (model.config.model_type in _OF_FUSED_KERNELS and name.endswith(".out_proj"))
    ]
    norms = [
        name
        for name, module in used.items()
        if (params := list(module._parameters.values())) and all(p is None or p.dim() == 1 for p in params)
    ]
    inside = (name for name in names_inside(model, experts) if model.get_parameter(name).dim() == 3)
    matrices = sorted({f"experts.{name.rpartition('.')[2]}" for name in inside})
    ends = [name for name, module in used.items() if module in (model.get_input_embeddings(), head)]
    decoder = set(model.get_decoder().modules())
    return Targets(linears, norms, matrices, ends, [name for name in linears if used[name] in decoder])


def _called(model: Any, batch: dict[str, Any]) -> set[str]:
    """Returns the names of the modules that a forward calls and that return a single tensor, as PEFT requires."""
    called_names: set[str] = set()

    def note(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            called_names.add(name)

    hooks = [module.register_forward_hook(functools.partial(note, name)) for name, module in model.named_modules()]
    with torch.no_grad():
        model(**batch)
    for hook in hooks:
        hook.remove()
    return called_names


def _lora(targets: Targets, **settings: Any) -> Any:
    from peft import LoraConfig

    # A small scale relative to the base weights, because a model with large gradients amplifies round-off.
    return LoraConfig(r=4, lora_alpha=1, target_modules=targets.linears, **settings)


def _ia3(targets: Targets) -> Any:
    from peft import IA3Config

    return IA3Config(target_modules=targets.linears, feedforward_modules=targets.linears[::2])


def _norms(targets: Targets) -> Any:
    from peft import LNTuningConfig

    return LNTuningConfig(target_modules=targets.norms)


def _prompts(kind: str, targets: Targets, **settings: Any) -> Any:
    import peft

    return getattr(peft, kind)(num_virtual_tokens=5, task_type="CAUSAL_LM", **settings)


# Name of an adapter case -> function that creates its PEFT config.
METHODS: Mapping[str, Callable[[Targets], Any]] = {
    "lora": _lora,
    # Modality encoders and projectors are replicated and frozen, so no gradient reaches the image features.
    "lora_text": lambda targets: _lora(replace(targets, linears=targets.text)),
    "rslora": functools.partial(_lora, use_rslora=True),
    "lora_bias": functools.partial(_lora, lora_bias=True),
    "patterns": functools.partial(_lora, rank_pattern={r"layers\.0.*": 6}, alpha_pattern={r".*(q_proj|down_proj)": 12}),
    "biases": functools.partial(_lora, bias="all"),
    "dora": functools.partial(_lora, use_dora=True),
    "pissa": functools.partial(_lora, init_lora_weights="pissa"),
    "olora": functools.partial(_lora, init_lora_weights="olora"),
    "experts": lambda targets: _lora(targets, target_parameters=targets.experts),
    "embedding": lambda targets: _lora(replace(targets, linears=[targets.ends[0], *targets.linears])),
    "tokens": functools.partial(_lora, trainable_token_indices=[7, 3, 5]),
    "saved": lambda targets: _lora(targets, modules_to_save=targets.norms),
    "vocabulary": lambda targets: _lora(targets, modules_to_save=targets.ends),
    "ia3": _ia3,
    "ln_tuning": _norms,
    "prompt": functools.partial(_prompts, "PromptTuningConfig"),
    "p_tuning": functools.partial(_prompts, "PromptEncoderConfig", encoder_hidden_size=24),
    "prefix": functools.partial(_prompts, "PrefixTuningConfig"),
    "prefix_projection": functools.partial(
        _prompts, "PrefixTuningConfig", prefix_projection=True, encoder_hidden_size=24
    ),
}


def _with_prompts(method: str, seed: int, model: Any) -> Any:
    """Wraps a model with newly initialized prompts."""
    from peft import get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, METHODS[method](Targets([], [], [], [], [])))


def adapted(tiny_model: TinyModel, method: str) -> TinyModel:
    """Returns a tiny model with a randomly drawn adapter and its single-process reference.

    Args:
        tiny_model (`TinyModel`): the base model.
        method (`str`): a key of `METHODS`.

    Raises:
        ConfigError: the method is not in `METHODS`.
    """
    from peft import PeftModel, get_peft_model

    if method not in METHODS:
        raise ConfigError(f"adapter {method!r}: expected one of {', '.join(METHODS)}.")

    def get_folder(seed: int) -> Path:
        return Path(tiny_model.directory, f"{method}_{seed}")

    def is_saved(seed: int) -> bool:
        """Saves a drawn adapter; returns `False` for prompts, which PEFT does not train after loading."""
        model = tiny_model.load()
        config = METHODS[method](find_targets(model, tiny_model))
        if config.is_prompt_learning:
            return False
        wrapped = get_peft_model(model, config)
        draw_parameters(wrapped, seed, trained_only=True)
        wrapped.save_pretrained(get_folder(seed))
        return True

    def drawn(seed: int, best: float) -> TinyModel:
        # In a fork, because PEFT uses a GPU if there is one.
        if not run_in_fork(lambda: is_saved(seed)):
            return measured(replace(tiny_model, adapt=functools.partial(_with_prompts, method, seed)), best)

        def load(model: Any) -> Any:
            return PeftModel.from_pretrained(model, get_folder(seed), is_trainable=True).get_base_model()

        return measured(replace(tiny_model, adapt=load), best)

    return best_draw(drawn)[0]
