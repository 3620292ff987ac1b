"""Adapters that transformers itself loads: `model.load_adapter`, `pipeline(...)`, and folders in `from_pretrained`.

The adapter becomes part of the model, without a `PeftModel` around it, and `save_pretrained` writes the adapter alone.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...errors import UnsupportedError

# Prefix of the names in PEFT's files.
_WRAPPED = "base_model.model."
# Key of `adapter_kwargs` of a model whose adapter is loaded once the model is complete.
_LOADED_LATER = "_hf_megatron_loads_adapter"


def find_adapter_base(path: Any, kwargs: dict[str, Any]) -> tuple[Any, Callable[[Any], None] | None]:
    """Returns the base model of an adapter's folder or repository, and a function that loads the adapter into it.

    Args:
        path: first argument of `from_pretrained`.
        kwargs: the others; those of the adapter are removed.

    Returns:
        `path` itself and `None` if it is not an adapter's.
    """
    from transformers.integrations.peft import maybe_load_adapters

    hub = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
    download: Any = {name: kwargs[name] for name in hub if kwargs.get(name) is not None}
    adapter_name = kwargs.pop("adapter_name", "default")
    adapter, base, options = maybe_load_adapters(path, download, **(kwargs.pop("adapter_kwargs", None) or {}))
    if adapter is None:
        return path, None
    if base == path:
        # The folder also has the model: transformers would find the adapter again.
        kwargs["adapter_kwargs"] = {_LOADED_LATER: True}
    else:
        # They belong to the adapter's repository.
        kwargs.pop("revision", None)
        kwargs.pop("subfolder", None)
    if "token" in download:
        options["token"] = download["token"]

    def load(model: Any) -> None:
        model.load_adapter(adapter, adapter_name=adapter_name, adapter_kwargs=options)

    return base, load


def find_adapter(original: Callable, path: Any, download_kwargs: Any, **adapter_kwargs: Any) -> Any:
    """Finds the adapter of a folder, unless it is loaded later; called by transformers' loader."""
    if adapter_kwargs.pop(_LOADED_LATER, False):
        return None, path, adapter_kwargs
    return original(path, download_kwargs, **adapter_kwargs)


def add_adapter(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Adds a new adapter to a model; one that is rejected leaves a parallelized model without it."""
    before = self._hf_peft_config_loaded
    try:
        original(self, *args, **kwargs)
    except UnsupportedError:
        self._hf_peft_config_loaded = before
        raise


def load_adapter(original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Injects an adapter into a parallelized model and loads its weights; collective.

    Raises:
        UnsupportedError: for hotswapping, and adapters that the layout does not support.
    """
    # Read the attribute directly: this replacement is looked up while transformers is being imported.
    if "_hf_megatron" not in vars(self):
        return original(self, *args, **kwargs)
    from peft import PeftConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
    from transformers.utils.loading_report import LoadStateDictInfo

    given = inspect.signature(original).bind(self, *args, **kwargs)
    given.apply_defaults()
    arguments = given.arguments
    if arguments["hotswap"] is True:
        raise UnsupportedError(
            "load_adapter(hotswap=True) is not supported on a parallelized model. Load the adapter under another name, "
            "and select it with set_adapter()."
        )
    adapter = arguments["adapter_name"] or "default"
    if adapter in getattr(self, "peft_config", {}):
        raise ValueError(f"Adapter with name {adapter} already exists. Please use a different name.")
    path, config, weights = (arguments[name] for name in ("peft_model_id", "peft_config", "adapter_state_dict"))
    download = {**(arguments["adapter_kwargs"] or {}), **arguments["kwargs"]}
    download["local_files_only"] = arguments["local_files_only"] or download.get("local_files_only", False)
    if config is None:
        config = PeftConfig.from_pretrained(path, **download)
    if weights is None:
        weights = load_peft_weights(path, device="cpu", **download)
    config.inference_mode = not arguments["is_trainable"]
    inject_adapter_in_model(config, self, adapter)
    self._hf_peft_config_loaded = True
    weights = {name.removeprefix(_WRAPPED): weight for name, weight in weights.items()}
    result: Any = set_peft_model_state_dict(self, weights, adapter)
    if config.inference_mode:
        self.eval()
        tuners: Any = (module for module in self.modules() if isinstance(module, BaseTunerLayer))
        for tuner in tuners:
            tuner.requires_grad_(False)
    missing = {name for name in result.missing_keys if f".{adapter}." in name}
    return LoadStateDictInfo(
        missing_keys=missing,
        unexpected_keys=set(result.unexpected_keys),
        mismatched_keys=set(),
        error_msgs=[],
        conversion_errors={},
        skipped_pp_keys=set(),
    )


def save_loaded_adapter(
    model: Any,
    folder: Any,
    *,
    state_dict: Mapping[str, Any] | None = None,
    is_main_process: bool = True,
    save_peft_format: bool = True,
) -> None:
    """Writes the adapter that transformers has loaded into a model, from rank 0.

    Collective, except with a state dict: rank 0 writes its full tensors, and other ranks return at once.

    Args:
        save_peft_format (`bool`): whether the names in the file are PEFT's, or the model's.
    """
    import torch.distributed as dist
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    from .saving import require_full_adapter

    [adapter, *others] = model.active_adapters()
    if others:
        raise ValueError("Multiple active adapters detected. Select one with set_adapter() and save it.")
    if state_dict is not None:
        state_dict = require_full_adapter(state_dict)
    prefix = _WRAPPED if save_peft_format else ""
    writes = dist.get_rank() == 0 and is_main_process
    if state_dict is None or writes:
        weights = get_peft_model_state_dict(model, state_dict=state_dict, adapter_name=adapter)
    if writes:
        Path(folder).mkdir(parents=True, exist_ok=True)
        model.peft_config[adapter].save_pretrained(folder)
        named = {f"{prefix}{name}": weight.cpu().contiguous() for name, weight in weights.items()}
        save_file(named, Path(folder, "adapter_model.safetensors"), metadata={"format": "pt"})
    if state_dict is None:
        dist.barrier()
