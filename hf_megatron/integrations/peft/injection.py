"""Where PEFT puts adapters into a model, takes them out and saves them: they are laid out as the model is."""

from collections.abc import Callable
from functools import partial
from typing import Any

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
    from ...tensor_parallel.linear import ParallelLinear

    if isinstance(base_layer, ParallelLinear) and base_layer.weight_dim_out == 1:
        config.fan_in_fan_out = kwargs["is_target_conv_1d_layer"] = True
    original(self, base_layer, adapter_name, config, *args, **kwargs)


def dora_update_layer(original: Callable, self: Any, *, base_layer: Any, **kwargs: Any) -> None:
    """Takes the norms of a whole weight, where ranks and stages have parts of it."""
    from .full_base_weight import full_base_weight

    with full_base_weight(base_layer):
        original(self, base_layer=base_layer, **kwargs)


def from_base(original: Callable, self: Any, adapter_name: str, *args: Any) -> None:
    """Makes initial values of a whole weight, and leaves the rest of it in its place, alike on all ranks."""
    from ...data_parallel.engine import engine_of
    from .full_base_weight import agree_on, full_base_weight

    base = self.get_base_layer()
    is_parallelized = engine_of(base.weight) is not None
    with full_base_weight(base):
        original(self, adapter_name, *args)
        if is_parallelized:
            agree_on(base.weight, self.lora_A[adapter_name].weight, self.lora_B[adapter_name].weight)


def init(original: Callable, self: Any, model: Any, peft_config: Any, *args: Any, **kwargs: Any) -> None:
    """Wraps a model; what is known of its layout is known of the wrapper."""
    from ...parallel_state import parallel_state, share_state

    state = parallel_state(model)
    if state is not None:
        require_method(peft_config)
    if state is not None and kwargs.get("low_cpu_mem_usage"):
        reject_adapter("low_cpu_mem_usage = True", "ranks make whole adapters, which are small, and keep their part")
    original(self, model, peft_config, *args, **kwargs)
    if state is not None:
        share_state(self, model, state)


