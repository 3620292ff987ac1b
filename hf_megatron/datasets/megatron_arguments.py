"""Datasets of a Megatron-LM run from its arguments: the same files, blends, splits, and seeds."""

import functools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DataError
from .argument_values import parse_integer, truth_value, with_defaults
from .blended import BlendedDataset
from .indexed import IndexedDataset
from .ordered_dataset import OrderedDataset, WithoutSamples
from .pretraining import PretrainingDataset
from .ramp_up import BatchRampUp
from .sample_index import SPLITS, count_blend_samples, parse_split

# Argument -> its default in Megatron-LM (`megatron/training/arguments.py`).
_DEFAULTS: dict[str, Any] = {
    "data_path": None,
    "data_args_path": None,
    "train_data_path": None,
    "valid_data_path": None,
    "test_data_path": None,
    "per_split_data_args_path": None,
    "data_cache_path": None,
    "split": None,
    "seed": 1234,
    "seq_length": None,
    "train_iters": None,
    "train_samples": None,
    "global_batch_size": None,
    "rampup_batch_size": None,
    "eval_interval": 1000,
    "eval_iters": 100,
    "eod_mask_loss": False,
    "reset_position_ids": False,
    "reset_attention_mask": False,
}
_SPLIT = "969,30,1"
_OWN_PATHS = {f"{split}_data_path": split for split in SPLITS}


@dataclass(frozen=True)
class PretrainingSplits:
    """Datasets of a run; `None` for a split without documents or samples.

    Attributes:
        train, valid, test: as Megatron-LM builds them, with full epochs.
        evaluated (`int`): samples of one evaluation in Megatron-LM.
    """

    train: OrderedDataset | None
    valid: OrderedDataset | None
    test: OrderedDataset | None
    evaluated: int

    @property
    def evaluation(self) -> OrderedDataset | None:
        """Samples of each evaluation by Trainer: the first ones of `valid`; Megatron-LM takes new ones every time."""
        if self.valid is None or len(self.valid) <= self.evaluated:
            return self.valid
        return WithoutSamples(self.valid, [(self.evaluated, len(self.valid))])


def datasets_from_megatron_args(
    arguments: Mapping[str, Any],
    *,
    pad_token: int | None = None,
    eod_token: int | None = None,
    dataset: Callable[..., OrderedDataset] | None = None,
) -> PretrainingSplits:
    """Builds the datasets that Megatron-LM builds from its arguments; they have full epochs, so a run may use less.

    Files come from `--data-path` or `--data-args-path` with `--split`, or from `--train-data-path`, `--valid-data-path`
    and `--test-data-path`, or from `--per-split-data-args-path`: one prefix, several prefixes, or alternating weights
    and prefixes. `--train-iters` or `--train-samples`, `--global-batch-size`, `--eval-interval` and `--eval-iters`
    determine the numbers of samples; `--rampup-batch-size` sets `ramp_up` of the training dataset. Also supported are
    `--seq-length`, `--seed`, `--data-cache-path`, `--eod-mask-loss`, and `--reset-position-ids` together with
    `--reset-attention-mask`.

    Args:
        arguments: by name, with or without leading dashes; numbers may be text.
        pad_token (`int`, *optional*): as in `PretrainingDataset`.
        eod_token (`int`, *optional*): as in `PretrainingDataset`.
        dataset (*optional*): creates the dataset of a file and split from `sequence_length`, `samples`, `seed`, `share`
            and `cache`, such as `functools.partial(BertDataset, tokenizer=tokenizer)`; `PretrainingDataset` by default.

    Raises:
        DataError: an argument that is unknown or missing, or that excludes another one.
    """
    args = with_defaults(arguments, _DEFAULTS, "the datasets")
    for name in ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"):
        args[name] = truth_value(args, name)
    if args["reset_position_ids"] != args["reset_attention_mask"]:
        raise DataError(
            "reset_position_ids and reset_attention_mask: expected both or neither; transformers models attend within "
            "documents if positions restart."
        )
    of_causal_models = {
        "pad_token": pad_token,
        "eod_token": eod_token,
        "eod_mask_loss": args["eod_mask_loss"],
        "restart": "eod" if args["reset_position_ids"] else None,
    }
    if dataset is not None and (said := [name for name, value in of_causal_models.items() if value]):
        raise DataError(f"{', '.join(said)}: only valid for PretrainingDataset; dataset= creates another one.")
    make = functools.partial(
        functools.partial(PretrainingDataset, **of_causal_models) if dataset is None else dataset,
        sequence_length=parse_integer(args, "seq_length"),
        seed=parse_integer(args, "seed"),
        cache=args["data_cache_path"],
    )
    ramp_up = _ramp_up(args)
    num_samples, shared_blend = _samples(args, ramp_up), _blend(args, "data_path", "data_args_path")
    split_blends = _parse_split_blends(args)
    if (shared_blend is None) == (split_blends is None):
        raise DataError("expected data_path (or data_args_path), or the paths of each split; " + _present(args))
    if split_blends is not None:
        if args["split"] is not None:
            raise DataError(f"split = {args['split']!r} requires data_path; here each split has its own files.")
        # The weight of a single prefix has no effect in Megatron-LM.
        alone = {
            split: (blend[0], None) if blend and len(blend[0]) == 1 else blend for split, blend in split_blends.items()
        }
        split_datasets = [_dataset(alone[split], (0.0, 1.0), num_samples[split], make) for split in SPLITS]
    else:
        shares = parse_split(args["split"] or _SPLIT)
        split_datasets = [
            _dataset(shared_blend, share, num_samples[split], make) for split, share in zip(SPLITS, shares, strict=True)
        ]
    if split_datasets[0] is not None:
        split_datasets[0].ramp_up = ramp_up
    return PretrainingSplits(split_datasets[0], split_datasets[1], split_datasets[2], num_samples["test"])


