"""Tests of SentenceTransformerTrainer on parallelized models: global negatives, evaluation, saving, resuming."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.cross_encoder import losses as cross_losses
from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.sentence_transformer.losses import (
    CachedMultipleNegativesRankingLoss,
    CoSENTLoss,
    CosineSimilarityLoss,
    MatryoshkaLoss,
    MultipleNegativesRankingLoss,
)
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from sentence_transformers.sparse_encoder import losses as sparse_losses
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from hf_megatron import UnsupportedError
from hf_megatron.core.communication.collectives import gather_from_ranks
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.integrations import sentence_transformers as replaced
from hf_megatron.integrations.accelerate import batch_shards
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.conftest import TESTS

STEPS = 20
# Smallest tolerance, and its ratio to the rounding error of the single-process run.
LEAST, FACTOR = 1e-4, 8
LAYOUTS = {
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2},
    "dp2": {"dp_size": 2},
    "dp2+zero3": {"dp_size": 2, "zero_stage": 3},
    "tp2+dp2": {"tp_size": 2, "dp_size": 2},
}


def read_sentences(count):
    text = (TESTS / "data" / "tinystories_sample.txt").read_text("utf-8")
    return [line for line in text.split(".") if 20 < len(line) < 200][:count]


def pairs(count):
    halves = [(line[: len(line) // 2], line[len(line) // 2 :]) for line in read_sentences(count)]
    return Dataset.from_list([{"anchor": first, "positive": second} for first, second in halves])


def make_embedder(stories, layout, *further, dtype=torch.float32):
    arguments = {"dtype": dtype} if layout is None else {"megatron_config": layout}
    transformer = Transformer(str(stories), model_kwargs=arguments)
    transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    pooling = Pooling(transformer.get_embedding_dimension(), "mean")
    return SentenceTransformer(modules=[transformer, pooling, *further], device="cpu")


def make_evaluator():
    lines = read_sentences(12)
    return EmbeddingSimilarityEvaluator(lines[:6], lines[6:], [0.1, 0.9, 0.3, 0.7, 0.5, 0.2], write_csv=False)


def make_trainer(stories, folder, layout, loss=MultipleNegativesRankingLoss, rows=40, dtype=torch.float32, **arguments):
    model = make_embedder(stories, layout, dtype=dtype)
    replicas = 1 if layout is None else layout.dp_size or 1
    options = {"gather_across_devices": layout is not None} if loss is not CosineSimilarityLoss else {}
    data = pairs(rows)
    if loss is CosineSimilarityLoss:
        data = data.add_column("label", [0.1 * (row % 10) for row in range(rows)])
    defaults = {
        **{"per_device_train_batch_size": 8 // replicas, "max_steps": STEPS, "learning_rate": 1e-3, "logging_steps": 1},
        **{"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 5.0},
        **{"eval_strategy": "steps", "eval_steps": 10, "dataloader_drop_last": True},
    }
    return SentenceTransformerTrainer(
        model,
        SentenceTransformerTrainingArguments(str(folder), **(defaults | arguments)),
        train_dataset=data,
        loss=loss(model, **options),
        evaluator=make_evaluator(),
    )


def read_log(trainer):
    names = ("loss", "grad_norm", "eval_pearson_cosine")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


def train(stories, folder, layout, **arguments):
    trainer = make_trainer(stories, folder / "run", layout, **arguments)
    trainer.train()
    trainer.save_model(str(folder / "saved"))
    return read_log(trainer)


def assert_logs_match(found, expected, exact):
    """Compares logs with the single-process log; tolerances follow from `exact`, the same run in double precision."""
    limits = compute_limits(expected, exact)
    for log in found:
        assert len(log) == len(expected)
        for entry, other in zip(log, expected, strict=True):
            assert entry.keys() == other.keys()
            for name, value in entry.items():
                assert value == pytest.approx(other[name], rel=limits[name], abs=limits[name]), name


def compute_limits(expected, exact):
    """Returns a tolerance per metric: `FACTOR` times the rounding error of the single-process run."""
    limits = {}
    for entry, other in zip(expected, exact, strict=True):
        for name, value in entry.items():
            error = abs(value - other[name]) / max(1, abs(other[name]))
            limits[name] = max(limits.get(name, LEAST), FACTOR * error)
    return limits


def get_layout_and_ranks(name):
    sizes = LAYOUTS[name]
    layout = ConfigUnderTest(**sizes)
    return layout, layout.ranks_per_replica * (layout.dp_size or 1)


def train_in_both_precisions(stories, folder, **arguments):
    """Returns the single-process logs in single and in double precision."""
    [log] = run_ranks(train, 1, stories, folder, None, timeout=300, **arguments)
    [exact] = run_ranks(train, 1, stories, folder / "exact", None, timeout=300, dtype=torch.float64, **arguments)
    return log, exact


def train_on_ranks(name, stories, folder, **arguments):
    layout, count = get_layout_and_ranks(name)
    return run_ranks(train, count, stories, folder, layout, timeout=300, **arguments)


@pytest.fixture(scope="module")
def alone(stories, tmp_path_factory):
    """Single-process logs in single and double precision, and the embeddings of the saved model."""
    folder = tmp_path_factory.mktemp("alone")
    log, exact = train_in_both_precisions(stories, folder)
    assert sum("loss" in entry for entry in log) == STEPS and any("eval_pearson_cosine" in entry for entry in log)
    return log, exact, SentenceTransformer(str(folder / "saved"), device="cpu").encode(read_sentences(6))


@pytest.mark.parametrize("name", LAYOUTS)
def test_in_batch_negatives_from_all_ranks(stories, tmp_path, alone, name):
    log, exact, embeddings = alone
    assert_logs_match(train_on_ranks(name, stories, tmp_path), log, exact)
    saved = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert saved.encode(read_sentences(6)) == pytest.approx(embeddings, abs=1e-3)


@pytest.mark.parametrize("loss", [CachedMultipleNegativesRankingLoss, CosineSimilarityLoss])
@pytest.mark.parametrize("name", ["pp2", "tp2+dp2"])
def test_cached_and_similarity_losses(stories, tmp_path, loss, name):
    arguments = {"loss": loss, "max_steps": 4, "eval_strategy": "no"}
    expected = train_in_both_precisions(stories, tmp_path / "one", **arguments)
    assert_logs_match(train_on_ranks(name, stories, tmp_path / "split", **arguments), *expected)


def train_on_several_datasets(stories, folder, layout, batch_sampler="batch_sampler", dtype=torch.float32):
    """Trains round-robin on two datasets with different columns and losses; the first contains every pair twice."""
    model = make_embedder(stories, layout, dtype=dtype)
    replicas = 1 if layout is None else layout.dp_size or 1
    twice = Dataset.from_list([pair for pair in pairs(24) for _ in range(2)])
    scored = pairs(40).add_column("label", [0.1 * (row % 10) for row in range(40)])
    arguments = SentenceTransformerTrainingArguments(
        str(folder / "run"),
        **{"per_device_train_batch_size": 8 // replicas, "max_steps": 6, "learning_rate": 1e-3, "logging_steps": 1},
        **{"save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, "max_grad_norm": 5.0},
        **{"batch_sampler": batch_sampler, "multi_dataset_batch_sampler": "round_robin", "dataloader_drop_last": True},
    )
    negatives = MultipleNegativesRankingLoss(model, gather_across_devices=layout is not None)
    trainer = SentenceTransformerTrainer(
        model,
        arguments,
        train_dataset={"pairs": twice, "scored": scored},
        loss={"pairs": negatives, "scored": CosineSimilarityLoss(model)},
    )
    trainer.train()
    return read_log(trainer)


def train_on_several_datasets_in_both_precisions(stories, folder, *sampler):
    def on_rank(dtype):
        return train_on_several_datasets(stories, folder / str(dtype), None, *sampler, dtype=dtype)

    return [log for dtype in (torch.float32, torch.float64) for log in run_ranks(on_rank, 1, dtype, timeout=300)]


@pytest.mark.parametrize("batch_sampler", ["batch_sampler", "no_duplicates"])
def test_multi_dataset_batches(stories, tmp_path, batch_sampler):
    expected = train_on_several_datasets_in_both_precisions(stories, tmp_path, batch_sampler)
    layout, count = get_layout_and_ranks("dp2")
    assert_logs_match(
        run_ranks(train_on_several_datasets, count, stories, tmp_path / "two", layout, batch_sampler, timeout=300),
        *expected,
    )


def test_rank_local_batch_order_is_detected(stories, tmp_path, monkeypatch):
    expected = train_on_several_datasets_in_both_precisions(stories, tmp_path)
    monkeypatch.setattr(replaced, "_ranks_with_other_rows", lambda trainer: 1)
    layout, count = get_layout_and_ranks("dp2")
    with pytest.raises((AssertionError, RankError)):
        assert_logs_match(
            run_ranks(train_on_several_datasets, count, stories, tmp_path / "two", layout, timeout=300), *expected
        )


class StopsAtSave(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = True


def train_first_half(stories, folder, layout):
    trainer = make_trainer(stories, folder / "run", layout, save_strategy="steps", save_steps=10)
    trainer.add_callback(StopsAtSave())
    trainer.train()


def resume_second_half(stories, folder, layout):
    trainer = make_trainer(stories, folder / "run", layout)
    trainer.train(resume_from_checkpoint=True)
    return read_log(trainer)


def test_training_resumes_on_another_layout(stories, tmp_path, alone):
    layout, count = get_layout_and_ranks("tp2+sp")
    run_ranks(train_first_half, count, stories, tmp_path, layout, timeout=300)
    layout, count = get_layout_and_ranks("dp2")
    assert_logs_match(run_ranks(resume_second_half, count, stories, tmp_path, layout, timeout=300), *alone[:2])


@pytest.mark.parametrize(
    "fault",
    [
        (batch_shards, "get_batch_group", lambda: None),
        (replaced, "gather_from_ranks", lambda *given, sum_gradient: gather_from_ranks(*given)),
    ],
    ids=["own negatives only", "own gradient only"],
)
def test_incomplete_gathering_is_detected(stories, tmp_path, alone, monkeypatch, fault):
    monkeypatch.setattr(*fault)
    with pytest.raises(AssertionError):
        assert_logs_match(
            train_on_ranks("dp2", stories, tmp_path, max_steps=4, eval_strategy="no"), alone[0][:4], alone[1][:4]
        )


def test_unsupported_setups_are_rejected(stories, tmp_path):
    layout, count = get_layout_and_ranks("dp2")

    def on_rank():
        compared = make_trainer(stories, tmp_path, layout, eval_strategy="no")
        compared.loss = MatryoshkaLoss(compared.model, CoSENTLoss(compared.model), [32, 16])
        message = "CoSENTLoss .* compares the samples .* Use dp_size=1, or a loss with gather_across_devices=True"
        with pytest.raises(UnsupportedError, match=message):
            compared.train()
        # The loss only needs a module to call; the trainer's model is the parallelized one.
        scores = torch.nn.Module()
        for loss in (cross_losses.MultipleNegativesRankingLoss, cross_losses.LambdaLoss, sparse_losses.FlopsLoss):
            compared.loss = loss.__new__(loss)
            torch.nn.Module.__init__(compared.loss)
            compared.loss.model = scores
            with pytest.raises(UnsupportedError, match=f"{loss.__name__} .* compares the samples"):
                compared.train()
        model = make_embedder(stories, layout, Dense(64, 16))
        with pytest.raises(
            UnsupportedError, match=r"SentenceTransformer: it contains a parallelized \w+ and weights .*\(2\."
        ):
            SentenceTransformerTrainer(model, compared.args, train_dataset=pairs(8), loss=CosineSimilarityLoss(model))
        # A loss with `gather_across_devices=True`.
        return train_epoch(stories, tmp_path, layout, 40)

    [expected] = run_ranks(train_epoch, 1, stories, tmp_path, None, 40)
    for log in run_ranks(on_rank, count, timeout=200):
        for entry, other in zip(log, expected, strict=True):
            assert entry == pytest.approx(other, rel=1e-3)


# One epoch of five steps.
EPOCH = {"num_train_epochs": 1, "max_steps": -1, "eval_strategy": "no"}


def train_epoch(stories, folder, layout, rows, drops=True):
    trainer = make_trainer(stories, folder, layout, rows=rows, **EPOCH)
    # In a job with several ranks, sentence-transformers sets it to True, whatever the arguments say.
    trainer.args.dataloader_drop_last = drops
    trainer.train()
    return read_log(trainer)[:-1]


def test_incomplete_batches_are_rejected_or_dropped(stories, tmp_path):
    layout, count = get_layout_and_ranks("dp2")
    numbers = (
        "or train on a number of samples that is a multiple of per_device_train_batch_size times the data-parallel"
    )

    def on_rank():
        with pytest.raises(UnsupportedError, match=f"repeated samples, .* Set dataloader_drop_last=True, {numbers}"):
            train_epoch(stories, tmp_path, layout, 44, drops=False)
        return [train_epoch(stories, tmp_path, layout, *given) for given in ((44,), (40, False))]

    expected = run_ranks(lambda: [train_epoch(stories, tmp_path, None, rows) for rows in (44, 40)], 1)[0]
    for logs in run_ranks(on_rank, count, timeout=200):
        for log, alone in zip(logs, expected, strict=True):
            assert len(log) == 5
            for entry, other in zip(log, alone, strict=True):
                assert entry == pytest.approx(other, rel=1e-3)


def train_by_hand(stories, layout, rows, drops):
    """Returns the losses of an Accelerate loop over all batches."""
    model = make_embedder(stories, layout)
    loss_of = MultipleNegativesRankingLoss(model, gather_across_devices=layout is not None)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=False))
    loader = DataLoader(list(pairs(rows)), 8 if layout is None else 4, drop_last=drops, collate_fn=list)
    module, loader = accelerator.prepare(model, loader)
    losses = []
    for batch in loader:
        texts = [[row[name] for row in batch] for name in ("anchor", "positive")]
        loss = loss_of([module.tokenize(each) for each in texts], None)
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


def test_unequal_batch_sizes_across_ranks_are_rejected(stories):
    layout, count = get_layout_and_ranks("dp2")

    def on_rank():
        message = r"same batch size .* got \[4, 2\]. Set drop_last=True in the DataLoader .*, or train on a number"
        with pytest.raises(UnsupportedError, match=message):
            train_by_hand(stories, layout, 14, drops=False)
        return train_by_hand(stories, layout, 14, drops=True), train_by_hand(stories, layout, 16, drops=False)

    expected = [train_by_hand(stories, None, *given) for given in ((14, True), (16, False))]
    for results in run_ranks(on_rank, count):
        for losses, alone in zip(results, expected, strict=True):
            assert losses == pytest.approx(alone, rel=1e-4)


@pytest.mark.parametrize("layout", ["tp2+sp", "pp2", "dp2+zero3"])
def test_model_is_used_on_all_ranks_after_a_save(stories, tmp_path, layout):
    """The model card encodes examples, which rank 0 would do alone."""

    def on_rank():
        embedder = make_embedder(stories, ConfigUnderTest(**LAYOUTS[layout]))
        embedder.save_pretrained(str(tmp_path / "saved"))
        return embedder.encode(read_sentences(4)).sum().item()

    first, second = run_ranks(on_rank, 2)
    assert first == pytest.approx(second, rel=1e-5)
    assert "SentenceTransformer" in (tmp_path / "saved" / "README.md").read_text("utf-8")
