"""Rendering, checking and writing model cards."""

import dataclasses
import functools
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, metadata_load
from huggingface_hub.repocard_data import model_index_to_eval_results
from jinja2 import Template

from ..core.io.safe_paths import replace_file
from ..errors import ConfigError
from .card_data import CardData
from .loss_plot import can_draw, draw_losses
from .provenance import CARD, PICTURE, stored_card, stored_file
from .sections import template_variables

MARKER = "<!-- Written by hf_megatron, and written anew by every save; delete this line to keep your own text. -->"
_TEMPLATE = Path(__file__).with_name("template.md")
# Sections about the files, which are re-rendered for converted files.
_SECTIONS = {
    name: re.compile(f"<!-- {name} -->.*?<!-- end of {name} -->", re.DOTALL)
    for name in ("what this is", "how to load it", "conversion")
}
# Title line; for a checkpoint that was only converted, it is the folder's name.
_TITLE = re.compile(r"^# .*$", re.MULTILINE)
# Rows of the model table.
_ROWS = [re.compile(rf"^\| {name} \| .* \|$", re.MULTILINE) for name in ("parameters", "dtype")]
_TRAINED = re.compile(r"^(Trained|Saved)\b", re.MULTILINE)
_ABSOLUTE_PATH = re.compile(r"(?<![\w:/.~<*)\]-])/(?:[\w.@+-]+/)+[\w.@+-]*|(?<!\w)~/|\bfile://|\b[A-Za-z]:\\\w")


def render(facts: CardData, picture: str | None = None) -> ModelCard:
    """Renders the card of a model; `picture` is the loss plot's file name, relative to the card."""
    variables = {"marker": MARKER, "facts": facts, "picture": picture, **template_variables(facts)}
    return ModelCard(card_template().render(card_data=card_data(facts).to_yaml(), **variables))


@functools.cache
def card_template() -> Template:
    """Compiles the template of cards, once."""
    # `ModelCard.from_template` would compile it for every card.
    return Template(_TEMPLATE.read_text(encoding="utf-8"))


def card_data(facts: CardData) -> ModelCardData:
    """Returns the metadata block, with evaluation results if dataset and task have names on the Hub."""
    results = []
    if facts.evaluation_dataset is not None and facts.pipeline_tag is not None:
        results = [
            EvalResult(
                task_type=facts.pipeline_tag,
                dataset_type=facts.evaluation_dataset,
                dataset_name=facts.evaluation_dataset,
                dataset_config=facts.evaluation_config,
                dataset_split=facts.evaluation_split,
                metric_type=name,
                metric_value=value,
            )
            for name, value in (facts.metrics or {}).items()
            if math.isfinite(value)
        ]
    own_license = facts.license if facts.license not in LICENSES else None
    return ModelCardData(
        base_model=facts.base_model,
        datasets=list(facts.datasets) or None,
        eval_results=results or None,
        language=list(facts.language) or None,
        library_name=facts.library_name,
        license="other" if own_license else facts.license,
        license_name=own_license or None,
        model_name=facts.model_name or facts.architecture or "Model" if results else None,
        pipeline_tag=facts.pipeline_tag,
        tags=list(facts.tags) or None,
    )


def check_card(card: ModelCard) -> None:
    """Runs the part of the Hub's validation that needs no network; `card.validate()` sends the card to the Hub.

    Raises:
        ConfigError: the metadata block does not read back unchanged, the license is unknown to the Hub, or the text
            contains a local path.
    """
    content, expected = str(card), card.data.to_dict()
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / CARD
        file.write_text(content, encoding="utf-8")
        try:
            read, plain = ModelCard.load(file).data, metadata_load(file)
        except (yaml.YAMLError, ValueError) as error:
            raise ConfigError(f"The card's metadata cannot be read back: {error}") from error
    # Compare dictionaries: the classes' own `==` returns True for different contents.
    if read.to_dict() != expected or plain != expected:
        raise ConfigError(f"The card's metadata does not read back as it was written: {plain} is not {expected}.")
    if "model-index" in expected:
        data: Any = card.data
        _, results = model_index_to_eval_results(expected["model-index"])
        if results != data.eval_results:
            raise ConfigError(f"The card's evaluation results do not read back as they were written: {results}.")
    license_ = expected.get("license")
    if license_ is not None and license_ not in LICENSES:
        raise ConfigError(f"The card's license {license_!r} is not known to the Hub. Use `other` with a license_name.")
    if license_ == "other" and "license_name" not in expected:
        raise ConfigError("The card's license is `other`, which requires a license_name.")
    if match := _ABSOLUTE_PATH.search(content):
        raise ConfigError(f"The card contains a local path: {match[0]!r}.")


