"""Patches of PEFT's creation, removal and saving of adapters, which shard adapters like the model."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from ...compat.torch_autograd import called_module
from ...errors import UnsupportedError
from .checks import (
    has_codes,
    reject_adapter,
    require_full_base_weight,
    require_method,
    require_prompts,
    require_saved,
    require_supported,
    require_targets,
)


def in_out_features(original: Callable, module: Any) -> Any:
    """Returns the feature sizes `(in, out)` of the full linear instead of this rank's shard."""
    from torch import nn
    from torch.distributed.tensor import DTensor

    weight = module._parameters.get("weight")
    if not isinstance(module, nn.Linear) or not isinstance(weight, DTensor):
        features = original(module)
        # transformers' Conv1D stores its weight as `[in, out]`.
        return tuple(weight.shape) if isinstance(weight, DTensor) and type(module).__name__ == "Conv1D" else features
    return module.in_features, module.out_features


def linear_init(
    original: Callable, self: Any, base_layer: Any, adapter_name: str, config: Any, *args: Any, **kwargs: Any
) -> None:
    """Creates an adapter layer; marks a split `Conv1D`, which PEFT treats as a linear, as transposed."""
    from ...tensor_parallel.linear import ParallelLinear

    if isinstance(base_layer, ParallelLinear) and base_layer.weight_dim_out == 1:
        config.fan_in_fan_out = kwargs["is_target_conv_1d_layer"] = True
    original(self, base_layer, adapter_name, config, *args, **kwargs)


def dora_update_layer(original: Callable, self: Any, *, base_layer: Any, **kwargs: Any) -> None:
    """Computes DoRA's weight norms from the full weight."""
    from .full_base_weight import full_base_weight

    with full_base_weight(base_layer):
        original(self, base_layer=base_layer, **kwargs)


