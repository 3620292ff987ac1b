"""The layouts: how each is recognised, opened and written."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from ..checkpoint.manifest import MANIFEST
from ..errors import CheckpointError, ConfigError, UnsupportedError
from .architecture import Architecture
from .dcp import DcpReader, DcpWriter
from .families import family_of
from .hugging_face import HuggingFaceReader, HuggingFaceWriter
from .megatron_core import MegatronCoreReader
from .megatron_core_writer import MegatronCoreWriter
from .megatron_folder import TRACKER, iteration_folder
from .megatron_legacy import MegatronLegacyReader
from .megatron_legacy_writer import MegatronLegacyWriter
from .naming import TransformersNames, TransformersView, megatron_plan
from .output import Output
from .rules import Rule
from .shard_folder import ShardsWriter
from .sharded import ShardedReader, ShardedWriter
from .tensors import Entry, Key, Layout, OptimizerState, Reader, Writer


@dataclass(frozen=True)
class Format:
    """A layout of checkpoints.

    Attributes:
        megatron: whether its names are Megatron's.
        moments: whether it can hold an optimizer's moments so that they can be read on other layouts.
        sizes: the fields of `Layout` that it knows.
        main_weights: when moments come with fp32 weights: always, where weights are narrower, or never.
    """

    name: str
    title: str
    megatron: bool = False
    moments: bool = False
    sizes: frozenset[str] = frozenset()
    main_weights: Literal["always", "narrower", "never"] = "never"


_VOCABULARY = frozenset({"tp_size", "ep_size", "make_vocab_size_divisible_by"})
HF = Format("hf", "Hugging Face folder", sizes=frozenset({"max_shard_size"}))
SHARDED = Format("sharded", "hf_megatron sharded checkpoint", moments=True, main_weights="narrower")
MEGATRON_CORE = Format(
    "megatron_core", "Megatron-Core torch_dist", True, moments=True, sizes=_VOCABULARY, main_weights="always"
)
MEGATRON_LEGACY = Format(
    "megatron_legacy",
    "Megatron legacy torch (mp_rank_XX)",
    True,
    sizes=_VOCABULARY | {"pp_size", "local_names"},
)
DCP = Format("dcp", "torch DCP under Hugging Face names", moments=True)
SHARDS = Format("shards", "transformers' shard-*.safetensors folder")

FORMATS = MappingProxyType(
    {format.name: format for format in (HF, SHARDED, MEGATRON_CORE, MEGATRON_LEGACY, DCP, SHARDS)}
)
# What `--ckpt-format` of Megatron-LM calls them.
ALIASES = MappingProxyType({"torch_dist": MEGATRON_CORE, "torch": MEGATRON_LEGACY})


def format_named(name: str) -> Format:
    """A format by its name or alias.

    Raises:
        ConfigError: naming those that there are.
    """
    found = FORMATS.get(name) or ALIASES.get(name)
    if found is None:
        raise ConfigError(f"format={name!r}: expected one of {', '.join([*FORMATS, *ALIASES])}.")
    return found


def is_known(path: Path) -> bool:
    """Whether a folder has what some layout has, other than Hugging Face's; it may be damaged."""
    if not path.is_dir():
        return False
    if (path / TRACKER).is_file():
        return True
    try:
        return recognise(path) is not HF
    except CheckpointError:
        return False


def check_layout(format: Format, layout: Layout) -> None:
    """Whether a format knows of the sizes that were given.

    Raises:
        ConfigError: naming a size that would have no effect, and those that the format has.
    """
    for field in dataclasses.fields(layout):
        value = getattr(layout, field.name)
        if value != field.default and field.name not in format.sizes:
            known = ", ".join(sorted(format.sizes)) or "none"
            raise ConfigError(f"{field.name}={value!r} means nothing to {format.name}; the sizes it has are: {known}.")


