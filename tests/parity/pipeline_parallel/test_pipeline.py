"""Parity tests of pipeline parallelism: loss, every gradient, and the weights after two steps of two optimizers.

The batches of the tiny model have five samples, the second without labels. This covers microbatches of unequal size,
microbatches without targets, and fewer microbatches than stages.
"""

import dataclasses
import functools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_megatron import ConfigError, MegatronConfig, RankError, UnsupportedError, local_named_parameters
from hf_megatron.compat.torch_autograd import splits_python_functions
from hf_megatron.compat.torch_distributed import communication_through
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.core.mesh import ParallelMesh
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallelize import parallel_state
from hf_megatron.pipeline_parallel import p2p
from hf_megatron.pipeline_parallel.schedules import SCHEDULES, valid_microbatches
from hf_megatron.testing.measure import Measurement, _full, _gradients, measure
from hf_megatron.testing.parity import TinyModel, check_tiny_model
from hf_megatron.testing.tiny_model import make_batch
from hf_megatron.testing.tolerances import gradient_errors
from tests.helpers.shared_tiny_models import make_tiny_model

ALL_ZERO_STAGES = "pp2+dp2+zero0,pp2+dp2+zero1,pp2+dp2+zero2,pp2+dp2+zero3"
# Model type, batches per optimizer step, layouts. Covers tied and untied heads and the special stage boundaries in the
# table of docs/pipeline_parallel.md.
CASES = [
    ("llama", 2, f"pp2+mb1,pp2,pp4,tp2+pp2,{ALL_ZERO_STAGES},tp2+sp+pp2+dp2+zero3"),
    ("gemma2", 2, "pp2,pp4,pp2+dp2+zero1,pp2+dp2+zero3,tp2+pp2+dp2"),
    ("gpt2", 2, "pp2,pp2+dp2+zero2"),
    ("granite", 1, "pp2"),
    ("cohere2", 1, "pp2"),
    ("gemma3_text", 1, "pp2,pp4"),
    ("phi", 1, "pp2"),
    ("gpt_neox", 1, "pp2,pp4"),
    ("exaone4", 1, "pp2"),
    ("olmo3", 1, "pp2"),
    ("gpt_oss", 1, "pp2"),
    ("qwen3_moe", 2, "pp2+dp2,tp2+sp+pp2"),
    ("falcon", 1, "pp2"),
    ("opt", 1, "tp2+pp2"),
]


@functools.lru_cache(maxsize=1)
def _get_tiny_model(model_type, microbatches=1, min_layers=4):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=microbatches, batch_size=5, min_layers=min_layers)


def _flatten_cases():
    for model_type, microbatches, layouts in CASES:
        for text, layout in zip(layouts.split(","), parse_layouts(layouts), strict=True):
            yield pytest.param(model_type, microbatches, layout, id=f"{model_type}-{text}-{microbatches}")


@pytest.mark.parametrize(("model_type", "microbatches", "layout"), _flatten_cases())
def test_layouts_match_single_process(model_type, microbatches, layout):
    comparison = check_tiny_model(_get_tiny_model(model_type, microbatches), layout)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("model_type", "layout", "batches"),
    [("gpt2", "pp2", 2), ("gpt2", "tp2+pp2", 1), ("llama", "tp2+sp+pp2", 1)],
    ids=["gpt2-pp2", "gpt2-tp2+pp2", "llama-tp2+sp+pp2"],
)
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_schedules_match_single_process(model_type, layout, batches, schedule):
    [config] = parse_layouts(layout)
    # Five samples in five microbatches, or in as many as the schedule supports.
    count = valid_microbatches(schedule, config.pp_size, SCHEDULES[schedule].resolve(config.virtual_stages), 5)
    config = dataclasses.replace(config, pipeline_schedule=schedule, num_microbatches=count)
    if is_unsupported_on_this_torch(config):
        with pytest.raises(RankError, match="needs torch 2.13"):
            check_tiny_model(_get_tiny_model(model_type, batches), config)
        return
    comparison = check_tiny_model(_get_tiny_model(model_type, batches), config)
    assert comparison.passed, comparison.report()


