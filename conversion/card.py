"""The model card of a converted checkpoint."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..core.io.safetensors import TensorMeta
from ..errors import MegatronError
from ..model_cards import card_data_from_config, carry_card, is_own_card, write_card
from .auxiliary_files import only_dtype, widest_dtype
from .format import Format
from .interfaces import WEIGHT, Key


def write_conversion_card(
    folder: Path,
    name: str,
    config: Any,
    source: str,
    to: Format,
    notes: Sequence[str],
    before: Path | None,
    plan: Mapping[Key, TensorMeta],
) -> None:
    """Writes a model card: where the checkpoint comes from, how to load it, and what was not checked.

    Failing to write the card is only a warning, because the weights are already written.

    Args:
        folder: where the files are.
        name: the checkpoint's final name.
        source: the format it was converted from.
        before: a folder with the source's card: one of this library is carried over, a third-party one only into
            Hugging Face's format.
        plan: the tensors written; the config's dtype may differ from theirs.
    """
    dtype = only_dtype(plan.items()) or config.dtype or widest_dtype(plan.items())
    if to.card is None:
        model_class = "AutoModelForCausalLM" if config.get_text_config() is config else "AutoModelForImageTextToText"
        how = f"`{model_class}.from_pretrained(folder, megatron_config=MegatronConfig())` under hf_megatron"
        notes = [*notes, f"to load it: {how}; `hf-megatron convert FOLDER OUT --to hf` makes plain files"]
    facts = card_data_from_config(
        config,
        model_name=name,
        source_format=source,
        target_format=to.title,
        notes=tuple(notes),
        files=to.card,
        library_name=None if to.card is None else "transformers",
        parameters=sum(entry.numel for key, entry in plan.items() if key.kind == WEIGHT),
        **({} if dtype is None else {"dtype": str(dtype).removeprefix("torch.")}),
    )
    try:
        if before is not None and (to.card == "merged" or is_own_card(before)):
            carry_card(before, folder, facts)
        else:
            write_card(folder, facts)
    except (MegatronError, OSError, ValueError) as error:
        warnings.warn(f"No model card was written to {folder}: {error}. Everything else was written.", stacklevel=2)
