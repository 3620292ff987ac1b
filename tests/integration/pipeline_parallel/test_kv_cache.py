"""Tests of evaluation with pipeline parallelism: generate() with every cache type, losses and predictions."""

import time

import numpy as np
import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModel,
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
# State space layers have a different cache type, with its own reordering for beam search.
BEAMS = ("qwen3_next", "lfm2_moe")
TP2_PP2 = ConfigUnderTest(pp_size=2, tp_size=2)
LAYOUTS = [
    ConfigUnderTest(pp_size=2, tp_size=2, sequence_parallel=True),
    ConfigUnderTest(pp_size=4),
    ConfigUnderTest(pp_size=2, pipeline_schedule="interleaved_1f1b", virtual_stages=2),
    ConfigUnderTest(pp_size=2, pipeline_schedule="zbv"),
]


def make_model(directory, model_type, layers=None):
    """Saves a tiny model whose attention windows are shorter than the generated sequences."""
    config = tiny_config(AutoConfig.for_model(model_type))
    # A tied head would repeat the last token regardless of the context.
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


def make_prompts():
    """Returns three left-padded prompts."""
    ids = torch.randint(3, 110, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :3] = mask[2, :5] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def generate(model, **kwargs):
    defaults = {"do_sample": False, "use_cache": True, "max_new_tokens": NEW_TOKENS}
    return model.generate(**(make_prompts() | defaults | kwargs))


def generate_tokens_and_logits(directory, config, kinds):
    """Returns the tokens and the logits they were chosen from, for each set of generation arguments."""
    model = load(directory, config)
    outputs = [generate(model, return_dict_in_generate=True, output_logits=True, **kind) for kind in kinds]
    return [(output.sequences, torch.stack(output.logits)) for output in outputs]


def generate_for_families(directories, config):
    return {
        name: generate_tokens_and_logits(directory, config, [{}, {"num_beams": 2}] if name in BEAMS else [{}])
        for name, directory in directories.items()
    }


def compute_logit_difference(found, expected):
    """Returns the largest difference between logits, or infinity if tokens differ."""
    pairs = [*zip(found, expected, strict=True)]
    if not all(torch.equal(tokens, reference) for (tokens, _), (reference, _) in pairs):
        return float("inf")
    return max((logits - reference).abs().max().item() for (_, logits), (_, reference) in pairs)


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Generations of each family in a single process, and on both pipeline ranks."""
    directories = {model_type: make_model(tmp_path_factory.mktemp(model_type), model_type) for model_type in FAMILIES}
    return generate_for_families(directories, None), run_ranks(generate_for_families, 2, directories, PP2)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families_match_single_process(families, model_type):
    expected, ranks = families
    for outputs in ranks:
        assert compute_logit_difference(outputs[model_type], expected[model_type]) < 1e-4


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """Model with sliding and full attention layers, and its single-process generations."""
    directory = make_model(tmp_path_factory.mktemp("gemma"), "gemma3_text", layers=5)
    return directory, generate_tokens_and_logits(directory, None, KINDS)


KINDS = [
    {},
    {"use_cache": False},
    {"num_beams": 3, "num_return_sequences": 2},
    {"cache_implementation": "static", "prefill_chunk_size": 3},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda config: f"{config.layout()}-{config.pipeline_schedule}")
def test_caches_on_every_layout(gemma, layout):
    directory, expected = gemma
    for outputs in run_ranks(generate_tokens_and_logits, layout.ranks_per_replica, directory, layout, KINDS):
        assert compute_logit_difference(outputs, expected) < 1e-4


def test_missing_cache_advance_changes_tokens(gemma):
    directory, expected = gemma

    def generate_without_advance():
        StagedCache.advance = lambda self, inputs: None
        return generate_tokens_and_logits(directory, PP2, [{}])

    for outputs in run_ranks(generate_without_advance, 2):
        assert compute_logit_difference(outputs, expected[:1]) == float("inf")


def test_cache_shared_between_stages_raises(gemma):
    directory, _ = gemma

    def generate_with_shared_cache():
        StagedCache.seen_by = lambda self, stage: self.cache
        return generate_tokens_and_logits(directory, LAYOUTS[-1], [{}])

    with pytest.raises(RankError, match="The size of tensor"):
        run_ranks(generate_with_shared_cache, 2)


class RecordingStreamer(BaseStreamer):
    def __init__(self):
        self.seen = []

    def put(self, value):
        self.seen.append(value)

    def end(self):
        self.seen.append(None)


class LocalTimeLimit(StoppingCriteria):
    """Stops by the clock of this rank."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((input_ids.shape[0],), time.monotonic() > self.end)


