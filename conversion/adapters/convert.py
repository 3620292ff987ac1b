"""Adapter files: PEFT's folder, and Megatron-Bridge's `torch_dist` folder with its `run_config.yaml`."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save
from torch import Tensor

from ...core.io.buffer_pool import FRESH
from ...errors import CheckpointError, ConfigError, UnsupportedError
from ..architecture import Architecture
from ..dcp.store_reader import StoreReader
from ..dcp.store_writer import StoreWriter
from ..families import list_rules
from ..interfaces import TargetOptions
from ..megatron.folder import TRACKER, folder_name, iteration_folder, tracker_text
from ..megatron_core.reader import COMMON, COMMON_OBJECT, CONFIG
from ..output_folder import Output
from ..torch_files.archive_writer import write_object
from .factors import PARTS, LowRank, Target, bridge_targets, to_bridge, to_peft

KINDS = ("peft", "bridge", "bridge_canonical")
_RUN = "run_config.yaml"
_WRAPPED = "base_model.model."
_STACKED = re.compile(r"(decoder\.layers)\.(\d+)\.(.+)")
_CLASSES = {"bridge": "lora.LoRA", "bridge_canonical": "canonical_lora.CanonicalLoRA"}


def convert_adapter(source: str | Path, target: str | Path, to: str, base: str | Path) -> list[str]:
    """Writes a LoRA adapter in another format; returns the names of the tensors written.

    Args:
        source: a folder of PEFT, or a checkpoint of Megatron-Bridge that holds an adapter and nothing else.
        target: a folder that does not exist.
        to: `"peft"`; `"bridge"`, with one adapter for query, key and value and one for gate and up; or
            `"bridge_canonical"`, with separate adapters as in PEFT.
        base: a folder with the base model's config.json.

    Raises:
        CheckpointError: the source is no adapter, is damaged, or does not fit the base model; or the target exists.
        ConfigError: an unknown format.
        UnsupportedError: an adapter or a model that the other format cannot express.
    """
    if to not in KINDS:
        raise ConfigError(f"to = {to!r}: valid are {', '.join(KINDS)}.")
    targets = list(bridge_targets(list_rules(Architecture.from_folder(base), TargetOptions())))
    source = Path(source)
    is_peft = (source / "adapter_config.json").is_file()
    adapters = _read_peft(source) if is_peft else _read_bridge(source, targets)
    if not adapters:
        raise CheckpointError(f"{source} holds no adapter.")
    with Output(target) as output:
        return _write_peft(output, adapters, base) if to == "peft" else _write_bridge(output, adapters, targets, to)


def _read_peft(folder: Path) -> dict[str, LowRank]:
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "adapter_model.safetensors")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("lora_bias"):
        raise UnsupportedError(
            f"{folder}: only LoRA without DoRA and biases can be converted, got peft_type "
            f"{config.get('peft_type')!r}, use_dora {config.get('use_dora')}, lora_bias {config.get('lora_bias')}. "
            "Merge the adapter into the base model and convert the merged model."
        )
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.+)\.(lora_[AB])\.weight", name.removeprefix(_WRAPPED))
        if match is None:
            raise UnsupportedError(
                f"{folder}: {name} is not a LoRA factor; modules and biases saved with an adapter cannot be converted. "
                "Merge the adapter into the base model and convert the merged model."
            )
        factors.setdefault(match[1], {})[match[2]] = tensor
    adapters = {}
    for module, pair in factors.items():
        if pair.keys() != {"lora_A", "lora_B"}:
            raise CheckpointError(f"{folder}: {module} must have lora_A and lora_B, got only {sorted(pair)}.")
        rank = pair["lora_A"].shape[0]
        alpha = _get_pattern_value(config.get("alpha_pattern") or {}, module, config.get("lora_alpha"))
        root = math.sqrt(rank) if config.get("use_rslora") else rank
        adapters[module] = LowRank(pair["lora_A"], pair["lora_B"], float(alpha) / root)
    return adapters


def _get_pattern_value(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """Returns a module's value of a setting with patterns (`peft.utils.other.get_pattern_key`)."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _write_peft(output: Output, adapters: Mapping[str, LowRank], base: str | Path) -> list[str]:
    rank, scale = next((adapter.rank, adapter.scale) for adapter in adapters.values())
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapters}),
        "rank_pattern": {module: adapter.rank for module, adapter in adapters.items() if adapter.rank != rank},
        "bias": "none",
        "inference_mode": True,
    }
    tensors = {}
    for module, adapter in adapters.items():
        tensors[f"{_WRAPPED}{module}.lora_A.weight"] = adapter.a.contiguous().clone()
        # PEFT has one `lora_alpha`: adapters with another scale fold the difference into B.
        b = adapter.b if adapter.scale == scale else adapter.b * (adapter.scale / scale)
        tensors[f"{_WRAPPED}{module}.lora_B.weight"] = b.contiguous().clone()
    output.add("adapter_config.json", json.dumps(config, indent=2) + "\n")
    output.add("adapter_model.safetensors", save(tensors, metadata={"format": "pt"}))
    return sorted(tensors)


