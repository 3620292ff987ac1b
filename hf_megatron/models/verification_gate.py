"""Verification check for layouts without a recorded parity result against the single-process run."""

import dataclasses
import json
import shlex
import warnings
from typing import Any, Protocol

import torch.distributed as dist
from transformers import CONFIG_MAPPING

from ..compat.transformers_models import has_labels, is_base_model
from ..config import MegatronConfig
from ..core.placement import ParameterSharding
from ..errors import UnsupportedError, UnverifiedLayoutError
from .automatic_check import check_once_per_job
from .fingerprint import Description, Features, is_stock_class
from .verified import (
    compared_modalities,
    differences,
    failed,
    get_context_layout_kind,
    layout_kinds,
    splits_weights,
)

# Number of differences listed in an error.
_SHOWN = 6
# Config entries that do not describe the architecture.
_NOT_ARCHITECTURE = (
    "architectures",
    "transformers_version",
    "dtype",
    "distributed_config",
    "_name_or_path",
    "model_type",
)


class PlannedModel(Protocol):
    """The members of `ParallelState` that the check reads.

    Attributes:
        shardings: name -> sharding of every parameter.
        modalities: inputs that a pipeline accepts besides text and images; set by the check.
    """

    config: MegatronConfig
    shardings: dict[str, ParameterSharding]
    modalities: frozenset[str]


class ConfigUnderTest(MegatronConfig):
    """Layout used by a parity check itself; it skips the verification check."""


def require_verified(model: Any, state: PlannedModel, description: Description) -> None:
    """Raises `UnverifiedLayoutError` if a parity result is missing and `config.unverified` does not accept that.

    A base model counts as verified where a class with a head on top of it is.

    Args:
        model: a model that is planned, but not placed on devices yet.
        description: description of the model before the pipeline removed modules.

    Raises:
        UnverifiedLayoutError: with `unverified="raise"`, or if the automatic check or a recorded one found differences.
        UnsupportedError: a class is neither a base model nor computes a loss, so it cannot be checked.
    """
    config, name, model_type = state.config, type(model).__name__, model.config.model_type
    if isinstance(config, ConfigUnderTest):
        return
    if config.pp_size > 1:
        # Loading proceeds without them: the pipeline rejects unverified modalities by name when a batch contains them.
        state.modalities = compared_modalities(name, model_type, "pp")
    for kind in filter(splits_weights, layout_kinds(config)):
        _warn_replicated_layers(model, config, features_on(kind, description, state))
    gaps = find_gaps(model, config, state, description)
    if not gaps:
        return
    problem = f"{name} (model type {model_type!r}) has no matching parity result against the single-process run.\n  "
    problem += "\n  ".join(map(str, gaps))
    if config.unverified == "allow":
        if dist.get_rank() == 0:
            warnings.warn(
                f'{problem}\nIt is loaded without a comparison (unverified="allow"): loss and gradients may differ '
                "from a single process.",
                stacklevel=2,
            )
        return
    if not has_labels(type(model)) and not is_base_model(model):
        raise UnsupportedError(
            f"{name} computes no loss, so it cannot be checked against the single-process run. Load a class with a "
            "head, such as AutoModelForCausalLM, and read outputs.hidden_states (output_hidden_states=True)."
        )
    has_copied_shards = any(split.copies > 1 for one in state.shardings.values() for split in one.placement.splits)
    layouts = _layouts([gap.kind for gap in gaps], has_copied_shards)
    if config.unverified == "raise":
        command = f"Run\n    {check_command(model.config, name, layouts)}\nto check it, or pass"
        raise UnverifiedLayoutError(
            f"{problem}\n{command if is_stock_class(type(model)) else 'Pass'} "
            'MegatronConfig(unverified="check"), which checks it when it is loaded and continues if it passes.'
        )
    report: str | None = ""
    if not any(gap.has_failed for gap in gaps):
        features = [features_on(gap.kind, description, state) for gap in gaps]
        report = check_once_per_job(model, description, layouts, features)
    if report is not None:
        raise UnverifiedLayoutError(
            f"{problem}\nThe parity check did not pass. Use another layout, or accept differences with "
            f'MegatronConfig(unverified="allow").\n{report}'.rstrip()
        )


@dataclasses.dataclass(frozen=True)
class VerificationGap:
    """A kind of layout on which no parity result covers a model.

    Attributes:
        kind (`str`): the kind, such as `"tp+sp"`.
        reason (`str`): the model's unverified features, or the error of a failed result.
        has_failed (`bool`): whether a result for the same model and sizes is recorded and did not pass.
    """

    kind: str
    reason: str
    has_failed: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.reason}"