def init_mixed(original: Callable, self: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    """Refuses adapters of several methods on a laid out model."""
    from ...parallel_state import parallel_state

    if parallel_state(model) is not None:
        reject_adapter("mixed=True", "adapters of several methods in one linear were not compared with one process")
    original(self, model, *args, **kwargs)


def setup_prompt_encoder(original: Callable, self: Any, adapter_name: str) -> None:
    """Makes what makes prompts, from one random state on all ranks, and lays it out."""
    from ...parallel_state import parallel_state

    model = self.base_model
    if (state := parallel_state(model)) is None:
        original(self, adapter_name)
        return
    from .layout import note_modules
    from .prompts import PROMPTS, embedded, shard_prompts

    require_prompts(self.peft_config[adapter_name], state)
    _draw_identical(state)
    encoders = model.get_submodule(PROMPTS) if PROMPTS in model._modules else None
    trained = [] if encoders is None else [p for p in encoders.parameters() if p.requires_grad]
    original(self, adapter_name)
    for parameter in trained:
        # PEFT freezes all that the model has.
        parameter.requires_grad_(True)
    shard_prompts(self.prompt_encoder, model, state)
    # Its names before those that it has in the model.
    self._modules["base_model"] = self._modules.pop("base_model")
    vars(self)["word_embeddings"] = partial(embedded, self._modules.pop("word_embeddings"))
    note_modules(model, state)


def get_prompt(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns what this rank's model takes of a prompt."""
    from ...parallel_state import parallel_state

    if (state := parallel_state(self.base_model)) is None:
        return original(self, *args, **kwargs)
    from .prompts import local_prompt, reading_prompts

    # Prompts are made before the model is called, which does it, too.
    state.data_parallel.sync_user_edits()  # type: ignore[union-attr]
    with reading_prompts(state):
        return local_prompt(original(self, *args, **kwargs), state)


def _draw_identical(state: Any) -> None:
    """Gives all ranks the first one's random state."""
    from ...core.communication.rng import broadcast_state

    broadcast_state(state.mesh.device, *(state.mesh.host_group(axis) for axis in ("tp", "cp", "pp", "dp")))


def inject_adapter(original: Callable, self: Any, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
    """Puts an adapter into a model, from one random state on all ranks, and lays it out."""
    from ...parallel_state import parallel_state

    if (state := parallel_state(model)) is None:
        original(self, model, adapter_name, *args, **kwargs)
        return
    from .layout import shard_adapters

    if kwargs.get("low_cpu_mem_usage"):
        reject_adapter("low_cpu_mem_usage = True", "ranks make whole adapters, which are small, and keep their part")
    require_supported(self.peft_config[adapter_name], state)
    require_targets(self, model, adapter_name, state)
    require_saved(self.peft_config[adapter_name], model, state)
    _draw_identical(state)
    original(self, model, adapter_name, *args, **kwargs)
    shard_adapters(model, state)


def forward_hooks(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Has rows of a batch choose their adapters, except where a pipeline cuts the batch."""
    from ...parallel_state import parallel_state

    state = parallel_state(self.model)
    if state is not None and state.cut is not None and kwargs.get("adapter_names") is not None:
        reject_adapter(
            "adapter_names= with pp_size > 1", "a batch is cut into microbatches, the names are those of all rows"
        )
    return original(self, *args, **kwargs)


def unload(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes adapters out of a model, or merges them into its weights, and has the layout follow."""
    from ...parallel_state import parallel_state

    if (state := parallel_state(self.model)) is None:
        return original(self, *args, **kwargs)
    from .layout import forget_adapters, insides

    if kwargs.get("merge", args[0] if args else True):
        require_full_base_weight(state)
        if has_codes(state):
            # Sums are rounded to the dtype of the model, not to codes a second time.
            self.model.dequantize()
    before = insides(self.model)
    model = original(self, *args, **kwargs)
    forget_adapters(model, state, before)
    return model


def cast_adapter(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Casts an adapter, which PEFT does by putting other parameters in the place of those that were laid out."""
    from ...parallel_state import parallel_state

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
    from ...parallel_state import parallel_state

    if (state := parallel_state(self.model)) is not None:
        require_full_base_weight(state)
        if has_codes(state):
            reject_adapter(
                "merge_adapter on a quantised base",
                "codes would be rounded a second time; merge_and_unload() puts weights in their place, and so does "
                "get_base_model().dequantize() before merge_adapter()",
            )
    return original(self, *args, **kwargs)


def adapter_state_dict(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns an adapter's weights of any shape in full on every rank; all of them call it."""
    from ...parallel_state import parallel_state

    found, state = original(model, *args, **kwargs), parallel_state(model)
    if state is None:
        return found
    from .saving import full_adapter, is_replicated

    given = args[0] if args else kwargs.get("state_dict")
    if given is not None and is_replicated(given):
        # `Accelerator.get_state_dict` has gathered it on the first rank.
        return found
    return full_adapter(found, state)


def parts_for_load(original: Callable, model: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Leaves whole tensors of any shape to the model's `load_state_dict`, which takes this rank's part of them."""
    from ...parallel_state import parallel_state

    return original(model, state_dict) if parallel_state(model) is None else state_dict


def push_adapter(original: Callable, self: Any, repo_id: str, **kwargs: Any) -> Any:
    """Pushes adapters as models are; what else is pushed goes as in stock.

    It is looked up while transformers is imported, maybe by a part of this library: nothing is imported before a call.
    """
    from ...parallel_state import parallel_state

    if parallel_state(self) is None:
        return original(self, repo_id, **kwargs)
    from ..hub.hooks import push_to_hub

    return push_to_hub(original, self, repo_id, **kwargs)


def save_adapter(
    original: Callable, self: Any, save_directory: str, *args: Any, is_main_process: bool = True, **kwargs: Any
) -> None:
    """Writes the adapters' files from rank 0; every rank calls it, and returns when they are there."""
    from ...parallel_state import parallel_state

    if parallel_state(self) is None:
        original(self, save_directory, *args, is_main_process=is_main_process, **kwargs)
        return
    if kwargs.get("path_initial_model_for_weight_conversion") is not None:
        reject_adapter(
            "save_pretrained(path_initial_model_for_weight_conversion=...)",
            "PEFT loads the initial adapter on the first rank alone; save both, and convert in one process",
        )
    import torch.distributed as dist

    if kwargs.get("state_dict") is None or dist.get_rank() == 0:
        original(self, save_directory, *args, is_main_process=is_main_process and dist.get_rank() == 0, **kwargs)
    dist.barrier()