def _read_bridge(folder: Path, targets: list[Target]) -> dict[str, LowRank]:
    at = iteration_folder(folder)
    try:
        run = yaml.safe_load((at / _RUN).read_text(encoding="utf-8"))
        settings = run["peft"]
        scale = float(settings["alpha"]) / int(settings["dim"])
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(
            f"{at}: expected PEFT's adapter_config.json, or Megatron-Bridge's {_RUN} with peft.dim and peft.alpha "
            f"({type(error).__name__}: {error})."
        ) from error
    if "dora" in str(settings.get("_target_", "")).lower():
        raise UnsupportedError(f"{at}: {settings['_target_']} is not supported; only LoRA can be converted.")
    store, tensors = StoreReader(at), {}
    for stored, entry in store.entries.items():
        if ".adapter." not in stored or stored.startswith("optimizer."):
            continue
        stacked = FRESH.empty(entry.shape, entry.dtype)
        store.read_into(stored, [0] * stacked.dim(), stacked)
        if _STACKED.fullmatch(stored) or not stored.startswith("decoder.layers."):
            tensors[stored] = stacked
            continue
        for layer, tensor in enumerate(stacked):
            tensors[stored.replace("decoder.layers.", f"decoder.layers.{layer}.", 1)] = tensor
    return to_peft(tensors, targets, scale)


def _write_bridge(output: Output, adapters: Mapping[str, LowRank], targets: list[Target], to: str) -> list[str]:
    tensors, rank, alpha = to_bridge(adapters, targets, fused=to == "bridge")
    folder = f"{folder_name(None)}/"
    store, is_stacked = StoreWriter(output, folder), _layers_are_identical(tensors, targets)
    layers = len({match[2] for target in targets if (match := _STACKED.fullmatch(target.megatron))})
    for name, tensor in tensors.items():
        match = _STACKED.fullmatch(name)
        if match is None or not is_stacked:
            store.write_chunk(name, tensor.shape, (0,) * tensor.dim(), tensor)
        else:
            front, stack = (int(match[2]), *(0,) * tensor.dim()), (layers, *tensor.shape)
            store.write_chunk(f"{match[1]}.{match[3]}", stack, front, tensor)
    common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {"non_homogeneous_layers": not is_stacked}}
    store.write_object(COMMON_OBJECT, [common])
    store.finish()
    write_object(output.create(folder + COMMON), common)
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    output.add(folder + CONFIG, json.dumps(backend | {"common_backend": "torch", "common_backend_version": 1}))
    output.add(folder + _RUN, yaml.safe_dump({"peft": _settings(adapters, targets, to, rank, alpha)}, sort_keys=False))
    output.add(TRACKER, tracker_text(None))
    return sorted(tensors)


def _settings(
    adapters: Mapping[str, LowRank], targets: list[Target], to: str, rank: int, alpha: float
) -> dict[str, Any]:
    target_modules = set()
    for target in targets:
        for module in adapters.keys() & set(target.modules):
            is_part = to == "bridge_canonical" and len(target.modules) > 1
            target_modules.add(PARTS[module.rpartition(".")[2]][1] if is_part else target.kind)
    alpha_value = int(alpha) if alpha == int(alpha) else alpha
    return {
        "_target_": f"megatron.bridge.peft.{_CLASSES[to]}",
        "target_modules": sorted(target_modules),
        "dim": rank,
        "alpha": alpha_value,
        "dropout": 0.0,
    }


def _layers_are_identical(tensors: Mapping[str, Tensor], targets: list[Target]) -> bool:
    """Returns whether every layer has the same tensors; Megatron stacks them in that case."""
    layers: dict[str, dict[str, torch.Size]] = {}
    for name, tensor in tensors.items():
        if match := _STACKED.fullmatch(name):
            layers.setdefault(match[2], {})[match[3]] = tensor.shape
    of_model = {match[2] for target in targets if (match := _STACKED.fullmatch(target.megatron))}
    first, *others = layers.values() or [{}]
    return layers.keys() == of_model and all(layer == first for layer in others)