def communicate_as_nccl():
    """Sends activations and gradients in separate groups and without tags: in the order of the calls."""

    def drop_tag(operation):
        return lambda *args, tag, **kwargs: operation(*args, **kwargs)

    ParallelMesh.direction_groups = ParallelMesh._split_directions
    p2p.dist = SimpleNamespace(**vars(dist) | {"isend": drop_tag(dist.isend), "irecv": drop_tag(dist.irecv)})


@pytest.mark.parametrize(
    "changes",
    [
        {"pp_size": 4},
        {"pp_size": 2, "virtual_stages": 3, "pipeline_schedule": "interleaved_1f1b", "num_microbatches": 4},
        {"pp_size": 2, "pipeline_schedule": "zbv", "num_microbatches": 4},
    ],
    ids=str,
)
def test_order_alone_pairs_messages(changes):
    """On NCCL, which has no tags, each direction has a group of its own."""
    config = MegatronConfig(**changes)
    model = make_tiny_model(CONFIG_MAPPING["llama"](), batch_size=5, min_layers=6)
    comparison = check_tiny_model(model, config, sabotage=communicate_as_nccl)
    assert comparison.passed, comparison.report()


def is_unsupported_on_this_torch(config):
    splits = SCHEDULES[config.pipeline_schedule].splits_backward
    return splits and config.tp_size > 1 and not splits_python_functions()


@pytest.fixture(scope="module")
def trained(stories):
    """A trained checkpoint with five layers and a tied head."""
    model = AutoModelForCausalLM.from_pretrained(stories)
    batches = [make_batch(model.config, batch_size=5, seed=seed) for seed in range(2)]
    return TinyModel(type(model), stories, batches, measure(model, batches), model.config)


@pytest.mark.parametrize(
    "changes",
    [
        {"pp_size": 2},
        {"pp_size": 4},
        {"pp_size": 2, "pipeline_schedule": "dualpipev", "num_microbatches": 4},
        {"pp_size": 2, "tp_size": 2, "pipeline_schedule": "interleaved_1f1b"},
    ],
    ids=str,
)
def test_trained_checkpoint_matches_single_process(trained, changes):
    comparison = check_tiny_model(trained, MegatronConfig(**changes))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    "changes",
    [
        {"pipeline_partition": [1, 5]},
        {"pipeline_partition": [5, 1]},
        {"pipeline_partition": "layers"},
        {"pipeline_schedule": "interleaved_1f1b", "pipeline_partition": [1, 1, 3, 1], "num_microbatches": 4},
        {"recompute": "full"},
        {"recompute": "selective", "pipeline_schedule": "zbv"},
    ],
    ids=str,
)
def test_uneven_stages_and_recompute_match_single_process(changes):
    tiny_model = _get_tiny_model("gemma2", 2)
    assert tiny_model.config.num_hidden_layers == 6
    comparison = check_tiny_model(tiny_model, MegatronConfig(pp_size=2, **changes))
    assert comparison.passed, comparison.report()


def test_batch_smaller_than_required_microbatches():
    """DualPipeV on two ranks needs four microbatches: three samples are padded with one that has no loss."""
    tiny_model = make_tiny_model(CONFIG_MAPPING["qwen3_moe"](), microbatches=2, batch_size=3, min_layers=4)
    comparison = check_tiny_model(tiny_model, MegatronConfig(pp_size=2, pipeline_schedule="dualpipev"))
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("zero_stage", [0, 1, 2])
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_v_schedules_reduce_tied_embedding_over_dp(schedule, zero_stage):
    """Reduction of the tied embedding's gradient must wait for the embedding's backward, which follows the head's."""
    config = CONFIG_MAPPING["llama"](tie_word_embeddings=True)
    tiny_model = make_tiny_model(
        config, changes={"tie_word_embeddings": True}, microbatches=2, min_layers=4, batch_size=8
    )
    layout = MegatronConfig(pp_size=2, dp_size=2, pipeline_schedule=schedule, num_microbatches=4, zero_stage=zero_stage)
    comparison = check_tiny_model(tiny_model, layout)
    assert comparison.passed, comparison.report()


# Communication of a step


