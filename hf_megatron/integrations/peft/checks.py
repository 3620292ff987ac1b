"""Checks of PEFT methods, settings and targets on a parallelized model, before anything is changed."""

import re
from typing import Any

from ...errors import UnsupportedError

# Settings without a recorded parity result, and their disabled values.
_OFF: dict[str, tuple[Any, ...]] = {
    "layer_replication": (None,),
    "use_qalora": (False,),
    "ensure_weight_tying": (False,),
    **dict.fromkeys(
        ("velora_config", "alora_invocation_tokens", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"),
        (None,),
    ),
}
# Supported initializations; others read or change the base weights as well.
_INITIAL = ("True", "False", "gaussian", "pissa", r"pissa_niter_\d+", "olora")
# Modules adapted by each PEFT method.
_METHODS = {"LORA": "linears", "IA3": "linears", "LN_TUNING": "norms", "TRAINABLE_TOKENS": "tokens"}
# Methods that add no modules to the model.
_PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")


def has_codes(state: Any) -> bool:
    """Returns whether the base is quantized."""
    from ...tensor_parallel.quantization.scheme import NAME

    return NAME in state.placed


def require_full_base_weight(state: Any) -> None:
    """Raises `UnsupportedError` for a base that ZeRO-3 shards."""
    if state.shards_weights:
        reject_adapter(
            "Merging a PEFT adapter with zero_stage = 3",
            "it shards the base weights but not the adapters. Save the adapter, and merge it in a single process or "
            "with zero_stage=2",
        )


def require_method(config: Any) -> None:
    """Raises `UnsupportedError` for an unsupported method; some inspect the model before they inject."""
    method = config.peft_type.value
    if method not in (*_METHODS, *_PROMPTS):
        reject_adapter(f"{method} of PEFT", f"valid methods are {', '.join((*_METHODS, *_PROMPTS))}")


def require_supported(config: Any, state: Any) -> None:
    """Raises `UnsupportedError` for a method, setting or layout without a recorded parity result."""
    method = config.peft_type.value
    require_method(config)
    if getattr(config, "megatron_config", None) is not None:
        raise UnsupportedError(
            "LoraConfig.megatron_config is PEFT's setting for Megatron-Core models and is not supported on a "
            "parallelized model. Leave it unset; the layout was set by from_pretrained(..., megatron_config=...)."
        )
    for name, values in _OFF.items():
        value = getattr(config, name, values[0])
        if value not in values:
            reject_adapter(f"{type(config).__name__}.{name} = {value!r}", f"valid is {values[0]!r}")
    initial = getattr(config, "init_lora_weights", True)
    if not any(re.fullmatch(pattern, str(initial)) for pattern in _INITIAL):
        reject_adapter(f"LoraConfig.init_lora_weights = {initial!r}", f"valid are {', '.join(_INITIAL)}")
    if getattr(config, "use_dora", False) and config.bias != "none":
        reject_adapter(
            f"LoraConfig.use_dora with bias = {config.bias!r}", "DoRA does not scale biases; valid is 'none'"
        )
    if has_codes(state) and (getattr(config, "use_dora", False) or initial not in (True, False, "gaussian")):
        reject_adapter(
            f"LoraConfig.use_dora = {config.use_dora}, init_lora_weights = {initial!r} with a quantized base",
            "both read or change the unquantized weights; valid are use_dora = False and init_lora_weights = True, "
            "False or 'gaussian'",
        )
    saved = getattr(config, "modules_to_save", None)
    trains_base = method == "LN_TUNING" or saved or getattr(config, "bias", "none") != "none"
    if state.shards_weights and trains_base:
        reject_adapter(
            f"{method} of PEFT with zero_stage = 3, modules_to_save = {saved} and bias",
            "ZeRO stage 3 needs a frozen base; use zero_stage=2, which shards gradients and optimizer states",
        )


def require_prompts(config: Any, state: Any) -> None:
    """Raises `UnsupportedError` for prompts without a recorded parity result."""
    method = config.peft_type.value
    require_method(config)
    if getattr(config, "encoder_reparameterization_type", None) == "LSTM":
        reject_adapter("PromptEncoderConfig.encoder_reparameterization_type = 'LSTM'", "valid is 'MLP'")
    split = [axis for axis in ("pp", "cp") if state.axes.size(axis) > 1]
    if method == "PREFIX_TUNING" and split:
        reject_adapter(
            f"PREFIX_TUNING of PEFT with {split[0]}_size > 1",
            "prefixes are passed as a key-value cache, which training over pipeline stages or sequence shards does "
            "not support; use PROMPT_TUNING or P_TUNING",
        )
    if method != "PREFIX_TUNING" and state.shards_weights:
        reject_adapter(
            f"{method} of PEFT with zero_stage = 3",
            "PEFT calls the embedding outside the model's forward, where its weight is not gathered; use zero_stage=2",
        )
    if config.modules_to_save:
        names = list(dict.fromkeys(config.modules_to_save))
        reject_adapter(
            f"{method} of PEFT with a trained copy of {', '.join(names)}, which PEFT adds for task_type = "
            f"{config.task_type!r},",
            "prompts are trained alone; use LORA or IA3 for classification",
        )


def require_targets(tuner: Any, model: Any, adapter: str, state: Any) -> None:
    """Raises `UnsupportedError` for target modules without a rule, before any is changed."""
    import copy

    from peft.tuners.tuners_utils import BaseTunerLayer, _maybe_include_all_linear_layers
    from torch import nn

    from ...compat.transformers_models import ties_embeddings
    from .layout import require_parameter_rule, require_rules

    # Resolve targets as PEFT does: the defaults of the model's type, or all linears.
    config: Any = copy.deepcopy(tuner.peft_config[adapter])
    config = tuner._prepare_adapter_config(config, tuner.get_model_config(model))
    config = _maybe_include_all_linear_layers(config, model)
    named = dict(model.named_modules())
    targets = [name for name in named if name and tuner._check_target_module_exists(config, name) is True]
    targets = [name for name in targets if not isinstance(named[name], BaseTunerLayer) and ".base_layer" not in name]
    embedding = model.get_input_embeddings()
    if config.peft_type.value == "LORA" and not config.use_dora:
        looked_up = [name for name in targets if named[name] is embedding]
        if looked_up and state.cut is not None and ties_embeddings(model):
            reject_adapter(
                f"A PEFT adapter on {looked_up[0]} with pp_size > 1",
                "the embedding is tied to the head, whose copy on the last stage would need the adapter as well",
            )
        targets = [name for name in targets if name not in looked_up]
    if config.peft_type.value == "TRAINABLE_TOKENS":
        _require_token_tables(model, targets)
        return
    tokens = getattr(config, "trainable_token_indices", None)
    if tokens is not None:
        keys = tokens if isinstance(tokens, dict) else [next(name for name in named if named[name] is embedding)]
        # PEFT compares the ends of names, and wraps a module only once.
        inside = (name for name in named if ".token_adapter" not in name)
        _require_token_tables(model, [name for name in inside if any(name.endswith(key) for key in keys)])
    for name in targets:
        if named[name] in (embedding, model.get_output_embeddings()):
            reject_adapter(f"A PEFT adapter on {name}", "the loss and the sharded embedding read its weight directly")
        if _METHODS[config.peft_type.value] != "linears":
            continue
        if not isinstance(named[name], nn.Linear) and type(named[name]).__name__ != "Conv1D":
            reject_adapter(f"A PEFT adapter on {name} ({type(named[name]).__name__})", "only linears are supported")
    if _METHODS[config.peft_type.value] == "linears":
        require_rules(state, targets)
    suffixes = tuple(f".{name}" for name in getattr(config, "target_parameters", None) or ())
    for name, _ in model.named_parameters():
        if f".{name}".endswith(suffixes or ("\0",)):
            require_parameter_rule(state, name, model.get_submodule(name.rpartition(".")[0]))


def _require_token_tables(model: Any, names: list[str]) -> None:
    """Raises `UnsupportedError` for trained tokens of modules other than the embedding and a head without a bias."""
    from ...compat.torch_autograd import called_module
    from ...compat.transformers_models import ties_embeddings

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if getattr(model.config, "is_encoder_decoder", False):
        reject_adapter("Trained tokens of an encoder-decoder model", "several tables may be tied to its embedding")
    for name in names:
        module = model.get_submodule(name)
        if module is not embedding and module is not head:
            reject_adapter(f"Trained tokens of {name}", "only the input embedding and the head are supported")
    if head is None or not (ties_embeddings(model) or any(model.get_submodule(name) is head for name in names)):
        return
    if getattr(called_module(head), "bias", None) is not None:
        reject_adapter("Trained tokens of a head with a bias", "PEFT's forward leaves the bias out")


def require_saved(config: Any, model: Any, state: Any) -> None:
    """Raises `UnsupportedError` for `modules_to_save` whose weights are tied or read by the sharded loss."""
    from ...compat.transformers_models import ties_embeddings

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    saved = getattr(config, "modules_to_save", None) or ()
    for name, module in model.named_modules():
        if module not in (embedding, head) or module is None:
            continue
        if not any(name == key or name.endswith(f".{key}") for key in saved):
            continue
        setting = f"{type(config).__name__}.modules_to_save = {saved!r}"
        if ties_embeddings(model):
            reject_adapter(setting, f"{name} is tied, and the copy in modules_to_save would not be")
        if module is head and state.axes.size("cp") > 1:
            reject_adapter(f"{setting} with cp_size > 1", "the head receives sequence shards")


def reject_adapter(what: str, reason: str) -> None:
    """Raises `UnsupportedError` with a reason and the alternatives."""
    raise UnsupportedError(
        f"{what} is not supported on a parallelized model: {reason}. Change it, or train the adapter on a model loaded "
        "without megatron_config."
    )
