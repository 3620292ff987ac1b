"""Rendering, checking and writing model cards."""

import dataclasses
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results

from ..errors import ConfigError
from . import sections
from .facts import CardFacts
from .licenses import LICENSES
from .picture import can_draw, draw_losses
from .training import is_drawable

MARKER = "<!-- Written by hf_megatron, and written anew by every save; delete this line to keep your own text. -->"
CARD, PICTURE = "README.md", "loss.png"
_TEMPLATE = Path(__file__).with_name("template.md")
_BEGIN, _END = "<!-- how to load it -->", "<!-- end of how to load it -->"
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.~<*)\]-])/(?:[\w.@+-]+/)+[\w.@+-]*|(?<!\w)~/|\bfile://|\b[A-Za-z]:\\\w")


def render(facts: CardFacts, picture: str | None = None) -> ModelCard:
    """The card of a model.

    Args:
        facts (`CardFacts`): what it says.
        picture (`str`, *optional*): the file with the losses, relative to the card.
    """
    texts: dict[str, Any] = {
        "title": facts.model_name or facts.architecture or "Model",
        "summary": sections.summary(facts),
        "model": sections.model_table(facts),
        "loading": _loading_section(facts),
        "training": sections.training_table(facts),
        "losses": sections.loss_table(facts),
        "evaluation": sections.evaluation_table(facts),
        "evaluation_source": sections.evaluation_source(facts),
        "layout": sections.layout_table(facts),
        "parity": sections.parity_text(facts),
        "source_format": facts.source_format,
        "target_format": facts.target_format,
        "notes": [" ".join(note.split()) for note in facts.notes],
        "versions": sections.versions_table(facts),
    }
    marks = {"marker": MARKER, "begin_loading": _BEGIN, "end_loading": _END}
    return ModelCard.from_template(card_data(facts), template_path=str(_TEMPLATE), picture=picture, **marks, **texts)


def card_data(facts: CardFacts) -> ModelCardData:
    """The metadata block; evaluation results are in it when the dataset and the task have names on the Hub."""
    results = _eval_results(facts)
    known = facts.license in LICENSES
    return ModelCardData(
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        eval_results=results or None,
        language=list(facts.language) or None,
        library_name=facts.library_name,
        license="other" if facts.license and not known else facts.license,
        license_name=facts.license if facts.license and not known else None,
        model_name=facts.model_name or facts.architecture or "Model" if results else None,
        pipeline_tag=facts.pipeline_tag,
        tags=list(facts.tags) or None,
    )


def _eval_results(facts: CardFacts) -> list[EvalResult]:
    if facts.evaluation_dataset is None or facts.pipeline_tag is None:
        return []
    return [
        EvalResult(
            task_type=facts.pipeline_tag,
            dataset_type=facts.evaluation_dataset,
            dataset_name=facts.evaluation_dataset,
            dataset_config=facts.evaluation_config,
            dataset_split=facts.evaluation_split,
            metric_type=name,
            metric_value=value,
        )
        for name, value in sections.finite(facts.metrics or {}).items()
    ]


def _loading_section(facts: CardFacts) -> str:
    text = sections.loading(facts)
    return f"\n## How to load it\n\n{text}\n" if text else ""


def check_card(card: ModelCard) -> None:
    """The part of the Hub's validation that needs no network; `card.validate()` asks the Hub.

    Raises:
        ConfigError: a metadata block that does not read back as it is, a license that the Hub does not know, or a path
            of this machine in the text.
    """
    content, expected = str(card), card.data.to_dict()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / CARD
        file.write_text(content, encoding="utf-8")
        try:
            read, plain = ModelCard.load(file).data, metadata_load(file)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"The card's metadata cannot be read back: {error}") from error
    # As dictionaries: the classes compare equal whatever they hold.
    if read.to_dict() != expected or plain != expected:
        raise ConfigError(f"The card's metadata does not read back as it was written: {plain} is not {expected}.")
    if "model-index" in expected:
        data: Any = card.data
        _, results = model_index_to_eval_results(expected["model-index"])
        if results != data.eval_results:
            raise ConfigError(f"The card's evaluation results do not read back as they were written: {results}.")
    license_ = expected.get("license")
    if license_ is not None and license_ not in LICENSES:
        raise ConfigError(
            f"The card's license {license_!r} is not one that the Hub knows: `other`, with a license_name."
        )
    if license_ == "other" and "license_name" not in expected:
        raise ConfigError("The card's license is `other`: it needs a license_name.")
    if found := _ABSOLUTE_PATH.search(content):
        raise ConfigError(f"The card names a path of this machine: {found[0]!r}.")


