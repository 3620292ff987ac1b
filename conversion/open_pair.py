"""Comparison of two checkpoints of any formats, tensor by tensor."""

import os
from collections.abc import Callable

from ..core.io.buffer_pool import Pool
from .compare import Comparison, compare_logits, compare_readers, differing_settings
from .interfaces import largest
from .source import Source, find_source, local_folder, with_config

Folder = str | os.PathLike[str]


def compare(
    first: Folder,
    second: Folder,
    *,
    config: str | None = None,
    logits: bool = False,
    without_mtp: bool = False,
    on_tensor: Callable[[int], object] = lambda size: None,
) -> Comparison:
    """Compares two checkpoints of any formats tensor by tensor: equal means equal bytes.

    Args:
        first, second: folders, or ids of models on the Hub.
        config: a folder or model id with the config.json, for checkpoints that have none.
        logits: compare the logits of both through transformers, in fp32.
        without_mtp: leave out multi-token prediction layers; the result includes their number.
        on_tensor: called with the size in bytes of each tensor.

    Raises:
        CheckpointError: one is damaged, unsafe, or does not fit its config.
    """

    def locate_source(one: Folder, other: Folder) -> Source:
        if (with_config(local_folder(one)) / "config.json").is_file():
            # Use its own config: another one would hide differing settings.
            return find_source(one, None, None, without_mtp)
        return find_source(one, None, config or os.fspath(with_config(local_folder(other))), without_mtp)

    return compare_sources(
        locate_source(first, second), locate_source(second, first), logits=logits, on_tensor=on_tensor
    )


def compare_sources(
    first: Source,
    second: Source,
    *,
    moments: bool = True,
    logits: bool = False,
    on_tensor: Callable[[int], object] = lambda size: None,
) -> Comparison:
    """Compares two checkpoints that were already found; raises the errors of `compare`.

    Args:
        moments: also compare optimizer state if both have it.
        logits, on_tensor: as for `compare`.
    """
    with_mtp = first.format.holds_mtp and second.format.holds_mtp
    with first.open(False, with_mtp) as one, second.open(False, with_mtp) as other:
        one.memory, other.memory = Pool(largest(one.entries)), Pool(largest(other.entries))
        result = compare_readers(one, other, moments=moments, on_tensor=on_tensor)
    result.settings = differing_settings(first.architecture.config, second.architecture.config)
    if logits and not (result.only_first or result.only_second):
        result.logits = compare_logits(first, second)
    return result