def run_generation_modes(directory, config):
    """Runs further generation modes: scores, streaming, assistants, embeddings, and caches edited by the user."""
    model = load(directory, config)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    results = {}
    full = generate(model, return_dict_in_generate=True, output_scores=True, output_logits=True)
    results["scores"], results["logits"] = torch.stack(full.scores), torch.stack(full.logits)
    streamer = RecordingStreamer() if rank == 0 else None
    one = {"input_ids": make_prompts()["input_ids"][:1], "attention_mask": make_prompts()["attention_mask"][:1]}
    results["streamed"] = generate(model, streamer=streamer, **one)
    if rank == 0:
        assert len(streamer.seen) == NEW_TOKENS + 2
    results["lookup"] = generate(model, prompt_lookup_num_tokens=3, **one)
    results["assistant"] = generate(model, assistant_model=load(directory, None), **one)
    embeddings = model.get_input_embeddings()(make_prompts()["input_ids"])
    results["embeddings"] = generate(model, input_ids=None, inputs_embeds=embeddings)

    # A user-created cache without a config, over two generations; then cropped, repeated and indexed.
    cache = DynamicCache()
    start = generate(model, past_key_values=cache, max_new_tokens=3)
    mask = torch.cat([make_prompts()["attention_mask"], torch.ones(3, 3, dtype=torch.long)], 1)
    results["continued"] = generate(
        model, input_ids=start, attention_mask=mask, past_key_values=cache, max_new_tokens=5
    )
    with torch.no_grad():
        cache = DynamicCache()
        ids = make_prompts()["input_ids"]
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


def test_generation_modes(stories):
    expected = run_generation_modes(stories, None)
    for results in run_ranks(run_generation_modes, 2, stories, PP2):
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(results[name], value, rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def generate_with_quantized_cache(directory, config):
    model = load(directory, config)
    cache = QuantizedCache("fp8", model.config)
    return generate(model, past_key_values=cache, num_beams=2)


def test_quantized_cache(stories):
    expected = generate_with_quantized_cache(stories, None)
    for tokens in run_ranks(generate_with_quantized_cache, 2, stories, PP2):
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=lambda config: config.layout())
def test_sampling_and_stopping_agree_across_ranks(stories, layout):
    def sample():
        rank = torch.distributed.get_rank()
        set_seed(rank)
        model = load(stories, layout)
        sequences = [generate(model, do_sample=True, top_k=0) for _ in range(2)]
        # Dropout draws separately on each stage.
        model.config.attention_dropout = 0.5
        for layer in model.modules():
            if "attention_dropout" in vars(layer):
                layer.attention_dropout = 0.5
        sequences.append(generate(model.train(), do_sample=True, top_k=0))
        model.eval()
        # A time limit that expires on one rank only, and one that expires at different times.
        criteria = StoppingCriteriaList([LocalTimeLimit(0.0 if rank == 0 else 1e6)])
        sequences.append(generate(model, stopping_criteria=criteria))
        sequences.append(generate(model, max_time=0.05 + rank, max_new_tokens=300))
        return sequences

    first, *others = run_ranks(sample, layout.ranks_per_replica)
    for other in others:
        assert all(torch.equal(*pair) for pair in zip(other, first, strict=True))
    assert not torch.equal(first[0], first[1])
    assert first[3].shape[1] == make_prompts()["input_ids"].shape[1] + 1


