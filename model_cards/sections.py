"""The tables and paragraphs of a card, as Markdown."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..config import MegatronConfig
from .facts import CardFacts, Parity
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
# Of this run, and no part of how a model is laid out.
_OF_THE_RUN = ("dp_size", "dp_replicate_size", "strict_loading", "seed", "timeout", "async_save", "verify_checksums")


def number(value: Any) -> str:
    """A figure as the card shows it: whole numbers in full, others with six digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.6g}"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; a cell may hold anything. Empty without rows."""
    lines = [[_cell(value) for value in row] for row in rows]
    if not lines:
        return ""
    parts = [list(header), ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(part)} |" for part in parts)


def _cell(value: Any) -> str:
    text = "" if value is None else number(value)
    return " ".join(text.split()).replace("|", "\\|")


def _rows(values: Mapping[str, Any]) -> str:
    return table(["", ""], [(name, value) for name, value in values.items() if value not in (None, "", ())])


def summary(facts: CardFacts) -> str:
    """One sentence: where the weights come from."""
    base = f"[{facts.base_model}](https://huggingface.co/{facts.base_model})" if facts.base_model else None
    where = ""
    if facts.layout is not None:
        ranks = f" ({facts.world_size} ranks)" if facts.world_size else ""
        where = f" on the layout `{facts.layout.layout()}`{ranks}"
    if facts.source_format or facts.target_format:
        ends = [("from", facts.source_format), ("to", facts.target_format)]
        return "Converted " + " ".join(f"{word} {name}" for word, name in ends if name) + " by hf_megatron."
    if facts.steps:
        start = f" from {base}" if base else ""
        return f"Trained{start} for {facts.steps:,} optimizer steps{where} with hf_megatron."
    return f"Saved{f' from {base}' if base else ''}{where} with hf_megatron."


def model_table(facts: CardFacts) -> str:
    return _rows(
        {
            "base model": facts.base_model,
            "class": facts.architecture and f"`{facts.architecture}`",
            "model type": facts.model_type and f"`{facts.model_type}`",
            "parameters": facts.parameters,
            "dtype": facts.dtype and f"`{facts.dtype}`",
        }
    )


def training_table(facts: CardFacts) -> str:
    if not facts.steps:
        return ""
    return _rows(
        {
            "data": ", ".join(dict.fromkeys((*facts.datasets, *facts.dataset_names))),
            "trainer": facts.trainer and f"`{facts.trainer}`",
            "optimizer steps": facts.steps,
            "epochs": facts.epochs,
            "rows of a step, all ranks": facts.batch_size,
            "gradient accumulation": facts.accumulation,
            "tokens seen": facts.tokens,
            "optimizer": facts.optimizer and f"`{facts.optimizer}`",
            "learning rate": ", ".join(map(number, facts.learning_rates)),
            "mixed precision": facts.mixed_precision,
            "seed": None if facts.seed is None else str(facts.seed),
        }
    )


def loss_table(facts: CardFacts) -> str:
    """Losses by step; of more than fifty steps evenly spaced ones, the first and the last among them."""
    found = curves(facts.log_history)
    by_step: dict[float, dict[str, float]] = {}
    for label, points in found.items():
        for step, value in points:
            by_step.setdefault(step, {})[label] = value
    steps = sorted(by_step)
    if len(steps) > MOST_ROWS:
        places = {round(place * (len(steps) - 1) / (MOST_ROWS - 1)) for place in range(MOST_ROWS)}
        steps = [steps[place] for place in sorted(places)]
    return table(["step", *found], [(str(step), *(by_step[step].get(label) for label in found)) for step in steps])


def evaluation_table(facts: CardFacts) -> str:
    return table(["metric", "value"], (facts.metrics or {}).items())


def evaluation_source(facts: CardFacts) -> str:
    parts = [facts.evaluation_dataset and f"on {facts.evaluation_dataset}"]
    parts.append(facts.evaluation_split and f"(split `{facts.evaluation_split}`)")
    parts.append(None if facts.metrics_step is None else f"at step {facts.metrics_step:,}")
    words = " ".join(part for part in parts if part)
    return f"Measured {words}." if words else ""


def layout_table(facts: CardFacts) -> str:
    """The fields of the layout that are not the defaults, and the ranks."""
    if facts.layout is None:
        return ""
    values = {f"`{name}`": f"`{value}`" for name, value in _changed(facts.layout).items()}
    return _rows({**values, "ranks": facts.world_size})


