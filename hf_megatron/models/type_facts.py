"""Facts about single model types that are not part of a parallel plan, declared in the file of the type's family."""

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
    """Facts about one model type; each is empty unless its family states it.

    Attributes:
        defaults: what the default config of the class lacks to build a model, or to build an interesting one. It is
            applied before the rules that shrink a config, all of it at once, and only to a config that has the default
            value of each of these attributes.
        tiny: sizes of a twin where those of all types would make it large.
        variants: changes of the default config that change the path through the code. Sizes do not, except for numbers
            of key/value heads below the number of ranks.
        audio: what a type has that takes sounds, and not by default.
        no_gradient: regular expressions of the trainable parameters that get no gradient, with the reasons.
        no_gradient_without: the same of batches without a medium (`"videos"`, `"audio"`).
        frozen: parts that their constructors put into evaluation mode, where norms by the statistics of a batch would
            be others' for each part of it. Twins keep them there.
        min_row_length: the fewest tokens of a row: shorter rows have another kind of attention, for which the model
            exchanges its modules.
        needs_decoder_inputs: whether the model makes no decoder inputs of its labels.
        reads_codebooks: whether the decoder alone reads tokens of several codebooks, with a table for each.
        needs_a_label: whether the shift of labels looks for the last label of each row.
        batch_coupling: why the rows of a batch depend on each other, so that a part of a batch gives other numbers.
        batch_coupling_if: whether a config makes it so; `None` for every config.
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

# Images of a twin become tokens of so many kinds.
IMAGE_CODES = 8

# Reasons that several families state.
UNREAD_LAST_NORM = {r"_tower\.post_layernorm\.": "the states of layers are read, which it does not see"}
IMAGE_TOKENIZER = {r"\.vqmodel\.": "chooses tokens of images: no gradient comes through a choice"}
SPARSE_INDEXER = {r"\.indexer\.": "chooses which tokens are read: no gradient comes through a choice"}
EXPERT_CHOICE = {r"\.e_score_correction_bias$": "chooses experts: no gradient comes through a choice"}
UNREAD_POOLER = {r"\.pooler\.": "read by heads of classes alone"}
FIXED_POSITIONS = {r"\.embed_positions\.": "positions are looked up without gradients"}
UNSEEN_GLOBAL_TOKENS = {r"_global\.": "reads tokens that see all others: compared without such"}
UNHEARD_AUDIO = {"audio": {r"\.?audio_tower\.": "reads sounds: compared on images alone"}}


def register_facts(*model_types: str, facts: TypeFacts) -> None:
    """Registers the facts of model types.

    Raises:
        PlanError: a type has facts already.
    """
    for model_type in model_types:
        if model_type in _FACTS:
            raise PlanError(f"facts of model type {model_type!r} are registered already.")
        _FACTS[model_type] = facts


@functools.cache
def load_families() -> None:
    """Imports every family file, which registers its specs and facts; twice is once."""
    from . import families

    for module in pkgutil.iter_modules(families.__path__):
        importlib.import_module(f"{families.__name__}.{module.name}")


def facts_of(model_type: str) -> TypeFacts:
    """Returns the facts of a model type; empty ones for a type that no family knows."""
    load_families()
    return _FACTS.get(model_type, _NONE)


def batch_coupling_reason(config: Any) -> str | None:
    """Says why a model's rows cannot be computed apart from each other, or `None` where they can."""
    facts = facts_of(config.model_type)
    is_coupled = facts.batch_coupling_if is None or facts.batch_coupling_if(config)
    return facts.batch_coupling if is_coupled else None