def _read(file: Path) -> str:
    # A third-party card may have any encoding.
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def write_card(directory: str | os.PathLike[str], facts: CardData) -> Path | None:
    """Writes `README.md`, and `loss.png` if there are losses and matplotlib is installed.

    A third-party card is kept. Each file is replaced atomically.

    Returns:
        `Path`: the card, or `None` if another one was kept.

    Raises:
        ConfigError: `check_card` failed; nothing is written then.
        OSError: the folder cannot be written to.
    """
    folder = Path(directory)
    old_text = _read(folder / CARD)
    if (folder / CARD).exists() and MARKER not in old_text:
        return None
    facts = _with_files(facts, folder)
    # An existing picture of that name is only overwritten if a card of this library shows it.
    free = not (folder / PICTURE).exists() or f"]({PICTURE})" in old_text
    draws = free and can_draw(facts.log_history)
    card = render(facts, PICTURE if draws else None)
    check_card(card)
    if draws:
        replace_file(folder / PICTURE, lambda path: draw_losses(facts.log_history, path))
    replace_file(folder / CARD, lambda path: path.write_text(str(card), encoding="utf-8"))
    if not draws and f"]({PICTURE})" in old_text:
        (folder / PICTURE).unlink(missing_ok=True)
    return folder / CARD


def _with_files(facts: CardData, folder: Path) -> CardData:
    """Sets `files` and `tokenizer` from the content of the folder unless they are set already."""
    files, tokenizer = facts.files, facts.tokenizer
    if files is None and (folder / "manifest.json").exists():
        files = "sharded"
    elif files is None and (folder / "config.json").exists() and next(folder.glob("model*.safetensors"), None):
        files = "merged"
    if tokenizer is None:
        tokenizer = (folder / "tokenizer_config.json").exists()
    return dataclasses.replace(facts, files=files, tokenizer=tokenizer)


def is_own_card(directory: str | os.PathLike[str]) -> bool:
    """Returns whether a folder has a card that this library wrote; raises the errors of `stored_file`."""
    return MARKER in stored_card(directory)


def carry_card(source: str | os.PathLike[str], directory: str | os.PathLike[str], facts: CardData) -> Path | None:
    """Carries over the card of a model whose files were converted, such as a sharded checkpoint that was merged.

    A card of this library is copied with its plot, and the sections about the files and loading them are re-rendered;
    training, losses and evaluation are kept. A third-party card is copied unchanged. If there is none, a new one is
    written.

    Args:
        source (`str` or `Path`): the folder of the original files.
        directory (`str` or `Path`): the folder of the new files; an existing card there is replaced if this library
            wrote it.
        facts (`CardData`): data on the new files; a new card contains nothing else.

    Returns:
        `Path`: the card, or `None` if a third-party card was copied or kept.

    Raises:
        ConfigError, OSError: as `write_card`.
        CheckpointError: as `stored_file`.
    """
    old, folder = Path(source), Path(directory)
    old_text = stored_card(old)
    if (folder / CARD).exists() and MARKER not in _read(folder / CARD):
        return None
    if (old / CARD).is_file() and MARKER not in old_text:
        content = stored_file(old, CARD)
        replace_file(folder / CARD, lambda path: path.write_bytes(content))
        return None
    if not _SECTIONS["how to load it"].search(old_text):
        return write_card(folder, facts)
    card = _replace_file_sections(old_text, render(_with_files(facts, folder)))
    check_card(card)
    if f"]({PICTURE})" in old_text and (old / PICTURE).is_file():
        picture = stored_file(old, PICTURE)
        replace_file(folder / PICTURE, lambda path: path.write_bytes(picture))
    replace_file(folder / CARD, lambda path: path.write_text(str(card), encoding="utf-8"))
    return folder / CARD


def _replace_file_sections(old_text: str, new_card: ModelCard) -> ModelCard:
    """Returns a card of this library with the new card's sections about the files."""
    text, new_text = old_text, str(new_card)
    what = _SECTIONS["what this is"].search(old_text)
    is_of_training = what is not None and _TRAINED.search(what[0]) is not None
    parts = [part for name, part in _SECTIONS.items() if name != "what this is" or not is_of_training]
    for part in [*parts, *_ROWS, *([] if is_of_training else [_TITLE])]:
        old, new = part.search(text), part.search(new_text)
        if old is not None and new is not None:
            text = text.replace(old[0], new[0], 1)
    try:
        card = ModelCard(text)
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, LookupError):
        # The old metadata is unreadable: huggingface_hub does not validate types.
        return new_card
    card.data["library_name"] = new_card.data.get("library_name")
    return card


_NAMES = (
    "afl-3.0 agpl-3.0 apache-2.0 apple-amlr apple-ascl artistic-2.0 bigcode-openrail-m bigscience-bloom-rail-1.0 "
    "bigscience-openrail-m bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear bsl-1.0 c-uda cc cc-by-2.0 cc-by-2.5 "
    "cc-by-3.0 cc-by-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 "
    "cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cc-by-nd-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc0-1.0 cdla-permissive-1.0 "
    "cdla-permissive-2.0 cdla-sharing-1.0 creativeml-openrail-m deepfloyd-if-license ecl-2.0 epl-1.0 epl-2.0 "
    "etalab-2.0 eupl-1.1 eupl-1.2 fair-noncommercial-research-license gemma gfdl gpl gpl-2.0 gpl-3.0 "
    "grok2-community h-research intel-research isc lgpl lgpl-2.1 lgpl-3.0 lgpl-lr llama2 llama3 llama3.1 llama3.2 "
    "llama3.3 llama4 lppl-1.3c mit mpl-2.0 ms-pl ncsa odbl odc-by ofl-1.1 openmdw-1.0 openmdw-1.1 openrail "
    "openrail++ osl-3.0 other pddl postgresql unknown unlicense wtfpl zlib"
)


LICENSES = frozenset(_NAMES.split())
