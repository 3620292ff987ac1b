"""`hf-megatron check`: parity check of any architecture, by model type, folder or hub name."""

import concurrent.futures
import contextlib
import functools
import inspect
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ..config import MegatronConfig
from ..core.axes import Axes
from ..core.fork_harness import first_reason, make_ready_to_fork
from ..errors import ConfigError, MegatronError, RankError, UnsupportedError
from ..models.experts import find_experts
from ..models.fingerprint import Features, describe_model
from ..models.registry import registered_spec
from ..models.spec import ModelSpec
from ..models.type_facts import get_type_facts
from ..models.verified import layout_kind, recorded_draw, tested_versions, write_results
from ..parallelize import plan
from ..pipeline_parallel.layers_per_stage import layers_with_features
from .adapters import adapted
from .cases import iter_cases, list_variants, resolve_case
from .parity import UNBUILDABLE, TinyModel, check_tiny_model, make_tiny_model
from .resolve_model import resolve_config
from .rng_parity import check_draws
from .tiny_model import TASKS
from .token_mixing import full_share, unknown_mixing
from .tolerances import ParityComparison
from .unread_parameters import without_gradient

# The sharded share of the layers' parameters is printed if it is smaller.
_LARGE_SHARE = 0.5
# Attention heads of a tiny model, see `tiny_config`.
_TWIN_HEADS = 4
# Batch size of a tiny model.
_ROWS = 3
# Minimum layers of a tiny model that adds image features after its first layers (at most two of these).
_LAYERS_WITH_FEATURES = 4


