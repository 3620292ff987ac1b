"""Tests of model cards of real saves: rank 0 writes them with the weights, they match the log, and their code runs."""

import dataclasses
import re
import shutil
import warnings

import pytest
from datasets import Dataset
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator
from trl import SFTConfig, SFTTrainer

from hf_megatron import MegatronConfig
from hf_megatron.checkpoint.reader import Checkpoint
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.model_cards import (
    MARKER,
    card_data_from_checkpoint,
    card_data_from_model,
    card_data_from_trainer,
    carry_card,
    check_card,
    recorded_parity,
    render,
    write_card,
)
from tests.integration.integrations.trainer.test_trainer import rows

TP2_SP, PP2 = MegatronConfig(tp_size=2, sequence_parallel=True), MegatronConfig(pp_size=2)


def load_card(folder):
    """Returns the validated card of a folder, which this library must have written."""
    card = ModelCard.load(folder / "README.md")
    check_card(card)
    assert MARKER in card.text
    return card


def find_code_blocks(card, language):
    return re.findall(rf"```{language}\n(.*?)```", card.text, re.DOTALL)


def read_table(card, heading):
    """Returns the rows of the table under a heading, without the header."""
    lines = card.text.split(f"\n## {heading}\n")[1].split("\n## ")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")][2:]


def save(path, target, config, **arguments):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    model.add_model_tags("tales")
    model.save_pretrained(target, **arguments)


def execute(block):
    names = {}
    exec(block, names)
    return names["model"].num_parameters()


@pytest.mark.parametrize("config", [TP2_SP, PP2], ids=lambda config: config.layout())
def test_save_pretrained_card_code_runs(stories, tmp_path, monkeypatch, config):
    run_ranks(save, 2, stories, tmp_path / "stories", config)
    card = load_card(tmp_path / "stories")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf_megatron", "tales"],
    }, "a folder is no base model"
    model, layout = dict(read_table(card, "Model")), read_table(card, "Layout")
    assert "# stories\n" in card.text and model["parameters"] == "260,032" and model["dtype"] == "`float32`"
    assert ["ranks", "2"] in layout
    for row in recorded_parity("LlamaForCausalLM", "llama", config).rows:
        table_row = next(line for line in layout if line[0] == f"`{row['layout']}`" and line[1] == str(row["tp_size"]))
        assert table_row[2:5] == [str(row.get("pp_size", 1)), "equal" if row["passed"] else "not equal", row["worst"]]
    monkeypatch.chdir(tmp_path / "stories")
    plain, parallel = find_code_blocks(card, "python")
    assert run_ranks(execute, 1, plain) == [260_032]
    counts = run_ranks(execute, 2, parallel)
    assert max(counts) <= 260_032 and sum(counts) >= 260_032


def test_user_card_is_kept_and_stock_save_has_none(stories, tmp_path):
    (tmp_path / "README.md").write_text("# Mine\n")
    run_ranks(save, 2, stories, tmp_path, TP2_SP)
    assert (tmp_path / "README.md").read_text() == "# Mine\n" and (tmp_path / "model.safetensors").exists()
    run_ranks(save, 1, stories, tmp_path / "one", None)
    assert not (tmp_path / "one" / "README.md").exists()


def accuracy(prediction):
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


def return_path_metric(prediction):
    return {"/data/tales/accuracy": 0.5}


def make_trainer(path, output, config, metrics=accuracy, **arguments):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 4,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "seed": 11,
    }
    return Trainer(
        model,
        TrainingArguments(str(output), **(defaults | arguments)),
        train_dataset=rows(16, 0),
        eval_dataset=rows(4, 1),
        data_collator=default_data_collator,
        compute_metrics=metrics,
        processing_class=AutoTokenizer.from_pretrained(path),
    )


def train(path, output, config, resume=None, final=None, card=None, **arguments):
    trainer = make_trainer(path, output, config, **arguments)
    trainer.train(resume_from_checkpoint=resume)
    if final is not None:
        trainer.save_model(str(final))
    if card is not None:
        trainer.create_model_card(**card)
    return trainer.state.log_history


@pytest.fixture(scope="module")
def trained(stories, tmp_path_factory):
    """A run on tp2 x dp2 with sharded checkpoints, its merged save, and its log."""
    folder = tmp_path_factory.mktemp("trained")
    config = MegatronConfig(tp_size=2, dp_size=2)
    log = run_ranks(train, 4, stories, folder / "run", config, final=folder / "final")[0]
    return folder, log


def list_losses(log, until):
    """Returns the rows of the card's table: step, training loss, evaluation loss."""
    table = {}
    for entry in log:
        for name, place in (("loss", 0), ("eval_loss", 1)):
            if name in entry and entry["step"] <= until:
                table.setdefault(entry["step"], ["", ""])[place] = f"{entry[name]:.6g}"
    return [[str(step), *values] for step, values in sorted(table.items())]


