"""Private and version-dependent symbols of transformers' weight loading."""

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError


def untied_state_dict(model: Any, state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns a state dict, with tensors of any shape, as stock `save_pretrained` writes it: tied weights once.

    Raises:
        CheckpointError: weights are shared that the class does not tie; after loading, one would be reinitialized.
    """
    from transformers.modeling_utils import _get_tied_weight_keys, remove_tied_weights_from_state_dict

    state_dict = dict(state_dict)
    for name in model._keys_to_ignore_on_save or ():
        state_dict.pop(name, None)
    # The helper compares storages; tied DTensors are identified by their shared parameter instead.
    by_identity: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    tied = set(model.all_tied_weights_keys)
    patterns = [*_get_tied_weight_keys(model), *map(re.escape, tied)]
    for name in list(state_dict):
        identity = id(parameters.get(name, state_dict[name]))
        first = by_identity.setdefault(identity, name)
        if first != name:
            if not any(re.search(pattern, one) for pattern in patterns for one in (first, name)):
                raise CheckpointError(
                    f"{first} and {name} share one weight, but {type(model).__name__} does not tie them, so one of "
                    "them would be initialized anew on loading. Give each its own parameter "
                    "(`torch.nn.Parameter(weight.detach().clone())`) before saving; stock transformers also rejects "
                    "this model."
                )
            state_dict.pop(name if name in tied or first not in tied else first, None)
    plain = {name: value for name, value in state_dict.items() if not isinstance(value, DTensor)}
    kept = remove_tied_weights_from_state_dict(dict(plain), model)
    return {name: value for name, value in state_dict.items() if name in kept or name not in plain}


def revert_conversion(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts in-memory names and tensors of any shape to the checkpoint format (`revert_weight_conversion`)."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)


def forget_conversions(model: Any) -> None:
    """Drops a model's recorded conversions, so that it is saved in its type's checkpoint format.

    A loader that had nothing to read has recorded that the model needs no conversions.
    """
    del model._weight_conversions


def conversion_groups(model: Any, names: list[str]) -> list[list[str]]:
    """Groups names that are combined by one reverse conversion; all others form groups of their own."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, apply_converters

    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in conversions if not isinstance(conversion, PrefixChange)]
    reverse = [conversion.reverse_transform() for conversion in conversions[::-1]]
    converters = [conversion for conversion in reverse if isinstance(conversion, WeightConverter)]
    groups: dict[str, list[str]] = {}
    for name in names:
        target, pattern = apply_converters(name, converters)
        groups.setdefault(target if pattern is not None else name, []).append(name)
    return list(groups.values())


def rearranged_targets(model: Any) -> list[str]:
    """Returns the target patterns of weight conversions that do not commute with slicing their target.

    The loader slices each source by the target's placement. That is correct for per-expert tensors that are stacked,
    but wrong if a source is split (`Chunk`), transposed (`Transpose`), reordered (`Interleave`) or concatenated along
    a split dim (`Concatenate`).
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    # The loader handles an expert's gate and up as one half each.
    commuting = ({MergeModulelist}, {MergeModulelist, Concatenate})
    return [
        pattern
        for conversion in get_model_conversion_mapping(model, add_legacy=False)
        if isinstance(conversion, WeightConverter) and {type(op) for op in conversion.operations} not in commuting
        for pattern in conversion.target_patterns
    ]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disables transformers' progress bars."""
    from transformers.utils import logging

    progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if progress:
            logging.enable_progress_bar()


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silences transformers' report of missing weights and its bars: nothing is loaded, or another rank reports."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_progress_bars():
            yield
    finally:
        logging.set_verbosity(verbosity)


@contextmanager
def without_output() -> Iterator[None]:
    """Silences transformers and torch, which print values of untrusted configs unescaped and at any length."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), without_progress_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)


def build_weight_conversions() -> None:
    """Builds transformers' table of weight conversions, which every process otherwise builds for its first model."""
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("")


def renamed_by_loader(model: Any, names: set[str]) -> set[str]:
    """Returns the names to which transformers' loader renames weights that are not in a model."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, rename_source_key

    conversions = [c for c in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(c, PrefixChange)]
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    return {rename_source_key(name, renamings, converters)[0] for name in names}


class LoadingGroup(NamedTuple):
    """Checkpoint tensors that one conversion of transformers' loader turns into weights of a model.

    Attributes:
        sources: names in the file with the pattern that each matched, in the loader's order.
        target: the weight by which the loader identifies the conversion.
    """

    transform: Any
    sources: tuple[tuple[str, str], ...]
    target: str


def loading_groups(model: Any, names: Iterable[str]) -> tuple[list[LoadingGroup], list[str]]:
    """Returns the conversions from a file's tensors to a model's weights, and the unexpected names.

    The second list excludes names that the model's class ignores.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    expected = model.state_dict()
    by_target: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    surplus = []
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if target not in expected and name in expected:
            target, pattern = name, None
        if target not in expected:
            surplus.append(name)
        elif pattern is None:
            by_target.setdefault(target, (WeightRenaming(name, target), []))[1].append((name, name))
        else:
            by_target.setdefault(target, (by_pattern[pattern], []))[1].append((name, pattern))
    groups = [LoadingGroup(transform, tuple(sources), target) for target, (transform, sources) in by_target.items()]
    # Buffers written by earlier releases, which not every class with them lists as ignored.
    older = (r"rotary_emb\.inv_freq$", r"\.attn\.masked_bias$")
    ignored = re.compile("|".join([*(model._keys_to_ignore_on_load_unexpected or ()), *older]))
    return groups, [name for name in surplus if not ignored.search(name)]


def convert_loaded(model: Any, group: LoadingGroup, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Converts a file's tensors of any shape, by name, to weights of the model; works on meta tensors too."""
    transform = copy.deepcopy(group.transform)
    for name, pattern in group.sources:
        transform.add_tensor(group.target, name, pattern, tensors[name])
    converted = transform.convert(group.target, model=model, config=model.config)
    return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}
