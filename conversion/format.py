"""Interface of a checkpoint format: its capabilities, and the functions that recognize, open and write it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..core.io.safetensors import TensorMeta
from .architecture import Architecture
from .interfaces import Key, OptimizerState, Reader, TargetOptions, Writer
from .output_folder import Output

Create = Callable[
    [Output, Mapping[Key, TensorMeta], Architecture, TargetOptions, "int | None", "OptimizerState | None"], Writer
]


@dataclass(frozen=True)
class Format:
    """A checkpoint format on disk; each folder of `conversion` with a reader and a writer defines one.

    Attributes:
        name: value for `--to` and `--from`.
        title: human-readable name.
        marks: files that identify a folder of this format, for the error about an unrecognized folder.
        files: pattern of the format's own file names, which are not copied along with config and tokenizer.
        recognise: returns whether a folder has this format, given its path and file names; tried in registry order.
        open: opens a folder as tensors of the model, given path, architecture, and whether to compare checksums.
        create: creates a writer that takes tensors of the model in the order of a plan, given output, plan,
            architecture, options, iteration and optimizer.
        alias: name of the format in Megatron-LM's `--ckpt-format`.
        megatron: whether it uses Megatron's names.
        moments: whether it can hold an optimizer's moments in a form that other layouts can read.
        options: the fields of `TargetOptions` that it supports.
        main_weights: when moments are accompanied by fp32 weights: always, if weights are narrower, or never.
        holds_mtp: whether it can hold multi-token prediction layers.
        card: kind of files for the model card, if this library or transformers loads them.
    """

    name: str
    title: str
    marks: str
    files: str
    recognise: Callable[[Path, Sequence[str]], bool]
    open: Callable[[Path, Architecture, bool], Reader]
    create: Create
    alias: str = ""
    megatron: bool = False
    moments: bool = False
    options: frozenset[str] = frozenset()
    main_weights: Literal["always", "narrower", "never"] = "never"
    holds_mtp: bool = False
    card: Literal["merged", "sharded"] | None = None
