"""Tests of recorded verification results: a random sample is rerun, and unrecorded layouts are rejected."""

import json
import random
import re
from importlib import metadata

import pytest
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, MODEL_MAPPING_NAMES

from hf_megatron import MegatronConfig, UnverifiedLayoutError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.models import verified
from hf_megatron.models.fingerprint import ENDS
from hf_megatron.models.registry import REGISTRY, register_model, registered_types
from hf_megatron.testing import parity
from hf_megatron.testing.cases import causal_types, get_class_task, image_types, iter_cases, resolve_case
from hf_megatron.testing.check import features_on_layout
from hf_megatron.testing.parity import check_tiny_model
from hf_megatron.testing.parity import make_tiny_model as make_own_tiny_model
from hf_megatron.testing.resolve_model import resolve_config
from hf_megatron.testing.tiny_config import tiny_config
from hf_megatron.testing.tiny_model import TASKS
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.structure import ROOT

# An older transformers lacks some of the recorded types.
RECORDS = [row for row in verified.records() if row["model_type"] in CONFIG_MAPPING]
REQUIRED = [
    "gemma2",
    "gemma3_text",
    "cohere2",
    "granite",
    "granitemoe",
    "phi",
    "phi3",
    "glm4",
    "olmo2",
    "olmo3",
    "gpt_neox",
    "qwen3_moe",
    "mixtral",
    "deepseek_v3",
    "llama4_text",
    "gpt2",
    "opt",
    "bloom",
    "falcon",
    "gptj",
    "stablelm",
    "bert",
    "t5",
    "gpt_oss",
]


def passed(model_type, layout, tp_size=2):
    return any(
        row["model_type"] == model_type and row["layout"] == layout and row["tp_size"] == tp_size and row["passed"]
        for row in RECORDS
    )


def test_required_types_are_recorded():
    missing = [name for name in REQUIRED if not passed(name, "tp")]
    assert not missing
    with_plan = [name for name in causal_types() if getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None)]
    both = [name for name in with_plan if passed(name, "tp") and passed(name, "tp+sp")]
    # transformers 5.21 has 96 of them.
    assert len(with_plan) >= 95 and len(both) >= 80


def test_causal_class_may_use_a_subconfig():
    musicgen = CONFIG_MAPPING["musicgen"]()
    assert resolve_case(musicgen, "causal", None) == (musicgen.decoder, "causal", "MusicgenForCausalLM")
    # Auto classes select a text config; most classes use the config of their model type.
    for config in (CONFIG_MAPPING["gemma3"](), CONFIG_MAPPING["llama"]()):
        resolved_config, _, class_name = resolve_case(config, "causal", None)
        assert resolved_config is config and class_name is None


def test_tp_causal_types_support_cp_or_are_listed():
    rows = [row for row in RECORDS if not row["changes"] and row["class"].endswith("ForCausalLM")]
    rows = [row for row in rows if _get_task(row) == "causal"]
    split = {row["model_type"] for row in rows if row["layout"] == "tp" and row["passed"]}
    for kind in ("cp", "cp+a2a"):
        shared = {row["model_type"] for row in rows if row["layout"] == kind and row["passed"]}
        assert len(split - shared) < 11 and shared.issuperset(set(REQUIRED) - {"gpt2", "bert", "t5"}), split - shared
    either = {row["model_type"] for row in rows if row["layout"].startswith("cp") and row["passed"]}
    unsupported = {"big_bird", "blt", "cpmant", "gemma3n_text", "hrm_text", "inkling2_text", "prophetnet"}
    unsupported |= {"musicgen_decoder"}
    assert split - either <= unsupported


def test_causal_types_support_pp_or_state_a_reason():
    classes = ("ForCausalLM", "LMHeadModel")
    causal = {row["model_type"] for row in RECORDS if row["class"].endswith(classes) and row["passed"]}
    unchanged = [row for row in RECORDS if not row["changes"]]
    cuts = [row for row in unchanged if row["layout"] == "pp" and row["class"].endswith(classes)]
    rows = {row["model_type"]: row for row in cuts}
    assert not causal - rows.keys()
    # ProphetNet's predicted n-gram streams crash one rank; its pipelines are not supported.
    causal -= {"prophetnet"}
    cut = {name for name in causal if rows[name]["passed"]}
    assert len(cut) >= 95 and cut.issuperset(set(REQUIRED) - {"t5"})
    reasons = (
        *("cannot be cut", "parameters of its own beside its layers", "has to have one list"),
        "must have exactly one list",
        *("does not support pipeline parallelism", "belong to no pipeline stage"),
        *("were not found where the pipeline is cut", "needs something that its pipeline stage does not have"),
    )
    assert all(any(reason in rows[name]["worst"] for reason in reasons) for name in causal - cut)


