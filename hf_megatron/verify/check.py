"""`hf-megatron check` and `plan`: any architecture, by model type, folder or hub name."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..config import MegatronConfig
from ..errors import ConfigError, MegatronError
from ..registry import registered_types
from ..registry.recorded import layout_kind, tested_versions
from .parity import TASKS, Twin, check_twin, make_twin

# Own specs that are not causal, and the tasks they are checked on.
OTHER_TASKS = {"bert": ("masked", "classification"), "t5": ("seq2seq",)}
_CLASS_TASKS = {"SequenceClassification": "classification", "MaskedLM": "masked", "Conditional": "seq2seq"}
_LAYOUT_WORDS = {
    "tp": "tp_size",
    "pp": "pp_size",
    "mb": "num_microbatches",
    "dp": "dp_size",
    "zero": "zero_stage",
    "replicas": "dp_replicate_size",
}


def parse_layouts(text: str) -> list[MegatronConfig]:
    """Parses `tp2,tp2+sp,tp2+dp2+zero3` into configs; a word that is no layout raises `ConfigError`."""
    configs = []
    for layout in text.split(","):
        fields: dict[str, Any] = {}
        for word in layout.strip().split("+"):
            name = word.rstrip("0123456789")
            if word == "sp":
                fields["sequence_parallel"] = True
            elif name in _LAYOUT_WORDS and name != word:
                fields[_LAYOUT_WORDS[name]] = int(word[len(name) :])
            else:
                raise ConfigError(
                    f"layout {layout!r}: expected tpN, sp, ppN, mbN (microbatches), dpN, zeroN, replicasN joined by +, "
                    "such as tp2,tp2+sp,tp4."
                )
        configs.append(MegatronConfig(**fields))
    return configs


def causal_types() -> list[str]:
    """Lists the causal model types with a plan in transformers or a spec here."""
    own, names = set(registered_types()), MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return [name for name in names if name in own or getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)]


def resolve_config(model: str) -> PreTrainedConfig:
    """Returns the config of a model type, a local folder or a hub name."""
    if not Path(model).exists() and model in CONFIG_MAPPING:
        return CONFIG_MAPPING[model]()
    return AutoConfig.from_pretrained(model)


def task_of_class(class_name: str) -> str:
    """Returns the task whose batches fit a transformers class."""
    return next((task for part, task in _CLASS_TASKS.items() if part in class_name), "causal")


def features(config: PreTrainedConfig) -> list[str]:
    """Names what of a twin's config a result covers beyond the plain architecture."""
    values = config.get_text_config().to_dict()
    heads, kv_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    found = {
        "tied embeddings": values.get("tie_word_embeddings"),
        "grouped key/value heads": kv_heads is not None and kv_heads != heads,
        "experts": any(values.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")),
        "sliding window": values.get("sliding_window"),
        "latent attention": values.get("kv_lora_rank"),
        "soft-cap": values.get("final_logit_softcapping") or values.get("attn_logit_softcapping"),
        "vocabulary and widths that do not divide": True,
    }
    return [name for name, active in found.items() if active]


def _cases(models: list[str], task: str, given_class: bool) -> Iterator[tuple[str, str]]:
    for model in models:
        if model == "all":
            yield from ((name, "causal") for name in causal_types())
            yield from ((name, other) for name, tasks in OTHER_TASKS.items() for other in tasks)
        else:
            tasks = OTHER_TASKS.get(model, ()) if task == "causal" and not given_class else ()
            yield from ((model, other) for other in tasks or (task,))


def check_models(
    models: list[str],
    layouts: list[MegatronConfig],
    *,
    class_name: str | None = None,
    task: str = "causal",
    timeout: float = 120.0,
    echo: Callable[[str], Any] = print,
) -> list[dict[str, Any]]:
    """Checks the tiny twin of each model on each layout; returns the rows that `--record` writes.

    Raises:
        ConfigError: an unknown task or model.
    """
    if task not in TASKS:
        raise ConfigError(f"task {task!r}: valid are {', '.join(TASKS)}.")
    if class_name is not None:
        task = task_of_class(class_name)
    rows = []
    # Every pipeline stage needs a layer.
    layers = max(layout.pp_size * (layout.virtual_stages or 1) for layout in layouts)
    for model, case_task in _cases(models, task, class_name is not None):
        config = resolve_config(model)
        twin: Twin | None = None
        reason = ""
        try:
            twin = make_twin(config, task=case_task, class_name=class_name, microbatches=2, min_layers=layers)
        except (ValueError, RuntimeError, TypeError, KeyError, AttributeError, ImportError) as error:
            reason = f"its tiny twin cannot be built: {type(error).__name__}: {error}"
            if "all" not in models:
                raise ConfigError(f"{model}: {reason}") from error
        for layout in layouts:
            row = _check_layout(config, twin, layout, timeout, reason)
            rows.append(row)
            refused = row["worst"].startswith("UnsupportedError")
            verdict = "equal" if row["passed"] else "refused" if refused else "DIFFERS"
            echo(f"{row['model_type']:24} {row['class']:36} {layout.layout():8} {verdict:8} {row['worst']}")
            if details := row.pop("details", None):
                echo(details)
        if twin is not None:
            twin.delete()
    return rows


def _check_layout(
    config: PreTrainedConfig, twin: Twin | None, layout: MegatronConfig, timeout: float, reason: str
) -> dict[str, Any]:
    """Returns the row of one twin on one layout."""
    row: dict[str, Any] = {
        "model_type": config.model_type,
        "class": "-" if twin is None else twin.class_name,
        "layout": layout_kind(layout),
        "tp_size": layout.tp_size,
        "pp_size": layout.pp_size,
        "features": [] if twin is None else features(twin.config),
        "versions": tested_versions(),
    }
    if twin is None:
        return row | {"passed": False, "worst": reason}
    try:
        comparison = check_twin(twin, layout, timeout=timeout)
    except MegatronError as error:
        # The first rank's error, without the traceback above it.
        lines = str(error).split("\nrank ")[0].splitlines()
        last = next(line.strip() for line in reversed(lines) if line.strip().strip("^~ "))
        return row | {"passed": False, "worst": last.removeprefix("hf_megatron.errors.")[:300]}
    row |= {"passed": comparison.passed, "worst": str(comparison.worst)}
    return row if comparison.passed else row | {"details": comparison.report()}


def print_plan(model: str, tp_size: int, sequence_parallel: bool, pp_size: int = 1) -> str:
    """Returns the plan of a model's full-size config, made on the meta device, without weights and ranks."""
    import torch
    from transformers import AutoModelForCausalLM

    from ..axes import Axes
    from ..parallelize import ParallelPlan, plan

    config = resolve_config(model)
    layout = MegatronConfig(tp_size=tp_size, sequence_parallel=sequence_parallel, pp_size=pp_size)
    with torch.device("meta"):
        instance = AutoModelForCausalLM.from_config(config)
    state = plan(instance, layout, Axes.of(layout, 0))
    return str(ParallelPlan(state.claims.values(), state.cut))
