"""Prediction targets in a model's arguments, and the number of terms of the loss of each.

    labels, shift_labels                        targets that are not ignored; shifted or not, as the model's class does
    start_positions, end_positions              positions inside the sequence: classes ignore others
    next_sentence_label, sentence_order_label   targets that are not ignored

Each name belongs to one loss: BERT's pretraining has two, with different numbers of terms. Labels of several codebooks
may have a loss each, named `labels.0` and so on.
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
    """Returns whether an argument of a model is a prediction target, by the rule that Trainer uses."""
    return "label" in name or name in POSITIONS


def next_tokens(labels: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Shifts labels `[batch, sequence]` to the targets of each position; the last position has none."""
    return F.pad(labels, (0, 1), value=ignore_index)[..., 1:].contiguous()


def resolve_targets(labels: Tensor | None, shift_labels: Tensor | None, *, shifts: bool, ignore_index: int) -> Tensor:
    """Returns the targets of positions `[batch, sequence]`: labels shifted by the caller, here, or not at all."""
    if shift_labels is not None:
        return shift_labels
    assert labels is not None
    return next_tokens(labels, ignore_index) if shifts else labels


def scalar(number: int, device: torch.device) -> Tensor:
    """Creates a scalar on a device without a synchronizing copy."""
    return torch.full((), number, device=device)


def count_targets(targets: Tensor, ignore_index: int = IGNORE_INDEX) -> Tensor:
    """Returns the number of targets, of any shape, that are not ignored; every entry counts if they are floats."""
    if targets.is_floating_point():
        return scalar(targets.numel(), targets.device)
    return (targets != ignore_index).sum()


def target_names(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the targets of a call's losses; start and end positions count only together."""
    names = ["labels"] if any(arguments.get(name) is not None for name in LABELS) else []
    if all(arguments.get(name) is not None for name in POSITIONS):
        names += POSITIONS
    names += [name for name in OF_SENTENCES if arguments.get(name) is not None]
    return tuple(names)


def with_codebooks(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns `target_names(arguments)`, and the names of each codebook's labels if there are several codebooks."""
    names = target_names(arguments)
    label_tensors = [arguments[name] for name in LABELS if isinstance(arguments.get(name), Tensor)]
    if not label_tensors or label_tensors[0].dim() != _WITH_CODEBOOKS or label_tensors[0].is_floating_point():
        return names
    return (*names, *(get_codebook_name("labels", book) for book in range(label_tensors[0].shape[-1])))


def get_codebook_name(name: str, book: int) -> str:
    """Returns the name of one codebook's labels."""
    return f"{name}.{book}"


def strip_codebook(name: str) -> str:
    """Returns the name of the labels that contain a codebook's labels; other names are returned as is."""
    return name.partition(".")[0]


def count_terms(name: str, arguments: Mapping[str, Any], *, shifts: bool) -> Tensor:
    """Returns the number of terms, a scalar, of the loss named by one of `with_codebooks(arguments)`."""
    ignore_index = arguments.get("ignore_index", IGNORE_INDEX)
    name, _, book = name.partition(".")
    if name == "labels":
        label_tensors = [arguments.get(label) for label in LABELS]
        if book:
            # [batch, sequence, codebooks] -> [batch, sequence]
            label_tensors = [None if labels is None else labels[..., int(book)] for labels in label_tensors]
        return count_targets(resolve_targets(*label_tensors, shifts=shifts, ignore_index=ignore_index), ignore_index)
    if name in POSITIONS:
        return (arguments[name] < row_length(arguments)).sum()
    return count_targets(arguments[name])


def row_length(arguments: Mapping[str, Any]) -> int:
    """Returns the sequence length of a call."""
    inputs = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    return next(int(tokens.shape[_TOKENS]) for tokens in inputs if isinstance(tokens, Tensor))


def mask_all_targets(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch without any target, so that it adds nothing to a loss."""
    batch = dict(arguments)
    for name in (*LABELS, *OF_SENTENCES):
        if batch.get(name) is not None:
            batch[name] = torch.full_like(batch[name], IGNORE_INDEX)
    for name in POSITIONS:
        if batch.get(name) is not None:
            # Positions outside of the sequence are ignored by the losses.
            batch[name] = torch.full_like(batch[name], row_length(arguments))
    return batch


def with_every_label(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a batch without ignored labels: the number of loss terms then shows whether the class shifts them.

    Labels of padding stay ignored, since some classes mask them themselves, except for the first of each sequence.
    """
    batch, ignore_index = dict(arguments), arguments.get("ignore_index", IGNORE_INDEX)
    mask = arguments.get("attention_mask")
    for name in LABELS:
        if (labels := batch.get(name)) is not None and not labels.is_floating_point():
            # Labels that count: all of them, or only for tokens that are not padding and the first one.
            counts = torch.ones_like(labels, dtype=torch.bool)
            if isinstance(mask, Tensor) and mask.shape == labels.shape and labels.dim() > _TOKENS:
                counts = mask != 0
                counts[:, 0] = True
            batch[name] = labels.masked_fill((labels == ignore_index) & counts.to(labels.device), 0)
    return batch
