"""What a call of a model says it should have predicted, and how many terms the loss of each has.

    labels, shift_labels                        those that are not ignored; shifted or not, as the model's class does
    start_positions, end_positions              those inside of the row: classes ignore others
    next_sentence_label, sentence_order_label   those that are not ignored

A name stands for one loss: that of BERT's pretraining has two, each with a number of terms of its own. Labels of
several codebooks may have a loss for each, of `labels.0` and so on.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
LABELS = ("labels", "shift_labels")
POSITIONS = ("start_positions", "end_positions")
OF_SENTENCES = ("next_sentence_label", "sentence_order_label")
_TOKENS = 1
# Dims of labels `[batch, sequence, codebooks]`.
_WITH_CODEBOOKS = 3


def is_target(name: str) -> bool:
    """Tells whether an argument of a model says what it should have predicted, as Trainer finds them."""
    return "label" in name or name in POSITIONS


def next_tokens(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Shifts labels `[batch, sequence]` to what each position predicts; the last one predicts nothing."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def targets_of(labels: Tensor | None, shift_labels: Tensor | None, *, shifts: bool, ignore_index: int) -> Tensor:
    """Returns what positions `[batch, sequence]` predict: labels shifted by the caller, by us, or not at all."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return next_tokens(labels, ignore_index) if shifts else labels


def scalar(number: int, device: torch.device) -> Tensor:
    """Makes a number on a device without a copy that would wait for it."""
    return torch.full((), number, device=device)


def count_targets(targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Counts targets of any shape, those to ignore left out; where they are no classes every entry is one."""
    if targets.is_floating_point():
        return scalar(targets.numel(), targets.device)
    return (targets != ignore_index).sum()


def target_names(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names the targets that the loss of a call is taken from; one position without the other says nothing."""
    found = ["labels"] if any(arguments.get(name) is not None for name in LABELS) else []
    if all(arguments.get(name) is not None for name in POSITIONS):
        found += POSITIONS
    found += [name for name in OF_SENTENCES if arguments.get(name) is not None]
    return tuple(found)


def with_codebooks(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Names what `target_names(arguments)` does, and the labels of each codebook where they are of several."""
    names = target_names(arguments)
    given = [arguments[name] for name in LABELS if isinstance(arguments.get(name), Tensor)]
    if not given or given[0].dim() != _WITH_CODEBOOKS or given[0].is_floating_point():
        return names
    return (*names, *(of_codebook("labels", book) for book in range(given[0].shape[-1])))


def of_codebook(name: str, book: int) -> str:
    """Names the labels of one codebook among those of a name."""
    return f"{name}.{book}"


def name_of_all(name: str) -> str:
    """Names the labels of all codebooks that those of a name are among, or are."""
    return name.partition(".")[0]


def count_terms(name: str, arguments: Mapping[str, Any], *, shifts: bool) -> Tensor:
    """Counts the terms, a scalar, of the loss of one of `with_codebooks(arguments)`."""
    ignore_index = arguments.get("ignore_index", IGNORE_INDEX)
    name, _, book = name.partition(".")
    if name == "labels":
        given = [arguments.get(label) for label in LABELS]
        if book:
            given = [None if labels is None else labels[..., int(book)] for labels in given]
        return count_targets(targets_of(*given, shifts=shifts, ignore_index=ignore_index), ignore_index)
    if name in POSITIONS:
        return (arguments[name] < row_length(arguments)).sum()
    return count_targets(arguments[name])


def row_length(arguments: Mapping[str, Any]) -> int:
    """Counts the tokens of a call's rows."""
    given = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return next(int(tokens.shape[_TOKENS]) for tokens in given if isinstance(tokens, Tensor))


def mask_all_targets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Makes a batch count for nothing."""
    found = dict(arguments)
    for name in (*LABELS, *OF_SENTENCES):
        if found.get(name) is not None:
            found[name] = torch.full_like(found[name], IGNORE_INDEX)
    for name in POSITIONS:
        if found.get(name) is not None:
            found[name] = torch.full_like(found[name], row_length(arguments))
    return found


def with_every_label(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Has a batch count every label: the number of terms of a loss then tells whether its class shifts them.

    Those of padding stay ignored, which some classes leave out by themselves, but for the first of each row.
    """
    found, ignore_index = dict(arguments), arguments.get("ignore_index", IGNORE_INDEX)
    mask = arguments.get("attention_mask")
    for name in LABELS:
        if (labels := found.get(name)) is not None and not labels.is_floating_point():
            counts = torch.ones_like(labels, dtype=torch.bool)
            if isinstance(mask, Tensor) and mask.shape == labels.shape and labels.dim() > _TOKENS:
                counts = mask != 0
                counts[:, 0] = True
            found[name] = labels.masked_fill((labels == ignore_index) & counts.to(labels.device), 0)
    return found
