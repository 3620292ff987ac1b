"""`save_pretrained` of a parallelized model, and the stock functions that it calls."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from ...checkpoint.merged_export import save_merged
from ...compat.patch_registry import PATCH_REGISTRY
from ...config import MegatronConfig
from ...errors import ConfigError
from ...parallel_state import model_inside, parallel_state
from ..hub.hooks import push_saved
from ..peft.loading import save_loaded_adapter
from .checkpoint_formats import save_in_format
from .model_cards import write_model_card
from .quantization import require_dense


def save_pretrained(
    original: Callable, self: Any, save_directory: Any, *args: Any, format: str = "hf", **kwargs: Any
) -> Any:
    """Saves merged Hugging Face files with a model card, or another format; collective."""
    require_dense(self)
    if format != "hf":
        PATCH_REGISTRY.activate()
        return save_in_format(self, original, save_directory, format, *args, **{"options": None, **kwargs})
    if "options" in kwargs:
        raise ConfigError("save_pretrained(options=...): Hugging Face files have no options. Pass format= too.")
    if parallel_state(self) is None:
        return original(self, save_directory, *args, **kwargs)
    if getattr(self, "_hf_peft_config_loaded", False):
        arguments = dict(zip(("is_main_process", "state_dict", "push_to_hub"), args, strict=False)) | kwargs
        names = ("is_main_process", "state_dict", "save_peft_format")
        named = {name: arguments[name] for name in names if name in arguments}
        save_loaded_adapter(self, save_directory, **named)
        if arguments.get("push_to_hub"):
            push_saved(save_directory, kwargs.get("token"), kwargs)
        return None
    card = functools.partial(write_model_card, self, repo_id=kwargs.get("repo_id"))
    return save_merged(self, original, save_directory, *args, before_push=card, push=push_saved, **kwargs)


def gather_sharded_state_dict_for_save(
    original: Callable, self: Any, model_to_save: Any, state_dict: dict, distributed_config: Any, **kwargs: Any
) -> dict:
    """Returns the state dict of a parallelized model unchanged: `save_merged` gathers its weights."""
    if isinstance(distributed_config, MegatronConfig):
        return state_dict
    return original(self, model_to_save, state_dict, distributed_config, **kwargs)


def barrier_after_gathered_checkpoint_save(original: Callable, self: Any, distributed_config: Any) -> None:
    """Skips the barrier for a parallelized model: `save_merged` writes the weights later and synchronizes itself."""
    if not isinstance(distributed_config, MegatronConfig):
        original(self, distributed_config)


def state_dict_type(original: Callable, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns a context without effect for a parallelized model, whose save gathers full weights by itself."""
    return original(module, *args, **kwargs) if parallel_state(module) is None else contextlib.nullcontext()


def get_model_param_count(original: Callable, model: Any, trainable_only: bool = False) -> int:
    """Returns the number of parameters of all pipeline stages; collective."""
    state = parallel_state(model)
    if state is None or state.pipeline is None:
        return original(model, trainable_only)
    return model_inside(model).num_parameters(only_trainable=trainable_only)