@pytest.mark.parametrize(("name", "step"), [("run/checkpoint-2", 2), ("run/checkpoint-4", 4), ("final", 4)])
def test_trainer_card_matches_log(trained, name, step):
    folder, log = trained
    card = load_card(folder / name)
    assert read_table(card, "Losses") == list_losses(log, step)
    last = [entry for entry in log if "eval_loss" in entry and entry["step"] == step][-1]
    assert dict(read_table(card, "Evaluation")) == {
        "loss": f"{last['eval_loss']:.6g}",
        "accuracy": f"{last['eval_accuracy']:.6g}",
    }
    training = dict(read_table(card, "Training"))
    # Two samples on each of two data-parallel ranks, accumulated twice.
    expected = {"optimizer steps": str(step), "rows of a step, all ranks": "8", "gradient accumulation": "2"}
    expected |= {"optimizer": "`AdamW`", "learning rate": "0.001", "seed": "11", "trainer": "`Trainer`"}
    assert expected.items() <= training.items()
    assert "generated_from_trainer" in card.data.tags
    picture = (folder / name / "loss.png").read_bytes()
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and (width, height) == (880, 440) and len(picture) > 5000


def test_training_resumes_after_card_edit(stories, trained):
    folder, log = trained
    path = folder / "run" / "checkpoint-2"
    assert not {"README.md", "loss.png"} & set(Checkpoint(path).manifest.files)
    (path / "README.md").write_text((path / "README.md").read_text() + "\nMore.\n")
    Checkpoint(path).verify()
    resumed = run_ranks(train, 2, stories, folder / "again", TP2_SP, str(path), eval_strategy="no")[0]
    assert [entry["step"] for entry in resumed if "loss" in entry] == [1, 2, 3, 4]
    assert read_table(load_card(folder / "again" / "checkpoint-4"), "Losses")[:2] == list_losses(log, 2)


def test_checkpoint_card_is_carried_to_merged_model(trained, tmp_path, monkeypatch):
    folder, log = trained
    source, merged = folder / "run" / "checkpoint-4", tmp_path / "merged"
    [command] = find_code_blocks(load_card(source), "bash")
    assert command == "hf-megatron merge . ../merged\n"
    shutil.copytree(folder / "final", merged, ignore=shutil.ignore_patterns("README.md", "loss.png"))
    card_data = dataclasses.replace(card_data_from_checkpoint(source), files=None)
    carry_card(source, merged, card_data)
    card = load_card(merged)
    assert read_table(card, "Losses") == list_losses(log, 4) and (merged / "loss.png").exists()
    assert "sharded checkpoint" not in card.text and "AutoTokenizer.from_pretrained(folder)" in card.text
    monkeypatch.chdir(merged)
    plain, parallel = find_code_blocks(card, "python")
    assert run_ranks(execute, 1, plain) == [260_032] and "tp_size=2" in parallel


def test_checkpoint_provides_card_data(trained, tmp_path):
    folder, log = trained
    source = folder / "run" / "checkpoint-4"
    card_data = card_data_from_checkpoint(source)
    assert (card_data.architecture, card_data.model_type, card_data.steps) == ("LlamaForCausalLM", "llama", 4)
    assert (
        card_data.layout.layout() == "tp2+dp2+zero1" and card_data.world_size == 4 and card_data.parity.kinds == ("tp",)
    )
    assert card_data.dtype == "float32" and card_data.versions["hf_megatron"]
    write_card(tmp_path, card_data)
    assert read_table(load_card(tmp_path), "Losses") == list_losses(log, 4)


def test_async_and_weights_only_checkpoints_have_cards(stories, tmp_path):
    config = MegatronConfig(tp_size=2, async_save=True)
    run_ranks(train, 2, stories, tmp_path / "background", config, eval_strategy="no", max_steps=2)
    checkpoint = Checkpoint(tmp_path / "background" / "checkpoint-2")
    checkpoint.verify()
    assert read_table(load_card(checkpoint.path), "Losses")
    arguments = {"eval_strategy": "no", "max_steps": 2, "save_only_model": True}
    run_ranks(train, 2, stories, tmp_path / "weights", PP2, **arguments)
    card = load_card(tmp_path / "weights" / "checkpoint-2")
    assert "# weights\n" in card.text and "from_pretrained" in card.text and len(read_table(card, "Losses")) == 2


def test_create_model_card_accepts_stock_arguments(stories, tmp_path):
    kwargs = {
        "language": "en",
        "license": "mit",
        "tags": "tiny",
        "model_name": "tuned-tales",
        "finetuned_from": "tests/stories",
        "dataset_tags": "tests/tales",
        "dataset": "Tales",
    }
    log = run_ranks(train, 2, stories, tmp_path, TP2_SP, card=kwargs, save_strategy="no", max_steps=2)[0]
    card = load_card(tmp_path)
    metadata = card.data.to_dict()
    expected = {"language": ["en"], "license": "mit", "base_model": "tests/stories", "datasets": ["tests/tales"]}
    assert expected.items() <= metadata.items()
    assert metadata["tags"] == ["hf_megatron", "generated_from_trainer", "tiny"]
    last = [entry for entry in log if "eval_loss" in entry][-1]
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == {
        "loss": last["eval_loss"],
        "accuracy": last["eval_accuracy"],
    }
    assert "# tuned-tales\n" in card.text and "Tales" in dict(read_table(card, "Training"))["data"]
    assert "How to load" not in card.text, "nothing was saved here"


