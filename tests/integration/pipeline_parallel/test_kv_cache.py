"""Evaluation over pipeline stages: generate() with every cache, and losses and predictions, equal to one process."""

import time

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DynamicCache,
    QuantizedCache,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.parallelize import parallel_state
from hf_megatron.pipeline_parallel.kv_cache import StagedCache
from hf_megatron.testing.parity import ConfigUnderTest
from hf_megatron.testing.tiny_config import tiny_config
from hf_megatron.testing.tiny_model import draw_parameters

PP2 = ConfigUnderTest(pp_size=2)
NEW_TOKENS = 14
# Sliding and full attention, learned positions, positions from the mask, alibi, experts, state space layers.
FAMILIES = ["granite", "cohere2", "gemma2", "gemma3_text", "gpt_oss", "gpt2", "gpt_neox", "phi", "falcon", "bloom"]
FAMILIES += ["opt", "qwen3_moe", "qwen3_next", "lfm2_moe", "mamba"]
# The cache of a state space layer is another, with its own way to be reordered.
BEAMS = ("qwen3_next", "lfm2_moe")
TP2_PP2 = ConfigUnderTest(pp_size=2, tp_size=2)
LAYOUTS = [
    ConfigUnderTest(pp_size=2, tp_size=2, sequence_parallel=True),
    ConfigUnderTest(pp_size=4),
    ConfigUnderTest(pp_size=2, pipeline_schedule="interleaved_1f1b", virtual_stages=2),
    ConfigUnderTest(pp_size=2, pipeline_schedule="zbv"),
]


def make_model(directory, model_type, layers=None):
    """A tiny model on disk whose windows are shorter than what is generated."""
    config = tiny_config(AutoConfig.for_model(model_type))
    # A tied head repeats the last token, whatever came before.
    config.tie_word_embeddings = False
    if layers is not None:
        kinds = config.layer_types
        config.num_hidden_layers = layers
        config.layer_types = [kinds[index % len(kinds)] for index in range(layers)]
    model = AutoModelForCausalLM.from_config(config).float()
    draw_parameters(model)
    model.save_pretrained(directory)
    return directory