def _content(file: Any, name: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"{name} = {str(file)!r}: {error.strerror}.") from None


def _present(args: Mapping[str, Any]) -> str:
    named = [name for name in args if name.endswith(("data_path", "args_path")) and args[name] is not None]
    return f"got {', '.join(named)}." if named else "got none of them."


def _ramp_up(args: Mapping[str, Any]) -> BatchRampUp | None:
    said = args["rampup_batch_size"]
    if said is None:
        return None
    words = said.split() if isinstance(said, str) else said
    if not isinstance(words, Sequence) or len(words) != 3:
        raise DataError(f"rampup_batch_size = {said!r}: expected start batch size, increment and samples.")
    if args["train_samples"] is None:
        raise DataError("rampup_batch_size requires train_samples, not train_iters.")
    values = [parse_integer({"rampup_batch_size": word}, "rampup_batch_size", 1) for word in words]
    return BatchRampUp(parse_integer(args, "global_batch_size", 1), *values)


def _samples(args: Mapping[str, Any], ramp_up: BatchRampUp | None) -> dict[str, int]:
    """Returns the numbers of samples of each split, as Megatron's trainer counts them."""
    if (args["train_iters"] is None) == (args["train_samples"] is None):
        raise DataError("expected either train_iters or train_samples, not both.")
    batch = parse_integer(args, "global_batch_size", 1)
    if args["train_samples"] is not None:
        train = parse_integer(args, "train_samples")
        iterations = train // batch if ramp_up is None else ramp_up.steps(train)
    else:
        iterations = parse_integer(args, "train_iters")
        train = iterations * batch
    interval, rounds = parse_integer(args, "eval_interval", 1), parse_integer(args, "eval_iters")
    return {
        "train": train,
        "valid": (iterations // interval + 1) * rounds * batch if rounds else 0,
        "test": rounds * batch,
    }


Blend = tuple[list[str], list[float] | None]


def _blend(args: Mapping[str, Any], name: str, file: str) -> Blend | None:
    if args[name] is not None and args[file] is not None:
        raise DataError(f"{name} and {file}: expected only one of them.")
    words = args[name]
    if args[file] is not None:
        words = _content(args[file], file)
    return None if words is None else _parsed(words, name)


def _parsed(words: str | os.PathLike[str] | Sequence[Any], name: str) -> Blend:
    """Returns the prefixes, and the weights if they alternate with the prefixes (`get_blend_from_list`)."""
    listed = words.split() if isinstance(words, str) else [words] if isinstance(words, os.PathLike) else list(words)
    texts = [os.fspath(word).strip() if isinstance(word, str | os.PathLike) else str(word) for word in listed]
    if not texts:
        raise DataError(f"{name}: contains no paths.")
    weights = [_weight(text) for text in texts[::2]]
    if len(texts) % 2 or all(weight is None for weight in weights):
        return texts, None
    if any(weight is None for weight in weights):
        raise DataError(f"{name} = {' '.join(texts)}: expected prefixes only, or a weight before each prefix.")
    return texts[1::2], [weight for weight in weights if weight is not None]


def _weight(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _parse_split_blends(args: Mapping[str, Any]) -> dict[str, Blend | None] | None:
    file = args["per_split_data_args_path"]
    named = {split: args[name] for name, split in _OWN_PATHS.items()}
    if file is not None:
        if any(value is not None for value in named.values()):
            raise DataError("per_split_data_args_path and paths of splits: expected only one of them.")
        try:
            said = json.loads(_content(file, "per_split_data_args_path"))
        except ValueError as error:
            raise DataError(f"per_split_data_args_path = {str(file)!r}: is not valid JSON ({error}).") from None
        if not isinstance(said, dict) or not all(
            value is None or isinstance(value, str | list) for value in said.values()
        ):
            raise DataError(f"{file}: expected the paths of each split, as a string or a list.")
        if unknown := set(said) - set(SPLITS):
            raise DataError(f"{file}: has {', '.join(sorted(unknown))}; expected {', '.join(SPLITS)}.")
        named = {split: said.get(split) for split in SPLITS}
    if all(value is None for value in named.values()):
        return None
    return {split: None if value is None else _parsed(value, f"{split}_data_path") for split, value in named.items()}


def _dataset(
    blend: Blend | None, share: tuple[float, float] | None, samples: int, make: "functools.partial[OrderedDataset]"
) -> OrderedDataset | None:
    """Builds the dataset of one split as `BlendedMegatronDatasetBuilder` does."""
    if blend is None or share is None or samples == 0:
        return None
    prefixes, weights = blend
    if weights is None and len(prefixes) == 1:
        return make(IndexedDataset(prefixes[0]), samples=samples, share=share)
    sizes: list[int | None] = [None] * len(prefixes)
    if weights is not None:
        if not all(math.isfinite(weight) and weight > 0 for weight in weights):
            raise DataError(f"blend weights {weights}: expected numbers above 0.")
        sizes = [*count_blend_samples(weights, samples)[1]]
    datasets = [
        make(IndexedDataset(prefix), samples=size, share=share) for prefix, size in zip(prefixes, sizes, strict=True)
    ]
    return BlendedDataset(datasets, weights, samples, cache=make.keywords["cache"])