@functools.lru_cache
def _count_collectives(layout):
    """Returns, per rank, the number of collectives of each kind and process group in one training step."""
    counts: dict[str, int] = {}

    def count_call(original, group, name, args):
        counts[f"{name} {group.group_desc}"] = counts.get(f"{name} {group.group_desc}", 0) + 1
        return original()

    tiny_model = _get_tiny_model("llama", 1)

    def on_rank():
        model = tiny_model.load(megatron_config=layout).train()
        model(**tiny_model.batches[0]).loss.backward()
        with communication_through(count_call, lambda wait, work: wait()):
            model(**tiny_model.batches[0]).loss.backward()
        return counts

    return run_ranks(on_rank, layout.ranks_per_replica)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp2+pp2", "tp2+sp+pp2"])
@pytest.mark.parametrize("schedule", sorted(SCHEDULES))
def test_schedules_issue_the_same_collectives(schedule, sequence_parallel):
    """A split backward visits autograd nodes twice; a collective in one of them would run twice."""
    # Interleaved schedules do not support five microbatches.
    config = ConfigUnderTest(pp_size=2, tp_size=2, sequence_parallel=sequence_parallel, num_microbatches=4)
    config_of_schedule = dataclasses.replace(config, pipeline_schedule=schedule)
    if is_unsupported_on_this_torch(config_of_schedule):
        with pytest.raises(RankError, match="needs torch 2.13"):
            _count_collectives(config_of_schedule)
        return
    counts = _count_collectives(config_of_schedule)
    baseline_counts = _count_collectives(config)

    def sum_counts(ranks, word):
        return sum(count for rank in ranks for name, count in rank.items() if word in name)

    assert sum_counts(counts, "mesh_tp") == sum_counts(baseline_counts, "mesh_tp") > 0
    # Each boundary sends every microbatch forward and backward; V-shaped schedules have one boundary inside a rank.
    stages = 2 * SCHEDULES[schedule].resolve(None)
    crossings = stages - 1 - SCHEDULES[schedule].v_shaped
    assert sum_counts(counts, "send") == sum_counts(counts, "recv") == 2 * crossings * 4 * 2


# Auxiliary losses of models


def _accumulate_microbatches(model, batch, microbatches):
    """Returns the single-process loss: token losses over all targets, router losses averaged over microbatches."""
    batch_size = len(batch["input_ids"])
    targets = (batch["labels"][:, 1:] != -100).sum()
    edges = [batch_size * index // microbatches for index in range(microbatches + 1)]
    total = 0.0
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        share = (stop - start) / batch_size
        microbatch = {name: value[start:stop] for name, value in batch.items()}
        loss = model(**microbatch, num_items_in_batch=targets * share).loss * share
        loss.backward()
        total += loss.item()
    return total


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [("qwen3_moe", "pp2"), ("qwen3_moe", "tp2+sp+pp2"), ("mixtral", "pp4"), ("mixtral", "zbv")],
)
def test_router_losses_cover_all_stages(model_type, layout):
    changes = {"pipeline_schedule": "zbv"} if layout == "zbv" else {}
    [config] = parse_layouts("pp2" if layout == "zbv" else layout)
    config = ConfigUnderTest(
        **{**config.to_dict(), **changes, "num_microbatches": 4, "router_aux_loss_scope": "microbatch"}
    )
    tiny_model = _get_tiny_model(model_type, 1)

    def measure_step(model):
        model.config.output_router_logits = True
        model.train()
        with torch.no_grad():
            evaluated = model(**tiny_model.batches[0])
        output = model(**tiny_model.batches[0])
        assert output.aux_loss > 0
        torch.testing.assert_close((evaluated.loss, evaluated.aux_loss), (output.loss.detach(), output.aux_loss))
        output.loss.backward()
        return Measurement(output.loss.item(), 0, 0, _full(model, _gradients(model)))

    model = tiny_model.load().train()
    model.config.output_router_logits = True
    loss = _accumulate_microbatches(model, tiny_model.batches[0], 4)
    reference = Measurement(loss, 0, 0, _full(model, _gradients(model)))
    plain = tiny_model.load().train()
    _accumulate_microbatches(plain, tiny_model.batches[0], 4)
    without_router_loss = Measurement(0, 0, 0, _full(plain, _gradients(plain)))

    measurements = run_ranks(lambda: measure_step(tiny_model.load(megatron_config=config)), config.ranks_per_replica)
    assert all(other.loss == measurements[0].loss for other in measurements)
    assert abs(measurements[0].loss / reference.loss - 1) < 1e-6
    worst = max(gradient_errors(measurements[0], reference), key=lambda error: error.value)
    assert worst.value <= 1, worst
    assert max(gradient_errors(without_router_loss, reference), key=lambda error: error.value).value > 10