def load(directory, config):
    model = AutoModelForCausalLM.from_pretrained(directory, megatron_config=config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts():
    """Three rows, padded on the left."""
    ids = torch.randint(3, 110, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, **kwargs):
    defaults = {"do_sample": False, "use_cache": True, "max_new_tokens": NEW_TOKENS}
    return model.generate(**(prompts() | defaults | kwargs))


def tokens_and_logits(directory, config, kinds):
    """For each kind of generation the tokens and what they were chosen from."""
    model = load(directory, config)
    outputs = [generate(model, return_dict_in_generate=True, output_logits=True, **kind) for kind in kinds]
    return [(output.sequences, torch.stack(output.logits)) for output in outputs]


def of_families(directories, config):
    return {
        name: tokens_and_logits(directory, config, [{}, {"num_beams": 2}] if name in BEAMS else [{}])
        for name, directory in directories.items()
    }


def difference(found, expected):
    """The largest difference between logits, infinite where tokens differ."""
    pairs = [*zip(found, expected, strict=True)]
    if not all(torch.equal(tokens, reference) for (tokens, _), (reference, _) in pairs):
        return float("inf")
    return max((logits - reference).abs().max().item() for (_, logits), (_, reference) in pairs)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """What each family generates in one process, and on both ranks of one job."""
    directories = {model_type: make_model(tmp_path_factory.mktemp(model_type), model_type) for model_type in FAMILIES}
    return of_families(directories, None), run_ranks(of_families, 2, directories, PP2)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_equals_one_process(families, model_type):
    expected, ranks = families
    for found in ranks:
        assert difference(found[model_type], expected[model_type]) < 1e-4


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A model of sliding and full layers, and what it generates in one process."""
    directory = make_model(tmp_path_factory.mktemp("gemma"), "gemma3_text", layers=5)
    return directory, tokens_and_logits(directory, None, KINDS)


KINDS = [
    {},
    {"use_cache": False},
    {"num_beams": 3, "num_return_sequences": 2},
    {"cache_implementation": "static", "prefill_chunk_size": 3},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda config: f"{config.layout()}-{config.pipeline_schedule}")
def test_caches_on_every_layout(gemma, layout):
    directory, expected = gemma
    for found in run_ranks(tokens_and_logits, layout.ranks_per_replica, directory, layout, KINDS):
        assert difference(found, expected) < 1e-4


def test_lengths_that_are_not_kept_change_the_tokens(gemma):
    directory, expected = gemma

    def sabotaged():
        StagedCache.advance = lambda self, inputs: None
        return tokens_and_logits(directory, PP2, [{}])

    for found in run_ranks(sabotaged, 2):
        assert difference(found, expected[:1]) == float("inf")


def test_a_past_that_another_stage_of_the_rank_moved_is_seen(gemma):
    directory, _ = gemma

    def sabotaged():
        StagedCache.seen_by = lambda self, stage: self.cache
        return tokens_and_logits(directory, LAYOUTS[-1], [{}])

    with pytest.raises(RankError, match="The size of tensor"):
        run_ranks(sabotaged, 2)


class Tokens(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value)

    def end(self):
        self.seen.append(None)


class AfterSeconds(StoppingCriteria):
    """Decides by this rank's clock."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), time.monotonic() > self.end)


def many_ways(directory, config):
    """Everything else that a generation can be asked for; tensors and lists of tensors."""
    model = load(directory, config)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    results = {}
    full = generate(model, return_dict_in_generate=True, output_scores=True, output_logits=True)
    results["scores"], results["logits"] = torch.stack(full.scores), torch.stack(full.logits)
    streamer = Tokens() if rank == 0 else None
    one = {"input_ids": prompts()["input_ids"][:1], "attention_mask": prompts()["attention_mask"][:1]}
    results["streamed"] = generate(model, streamer=streamer, **one)
    if rank == 0:
        assert len(streamer.seen) == NEW_TOKENS + 2
    results["lookup"] = generate(model, prompt_lookup_num_tokens=3, **one)
    results["assistant"] = generate(model, assistant_model=load(directory, None), **one)
    embeddings = model.get_input_embeddings()(prompts()["input_ids"])
    results["embeddings"] = generate(model, input_ids=None, inputs_embeds=embeddings)

    # A cache of the user's, without a config, over two generations; then cropped, repeated and chosen from.
    cache = DynamicCache()
    start = generate(model, past_key_values=cache, max_new_tokens=3)
    mask = torch.cat([prompts()["attention_mask"], torch.ones(3, 3, dtype=torch.long)], 1)
    results["continued"] = generate(
        model, input_ids=start, attention_mask=mask, past_key_values=cache, max_new_tokens=5
    )
    with torch.no_grad():
        cache = DynamicCache()
        ids = prompts()["input_ids"]
        output = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=2)
        assert output.past_key_values is cache and output.logits.shape[1] == 2
        cache.crop(-2)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 3, 5]))
        cache.reorder_cache(torch.tensor([2, 0, 1]))
        assert [cache.get_seq_length(index) for index in range(len(cache))] == [5] * len(cache)
        results["by hand"] = model(input_ids=ids[:, -3:], past_key_values=cache, use_cache=True).logits
        fresh = model(input_ids=ids, use_cache=True)
        results["fresh"] = model(input_ids=ids[:, :1], past_key_values=fresh.past_key_values).logits
    return results


def test_everything_else_that_generate_can_do(stories):
    expected = many_ways(stories, None)
    for found in run_ranks(many_ways, 2, stories, PP2):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def quantized(directory, config):
    model = load(directory, config)
    cache = QuantizedCache("fp8", model.config)
    return generate(model, past_key_values=cache, num_beams=2)


def test_a_quantised_cache(stories):
    expected = quantized(stories, None)
    for found in run_ranks(quantized, 2, stories, PP2):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=lambda config: config.layout())
def test_ranks_draw_the_same_tokens_and_stop_together(stories, layout):
    def sample():
        rank = torch.distributed.get_rank()
        set_seed(rank)
        model = load(stories, layout)
        sampled = [generate(model, do_sample=True, top_k=0) for _ in range(2)]
        # Dropout draws from each stage's own layers.
        model.config.attention_dropout = 0.5
        for layer in model.modules():
            if "attention_dropout" in vars(layer):
                layer.attention_dropout = 0.5
        sampled.append(generate(model.train(), do_sample=True, top_k=0))
        model.eval()
        # A clock that runs on one rank only, and one that runs out at different times.
        criteria = StoppingCriteriaList([AfterSeconds(0.0 if rank == 0 else 1e6)])
        sampled.append(generate(model, stopping_criteria=criteria))
        sampled.append(generate(model, max_time=0.05 + rank, max_new_tokens=300))
        return sampled

    first, *others = run_ranks(sample, layout.ranks_per_replica)
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(other, first, strict=True))
    assert not torch.equal(first[0], first[1])
    assert first[3].shape[1] == prompts()["input_ids"].shape[1] + 1


