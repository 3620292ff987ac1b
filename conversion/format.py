"""The face of a checkpoint format: what it can hold, and the functions that recognise, open and write it."""

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
    """One way in which checkpoints lie in files; each folder of `conversion` with a reader and a writer states one.

    Attributes:
        name: as `--to` and `--from` know it.
        title: for people.
        marks: what a folder of the format has, for the error about one that has nothing of any.
        files: a pattern of the names of its own files, which do not go along when config and tokenizer are copied.
        recognise: whether a folder is one, by its path and the names in it; the registry asks in its order.
        open: a folder as tensors of the model; path, architecture, whether to compare checksums.
        create: a writer that takes tensors of the model in the order of a plan; output, plan, architecture, options,
            iteration and optimizer.
        alias: what `--ckpt-format` of Megatron-LM calls it.
        megatron: whether its names are Megatron's.
        moments: whether it can hold an optimizer's moments so that they can be read on other layouts.
        options: the fields of `TargetOptions` that it knows.
        main_weights: when moments come with fp32 weights: always, where weights are narrower, or never.
        holds_mtp: whether it can hold layers of multi-token prediction.
        card: how a model card calls its files, where this library or transformers loads them.
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
