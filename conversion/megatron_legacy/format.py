"""Format entry of Megatron's legacy `torch` checkpoints (see the package)."""

import re

from ..families import get_family
from ..megatron.name_view import megatron_format
from .reader import MegatronLegacyReader
from .writer import MegatronLegacyWriter

_RANK = re.compile(r"mp_rank_\d{2,}(_\d{3,}){0,2}")

FORMAT = megatron_format(
    lambda path, architecture: MegatronLegacyReader(path, get_family(architecture.config).model(architecture.config)),
    lambda output, plan, model, options, iteration, optimizer: MegatronLegacyWriter(
        output, plan, model, options, iteration, options.local_names
    ),
    name="megatron_legacy",
    title="Megatron legacy torch (mp_rank_XX)",
    marks="mp_rank_*",
    files=r"latest_checkpointed_iteration\.txt",
    recognise=lambda path, names: any(map(_RANK.fullmatch, names)),
    alias="torch",
    options=frozenset({"tp_size", "ep_size", "make_vocab_size_divisible_by", "pp_size", "local_names"}),
)
