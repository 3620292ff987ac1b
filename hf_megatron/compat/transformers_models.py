"""Private and version-dependent symbols of transformers' models: plans, masks, losses and recorded outputs."""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from types import MappingProxyType
from typing import Any

import torch

from .versions import _minor

# Arguments that hold a cache: `cache` from transformers 5.24, whose forwards rename the earlier ones.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
# The field of outputs; from 5.24 the earlier names are properties.
CACHE_OUTPUT = "cache" if _minor(metadata.version("transformers")) >= (5, 24) else "past_key_values"

# Styles in transformers' ALL_PARALLEL_STYLES that model plans use. Other names appeared later, and
# `registry.derive` rejects them.
KNOWN_STYLES = frozenset(
    {
        "all_reduce",
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "embedding_colwise",
        "embedding_rowwise",
        "local_params",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "packed_colwise",
        "packed_rowwise",
        "replicate",
        "replicated_with_grad_allreduce",
        "rowwise",
        "rowwise_rep",
        "rowwise_split_input",
    }
)


def is_base_model(model: Any) -> bool:
    """Returns whether a model is a base model, which returns hidden states and to which other classes add a head."""
    return model.base_model is model and not has_labels(type(model))


def has_labels(cls: type) -> bool:
    """Returns whether a class computes a loss from a labels argument, which its forward may pass on in `**kwargs`."""
    from transformers.utils.generic import find_labels

    for owner in cls.__mro__:
        forward = vars(owner).get("forward")
        if forward is None:
            continue
        if find_labels(owner):
            return True
        parameters = inspect.signature(forward).parameters.values()
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return False
    return False


def prepends_tokens(model: Any) -> bool:
    """Returns whether PEFT prepends virtual tokens to a model's sequences, whose first tokens are then targets too."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return False
    return model.active_peft_config.peft_type.value in ("PROMPT_TUNING", "P_TUNING")


def ties_embeddings(model: Any) -> bool:
    """Returns whether a model's config ties its head to its embedding; False if the config lacks the field."""
    return bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))


def merged_tp_plan(model: Any) -> dict[str, str]:
    """Returns the TP plan that transformers merged from a model's config, class and children (`_tp_plan`)."""
    return dict(model._tp_plan or {})


def uses_grouped_product(module: Any) -> bool:
    """Returns whether an experts module uses torch's grouped matmul (attributes of transformers' decorator)."""
    if vars(module).get("is_transposed") is None or vars(module).get("has_gate") is None:
        return False
    return bool(module.config._experts_implementation == "grouped_mm")