def test_tied_and_untied_embeddings_are_recorded():
    """Covers widely used types; other types raise until they are verified."""
    for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt2", "gpt_neox", "olmo2", "granite"):
        rows = [row for row in RECORDS if row["model_type"] == name and row["passed"]]
        for kind in ("tp", "tp+sp", "pp", "cp", "cp+a2a"):
            ends = [part.lines for row in rows if row["layout"] == kind for part in row["parts"] if part.name == ENDS]
            tied = {any("is tied to" in line for line in lines) for lines in ends}
            assert tied == {True, False}, f"{name} on {kind}"
        assert any(row["draws"] for row in rows), f"{name} has no result with its rates on"


def test_passed_records_list_their_parts():
    for row in RECORDS:
        assert bool(row["parts"]) or not row["passed"], row


def test_records_state_versions_and_a_reason():
    for row in RECORDS:
        assert row["versions"].keys() >= {"torch", "transformers", "accelerate"}
        assert row["worst"], row
        assert row["passed"] or len(row["worst"]) > 20, f"a refusal needs a reason: {row}"


def test_image_types_are_recorded_or_listed_in_docs():
    equal = {}
    for row in RECORDS:
        names = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(row["model_type"])
        if row["passed"] and not row["changes"] and row["class"] == names and row.get("split", 1.0) >= 0.5:
            equal.setdefault(row["model_type"], set()).add(row["layout"])
    types = set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    done = {name for name, layouts in equal.items() if layouts >= {"tp", "tp+sp", "pp"}}
    assert len(done) >= 0.75 * len(types)
    page = (ROOT / "docs" / "images.md").read_text(encoding="utf-8").partition("## Types that are not equal")[2]
    stated = {name for row in page.split("\n| ")[1:] for name in re.findall(r"`([\w.-]+)`", row.partition(" | ")[0])}
    assert stated == types - done


_WITH_IMAGES = ("image", "video")


def _draw_sample():
    """Draws records, seeded by the version: 3 causal, and 12 each of cp, ep, image tasks and other tasks."""
    rows = [row for row in RECORDS if row["passed"] and row["class"].endswith("ForCausalLM")]
    kinds = {"cp": [], "ep": [], "": []}
    for row in rows:
        kinds[next(kind for kind in kinds if kind in row["layout"])].append(row)
    draw = random.Random(metadata.version("hf_megatron"))
    records = draw.sample(kinds[""], 3) + draw.sample(kinds["cp"], 12) + draw.sample(kinds["ep"], 12)
    images, others = {}, {}
    for row in RECORDS:
        if row["passed"] and (task := _get_task(row)) != "causal":
            groups = images if task in _WITH_IMAGES else others
            groups.setdefault(row["model_type"], []).append(row)
    return records + [draw.choice(group[name]) for group in (images, others) for name in draw.sample(sorted(group), 12)]


def test_sample_covers_image_types():
    types = {row["model_type"] for row in _draw_sample() if _get_task(row) in _WITH_IMAGES}
    assert len(types) >= 12
    assert len({row["model_type"] for row in _draw_sample()} - types - set(causal_types())) >= 3
    # Base classes, classes without a default placeholder, and types with a separate text-only class.
    assert all(_get_task(row) in _WITH_IMAGES for row in RECORDS if row["class"] in LATE_CLASSES)


LATE_CLASSES = {
    "ChameleonForConditionalGeneration",
    "Emu3ForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
}


def test_check_all_covers_recorded_types():
    """Cases of `hf-megatron check all`."""
    swept = set(iter_cases(["all"]))
    assert swept >= set(iter_cases(["all"], "image")) - {(name, "image") for name in causal_types()}
    assert {name for name, task in iter_cases(["all"], "image")} == set(image_types())
    assert len(swept) == len(list(iter_cases(["all"])))
    for row in RECORDS:
        task = "image" if _get_task(row) in _WITH_IMAGES else _get_task(row)
        if row["passed"] and not row["changes"] and task in ("causal", "image"):
            tasks = (
                {"causal", task} if row["model_type"].removesuffix("_decoder") in causal_types() else {"image", task}
            )
            # MusicGen's causal classes use a sub-config of their model type.
            name = row["model_type"].removesuffix("_decoder")
            assert any((name, task) in swept for task in tasks), name


def _draw_base_models():
    """Draws types and layouts for base models, which have no records; records of classes with a head apply to them."""
    plain = [row for row in RECORDS if row["passed"] and not row["changes"]]
    types = sorted(
        {row["model_type"] for row in plain if row["class"].endswith("ForCausalLM")} & {*MODEL_MAPPING_NAMES}
    )
    # Base models of image types wrap the text backbone; encoder-decoder base models have an encoder.
    types = [name for name in types if name not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES]
    types = [name for name in types if not CONFIG_MAPPING[name]().is_encoder_decoder]
    draw = random.Random(metadata.version("hf_megatron"))
    kinds = {"tp": "tp2", "tp+sp": "tp2+sp", "pp": "pp2", "cp": "cp2"}
    cases = []
    for model_type in draw.sample(types, 12):
        rows = [row for row in plain if row["model_type"] == model_type]
        cases.append((model_type, kinds[draw.choice(sorted({row["layout"] for row in rows} & kinds.keys()))]))
    return cases