# Forms of calls


def test_loss_scaling_and_backward_order():
    """Changing loss scales, two pending losses, backwards in another order, a forward without a backward."""
    tiny_model = _get_tiny_model("llama", 2)
    first, second = tiny_model.batches

    def collect_gradients(model):
        model.train()
        gradients = []

        def record_gradients():
            gradients.append(_full(model, _gradients(model)))
            model.zero_grad()

        (model(**first).loss * 3).backward()
        record_gradients()
        (model(**first).loss / 7).backward()
        (model(**second).loss * 2).backward()
        record_gradients()
        a, b = model(**first).loss, model(**second).loss
        (b * 2).backward()
        (a * 5).backward()
        record_gradients()
        (model(**first).loss + model(**second).loss ** 2).backward()
        record_gradients()
        model(**first)
        model.zero_grad()
        model(**second).loss.backward()
        record_gradients()
        return gradients

    expected = collect_gradients(tiny_model.load())
    for layout in ("pp2", "pp2+dp2+zero1"):
        [config] = parse_layouts(layout)
        ranks = 2 * (config.dp_size or 1)

        def on_rank(config=config):
            model = tiny_model.load(megatron_config=ConfigUnderTest(**config.to_dict()))
            state = parallel_state(model)
            if state.mesh.dp_size == 1:
                return collect_gradients(model)
            # Every dp rank gets the global batch: the average over ranks is the single-process gradient.
            return collect_gradients(model)

        rank_gradients = run_ranks(on_rank, ranks)[0]
        for one, other in zip(rank_gradients, expected, strict=True):
            worst = max(
                gradient_errors(Measurement(0, 0, 0, one), Measurement(0, 0, 0, other)), key=lambda error: error.value
            )
            assert worst.value <= 1, f"{layout}: {worst}"


def test_unsupported_calls_raise():
    tiny_model = _get_tiny_model("llama", 1)
    batch = tiny_model.batches[0]

    def on_rank():
        model = tiny_model.load(megatron_config=ConfigUnderTest(pp_size=2)).train()
        with pytest.raises(UnsupportedError, match="no logits in a training step"):
            model(**batch).logits.argmax(-1)
        with pytest.raises(UnsupportedError, match="output_hidden_states"):
            model(**batch, output_hidden_states=True)
        with pytest.raises(ConfigError, match="input_ids"):
            model(labels=batch["labels"])

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"pipeline_schedule": "2f2b"}, "pipeline_schedule = '2f2b': expected one of"),
        ({"virtual_stages": 2}, "virtual_stages = 2"),
        ({"pipeline_schedule": "interleaved_1f1b", "num_microbatches": 5}, "num_microbatches = 5"),
        ({"pipeline_schedule": "dualpipev", "num_microbatches": 3}, "num_microbatches = 3"),
        ({"pipeline_partition": [1, 1]}, "pipeline_partition = .1, 1.: expected 2 positive integers"),
        ({"pp_size": 2, "pipeline_schedule": "interleaved_1f1b", "virtual_stages": 4}, "one for each of the model's 5"),
    ],
)
def test_invalid_configs_raise_before_loading(config, message):
    tiny_model = _get_tiny_model("llama", 1)

    def on_rank():
        with pytest.raises(ConfigError, match=message):
            tiny_model.load(megatron_config=ConfigUnderTest(**{"pp_size": 2, **config}))

    run_ranks(on_rank, 2)


def test_ranks_hold_only_their_layers():
    tiny_model = _get_tiny_model("llama", 1)

    def on_rank():
        model = tiny_model.load(megatron_config=ConfigUnderTest(pp_size=2, pipeline_partition="layers"))
        parameters = dict(local_named_parameters(model))
        return set(parameters), sum(p.numel() for p in parameters.values())

    sizes = {name: parameter.numel() for name, parameter in tiny_model.load().named_parameters()}
    (first, first_size), (second, second_size) = run_ranks(on_rank, 2)
    assert first | second == sizes.keys() and not first & second
    assert first_size + second_size == sum(sizes.values())
    assert "model.embed_tokens.weight" in first and "lm_head.weight" in second
    assert {name for name in sizes if name.startswith(("model.layers.0.", "model.layers.1."))} < first
