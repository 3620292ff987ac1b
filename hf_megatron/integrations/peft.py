"""Where PEFT puts adapters into a model, takes them out and saves them: they are laid out as the model is."""

import re
from collections.abc import Callable
from typing import Any

from ..errors import UnsupportedError

# Settings that nobody has compared with one process: what they are when they are off.
_OFF: dict[str, tuple[Any, ...]] = {
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "use_qalora": (False,),
    "ensure_weight_tying": (False,),
    **dict.fromkeys(
        ("velora_config", "alora_invocation_tokens", "monteclora_config", "use_bdlora", "arrow_config", "kasa_config"),
        (None,),
    ),
}
# Of initial values; others read or change the base's weights, too.
_INITIAL = ("True", "False", "gaussian", "pissa", r"pissa_niter_\d+", "olora")
# What PEFT's methods put adapters on.
_METHODS = {"LORA": "linears", "IA3": "linears", "LN_TUNING": "norms"}
# Those that put nothing into a model.
_PROMPTS = ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING")


def in_out_features(original: Callable, module: Any) -> Any:
    """Returns the sizes `(in, out)` of the whole linear, of which a rank has a part."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or not isinstance(weight, DTensor):
        found = original(module)
        # transformers' Conv1D holds its weight the other way round.
        return tuple(weight.shape) if isinstance(weight, DTensor) and type(module).__name__ == "Conv1D" else found
    return module.in_features, module.out_features


def linear_init(
    original: Callable, self: Any, base_layer: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Makes an adapter's layer; PEFT takes a split `Conv1D` for a linear, whose weight would lie the other way."""
    from ..tensor_parallel.linear import ParallelLinear

    if isinstance(base_layer, ParallelLinear) and base_layer.weight_dim_out == 1:
        config.fan_in_fan_out = kwargs["is_target_conv_1d_layer"] = True
    original(self, base_layer, adapter_name, config, *args, **kwargs)


def dora_update_layer(original: Callable, self: Any, *, base_layer: Any, **kwargs: Any) -> None:
    """Takes the norms of a whole weight, where ranks and stages have parts of it."""
    from ..peft.whole_base import whole_base

    with whole_base(base_layer):
        original(self, base_layer=base_layer, **kwargs)


def from_base(original: Callable, self: Any, adapter_name: str, *args: Any) -> None:
    """Makes initial values of a whole weight, and leaves the rest of it in its place, alike on all ranks."""
    from ..data_parallel.engine import engine_of
    from ..peft.whole_base import agree_on, whole_base

    base = self.get_base_layer()
    is_laid_out = engine_of(base.weight) is not None
    with whole_base(base):
        original(self, adapter_name, *args)
        if is_laid_out:
            agree_on(base.weight, self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight)