def is_ours(directory: str | os.PathLike[str]) -> bool:
    """Whether a folder's card is one that a save may replace: written by this library and not taken over since."""
    return MARKER in _read(Path(directory) / CARD)


def _read(file: Path) -> str:
    # Somebody else's card may be in any encoding.
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def write_card(directory: str | os.PathLike[str], facts: CardFacts) -> Path | None:
    """Writes `README.md`, and `loss.png` where there are losses and matplotlib is installed.

    A card that somebody else wrote is kept. Each file appears when it is complete.

    Args:
        directory (`str` or `Path`): the folder of the model; it exists.
        facts (`CardFacts`): what the card says.

    Returns:
        `Path`: the card, or `None` where another one was kept.

    Raises:
        ConfigError: what `check_card` finds; nothing is written then.
        OSError: the folder cannot be written to.
    """
    folder = Path(directory)
    before = _read(folder / CARD)
    if (folder / CARD).exists() and MARKER not in before:
        return None
    facts = _with_files(facts, folder)
    # A picture of that name that no card of ours shows is somebody else's.
    free = not (folder / PICTURE).exists() or f"]({PICTURE})" in before
    draws = free and is_drawable(facts.log_history) and can_draw()
    card = render(facts, PICTURE if draws else None)
    check_card(card)
    if draws:
        _replace(folder / PICTURE, lambda path: draw_losses(facts.log_history, path))
    _replace(folder / CARD, lambda path: path.write_text(str(card), encoding="utf-8"))
    if not draws and f"]({PICTURE})" in before:
        (folder / PICTURE).unlink(missing_ok=True)
    return folder / CARD


def _with_files(facts: CardFacts, folder: Path) -> CardFacts:
    """What the facts leave open about the folder's files."""
    files, tokenizer = facts.files, facts.tokenizer
    if files is None and (folder / "manifest.json").exists():
        files = "sharded"
    elif files is None and (folder / "config.json").exists() and next(folder.glob("model*.safetensors"), None):
        files = "merged"
    if tokenizer is None:
        tokenizer = (folder / "tokenizer_config.json").exists()
    return dataclasses.replace(facts, files=files, tokenizer=tokenizer)


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def carry_card(source: str | os.PathLike[str], directory: str | os.PathLike[str], facts: CardFacts) -> Path | None:
    """The card of a model whose files have become others, such as a sharded checkpoint's that was merged.

    A card of ours comes along with its picture and says anew how to load the files, and nothing else in it changes;
    somebody else's is copied as it is. Where there is none, one is written.

    Args:
        source (`str` or `Path`): the folder before.
        directory (`str` or `Path`): the folder now; a card that is there already is replaced if it is ours.
        facts (`CardFacts`): how to load the files is said from these; a new card, all that it says.

    Returns:
        `Path`: the card, or `None` where somebody else's was copied or kept.

    Raises:
        ConfigError, OSError: as `write_card`.
    """
    old, folder = Path(source), Path(directory)
    before = _read(old / CARD)
    if (folder / CARD).exists() and not is_ours(folder):
        return None
    if (old / CARD).is_file() and MARKER not in before:
        _replace(folder / CARD, lambda path: shutil.copyfile(old / CARD, path))
        return None
    if MARKER not in before or _BEGIN not in before or _END not in before:
        return write_card(folder, facts)
    start, _, rest = before.partition(_BEGIN)
    _, _, end = rest.partition(_END)
    section = _loading_section(_with_files(facts, folder))
    card = ModelCard(f"{start}{_BEGIN}\n{section}\n{_END}{end}")
    check_card(card)
    if f"]({PICTURE})" in before and (old / PICTURE).is_file():
        _replace(folder / PICTURE, lambda path: shutil.copyfile(old / PICTURE, path))
    _replace(folder / CARD, lambda path: path.write_text(str(card), encoding="utf-8"))
    return folder / CARD
