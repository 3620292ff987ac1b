"""Format entry of Hugging Face folders (see the package)."""

import re

from ..format import Format
from .reader import HuggingFaceReader
from .writer import HuggingFaceWriter

_WEIGHTS = re.compile(r"(model|pytorch_model).*\.(safetensors|bin)(\.index\.json)?")

FORMAT = Format(
    name="hf",
    title="Hugging Face folder",
    marks="model.safetensors or its index",
    files=r".*\.(safetensors|bin)|.*\.index(\..*)?\.json",
    recognise=lambda path, names: any(map(_WEIGHTS.fullmatch, names)),
    open=lambda path, architecture, verify: HuggingFaceReader(path, architecture),
    create=lambda output, plan, architecture, options, iteration, optimizer: HuggingFaceWriter(
        output, plan, architecture, options
    ),
    options=frozenset({"max_shard_size"}),
    holds_mtp=True,
    card="merged",
)