def recognise(path: Path) -> Format:
    """The layout of a folder.

    Raises:
        CheckpointError: it is none of those that are known, naming what each would have.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder.")
    folder = iteration_folder(path)
    names = os.listdir(folder)
    if "metadata.json" in names and ".metadata" in names:
        return MEGATRON_CORE
    if any(re.fullmatch(r"mp_rank_\d{2,}(_\d{3,}){0,2}", name) for name in names):
        return MEGATRON_LEGACY
    if any(re.fullmatch(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?", name) for name in names):
        return HF
    if MANIFEST in names:
        return SHARDED
    if ".metadata" in names or any(re.fullmatch(r"shard-\d{5}-model-.*\.safetensors", name) for name in names):
        return DCP
    if any(name == ".metadata" for inner in names for name in _inside(folder / inner, "pytorch_model_fsdp")):
        return DCP
    raise CheckpointError(
        f"{path} is no checkpoint of a known layout: there is no metadata.json (megatron_core), mp_rank_* "
        f"(megatron_legacy), {MANIFEST} (sharded), .metadata or shard-*.safetensors (dcp), model.safetensors or its "
        "index (hf). Name the layout with --from."
    )


def _inside(folder: Path, prefix: str) -> list[str]:
    return os.listdir(folder) if folder.name.startswith(prefix) and folder.is_dir() else []


def check_config(config: Any) -> None:
    """Whether Megatron's layouts can express a config.

    Raises:
        UnsupportedError: naming the setting.
    """
    reason = family_of(config).refuse(config)
    if reason:
        raise UnsupportedError(f"{config.model_type}: {reason}")


def rules_of(config: Any, layout: Layout) -> list[Rule]:
    """The rules of a config's family, with a vocabulary padded as `layout` says."""
    multiple = layout.make_vocab_size_divisible_by * layout.tp_size
    check_config(config)
    return list(family_of(config).rules(config, -(-config.vocab_size // multiple) * multiple))


def open_reader(path: Path, format: Format, architecture: Architecture, verify: bool = True) -> Reader:
    """A checkpoint as tensors of the model, whatever its layout.

    Raises:
        CheckpointError: it is damaged or unsafe, or not one of this model with this config.
    """
    reader = _open(path, format, architecture, verify)
    try:
        architecture.check_entries(reader.entries, str(path))
    except CheckpointError:
        reader.close()
        raise
    return reader


def _open(path: Path, format: Format, architecture: Architecture, verify: bool) -> Reader:
    if format is HF:
        return HuggingFaceReader(path, architecture)
    if format is SHARDED:
        return ShardedReader(path, architecture, verify)
    if format in (DCP, SHARDS):
        return DcpReader(path, architecture.saved_names, architecture.first_name)
    config = architecture.config
    rules = rules_of(config, Layout())
    folder = iteration_folder(path)
    reader: Reader
    if format is MEGATRON_CORE:
        reader = MegatronCoreReader(folder)
    else:
        reader = MegatronLegacyReader(folder, family_of(config).model(config))
    try:
        return TransformersView(reader, rules, architecture, str(folder))
    except CheckpointError:
        reader.close()
        raise


def create_writer(
    output: Output,
    plan: Mapping[Key, Entry],
    format: Format,
    architecture: Architecture,
    layout: Layout,
    iteration: int | None,
    optimizer: OptimizerState | None,
) -> Writer:
    """A writer that takes tensors of the model in the order of the plan."""
    if format is HF:
        return HuggingFaceWriter(output, plan, architecture, layout)
    if format is SHARDED:
        return ShardedWriter(output, plan, architecture, layout, iteration, optimizer)
    if format is DCP:
        return DcpWriter(output, plan, optimizer)
    if format is SHARDS:
        return ShardsWriter(output, plan)
    config = architecture.config
    rules = rules_of(config, layout)
    model = family_of(config).model(config)
    inner = megatron_plan(plan, rules, str(output.target))
    writer: Writer
    if format is MEGATRON_CORE:
        # Experts have an optimizer of their own under expert parallelism.
        arguments = {**model.arguments, "expert_model_parallel_size": layout.ep_size}
        model = replace(model, arguments=arguments)
        writer = MegatronCoreWriter(output, inner, model, iteration, optimizer)
    else:
        writer = MegatronLegacyWriter(output, inner, model, layout, iteration, layout.local_names)
    return TransformersNames(writer, plan, rules)