def check_models(
    models: list[str],
    layouts: list[MegatronConfig],
    *,
    class_name: str | None = None,
    task: str = "causal",
    changes: Mapping[str, Any] | None = None,
    variants: bool = False,
    adapter: str | None = None,
    timeout: float = 120.0,
    device: str = "cpu",
    record: Path | None = None,
    workers: int = 1,
    echo: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """Checks the tiny model of each model on each layout; returns the results that `--record` writes.

    Args:
        models (`list[str]`): model types, folders or hub names; `"all"` as in `iter_cases`.
        layouts (`list[MegatronConfig]`): layouts to check.
        class_name (`str`, *optional*): a transformers class instead of the task's Auto class.
        task (`str`, defaults to `"causal"`): a key of `TASKS`.
        changes (`Mapping`, *optional*): values to change in the models' configs.
        variants (`bool`): also check the config variants of each type, see `list_variants`.
        adapter (`str`, *optional*): a key of `adapters.METHODS`; the adapter is trained instead of the model's weights.
        timeout (`float`, defaults to 120.0): seconds for one model on one layout.
        device (`str`): device of the ranks, `"cpu"` or `"cuda"`; the reference is always measured on the CPU.
        record (`Path`, *optional*): a results file, to which the results of each model are written once it is checked.
        workers (`int`, defaults to 1): number of models that are checked concurrently, each with its own ranks.

    Raises:
        ConfigError: an unknown task or model, or invalid config changes.
    """
    if task not in TASKS:
        raise ConfigError(f"task {task!r}: expected one of {', '.join(TASKS)}.")
    largest = max(layout.tp_size for layout in layouts)
    if largest > _TWIN_HEADS:
        raise ConfigError(
            f"tp_size = {largest}: tiny models have {_TWIN_HEADS} attention heads, and a result of tp{_TWIN_HEADS} "
            "also covers all larger sizes. `hf-megatron show MODEL --layout tpN` shows whether a size divides a model."
        )
    check = functools.partial(
        _check_case,
        layers=minimum_layers(layouts),
        layouts=layouts,
        class_name=class_name,
        changes=dict(changes or {}),
        variants=variants,
        everything="all" in models or variants,
        adapter=adapter,
        timeout=timeout,
        device=device,
    )
    rows = []
    for (model, _), outcome in in_forks(check, iter_cases(models, task, given_class=class_name is not None), workers):
        try:
            results, said = outcome()
        except ConfigError as error:
            if "all" not in models:
                raise
            # A type without a valid default config must not end the checks of the others.
            results, said = [], [f"{model:24} {error}"]
        for line in said:
            echo(line)
        rows += results
        if record is not None:
            write_results(record, results)
    return rows


def minimum_layers(layouts: list[MegatronConfig]) -> int:
    """Returns the layers that a tiny model needs: every pipeline stage has at least one."""
    return max(layout.pp_size * (layout.virtual_stages or 1) for layout in layouts)


def _check_case(
    model: str,
    task: str,
    *,
    layouts: list[MegatronConfig],
    class_name: str | None,
    changes: dict[str, Any],
    variants: bool,
    **how: Any,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the results of one model and its variants, and the lines to print."""
    said: list[str] = []
    check = functools.partial(_check_changed, model, task=task, layouts=layouts, class_name=class_name, **how)
    rows = check(changes=changes, echo=said.append)
    if variants and model in CONFIG_MAPPING and rows and rows[0]["class"] != "-":
        for variant in list_variants(model, rows[0]["class"]):
            rows += check(changes=changes | dict(variant), echo=said.append)
    return rows, said


def _check_changed(
    model: str,
    *,
    changes: dict[str, Any],
    layouts: list[MegatronConfig],
    class_name: str | None,
    task: str,
    **how: Any,
) -> list[dict[str, Any]]:
    """Returns the results of one model with changes in its config, one per layout."""
    if task == "audio":
        changes = {**get_type_facts(model).audio, **changes}
    config = resolve_config(model, changes)
    config, task, class_name = resolve_case(config, task, class_name)
    return check_layouts(config, task, class_name, layouts, name=model, changes=changes, **how)


def check_layouts(
    config: PreTrainedConfig,
    task: str,
    model_class: type | str | None,
    layouts: list[MegatronConfig],
    *,
    name: str,
    layers: int,
    changes: Mapping[str, Any] | None = None,
    everything: bool = False,
    adapter: str | None = None,
    timeout: float = 120.0,
    device: str = "cpu",
    echo: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """Checks the tiny model of a config and class; returns one result per layout.

    Args:
        config (`PreTrainedConfig`): config of any size, to which `changes` were applied.
        task (`str`): a key of `TASKS`.
        model_class (`type` or `str`, *optional*): as in `make_tiny_model`.
        layouts (`list[MegatronConfig]`): layouts to check.
        name (`str`): the model in error messages.
        layers (`int`): minimum number of layers of the tiny model.
        everything (`bool`): a model that cannot be built becomes a result and raises no `ConfigError`.
    """
    if layers_with_features(config):
        # The first stage needs all layers after which image features are added, and one more.
        layers = max(layers, _LAYERS_WITH_FEATURES)
    tiny_model: TinyModel | None = None
    # At least one sample per dp rank, and one more so that local batch sizes differ.
    rows = max(_ROWS, max(layout.dp_size or 1 for layout in layouts) + 1)
    reason, results = "", []
    made_of = {"task": task, "layers": layers, "rows": rows}
    try:
        tiny_model = make_tiny_model(
            config,
            task=task,
            model_class=model_class,
            microbatches=2,
            min_layers=layers,
            batch_size=rows,
            # The draws of other configs with the same changes, such as a checkpoint's, are not recorded.
            known_draw=recorded_draw(name, dict(changes or {}), made_of),
        )
        tiny_model = tiny_model if adapter is None else adapted(tiny_model, adapter)
    except UNBUILDABLE as error:
        # transformers lists every class that it has; a fork's error starts with its own type.
        text = str(error).partition("\n")[0].removeprefix(f"{type(error).__name__}: ")
        reason = f"its tiny model cannot be built: {type(error).__name__}: {text}"
        if not everything:
            raise ConfigError(f"{name}: {reason}") from error
    for layout in layouts:
        if layout.ep_size > 1 and tiny_model is not None and not _has_experts(tiny_model):
            if everything:
                continue
            with contextlib.suppress(UnsupportedError):
                # Planning raises for a model without experts; an `UnsupportedError` becomes a result below.
                plan(tiny_model.model_on_meta(), layout, Axes.of(layout, 0))
        row = _check_layout(config, tiny_model, layout, timeout, device, reason, adapter) | {
            "changes": dict(changes or {})
        }
        if tiny_model is not None and tiny_model.draw:
            row["draw"] = {**made_of, "number": tiny_model.draw}
        results.append(row)
        refused = row.pop("refused", False) or row["worst"].startswith(("UnsupportedError", "ConfigError"))
        judgment = "equal" if row["passed"] else "refused" if refused else "DIFFERS"
        changed = f"{row['class']} {json.dumps(changes)}" if changes else row["class"]
        share = f", {row['split']:.0%} of its layers' parameters split" if row.get("split", 1.0) < _LARGE_SHARE else ""
        share += f", {row['whole']:.0%} of its layers' parameters computed whole by each rank" if "whole" in row else ""
        echo(f"{row['model_type']:24} {changed:36} {layout.layout():8} {judgment:8} {row['worst']}{share}")
        if details := row.pop("details", None):
            echo(details)
    if tiny_model is not None:
        tiny_model.delete()
    return results


def _check_layout(
    config: PreTrainedConfig,
    tiny_model: TinyModel | None,
    layout: MegatronConfig,
    timeout: float,
    device: str,
    reason: str,
    adapter: str | None,
) -> dict[str, Any]:
    """Returns the result of a tiny model on a layout; with an adapter, the layout's name has all axes."""
    row: dict[str, Any] = {
        "model_type": config.model_type,
        "class": "-" if tiny_model is None else tiny_model.class_name,
        "layout": layout_kind(layout) if adapter is None else f"{layout.layout()} {adapter}",
        "tp_size": layout.tp_size,
        "pp_size": layout.pp_size,
        **({"cp_size": layout.cp_size} if layout.cp_size > 1 else {}),
        **({"ep_size": layout.ep_size} if layout.ep_size > 1 else {}),
        "parts": [],
        "draws": [],
        "versions": tested_versions(),
        **_modalities(tiny_model),
    }
    if tiny_model is None:
        return row | {"passed": False, "worst": reason}
    try:
        if adapter is not None:
            return row | _parity_row(check_tiny_model(tiny_model, layout, timeout=timeout, device=device), tiny_model)
        features = features_on_layout(tiny_model.model_on_meta(), layout)
        row |= {"parts": list(features.parts)} | (
            {"split": _split_share(tiny_model, layout)} if layout.tp_size > 1 else {}
        )
        if unlike := describe_model(tiny_model.model_on_meta()).features({}).parts ^ tiny_model.full.features({}).parts:
            difference = "; ".join(sorted(str(line) for part in unlike for line in part.lines))
            return row | {"passed": False, "worst": f"its tiny model differs from the full model: {difference}"[:300]}
        if layout.cp_size > 1:
            row |= _full_sequence_blocks(tiny_model, layout)
            if reason := row.pop("mixing", None):
                return row | {"passed": False, "worst": reason}
        comparison = check_tiny_model(tiny_model, layout, timeout=timeout, device=device)
        if comparison.passed and layout.tp_size > 1 and layout.pp_size == 1:
            sites, problem = check_draws(tiny_model, layout, timeout=timeout, device=device)
            row |= {"draws": sorted(sites)} | ({"draws_differ": problem} if problem else {})
            if tiny_model.full.draws - sites:
                return row | {
                    "passed": False,
                    "worst": f"with draws at {sorted(tiny_model.full.draws - sites)}: {problem}",
                }
    except MegatronError as error:
        refused = not isinstance(error, RankError)
        return row | {"passed": False, "worst": first_reason(str(error)), "refused": refused}
    return row | _parity_row(comparison, tiny_model)


def _modalities(tiny_model: TinyModel | None) -> dict[str, Any]:
    """Returns the modalities of a tiny model's batches besides text, as a field of its result."""
    if tiny_model is None:
        return {}
    return {"modalities": list(tiny_model.modalities)} if tiny_model.modalities else {}


def _parity_row(comparison: ParityComparison, tiny_model: TinyModel) -> dict[str, Any]:
    row: dict[str, Any] = {"passed": comparison.passed, "worst": str(comparison.worst)}
    if reasons := without_gradient(tiny_model.config, tiny_model.modalities):
        row["no_gradient"] = sorted(reasons.values())
    return row if comparison.passed else row | {"details": comparison.report()}


def _has_experts(tiny_model: TinyModel) -> bool:
    model = tiny_model.model_on_meta()
    return bool(find_experts(model, registered_spec(model) or ModelSpec(model.config.model_type)))


def _full_sequence_blocks(tiny_model: TinyModel, layout: MegatronConfig) -> dict[str, Any]:
    """Returns the share of the layers that cp runs on the full sequence, and token-mixing modules unknown to cp."""
    state = plan(tiny_model.model_on_meta(), layout, Axes.of(layout, 0))
    assert tiny_model.build_full is not None
    with torch.device("meta"):
        share = full_share(tiny_model.build_full(), state)
    model = tiny_model.load()
    arguments = inspect.signature(type(model).forward).parameters
    needed = {name for name, argument in arguments.items() if argument.default is argument.empty}
    batch = {name: value for name, value in tiny_model.batches[0].items() if name in {"input_ids", *needed}}
    reason = unknown_mixing(model, state.spec, batch)
    return ({"whole": round(share, 3)} if share else {}) | ({} if reason is None else {"mixing": reason})


def _split_share(tiny_model: TinyModel, layout: MegatronConfig) -> float:
    """Returns the sharded share of the full model's layers: a tiny model's encoders have a larger share of its size."""
    assert tiny_model.build_full is not None
    with torch.device("meta"):
        full = tiny_model.build_full()
    try:
        features = features_on_layout(full, layout)
    except MegatronError:
        # tp_size may not divide the sizes of a default config.
        features = features_on_layout(tiny_model.model_on_meta(), layout)
    return round(features.split, 3)


def features_on_layout(model: Any, layout: MegatronConfig) -> Features:
    """Returns the features of a model on the meta device on a layout."""
    description = describe_model(model)
    return description.features(plan(model, layout, Axes.of(layout, 0)).shardings if layout.tp_size > 1 else {})


def in_forks(
    function: Callable[..., Any], cases: Iterable[tuple[Any, ...]], workers: int
) -> Iterator[tuple[tuple[Any, ...], Callable[[], Any]]]:
    """Calls a function for each case in a pool of forked workers.

    Args:
        function (`Callable`): called with the values of a case; arguments, results and exceptions must be picklable.
        cases (`Iterable`): arguments of each call.
        workers (`int`): number of forks; with one, the function is called in this process.

    Yields:
        each case as soon as it is complete, with a callable that returns the function's result or raises its exception.
    """
    if workers == 1:
        yield from ((case, lambda case=case: function(*case)) for case in cases)
        return
    make_ready_to_fork()
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        pending = {pool.submit(function, *case): case for case in cases}
        try:
            for done in concurrent.futures.as_completed(pending):
                yield pending[done], done.result
        finally:
            # The caller may have stopped iterating at a failed case.
            pool.shutdown(cancel_futures=True)
