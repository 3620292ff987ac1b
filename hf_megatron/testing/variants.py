"""Variants of a type's default config that are compared too: tied and untied weights, and changes of checkpoints."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING

from ..models.type_facts import facts_of
from .tiny_config import full_config

Changes = Mapping[str, Any]


def variants_of(model_type: str, class_name: str) -> list[Changes]:
    """Lists what is changed of a type's default config, the tying of its weights first, where the class can be both."""
    return [*_tying(model_type, class_name), *facts_of(model_type).variants]


def _tying(model_type: str, class_name: str) -> list[Changes]:
    default = full_config(CONFIG_MAPPING[model_type]())
    flag = "tie_word_embeddings"
    try:
        changed = type(default).from_dict(default.to_dict() | {flag: not getattr(default, flag, False)})
    except StrictDataclassError:
        return []
    cls = getattr(transformers, class_name)
    if not isinstance(default, cls.config_class):
        return []
    with torch.device("meta"):
        tied = [cls(config).all_tied_weights_keys for config in (default, changed)]
    return [] if tied[0] == tied[1] else [{flag: getattr(changed, flag)}]