def test_caches_that_a_pipeline_cannot_keep_are_refused_by_name(stories):
    class OwnCache(DynamicCache):
        pass

    def refused():
        model = load(stories, PP2)
        ids = prompts()["input_ids"]
        with torch.no_grad(), pytest.raises(UnsupportedError, match=r"OwnCache.*use_cache=False"):
            model(input_ids=ids, past_key_values=OwnCache())
        offloaded = DynamicCache()
        offloaded.offloading = True
        with torch.no_grad(), pytest.raises(UnsupportedError, match="offloading"):
            model(input_ids=ids, past_key_values=offloaded)
        with pytest.raises(UnsupportedError, match="no_grad"):
            model(input_ids=ids, past_key_values=model(input_ids=ids, use_cache=True).past_key_values)
        with pytest.raises(UnsupportedError, match="generate_batch"):
            model.generate_batch([[1, 5]])
        with pytest.raises(UnsupportedError, match="past_key_values in a training step"):
            model.train()(input_ids=ids, labels=ids, past_key_values=DynamicCache())

    run_ranks(refused, 2)


# Evaluation


def rows(count, length=21):
    generator = torch.Generator().manual_seed(count)
    result = []
    for index in range(count):
        ids = torch.randint(3, 512, (length,), generator=generator)
        labels = ids.clone()
        labels[: 3 * index] = -100
        result.append({"input_ids": ids, "labels": labels})
    return result


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions[:, :-1] == prediction.label_ids[:, 1:]).mean())}


def evaluate(stories, output, config, evaluation_rows):
    """Trainer's evaluation with and without metrics, and a plain loop."""
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    defaults = {"per_device_eval_batch_size": 3, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    state = parallel_state(model)
    sent = []
    if state is not None:
        broadcast = state.pipeline.runner.transport.broadcast

        def counted(tensors, source):
            received = broadcast(tensors, source)
            sent.append(sum(tensor.numel() for tensor in received))
            return received

        state.pipeline.runner.transport.broadcast = counted

    def trainer(**kwargs):
        arguments = TrainingArguments(str(output), **(defaults | kwargs.pop("arguments", {})))
        dataset = rows(evaluation_rows)
        return Trainer(model, arguments, eval_dataset=dataset, data_collator=default_data_collator, **kwargs)

    metrics = []
    only_loss = trainer()
    metrics.append(only_loss.evaluate()["eval_loss"])
    largest = max(sent, default=0)
    metrics.append(trainer(arguments={"label_smoothing_factor": 0.1}).evaluate()["eval_loss"])
    with_metrics = trainer(
        compute_metrics=accuracy, preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)
    )
    result = with_metrics.evaluate()
    metrics += [result["eval_loss"], result["eval_accuracy"]]
    prediction = only_loss.predict(rows(4))
    metrics.append(prediction.metrics["test_loss"])
    model.eval()
    logits = []
    for start in range(0, evaluation_rows, 3):
        batch = default_data_collator(rows(evaluation_rows)[start : start + 3])
        with torch.no_grad():
            output = model(**batch)
            metrics.append(output.loss.item())
            # As many positions as rows.
            kept = model(input_ids=batch["input_ids"], logits_to_keep=torch.arange(len(batch["labels"]))).logits
            logits += [output.logits, model(input_ids=batch["input_ids"]).logits, kept]
    return metrics, prediction.predictions, logits, largest


# Seven rows end in a batch of one; five microbatches are more than any batch has rows.
@pytest.mark.parametrize(
    "layout",
    [
        MegatronConfig(pp_size=2),
        MegatronConfig(pp_size=2, tp_size=2),
        MegatronConfig(pp_size=2, num_microbatches=4, pipeline_schedule="interleaved_1f1b"),
    ],
    ids=lambda config: f"{config.layout()}-{config.pipeline_schedule}",
)
def test_evaluation_equals_one_process(stories, tmp_path, layout):
    layout = ConfigUnderTest(**layout.to_dict())
    [expected] = run_ranks(evaluate, 1, stories, tmp_path / "one", None, 7)
    for metrics, predictions, logits, largest in run_ranks(
        evaluate, layout.ranks_per_replica, stories, tmp_path / "two", layout, 7
    ):
        assert metrics == pytest.approx(expected[0], rel=2e-5)
        np.testing.assert_allclose(predictions, expected[1], atol=1e-3)
        for found, reference in zip(logits, expected[2], strict=True):
            torch.testing.assert_close(found, reference, rtol=0, atol=1e-3)
        # Only losses travelled while nobody asked for logits.
        assert 0 < largest <= 3