def tokens_update_layer(original: Callable, self: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Initializes trained tokens from the full embedding; those of a tied layer are the embedding's."""
    from .full_base_weight import full_base_weight

    with nullcontext() if kwargs.get("tied_adapter") is not None else full_base_weight(self.get_base_layer()):
        original(self, adapter_name, *args, **kwargs)


def from_base(original: Callable, self: Any, adapter_name: str, *args: Any) -> None:
    """Initializes an adapter from the full weight and keeps the modified base weight, identical on all ranks."""
    from ...data_parallel.engine import get_engine
    from .full_base_weight import agree_on, full_base_weight

    base = self.get_base_layer()
    is_parallelized = get_engine(base.weight) is not None
    with full_base_weight(base):
        original(self, adapter_name, *args)
        if is_parallelized:
            agree_on(base.weight, self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight)


def init(original: Callable, self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps a model and shares its parallel state with the wrapper."""
    from ...parallel_state import parallel_state, share_state

    state = parallel_state(model)
    if state is not None:
        require_method(peft_config)
    if state is not None and kwargs.get("low_cpu_mem_usage"):
        reject_adapter("low_cpu_mem_usage = True", "all ranks create the full adapter and keep their shard")
    original(self, model, peft_config, *args, **kwargs)
    if state is not None:
        share_state(self, model, state)


def init_mixed(original: Callable, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Rejects adapters of several methods on a parallelized model."""
    from ...parallel_state import parallel_state

    if parallel_state(model) is not None:
        reject_adapter("mixed=True", "several adapter methods on one linear have no recorded parity result")
    original(self, model, *args, **kwargs)


def setup_prompt_encoder(original: Callable, self: Any, adapter_name: str) -> None:
    """Creates a prompt encoder from one random state on all ranks, and places its parameters."""
    from ...parallel_state import parallel_state

    model = self.base_model
    if (state := parallel_state(model)) is None:
        original(self, adapter_name)
        return
    from .layout import note_modules
    from .prompts import PROMPTS, embedded, shard_prompts

    require_prompts(self.peft_config[adapter_name], state)
    _broadcast_rng_state(state)
    encoders = model.get_submodule(PROMPTS) if PROMPTS in model._modules else None
    trained = [] if encoders is None else [p for p in encoders.parameters() if p.requires_grad]
    original(self, adapter_name)
    for parameter in trained:
        # PEFT freezes all parameters of the model, including earlier prompt encoders.
        parameter.requires_grad_(True)
    shard_prompts(self.prompt_encoder, model, state)
    # List the prompt encoder before the base model, so that its parameters get the wrapper's names first.
    self._modules["base_model"] = self._modules.pop("base_model")
    vars(self)["word_embeddings"] = partial(embedded, self._modules.pop("word_embeddings"))
    note_modules(model, state)


def get_prompt(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns a prompt as this rank's model takes it."""
    from ...parallel_state import parallel_state

    if (state := parallel_state(self.base_model)) is None:
        return original(self, *args, **kwargs)
    from .prompts import local_prompt, reading_prompts

    # Prompts are created before the model's forward, which would otherwise sync in-place edits.
    state.data_parallel.sync_user_edits()  # type: ignore[union-attr]
    with reading_prompts(state):
        return local_prompt(original(self, *args, **kwargs), state)


def _broadcast_rng_state(state: Any) -> None:
    """Broadcasts the first rank's random state to all ranks."""
    from ...core.communication.rng import broadcast_state

    broadcast_state(state.mesh.device, *(state.mesh.host_group(axis) for axis in ("tp", "cp", "pp", "dp")))


def inject_adapter(original: Callable, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Injects an adapter from one random state on all ranks, and shards it."""
    from ...parallel_state import parallel_state

    if (state := parallel_state(model)) is None:
        original(self, model, adapter_name, *args, **kwargs)
        return
    from .layout import shard_adapters
    from .tokens import all_ties

    if kwargs.get("low_cpu_mem_usage"):
        reject_adapter("low_cpu_mem_usage = True", "all ranks create the full adapter and keep their shard")
    require_supported(self.peft_config[adapter_name], state)
    require_targets(self, model, adapter_name, state)
    require_saved(self.peft_config[adapter_name], model, state)
    _broadcast_rng_state(state)
    with all_ties(model, state):
        original(self, model, adapter_name, *args, **kwargs)
    shard_adapters(model, state)


def inject_tokens(original: Callable, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Injects trained tokens, and then those that are tied to them."""
    from ...parallel_state import parallel_state

    if (state := parallel_state(model)) is None:
        original(self, model, *args, **kwargs)
        return
    from .layout import shard_adapters
    from .tokens import all_ties

    with all_ties(model, state):
        original(self, model, *args, **kwargs)
    shard_adapters(model, state)


def reject_adapter_names(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Rejects per-sample adapters (`adapter_names`) with a pipeline, which splits the batch, or tokens of a head."""
    from ...parallel_state import parallel_state

    state = parallel_state(self.model)
    if state is not None and state.cut is not None and kwargs.get("adapter_names") is not None:
        reject_adapter(
            "adapter_names= with pp_size > 1", "the names refer to the full batch, which is split into microbatches"
        )
    if state is not None and kwargs.get("adapter_names") is not None:
        head = called_module(self.model.get_output_embeddings())
        if getattr(head, "weight_update", None) is not None:
            raise UnsupportedError(
                "adapter_names= with trained tokens of a head is not supported on a parallelized model. Select one "
                "adapter for the batch with set_adapter()."
            )
    return original(self, *args, **kwargs)


def unload(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Removes adapters or merges them into the base weights, and updates the parallel state."""
    from ...parallel_state import parallel_state

    if (state := parallel_state(self.model)) is None:
        return original(self, *args, **kwargs)
    from .layout import forget_adapters, insides

    if kwargs.get("merge", args[0] if args else True):
        require_full_base_weight(state)
        if has_codes(state):
            # Merge in the model's dtype: sums would be rounded a second time if quantized again.
            self.model.dequantize()
    before = insides(self.model)
    model = original(self, *args, **kwargs)
    forget_adapters(model, state, before)
    return model


def delete_adapter(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Deletes an adapter, and its shardings: a later adapter of the same name may have other shapes."""
    from ...parallel_state import parallel_state

    result = original(model, *args, **kwargs)
    if (state := parallel_state(model)) is not None:
        from .layout import forget_deleted

        forget_deleted(model, state)
    return result


def cast_adapter(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Casts an adapter; PEFT replaces parameters when it does, so the engine rescans the model."""
    from ...parallel_state import parallel_state

    original(self, *args, **kwargs)
    if (state := parallel_state(self.model)) is not None:
        state.data_parallel.scan()  # type: ignore[union-attr]


def merge_adapter(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Merges adapters into their bases; rejects bases that ZeRO-3 shards or that are quantized."""
    from ...parallel_state import parallel_state

    if (state := parallel_state(self.model)) is not None:
        require_full_base_weight(state)
        if has_codes(state):
            reject_adapter(
                "merge_adapter with a quantized base",
                "the weights would be quantized a second time. Use merge_and_unload(), or call "
                "get_base_model().dequantize() before merge_adapter()",
            )
    return original(self, *args, **kwargs)


def adapter_state_dict(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns an adapter's full weights, of any shape, on every rank; a collective call."""
    from ...parallel_state import parallel_state

    tensors, state = original(model, *args, **kwargs), parallel_state(model)
    if state is None:
        return tensors
    from .saving import full_adapter, is_replicated

    state_dict = args[0] if args else kwargs.get("state_dict")
    if state_dict is not None and is_replicated(state_dict):
        # `Accelerator.get_state_dict` has already gathered it on the first rank.
        return tensors
    return full_adapter(tensors, state)


def parts_for_load(original: Callable, model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Passes full tensors of any shape to the model's `load_state_dict`, which copies this rank's shard."""
    from ...parallel_state import parallel_state

    return original(model, state_dict) if parallel_state(model) is None else state_dict


def push_adapter(original: Callable, self: Any, repo_id: str, **kwargs: Any) -> Any:
    """Pushes adapters like parallelized models; other objects are pushed by upstream.

    Imports are inside the function because it is looked up while transformers is being imported.
    """
    from ...parallel_state import parallel_state

    if parallel_state(self) is None:
        return original(self, repo_id, **kwargs)
    from ..hub.hooks import push_to_hub

    return push_to_hub(original, self, repo_id, **kwargs)


def save_adapter(
    original: Callable, self: Any, save_directory: str, *args: Any, is_main_process: bool = True, **kwargs: Any
) -> None:
    """Writes the adapter files from rank 0.

    A collective call that returns when the files exist, except with a state dict: rank 0 writes its full tensors, and
    other ranks return at once.
    """
    from ...parallel_state import parallel_state

    if parallel_state(self) is None:
        original(self, save_directory, *args, is_main_process=is_main_process, **kwargs)
        return
    if kwargs.get("path_initial_model_for_weight_conversion") is not None:
        reject_adapter(
            "save_pretrained(path_initial_model_for_weight_conversion=...)",
            "PEFT loads the initial adapter on rank 0 only. Save both adapters, and convert in a single process",
        )
    import torch.distributed as dist

    from .saving import require_full_adapter

    state_dict, writes = kwargs.get("state_dict"), is_main_process and dist.get_rank() == 0
    if state_dict is not None:
        kwargs["state_dict"] = require_full_adapter(state_dict)
    if state_dict is None or writes:
        original(self, save_directory, *args, is_main_process=writes, **kwargs)
    if state_dict is None:
        dist.barrier()