def init(original: Callable, self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps a model; what is known of its layout is known of the wrapper."""
    from ..parallel_state import parallel_state, share_state

    state = parallel_state(model)
    original(self, model, peft_config, *args, **kwargs)
    if state is not None:
        share_state(self, model, state)


def setup_prompt_encoder(original: Callable, self: Any, adapter_name: str) -> None:
    """Makes what makes prompts, from one random state on all ranks, and lays it out."""
    from ..parallel_state import parallel_state

    model = self.base_model
    if (state := parallel_state(model)) is None:
        original(self, adapter_name)
        return
    from ..peft.layout import note_modules
    from ..peft.prompts import lay_out_prompts

    _require_prompts(self.peft_config[adapter_name], state)
    _draw_alike(state)
    original(self, adapter_name)
    lay_out_prompts(self.prompt_encoder, model, state)
    note_modules(model, state)


def get_prompt(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what this rank's model takes of a prompt."""
    from ..parallel_state import parallel_state

    if (state := parallel_state(self.base_model)) is None:
        return original(self, *args, **kwargs)
    from ..peft.prompts import local_prompt, reading_prompts

    # Prompts are made before the model is called, which does it, too.
    state.data_parallel.follow_edits()  # type: ignore[union-attr]
    with reading_prompts(state):
        return local_prompt(original(self, *args, **kwargs), state)


def _draw_alike(state: Any) -> None:
    """Gives all ranks the first one's random state."""
    from ..communication.random_streams import broadcast_state

    broadcast_state(state.mesh.device, *(state.mesh.host_group(axis) for axis in ("tp", "cp", "pp", "dp")))


def inject_adapter(original: Callable, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Puts an adapter into a model, from one random state on all ranks, and lays it out."""
    from ..parallel_state import parallel_state

    if (state := parallel_state(model)) is None:
        original(self, model, adapter_name, *args, **kwargs)
        return
    from ..peft.layout import lay_out_adapters

    _require_supported(self.peft_config[adapter_name], state)
    _require_targets(self, model, adapter_name, state)
    _require_saved(self.peft_config[adapter_name], model, state)
    _draw_alike(state)
    original(self, model, adapter_name, *args, **kwargs)
    lay_out_adapters(model, state)


def forward_hooks(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Has rows of a batch choose their adapters, except where a pipeline cuts the batch."""
    from ..parallel_state import parallel_state

    state = parallel_state(self.model)
    if state is not None and state.cut is not None and kwargs.get("adapter_names") is not None:
        _refuse("adapter_names= with pp_size > 1", "a batch is cut into microbatches, the names are those of all rows")
    return original(self, *args, **kwargs)


def unload(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes adapters out of a model, or merges them into its weights, and has the layout follow."""
    from ..parallel_state import parallel_state

    if (state := parallel_state(self.model)) is None:
        return original(self, *args, **kwargs)
    from ..peft.layout import forget_adapters, insides

    if kwargs.get("merge", args[0] if args else True):
        _require_whole_base(state)
        if _is_quantized(state):
            # Sums are rounded to the dtype of the model, not to codes a second time.
            self.model.dequantize()
    before = insides(self.model)
    model = original(self, *args, **kwargs)
    forget_adapters(model, state, before)
    return model


def cast_adapter(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Casts an adapter, which PEFT does by putting other parameters in the place of those that were laid out."""
    from ..parallel_state import parallel_state

    original(self, *args, **kwargs)
    if (state := parallel_state(self.model)) is not None:
        state.data_parallel.scan()  # type: ignore[union-attr]


def base_model_class(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the class that a model was loaded as, which FSDP2 puts one of its own in front of."""
    from torch.distributed.fsdp import FSDPModule

    cls = original(self, *args, **kwargs)
    return cls.__mro__[2] if issubclass(cls, FSDPModule) else cls


def merge_adapter(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Merges adapters into their bases, except into one that stage 3 splits."""
    from ..parallel_state import parallel_state

    if (state := parallel_state(self.model)) is not None:
        _require_whole_base(state)
        if _is_quantized(state):
            _refuse(
                "merge_adapter on a quantised base",
                "codes would be rounded a second time; merge_and_unload() puts weights in their place, and so does "
                "get_base_model().dequantize() before merge_adapter()",
            )
    return original(self, *args, **kwargs)


def _is_quantized(state: Any) -> bool:
    from ..quantized.scheme import NAME

    return NAME in state.placed


def _require_whole_base(state: Any) -> None:
    if state.shards_weights:
        _refuse(
            "Merging a PEFT adapter with zero_stage = 3",
            "FSDP2 holds rows of the base of which an adapter has none; save the adapter, and merge it into the base "
            "in one process or with zero_stage=2",
        )


def adapter_state_dict(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns an adapter's weights of any shape in full on every rank; all of them call it."""
    from ..parallel_state import parallel_state

    found, state = original(model, *args, **kwargs), parallel_state(model)
    if state is None:
        return found
    from ..peft.saving import is_whole, whole_adapter

    given = args[0] if args else kwargs.get("state_dict")
    if given is not None and is_whole(given):
        # `Accelerator.get_state_dict` has gathered it on the first rank.
        return found
    return whole_adapter(found, state)


def parts_for_load(original: Callable, model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Leaves whole tensors of any shape to the model's `load_state_dict`, which takes this rank's part of them."""
    from ..parallel_state import parallel_state

    return original(model, state_dict) if parallel_state(model) is None else state_dict


def save_adapter(
    original: Callable, self: Any, save_directory: str, *args: Any, is_main_process: bool = True, **kwargs: Any
) -> None:
    """Writes the adapters' files from rank 0; every rank calls it, and returns when they are there."""
    from ..parallel_state import parallel_state

    if parallel_state(self) is None:
        original(self, save_directory, *args, is_main_process=is_main_process, **kwargs)
        return
    if kwargs.get("path_initial_model_for_weight_conversion") is not None:
        _refuse(
            "save_pretrained(path_initial_model_for_weight_conversion=...)",
            "PEFT loads the initial adapter on the first rank alone; save both, and convert in one process",
        )
    import torch.distributed as dist

    if kwargs.get("state_dict") is None or dist.get_rank() == 0:
        original(self, save_directory, *args, is_main_process=is_main_process and dist.get_rank() == 0, **kwargs)
    dist.barrier()


def _require_supported(config: Any, state: Any) -> None:
    """Raises `UnsupportedError` for a method, a setting or a layout that nobody has compared with one process."""
    method = config.peft_type.value
    if method not in _METHODS:
        _refuse(f"{method} of PEFT", f"laid out are {', '.join((*_METHODS, *_PROMPTS))}")
    if getattr(config, "megatron_config", None) is not None:
        raise UnsupportedError(
            "LoraConfig.megatron_config is PEFT's, for models of Megatron-Core. The layout of this library belongs to "
            "from_pretrained(..., megatron_config=...), and is known of this model: leave it out."
        )
    for name, values in _OFF.items():
        value = getattr(config, name, values[0])
        if value not in values:
            _refuse(f"{type(config).__name__}.{name} = {value!r}", f"valid is {values[0]!r}")
    initial = getattr(config, "init_lora_weights", True)
    if not any(re.fullmatch(pattern, str(initial)) for pattern in _INITIAL):
        _refuse(f"LoraConfig.init_lora_weights = {initial!r}", f"valid are {', '.join(_INITIAL)}")
    if getattr(config, "use_dora", False) and config.bias != "none":
        _refuse(f"LoraConfig.use_dora with bias = {config.bias!r}", "DoRA leaves biases out of what it scales")
    if _is_quantized(state) and (getattr(config, "use_dora", False) or initial not in (True, False, "gaussian")):
        _refuse(
            f"LoraConfig.use_dora = {config.use_dora}, init_lora_weights = {initial!r} on a quantised base",
            "both read or change weights, of which there are codes; valid are False and True, False or 'gaussian'",
        )
    trains_base = method == "LN_TUNING" or config.modules_to_save or getattr(config, "bias", "none") != "none"
    if state.shards_weights and trains_base:
        _refuse(
            f"{method} of PEFT with zero_stage = 3, modules_to_save = {config.modules_to_save} and bias",
            "FSDP2 splits a frozen base alone; zero_stage=2 splits gradients and moments",
        )


def _require_prompts(config: Any, state: Any) -> None:
    """Raises `UnsupportedError` for prompts that nobody has compared with one process."""
    method = config.peft_type.value
    if method not in _PROMPTS:
        _refuse(f"{method} of PEFT", f"laid out are {', '.join((*_METHODS, *_PROMPTS))}")
    if getattr(config, "encoder_reparameterization_type", None) == "LSTM":
        _refuse("PromptEncoderConfig.encoder_reparameterization_type = 'LSTM'", "valid is 'MLP'")
    split = [axis for axis in ("pp", "cp") if state.axes.size(axis) > 1]
    if method == "PREFIX_TUNING" and split:
        _refuse(
            f"PREFIX_TUNING of PEFT with {split[0]}_size > 1",
            "keys and values of a prefix are given as a cache, which training over stages or parts of rows has not; "
            "PROMPT_TUNING and P_TUNING are laid out",
        )
    if method != "PREFIX_TUNING" and state.shards_weights:
        _refuse(
            f"{method} of PEFT with zero_stage = 3",
            "PEFT calls the embedding before the model, and FSDP2 puts it together within; use zero_stage=2",
        )
    if config.modules_to_save:
        _refuse(f"{method} of PEFT with modules_to_save = {config.modules_to_save}", "valid is None")


def _require_targets(tuner: Any, model: Any, adapter: str, state: Any) -> None:
    """Raises `UnsupportedError` for modules that have no rule, before any was changed."""
    import copy

    from peft.tuners.tuners_utils import BaseTunerLayer, _maybe_include_all_linear_layers
    from torch import nn

    from ..peft.layout import require_parameter_rule, require_rules
    from ..upstream import ties_embeddings

    # As PEFT does before it looks for targets: those of the model's type, or all linears.
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
            _refuse(
                f"A PEFT adapter on {looked_up[0]} with pp_size > 1",
                "it is tied, and the last stage's copy would have the adapter as well",
            )
        targets = [name for name in targets if name not in looked_up]
    for name in targets:
        if named[name] in (embedding, model.get_output_embeddings()):
            _refuse(f"A PEFT adapter on {name}", "the loss and the split vocabulary read its weight themselves")
        if _METHODS[config.peft_type.value] != "linears":
            continue
        if not isinstance(named[name], nn.Linear) and type(named[name]).__name__ != "Conv1D":
            _refuse(f"A PEFT adapter on {name} ({type(named[name]).__name__})", "only linears are laid out")
    if _METHODS[config.peft_type.value] == "linears":
        require_rules(state, targets)
    wanted = tuple(f".{name}" for name in getattr(config, "target_parameters", None) or ())
    for name, _ in model.named_parameters():
        if f".{name}".endswith(wanted or ("\0",)):
            require_parameter_rule(state, name, model.get_submodule(name.rpartition(".")[0]))


def _require_saved(config: Any, model: Any, state: Any) -> None:
    """Raises `UnsupportedError` for modules to save whose weights others read."""
    from ..upstream import ties_embeddings

    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, module in model.named_modules():
        if module not in (embedding, head) or module is None:
            continue
        if not any(name == key or name.endswith(f".{key}") for key in config.modules_to_save or ()):
            continue
        setting = f"{type(config).__name__}.modules_to_save = {config.modules_to_save!r}"
        if ties_embeddings(model):
            _refuse(setting, f"{name} is tied to the other end of the model, and a copy of it would not be")
        if module is head and state.axes.size("cp") > 1:
            _refuse(f"{setting} with cp_size > 1", "the head meets rows that are shared out")


def _refuse(what: str, reason: str) -> None:
    raise UnsupportedError(
        f"{what} on a model laid out by hf_megatron is not supported: {reason}. Change it, or train the adapter on a "
        "model loaded without megatron_config."
    )