def grouped_rows(module: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor | None:
    """Computes expert outputs of tokens `[rows, width]`, sorted by expert ids `[rows]`, by grouped matmuls.

    The module's own forward would sort the tokens again and restore their order. Returns `None` for modules without
    grouped matmul.
    """
    from transformers.integrations import moe

    product = getattr(moe, "_grouped_linear", None)
    if product is None or not uses_grouped_product(module):
        return None
    local = torch.arange(module.num_experts, device=rows.device)
    ends = torch.searchsorted(experts, local, right=True).to(torch.int32)
    first = "gate_up_proj" if module.has_gate else "up_proj"

    def linear(values: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias").index_select(0, experts) if module.has_bias else None
        projected: torch.Tensor = product(
            values, getattr(module, name), ends, bias=bias, is_transposed=module.is_transposed
        )
        return projected

    wide = linear(rows, first)
    outputs = linear(module._apply_gate(wide) if module.has_gate else module.act_fn(wide), "down_proj")
    return module.post_expert_norm(outputs) if vars(module).get("has_post_expert_norm") else outputs


def counted_experts(module: Any) -> int | None:
    """Returns the number of experts of a class with transformers' experts decorator; `None` for other classes."""
    attributes = vars(module)
    return attributes["num_experts"] if "_is_expert_parallel" in attributes else None


def token_loss_functions() -> dict[Any, bool]:
    """Maps transformers' losses over the vocabulary to whether they shift the labels."""
    from transformers.loss.loss_utils import ForCausalLMLoss, ForMaskedLMLoss

    return {ForCausalLMLoss: True, ForMaskedLMLoss: False}


def adds_router_loss(model: Any) -> bool:
    """Returns whether a model adds its routers' load-balancing loss to its loss."""
    output_router_logits = getattr(model.config.get_text_config(), "output_router_logits", False)
    return bool(output_router_logits) and hasattr(sys.modules[type(model).__module__], "load_balancing_loss_func")


def loss_functions() -> dict[Any, bool]:
    """Maps transformers' losses whose only targets are `labels` to whether they shift them."""
    from transformers.loss.loss_utils import ForSequenceClassificationLoss, ForTokenClassification

    return token_loss_functions() | {ForSequenceClassificationLoss: False, ForTokenClassification: False}  # type: ignore[dict-item]


def get_loss_function(model: Any) -> Any:
    """Returns the loss that transformers would select for a model now (`PreTrainedModel.loss_function`)."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    return LOSS_MAPPING.get(str(getattr(model, "loss_type", None)), LOSS_MAPPING["ForCausalLM"])


def uses_loss_function(model: Any) -> bool:
    """Returns whether a model's forward calls `model.loss_function` rather than computing the loss inline."""
    return "loss_function" in _names_used(type(model))  # type: ignore[arg-type]


@cache
def _map_mask_kinds() -> Mapping[Any, str]:
    """Maps the code objects of transformers' mask functions to their kinds."""
    from transformers import masking_utils as masks

    closures = {
        "and": masks.and_masks(),
        "window": masks.sliding_window_overlay(1),
        "window to both sides": masks.sliding_window_bidirectional_overlay(1),
        "chunks": masks.chunked_overlay(1, torch.zeros(1)),
        "documents": masks.packed_sequence_mask_function(torch.zeros(1)),
        "padding": masks.padding_mask_function(torch.zeros(1)),
        "causal": masks.causal_mask_function,
        "full": masks.bidirectional_mask_function,
    }
    # transformers before 5.23 counts chunks across packed documents.
    remap = getattr(masks, "remap_positions_for_packed_sequence", None)
    if remap is not None:
        closures["positions"] = remap(masks.causal_mask_function, torch.zeros(1))
    return MappingProxyType({function.__code__: kind for kind, function in closures.items()})


def rope_types() -> frozenset[str]:
    """Returns the RoPE types that transformers implements."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return frozenset(("default", *ROPE_INIT_FUNCTIONS))


def mask_parts(function: Any) -> tuple[str | None, Mapping[str, Any]]:
    """Returns the kind of a transformers mask function and its closure variables; `None` for other functions."""
    kind = _map_mask_kinds().get(getattr(function, "__code__", None))
    return kind, {} if kind is None else inspect.getclosurevars(function).nonlocals


def fetches_attention_core(cls: type) -> bool:
    """Returns whether a module class fetches its attention function from transformers' interface, in any file."""
    return {"ALL_ATTENTION_FUNCTIONS", "get_interface"} <= _names_used(cls)


def computes_own_attention(cls: type) -> bool:
    """Returns whether an attention class computes softmax in its own methods; linear attention does not."""
    softmax = {"softmax", "Softmax", "scaled_dot_product_attention", "multi_head_attention_forward"}
    return "attention" in cls.__name__.lower() and not softmax.isdisjoint(_names_used(cls))


def reshapes_to_inputs(cls: type) -> bool:
    """Returns whether a base model reshapes the last layer's output to the shape of its inputs (GPT-2 and similar)."""
    forward = inspect.unwrap(cls.forward)  # type: ignore[attr-defined]
    return "output_shape" in forward.__code__.co_varnames


@cache
def _names_used(cls: type) -> frozenset[str]:
    """Returns the names used in the methods of a module class, including inherited methods and nested functions."""
    values = [value for base in cls.__mro__ if base is not torch.nn.Module for value in vars(base).values()]
    functions = [inspect.unwrap(value) for value in values if inspect.isfunction(value)]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    names: set[str] = set()
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(constant for constant in code.co_consts if inspect.iscode(constant))
    return frozenset(names)


def function_between_layers(decoder: torch.nn.Module) -> Any:
    """Returns the function that adds image features to `(hidden_states, ...)` between layers, if there is one."""
    return getattr(decoder, "_deepstack_process", None)


def recorded_outputs() -> dict[str, list[Any]]:
    """Returns the outputs recorded by the current forward, such as router logits (`_active_collector`, private)."""
    from transformers.utils.output_capturing import _active_collector

    return _active_collector.get() or {}


def count_tokens_once(trainer: Any) -> None:
    """Keeps a TRL trainer from dividing its token count by the model-parallel group's size (`_tp_size`, private)."""
    trainer._tp_size = 1


def make_mtp_layer(model: Any, number: int) -> Any | None:
    """Creates a multi-token-prediction layer with the checkpoint's weight names, as `MtpModel` would for this model.

    Returns:
        a layer of the model's own class with `enorm`, `hnorm`, `eh_proj` and `shared_head.norm`; `None` for classes
        without such layers, or whose checkpoints use other names.
    """
    from transformers.modeling_layers import MtpLayer

    said = model.config.get_text_config()
    others = ("layer_types", "mlp_layer_types", "chain_hidden_post_norm", "mtp_per_layer_config")
    if getattr(said, "num_mtp_layers", None) is None or any(getattr(said, name, None) is not None for name in others):
        return None
    last = model.get_decoder().layers[-1]
    norms = [type(module) for name, module in last.named_modules() if "norm" in name]
    mtp_layer = MtpLayer(model.config.get_mtp_config(), type(last), norms[0], number)
    layer, head = mtp_layer.mtp_block, torch.nn.Module()
    head.add_module("norm", mtp_layer.post_norm)
    for name, module in {
        "enorm": mtp_layer.enorm,
        "hnorm": mtp_layer.hnorm,
        "eh_proj": mtp_layer.eh_proj,
        "shared_head": head,
    }.items():
        layer.add_module(name, module)
    return layer


def activation_classes() -> set[Any]:
    """Returns the classes of transformers' activation functions, which are elementwise (`ACT2CLS`)."""
    from transformers.activations import ACT2CLS

    return {value[0] if isinstance(value, tuple) else value for value in ACT2CLS.values()}


def get_recorder_attributes(base: type) -> dict[str, str]:
    """Returns class attributes with which a subclass of `base` keeps recording its outputs, such as hidden states.

    transformers looks up recorded outputs by the qualified name of a model's class (`_CAN_RECORD_REGISTRY`, private).
    Classes without recorded outputs get none: torch would treat a class with a torch module name as its own.
    """
    records = hasattr(base, "_can_record_outputs")
    return {"__module__": base.__module__, "__qualname__": base.__qualname__} if records else {}


@contextmanager
def attention_replaced(function: Callable[..., Any]) -> Iterator[None]:
    """Replaces the attention function of all modules in the process, whatever implementation they request."""
    from transformers.modeling_utils import AttentionInterface

    stock = vars(AttentionInterface)["get_interface"]
    AttentionInterface.get_interface = lambda self, *args, **kwargs: function  # type: ignore[method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = stock  # type: ignore[method-assign]


def chosen_functions(config: Any) -> dict[str, Callable[..., Any]]:
    """Returns the attention and experts functions that a config selects, except those defined in modeling files."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    tables = {"attn_implementation": ALL_ATTENTION_FUNCTIONS, "experts_implementation": ALL_EXPERTS_FUNCTIONS}
    chosen = {option: getattr(config, f"_{option}", None) for option in tables}
    functions = {f"{option}={name!r}": tables[option].get(name) for option, name in chosen.items()}
    return {option: function for option, function in functions.items() if function is not None}


def checkpoints_activations(model: Any) -> bool:
    """Returns whether gradient checkpointing is enabled in a model.

    The model property is named `is_activation_checkpointing` from transformers 5.23, where the previous name warns.
    """
    # Asked in each training forward: without generators and `Module.__getattr__`, which cost several calls per module.
    modules = [model]
    while modules:
        module = modules.pop()
        if vars(module).get("gradient_checkpointing", getattr(type(module), "gradient_checkpointing", False)):
            return True
        for child in module._modules.values():
            if child is not None:
                modules.append(child)
    return False