def find_gaps(
    model: Any, config: MegatronConfig, state: PlannedModel, description: Description
) -> list[VerificationGap]:
    """Returns the kinds of a layout without a matching parity result; empty if all are verified.

    Args:
        model, state, description: as in `require_verified`; planned on the same layout, with or without its pipeline.
    """
    gaps, name, model_type = [], type(model).__name__, model.config.model_type
    for kind in layout_kinds(config):
        if not is_stock_class(type(model)):
            # A class of another package may have the name of a recorded one.
            gaps.append(VerificationGap(kind, f"{type(model).__module__}.{name} is not a class of transformers"))
            continue
        features = features_on(kind, description, state)
        mismatches = differences(name, model_type, kind, features, _base_prefix(model))
        if (worst := failed(name, model_type, config, kind, features)) is not None:
            reason = f"the parity check failed on the same number of ranks ({worst})"
            gaps.append(VerificationGap(kind, reason, has_failed=True))
        elif mismatches is None:
            gaps.append(VerificationGap(kind, f"no parity result is recorded for {name}"))
        elif mismatches:
            further = f"\n    and {len(mismatches) - _SHOWN} more" if len(mismatches) > _SHOWN else ""
            listed = "\n    ".join(mismatches[:_SHOWN]) + further
            gaps.append(VerificationGap(kind, f"it differs from every verified {name} in\n    {listed}"))
    return gaps


def choose_verified_scheme(
    model: Any, config: MegatronConfig, with_default_scheme: MegatronConfig, description: Description
) -> MegatronConfig:
    """Returns the layout with the default scheme, or the ring (`"p2p"`) if none was set and only it was verified.

    Args:
        with_default_scheme: `config` with the default `cp_comm_type` filled in.
    """
    if config.cp_size == 1 or config.cp_comm_type is not None:
        return with_default_scheme
    features = description.features({})
    ring = dataclasses.replace(config, cp_comm_type="p2p")
    name, model_type = type(model).__name__, model.config.model_type
    compared = [
        differences(name, model_type, get_context_layout_kind(layout), features, _base_prefix(model)) == []
        for layout in (with_default_scheme, ring)
    ]
    return ring if compared == [False, True] else with_default_scheme


def _base_prefix(model: Any) -> str | None:
    """Returns the attribute name of a base model in classes with a head on top of it; `None` for other models."""
    return model.base_model_prefix if is_base_model(model) else None


def features_on(kind: str, description: Description, state: PlannedModel) -> Features:
    """Returns the features of a model on one kind of layout: of full modules if that kind splits no weights."""
    return description.features(state.shardings if splits_weights(kind) else {})


def check_command(model_config: Any, class_name: str, layouts: str) -> str:
    """Returns the command that checks a tiny model with the features of this config."""
    model, options = model_config.model_type, f"--class {class_name} --layout {layouts}"
    if model not in CONFIG_MAPPING:
        return f"hf-megatron check {shlex.quote(str(model_config.name_or_path))} {options}"
    default = json.loads(CONFIG_MAPPING[model]().to_json_string(use_diff=False))
    values = json.loads(model_config.to_json_string(use_diff=False))
    changes = {
        name: value for name, value in values.items() if name not in _NOT_ARCHITECTURE and value != default.get(name)
    }
    return f"hf-megatron check {model} {options}" + (f" --set {shlex.quote(json.dumps(changes))}" if changes else "")


def _warn_replicated_layers(model: Any, config: MegatronConfig, features: Features) -> None:
    if features.split < 0.5 and dist.get_rank() == 0:
        warnings.warn(
            f"tp_size = {config.tp_size} shards only {features.split:.0%} of the parameters in the layers of "
            f"{type(model).__name__}; the others are replicated on every rank.",
            stacklevel=2,
        )


def _layouts(kinds: list[str], has_copied_shards: bool) -> str:
    """Returns the smallest layout of each kind on which a tiny model is sharded in the same way as the model.

    Args:
        has_copied_shards: whether several tp ranks hold the same shard, which takes four ranks in the tiny model.
    """
    sizes = {"tp": "tp4" if has_copied_shards else "tp2", "cp": "cp2", "pp": "pp2", "ep": "ep2"}
    return ",".join(
        "dp2+ep2" if kind == "ep" else "+".join(sizes.get(word, word) for word in kind.split("+")) for kind in kinds
    )
