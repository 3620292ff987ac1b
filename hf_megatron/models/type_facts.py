"""`TypeFacts`: metadata of a model type beyond its parallel plan, registered in the file of the type's family."""

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import PlanError

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class TypeFacts:
    """Metadata of one model type; every field is empty by default.

    Attributes:
        defaults: Config values that the default config lacks to build a model, or to build a representative one. They
            are applied together, before the config is shrunk, and only if the config has the default value of all of
            these attributes.
        tiny: Sizes of the tiny model that replace the generic rules of `tiny_config`.
        variants: Changes of the default config that lead to another code path. Sizes do not, except for numbers of
            key/value heads below the number of ranks.
        audio: Config values that enable audio inputs, for a type that has none by default.
        no_gradient: Regular expression of trainable parameters that get no gradient -> the reason.
        no_gradient_without: Modality (`"videos"`, `"audio"`) -> the same, for batches without that modality.
        frozen: Modules that the model's constructor sets to evaluation mode. Tiny models keep them in that mode,
            because their batch norms would otherwise have other statistics for each shard of a batch.
        min_row_length: Minimum number of tokens per sequence. For shorter ones the model replaces its attention modules
            by another kind.
        needs_decoder_inputs: Whether the model does not create decoder inputs from its labels.
        reads_codebooks: Whether the model is a decoder that reads several codebooks, with an embedding for each.
        needs_a_label: Whether the model's label shift looks for the last label of each sequence.
        batch_coupling: Reason why the samples of a batch depend on each other, so that a sub-batch gives other results.
        batch_coupling_if: Predicate of a config for which `batch_coupling` applies; `None` for every config.
    """

    defaults: Values = field(default_factory=dict)
    tiny: Values = field(default_factory=dict)
    variants: Sequence[Values] = ()
    audio: Values = field(default_factory=dict)
    no_gradient: Mapping[str, str] = field(default_factory=dict)
    no_gradient_without: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    min_row_length: int = 0
    needs_decoder_inputs: bool = False
    reads_codebooks: bool = False
    needs_a_label: bool = False
    batch_coupling: str | None = None
    batch_coupling_if: Callable[[Any], bool] | None = None


_NONE = TypeFacts()
_FACTS: dict[str, TypeFacts] = {}

# Number of distinct image tokens (the codebook size) of a tiny model.
IMAGE_CODES = 8

# Reasons that several families share.
UNREAD_LAST_NORM = {r"_tower\.post_layernorm\.": "the states of layers are read, which it does not see"}
IMAGE_TOKENIZER = {r"\.vqmodel\.": "chooses tokens of images: no gradient comes through a choice"}
SPARSE_INDEXER = {r"\.indexer\.": "chooses which tokens are read: no gradient comes through a choice"}
EXPERT_CHOICE = {r"\.e_score_correction_bias$": "chooses experts: no gradient comes through a choice"}
UNREAD_POOLER = {r"\.pooler\.": "read by heads of classes alone"}
FIXED_POSITIONS = {r"\.embed_positions\.": "positions are looked up without gradients"}
UNSEEN_GLOBAL_TOKENS = {r"_global\.": "reads tokens that see all others: compared without such"}
UNHEARD_AUDIO = {"audio": {r"\.?audio_tower\.": "reads sounds: compared on images alone"}}


def register_facts(*model_types: str, facts: TypeFacts) -> None:
    """Registers the `TypeFacts` of model types.

    Raises:
        PlanError: a type is registered already.
    """
    for model_type in model_types:
        if model_type in _FACTS:
            raise PlanError(f"facts of model type {model_type!r} are registered already.")
        _FACTS[model_type] = facts


@functools.cache
def load_families() -> None:
    """Imports every family file, which registers its specs and `TypeFacts`; later calls do nothing."""
    from . import families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")


def get_type_facts(model_type: str) -> TypeFacts:
    """Returns the `TypeFacts` of a model type; empty ones for a type that is not registered."""
    load_families()
    return _FACTS.get(model_type, _NONE)


def batch_coupling_reason(config: Any) -> str | None:
    """Returns why the samples of a model's batch depend on each other, or `None` if they do not."""
    facts = get_type_facts(config.model_type)
    is_coupled = facts.batch_coupling_if is None or facts.batch_coupling_if(config)
    return facts.batch_coupling if is_coupled else None