def test_unsupported_caches_are_rejected(stories):
    class OwnCache(DynamicCache):
        pass

    def on_rank():
        model = load(stories, PP2)
        ids = make_prompts()["input_ids"]
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

    run_ranks(on_rank, 2)


# Evaluation


def make_dataset(count, length=21):
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
    """Evaluates with Trainer, with and without metrics, and with a plain loop."""
    model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
    defaults = {"per_device_eval_batch_size": 3, "use_cpu": True, "report_to": [], "disable_tqdm": True}
    state = parallel_state(model)
    sent = []
    if state is not None:
        broadcast = state.pipeline.runner.transport.broadcast

        def count_and_broadcast(*args):
            received = broadcast(*args)
            sent.append(sum(tensor.numel() for tensor in received.tensors))
            return received

        state.pipeline.runner.transport.broadcast = count_and_broadcast

    def trainer(**kwargs):
        arguments = TrainingArguments(str(output), **(defaults | kwargs.pop("arguments", {})))
        dataset = make_dataset(evaluation_rows)
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
    prediction = only_loss.predict(make_dataset(4))
    metrics.append(prediction.metrics["test_loss"])
    model.eval()
    logits = []
    for start in range(0, evaluation_rows, 3):
        batch = default_data_collator(make_dataset(evaluation_rows)[start : start + 3])
        with torch.no_grad():
            output = model(**batch)
            metrics.append(output.loss.item())
            # As many positions as samples.
            subset_logits = model(
                input_ids=batch["input_ids"], logits_to_keep=torch.arange(len(batch["labels"]))
            ).logits
            logits += [output.logits, model(input_ids=batch["input_ids"]).logits, subset_logits]
    return metrics, prediction.predictions, logits, largest


# Seven samples end in a batch of one; four microbatches exceed the batch size of three.
@pytest.mark.parametrize(
    "layout",
    [
        MegatronConfig(pp_size=2),
        MegatronConfig(pp_size=2, tp_size=2),
        MegatronConfig(pp_size=2, num_microbatches=4, pipeline_schedule="interleaved_1f1b"),
    ],
    ids=lambda config: f"{config.layout()}-{config.pipeline_schedule}",
)
def test_evaluation_matches_single_process(stories, tmp_path, layout):
    layout = ConfigUnderTest(**layout.to_dict())
    [expected] = run_ranks(evaluate, 1, stories, tmp_path / "one", None, 7)
    for metrics, predictions, logits, largest in run_ranks(
        evaluate, layout.ranks_per_replica, stories, tmp_path / "two", layout, 7
    ):
        assert metrics == pytest.approx(expected[0], rel=2e-5)
        np.testing.assert_allclose(predictions, expected[1], atol=1e-3)
        for actual, reference in zip(logits, expected[2], strict=True):
            torch.testing.assert_close(actual, reference, rtol=0, atol=1e-3)
        # Only losses were broadcast, because no logits were requested.
        assert 0 < largest <= 3


def test_first_call_of_base_model_has_a_cache(stories):
    """No trial forward precedes it, so that only the last stage knows that the model returns hidden states."""
    ids = make_prompts()["input_ids"]

    def decode(**layout):
        model = AutoModel.from_pretrained(stories, **layout).eval()
        with torch.no_grad():
            outputs = model(ids[:, :4], use_cache=True)
            return model(ids[:, 4:], past_key_values=outputs.past_key_values).last_hidden_state

    expected = decode()
    for hidden_states in run_ranks(lambda: decode(megatron_config=PP2), 2):
        torch.testing.assert_close(hidden_states, expected, rtol=1e-4, atol=1e-5)