@pytest.mark.parametrize(("model_type", "layout"), _draw_base_models())
def test_base_models_match_single_process(model_type, layout):
    tiny_model = make_tiny_model(resolve_config(model_type, {}), task="hidden_states", microbatches=2, min_layers=2)
    comparison = check_tiny_model(tiny_model, parse_layouts(layout)[0])
    assert comparison.passed, comparison.report()


def _get_task(row):
    class_task = get_class_task(row["class"], resolve_config(row["model_type"], row["changes"]))
    for medium, task in {"audio": "audio", "videos": "video"}.items():
        # Speech tasks always have audio.
        if medium in row.get("modalities", ()) and class_task != "speech":
            return task
    return class_task


def _select_class_name(config, task, name):
    """Returns the class name if the task's auto class does not support the config, as for MusicGen's decoder."""
    return None if type(config) in getattr(transformers, TASKS[task])._model_mapping else name


_LAYOUT_FORMATS = {"sp": "sp", "a2a": "a2a", "cp": "cp{cp_size}", "ep": "ep{ep_size}"}


def _format_layout(row):
    """Returns the layout of a record as text; records of plain expert parallelism get a dp size to exchange over."""
    words = [_LAYOUT_FORMATS[kind].format(**row) for kind in row["layout"].split("+") if kind in _LAYOUT_FORMATS]
    within = [f"dp{row['ep_size']}"] if row["layout"] == "ep" else []
    return "+".join([f"tp{row['tp_size']}", *words, *within, f"pp{row.get('pp_size', 1)}"])


@pytest.mark.parametrize(
    "row", _draw_sample(), ids=lambda row: f"{row['model_type']}-{'-'.join(row['changes'])}-{_format_layout(row)}"
)
def test_sample_matches_single_process(row):
    config = resolve_config(row["model_type"], row["changes"])
    task = _get_task(row)
    class_name = _select_class_name(config, task, row["class"])
    tiny_model = make_tiny_model(config, microbatches=2, task=task, model_class=class_name)
    [layout] = parse_layouts(_format_layout(row))
    assert features_on_layout(tiny_model.model_on_meta(), layout).parts == set(row["parts"])
    comparison = check_tiny_model(tiny_model, layout)
    assert comparison.passed, comparison.report()


_SLICES = 8


@pytest.mark.parametrize("number", range(_SLICES))
def test_records_match_current_plans(number, monkeypatch):
    """Layouts load if all their parts were verified; a changed sharding plan makes its records stale."""
    monkeypatch.setattr(parity, "measured", lambda tiny_model, best=0.0: tiny_model)
    cases = {}
    for row in RECORDS:
        if row["passed"]:
            case = row["model_type"], row["class"], json.dumps(row["changes"], sort_keys=True), _get_task(row)
            cases.setdefault(case, []).append(row)
    stale = []
    for case in sorted(cases)[number::_SLICES]:
        model_type, class_name, changes, task = case
        config = resolve_config(model_type, json.loads(changes))
        tiny_model = make_own_tiny_model(config, task=task, model_class=_select_class_name(config, task, class_name))
        for row in cases[case]:
            [layout] = parse_layouts(_format_layout(row))
            if features_on_layout(tiny_model.model_on_meta(), layout).parts != set(row["parts"]):
                stale.append((*case, layout.layout()))
        tiny_model.delete()
    assert not stale


@pytest.fixture
def unrecorded(tmp_path, monkeypatch):
    """A Llama checkpoint without recorded results."""
    records = tuple(row for row in RECORDS if row["model_type"] != "llama")
    monkeypatch.setattr(verified, "records", lambda: records)
    AutoModelForCausalLM.from_config(tiny_config(CONFIG_MAPPING["llama"]())).save_pretrained(tmp_path)
    return tmp_path


def test_unrecorded_layout_raises_with_check_command(unrecorded):
    def load():
        layout = MegatronConfig(tp_size=2, sequence_parallel=True, unverified="raise")
        with pytest.raises(UnverifiedLayoutError, match=r"check llama --class LlamaForCausalLM --layout tp2\+sp"):
            AutoModelForCausalLM.from_pretrained(unrecorded, megatron_config=layout)

    run_ranks(load, 2)


def test_duplicate_registration_raises():
    from hf_megatron import PlanError

    name = registered_types()[0]
    with pytest.raises(PlanError, match="replace=True"):
        register_model(name, REGISTRY[name])
