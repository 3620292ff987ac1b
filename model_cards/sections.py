"""Parts of a card that its template cannot render directly."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import MegatronConfig
from .card_data import CardData
from .training import curves

MOST_ROWS = 50
_AUTO_CLASSES = {
    "text-generation": "AutoModelForCausalLM",
    "fill-mask": "AutoModelForMaskedLM",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "text2text-generation": "AutoModelForSeq2SeqLM",
}
# Fields specific to a run, which are not part of a model's layout.
_OF_THE_RUN = ("dp_size", "dp_replicate_size", "strict_loading", "seed", "timeout", "async_save", "verify_checksums")


def cell(value: Any) -> str:
    """Returns a cell of a Markdown table: integers in full, floats with six digits, lists separated by commas."""
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value))
    if isinstance(value, int) and not isinstance(value, bool):
        value = f"{value:,}"
    elif isinstance(value, float):
        value = f"{value:.6g}"
    return " ".join(str("" if value is None else value).split()).replace("|", "\\|")


def loss_table(log: tuple[Mapping[str, Any], ...]) -> tuple[list[str], list[list[Any]]]:
    """Returns header and rows of the losses by step; more than fifty steps are thinned evenly, keeping both ends."""
    columns = {label: dict(points) for label, points in curves(log).items()}
    steps = sorted({step for column in columns.values() for step in column})
    if len(steps) > MOST_ROWS:
        places = {round(place * (len(steps) - 1) / (MOST_ROWS - 1)) for place in range(MOST_ROWS)}
        steps = [steps[place] for place in sorted(places)]
    return ["step", *columns], [[str(step), *(column.get(step) for column in columns.values())] for step in steps]


def template_variables(facts: CardData) -> dict[str, Any]:
    """Returns the variables of the template in addition to the card data."""
    layout = facts.layout
    changed = {
        field.name: value
        for field in dataclasses.fields(MegatronConfig)
        if layout is not None and (value := getattr(layout, field.name)) != field.default
    }
    if changed.get("dp_size") == 1:
        del changed["dp_size"]
    return {
        "cell": cell,
        "losses": loss_table(facts.log_history),
        "model_class": _AUTO_CLASSES.get(facts.pipeline_tag or "") or facts.architecture,
        "changed": {f"`{name}`": f"`{value}`" for name, value in changed.items()},
        "arguments": ", ".join(f"{name}={value!r}" for name, value in changed.items() if name not in _OF_THE_RUN),
    }