def test_cards_contain_no_local_paths(stories, tmp_path):
    """Regression: `run_glue.py` passes local folders, for which the card was rejected."""
    kwargs = {"finetuned_from": str(stories), "dataset_tags": str(tmp_path), "dataset": f"{tmp_path} plain"}
    run_ranks(train, 2, stories, tmp_path / "out", TP2_SP, card=kwargs, save_strategy="no", max_steps=2)
    card = load_card(tmp_path / "out")
    check_card(card)
    assert not {"base_model", "datasets"} & card.data.to_dict().keys()
    assert str(tmp_path) not in str(card) and str(stories) not in str(card)
    shutil.copytree(stories, tmp_path / "stories")
    (tmp_path / "stories" / "README.md").write_text("---\nbase_model: tests/stories\n---\n")
    kwargs["finetuned_from"] = str(tmp_path / "stories")
    run_ranks(train, 2, stories, tmp_path / "based", TP2_SP, card=kwargs, save_strategy="no", max_steps=2)
    assert load_card(tmp_path / "based").data.base_model == "tests/stories"


def test_unparallelized_model_gets_stock_card(stories, tmp_path):
    log = run_ranks(train, 1, stories, tmp_path, None, card={}, save_strategy="no", max_steps=2)[0]
    assert MARKER not in (tmp_path / "README.md").read_text()
    assert log


def collect_single_process_card_data(path, output):
    trainer = make_trainer(path, output, None, save_strategy="no", load_best_model_at_end=False)
    before = card_data_from_trainer(trainer)
    trainer.train()
    return before, card_data_from_trainer(trainer), card_data_from_model(trainer.model)


def test_single_process_card_data(stories, tmp_path):
    [(before, after, model)] = run_ranks(collect_single_process_card_data, 1, stories, tmp_path)
    assert (before.steps, before.log_history, before.optimizer, before.metrics) == (0, (), None, None)
    assert after.steps == 4 and after.batch_size == 4 and after.metrics_step == 4
    assert after.layout is None and after.parity is None and model.parameters == 260_032
    for card_data in (before, after, model):
        check_card(render(card_data))


def collect_best_model_card_data(path, output):
    """Evaluates at steps 2 and 4; step 2 counts as best, so the trainer ends with its weights."""
    trainer = make_trainer(
        path,
        output,
        MegatronConfig(tp_size=2),
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    trainer.train()
    card_data = card_data_from_trainer(trainer)
    trainer.evaluate()
    return card_data, card_data_from_trainer(trainer), trainer.state.log_history


def test_metrics_belong_to_saved_weights(stories, tmp_path):
    card_data, later, log = run_ranks(collect_best_model_card_data, 2, stories, tmp_path)[0]
    first = next(entry for entry in log if "eval_loss" in entry)
    assert card_data.metrics_step == 2 and card_data.metrics["loss"] == first["eval_loss"]
    assert later.metrics["loss"] == log[-1]["eval_loss"] == pytest.approx(first["eval_loss"], rel=1e-5)


def sft(path, output):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(tp_size=2))
    texts = ["a cat sat in the park", "a dog ran to the wood"] * 4
    arguments = {"per_device_train_batch_size": 2, "max_steps": 2, "save_steps": 2, "logging_steps": 1, "bf16": False}
    arguments |= {"report_to": [], "use_cpu": True, "disable_tqdm": True, "gradient_checkpointing": False}
    trainer = SFTTrainer(
        model,
        SFTConfig(str(output), **arguments),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=AutoTokenizer.from_pretrained(path, eos_token="</s>", pad_token="</s>"),
    )
    trainer.train()
    trainer.create_model_card(dataset_name="tests/tales")


def test_trl_trainer_card_has_trl_tags(stories, tmp_path):
    run_ranks(sft, 2, stories, tmp_path)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        card = load_card(folder)
        assert {"hf_megatron", "trl", "sft"} <= set(card.data.tags)
        assert dict(read_table(card, "Training"))["trainer"] == "`SFTTrainer`" and "trl" in dict(
            read_table(card, "Versions")
        )
    assert load_card(tmp_path).data.datasets == ["tests/tales"]


def train_with_warnings(*args, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*args, **kwargs)
    return [str(warning.message) for warning in caught if "model card" in str(warning.message)]


def test_failed_card_does_not_fail_checkpoint(stories, tmp_path):
    arguments = {"metrics": return_path_metric, "max_steps": 2, "final": tmp_path / "final"}
    first, second = run_ranks(train_with_warnings, 2, stories, tmp_path / "run", TP2_SP, **arguments)
    assert len(first) == 2 and all("'/data/tales/accuracy'" in text for text in first) and not second
    Checkpoint(tmp_path / "run" / "checkpoint-2").verify()
    assert not (tmp_path / "run" / "checkpoint-2" / "README.md").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final").num_parameters() == 260_032
    # The saved weights have a card of their own, which the trainer's card did not replace.
    assert "Evaluation" not in load_card(tmp_path / "final").text