def _changed(layout: MegatronConfig) -> dict[str, Any]:
    found = {field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
    defaults = {field.name: field.default for field in dataclasses.fields(layout)}
    return {name: value for name, value in found.items() if value != defaults[name] and (name, value) != ("dp_size", 1)}


def parity_text(facts: CardFacts) -> str:
    """Which recorded results back the layout, or that none does."""
    parity = facts.parity
    if parity is None:
        return ""
    if not parity.kinds:
        return (
            "No parity result is needed for a layout of data parallelism alone: every rank computes with the stock "
            "modules."
        )
    parts = []
    if parity.rows:
        parts.append(
            "Loss, every gradient and the weights after two optimizer steps of a tiny model of this class, over ranks, "
            "were compared with one process. The error is the worst over all compared quantities, as a share of its "
            "limit (`verified.json` of hf_megatron)."
            + " Each kind was compared on its own, not their combination."
            * (len(parity.kinds) > 1)
        )
        parts.append(_parity_table(parity))
    if parity.missing:
        kinds = ", ".join(f"`{kind}`" for kind in parity.missing)
        text = f"No passed parity result is recorded for {facts.architecture} (`{facts.model_type}`) on {kinds}."
        if facts.layout is not None and facts.layout.allow_unverified:
            text += (
                " It ran with `allow_unverified=True`, which compares a tiny model first and goes on if that passes."
            )
        parts.append(text)
    return "\n\n".join(parts)


def _parity_table(parity: Parity) -> str:
    header = ["layout", "tp", "pp", "result", "largest error", "measured with"]
    rows = [
        (
            f"`{row['layout']}`",
            row.get("tp_size", 1),
            row.get("pp_size", 1),
            "equal" if row["passed"] else "not equal",
            row.get("worst"),
            ", ".join(f"{name} {version}" for name, version in sorted(row.get("versions", {}).items())),
        )
        for row in parity.rows
    ]
    return table(header, rows)


def versions_table(facts: CardFacts) -> str:
    return _rows(dict(facts.versions or {}))


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def loading(facts: CardFacts) -> str:
    """How to load the files: plain, on the layout, and from a sharded checkpoint."""
    if facts.files == "sharded":
        return _loading_sharded()
    model_class = _AUTO_CLASSES.get(facts.pipeline_tag or "") or facts.architecture
    if facts.files != "merged" or model_class is None:
        return ""
    place = repr(facts.model_id or ".").replace("'", '"')
    comment = "or a folder with these files" if facts.model_id else "this folder, or its name on the Hub"
    names = ", ".join(sorted({model_class, "AutoTokenizer"} if facts.tokenizer else {model_class}))
    lines = [f"from transformers import {names}", "", f"folder = {place}  # {comment}"]
    lines.append(f"model = {model_class}.from_pretrained(folder)")
    lines += ["tokenizer = AutoTokenizer.from_pretrained(folder)"] if facts.tokenizer else []
    text = "In plain transformers:\n\n" + _fenced("python", lines)
    if facts.layout is None:
        return text
    arguments = ", ".join(f"{name}={value!r}" for name, value in _changed(facts.layout).items() if _is_layout(name))
    lines = [
        "from hf_megatron import MegatronConfig",
        f"from transformers import {model_class}",
        "",
        f"folder = {place}  # {comment}",
        f"layout = MegatronConfig({arguments})",
        f"model = {model_class}.from_pretrained(folder, megatron_config=layout)",
    ]
    ranks = facts.world_size or facts.layout.ranks_per_replica
    start = f"Over ranks with hf_megatron, as here (`torchrun --nproc_per_node {ranks} train.py`):\n\n"
    return f"{text}\n\n{start}{_fenced('python', lines)}"


def _is_layout(name: str) -> bool:
    return name not in _OF_THE_RUN


def _loading_sharded() -> str:
    merge = _fenced("bash", ["hf-megatron merge . ../merged"])
    return (
        "This folder is a sharded checkpoint: every rank's share of the weights and of the optimizer's state. On this "
        "layout, on any other and in one process training goes on from it with "
        "`trainer.train(resume_from_checkpoint=...)`, or `accelerator.load_state(...)` if `save_state` wrote it. This "
        "card is one of the files whose checksums are compared then: edit a copy. For plain Hugging Face files, run in "
        "this folder:\n\n"
        f"{merge}"
    )


def _fenced(language: str, lines: Sequence[str]) -> str:
    return "\n".join([f"```{language}", *lines, "```"])
