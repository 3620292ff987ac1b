"""Cards of real saves: written by rank 0 with the weights, true to the log, and their code runs."""

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


def card_of(folder):
    """The checked card of a folder; an error if there is none of ours."""
    card = ModelCard.load(folder / "README.md")
    check_card(card)
    assert MARKER in card.text
    return card


def blocks(card, language):
    return re.findall(rf"```{language}\n(.*?)```", card.text, re.DOTALL)


def cells(card, heading):
    """The rows of the table below a heading, without the header."""
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
def test_save_pretrained_writes_a_card_whose_code_runs(stories, tmp_path, monkeypatch, config):
    run_ranks(save, 2, stories, tmp_path / "stories", config)
    card = card_of(tmp_path / "stories")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["hf_megatron", "tales"],
    }, "a folder is no base model"
    model, layout = dict(cells(card, "Model")), cells(card, "Layout")
    assert "# stories\n" in card.text and model["parameters"] == "260,032" and model["dtype"] == "`float32`"
    assert ["ranks", "2"] in layout
    for row in recorded_parity("LlamaForCausalLM", "llama", config).rows:
        found = next(line for line in layout if line[0] == f"`{row['layout']}`" and line[1] == str(row["tp_size"]))
        assert found[2:5] == [str(row.get("pp_size", 1)), "equal" if row["passed"] else "not equal", row["worst"]]
    monkeypatch.chdir(tmp_path / "stories")
    plain, parallel = blocks(card, "python")
    assert run_ranks(execute, 1, plain) == [260_032]
    counts = run_ranks(execute, 2, parallel)
    assert max(counts) <= 260_032 and sum(counts) >= 260_032


def test_a_card_of_the_user_stays_and_one_process_has_none(stories, tmp_path):
    (tmp_path / "README.md").write_text("# Mine\n")
    run_ranks(save, 2, stories, tmp_path, TP2_SP)
    assert (tmp_path / "README.md").read_text() == "# Mine\n" and (tmp_path / "model.safetensors").exists()
    run_ranks(save, 1, stories, tmp_path / "one", None)
    assert not (tmp_path / "one" / "README.md").exists()


def accuracy(prediction):
    right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
    return {"accuracy": float(right.mean())}


def path_as_a_metric(prediction):
    return {"/data/tales/accuracy": 0.5}


def make(path, output, config, trainer_class=Trainer, metrics=accuracy, **arguments):
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
    trainer = make(path, output, config, **arguments)
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


def losses(log, until):
    """The rows of the card's table: step, training loss, evaluation loss."""
    found = {}
    for entry in log:
        for name, place in (("loss", 0), ("eval_loss", 1)):
            if name in entry and entry["step"] <= until:
                found.setdefault(entry["step"], ["", ""])[place] = f"{entry[name]:.6g}"
    return [[str(step), *values] for step, values in sorted(found.items())]


@pytest.mark.parametrize(("name", "step"), [("run/checkpoint-2", 2), ("run/checkpoint-4", 4), ("final", 4)])
def test_a_trainers_card_has_its_numbers(trained, name, step):
    folder, log = trained
    card = card_of(folder / name)
    assert cells(card, "Losses") == losses(log, step)
    last = [entry for entry in log if "eval_loss" in entry and entry["step"] == step][-1]
    assert dict(cells(card, "Evaluation")) == {
        "loss": f"{last['eval_loss']:.6g}",
        "accuracy": f"{last['eval_accuracy']:.6g}",
    }
    training = dict(cells(card, "Training"))
    # Two rows on each of two dp ranks, accumulated twice.
    expected = {"optimizer steps": str(step), "rows of a step, all ranks": "8", "gradient accumulation": "2"}
    expected |= {"optimizer": "`AdamW`", "learning rate": "0.001", "seed": "11", "trainer": "`Trainer`"}
    assert expected.items() <= training.items()
    assert "generated_from_trainer" in card.data.tags
    picture = (folder / name / "loss.png").read_bytes()
    width, height = (int.from_bytes(picture[start : start + 4], "big") for start in (16, 20))
    assert picture[:8] == b"\x89PNG\r\n\x1a\n" and (width, height) == (880, 440) and len(picture) > 5000


def test_a_card_may_be_edited_and_training_goes_on(stories, trained):
    folder, log = trained
    path = folder / "run" / "checkpoint-2"
    assert not {"README.md", "loss.png"} & set(Checkpoint(path).manifest.files)
    (path / "README.md").write_text((path / "README.md").read_text() + "\nMore.\n")
    Checkpoint(path).verify()
    resumed = run_ranks(train, 2, stories, folder / "again", TP2_SP, str(path), eval_strategy="no")[0]
    assert [entry["step"] for entry in resumed if "loss" in entry] == [1, 2, 3, 4]
    assert cells(card_of(folder / "again" / "checkpoint-4"), "Losses")[:2] == losses(log, 2)


def test_a_checkpoints_card_is_carried_to_its_merged_files(trained, tmp_path, monkeypatch):
    folder, log = trained
    source, merged = folder / "run" / "checkpoint-4", tmp_path / "merged"
    [command] = blocks(card_of(source), "bash")
    assert command == "hf-megatron merge . ../merged\n"
    shutil.copytree(folder / "final", merged, ignore=shutil.ignore_patterns("README.md", "loss.png"))
    facts = dataclasses.replace(card_data_from_checkpoint(source), files=None)
    carry_card(source, merged, facts)
    card = card_of(merged)
    assert cells(card, "Losses") == losses(log, 4) and (merged / "loss.png").exists()
    assert "sharded checkpoint" not in card.text and "AutoTokenizer.from_pretrained(folder)" in card.text
    monkeypatch.chdir(merged)
    plain, parallel = blocks(card, "python")
    assert run_ranks(execute, 1, plain) == [260_032] and "tp_size=2" in parallel


def test_a_checkpoint_without_a_card_has_facts_for_one(trained, tmp_path):
    folder, log = trained
    source = folder / "run" / "checkpoint-4"
    facts = card_data_from_checkpoint(source)
    assert (facts.architecture, facts.model_type, facts.steps) == ("LlamaForCausalLM", "llama", 4)
    assert facts.layout.layout() == "tp2+dp2+zero1" and facts.world_size == 4 and facts.parity.kinds == ("tp",)
    assert facts.dtype == "float32" and facts.versions["hf_megatron"]
    write_card(tmp_path, facts)
    assert cells(card_of(tmp_path), "Losses") == losses(log, 4)


def test_background_and_weights_only_checkpoints_have_cards(stories, tmp_path):
    config = MegatronConfig(tp_size=2, async_save=True)
    run_ranks(train, 2, stories, tmp_path / "background", config, eval_strategy="no", max_steps=2)
    checkpoint = Checkpoint(tmp_path / "background" / "checkpoint-2")
    checkpoint.verify()
    assert cells(card_of(checkpoint.path), "Losses")
    arguments = {"eval_strategy": "no", "max_steps": 2, "save_only_model": True}
    run_ranks(train, 2, stories, tmp_path / "weights", PP2, **arguments)
    card = card_of(tmp_path / "weights" / "checkpoint-2")
    assert "# weights\n" in card.text and "from_pretrained" in card.text and len(cells(card, "Losses")) == 2


def test_create_model_card_takes_stocks_arguments(stories, tmp_path):
    given = {
        "language": "en",
        "license": "mit",
        "tags": "tiny",
        "model_name": "tuned-tales",
        "finetuned_from": "tests/stories",
        "dataset_tags": "tests/tales",
        "dataset": "Tales",
    }
    log = run_ranks(train, 2, stories, tmp_path, TP2_SP, card=given, save_strategy="no", max_steps=2)[0]
    card = card_of(tmp_path)
    found = card.data.to_dict()
    expected = {"language": ["en"], "license": "mit", "base_model": "tests/stories", "datasets": ["tests/tales"]}
    assert expected.items() <= found.items()
    assert found["tags"] == ["hf_megatron", "generated_from_trainer", "tiny"]
    last = [entry for entry in log if "eval_loss" in entry][-1]
    assert {result.metric_type: result.metric_value for result in card.data.eval_results} == {
        "loss": last["eval_loss"],
        "accuracy": last["eval_accuracy"],
    }
    assert "# tuned-tales\n" in card.text and "Tales" in dict(cells(card, "Training"))["data"]
    assert "How to load" not in card.text, "nothing was saved here"


def test_scripts_that_were_started_with_folders_have_cards_without_paths(stories, tmp_path):
    """As `run_glue.py` does it: the card was refused for the path."""
    given = {"finetuned_from": str(stories), "dataset_tags": str(tmp_path), "dataset": f"{tmp_path} plain"}
    run_ranks(train, 2, stories, tmp_path / "out", TP2_SP, card=given, save_strategy="no", max_steps=2)
    card = card_of(tmp_path / "out")
    check_card(card)
    assert not {"base_model", "datasets"} & card.data.to_dict().keys()
    assert str(tmp_path) not in str(card) and str(stories) not in str(card)
    shutil.copytree(stories, tmp_path / "stories")
    (tmp_path / "stories" / "README.md").write_text("---\nbase_model: tests/stories\n---\n")
    given["finetuned_from"] = str(tmp_path / "stories")
    run_ranks(train, 2, stories, tmp_path / "based", TP2_SP, card=given, save_strategy="no", max_steps=2)
    assert card_of(tmp_path / "based").data.base_model == "tests/stories"


def test_stocks_card_is_left_to_models_of_one_process(stories, tmp_path):
    log = run_ranks(train, 1, stories, tmp_path, None, card={}, save_strategy="no", max_steps=2)[0]
    assert MARKER not in (tmp_path / "README.md").read_text()
    assert log


def facts_in_one_process(path, output):
    trainer = make(path, output, None, save_strategy="no", load_best_model_at_end=False)
    before = card_data_from_trainer(trainer)
    trainer.train()
    return before, card_data_from_trainer(trainer), card_data_from_model(trainer.model)


def test_facts_of_one_process(stories, tmp_path):
    [(before, after, model)] = run_ranks(facts_in_one_process, 1, stories, tmp_path)
    assert (before.steps, before.log_history, before.optimizer, before.metrics) == (0, (), None, None)
    assert after.steps == 4 and after.batch_size == 4 and after.metrics_step == 4
    assert after.layout is None and after.parity is None and model.parameters == 260_032
    for facts in (before, after, model):
        check_card(render(facts))


def best_facts(path, output):
    """Evaluations at steps 2 and 4, the first the "best": at the end the trainer holds those weights."""
    trainer = make(
        path,
        output,
        MegatronConfig(tp_size=2),
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,
    )
    trainer.train()
    facts = card_data_from_trainer(trainer)
    trainer.evaluate()
    return facts, card_data_from_trainer(trainer), trainer.state.log_history


def test_metrics_are_those_of_the_weights(stories, tmp_path):
    facts, later, log = run_ranks(best_facts, 2, stories, tmp_path)[0]
    first = next(entry for entry in log if "eval_loss" in entry)
    assert facts.metrics_step == 2 and facts.metrics["loss"] == first["eval_loss"]
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


def test_trl_trainers_get_our_card_with_their_tags(stories, tmp_path):
    run_ranks(sft, 2, stories, tmp_path)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        card = card_of(folder)
        assert {"hf_megatron", "trl", "sft"} <= set(card.data.tags)
        assert dict(cells(card, "Training"))["trainer"] == "`SFTTrainer`" and "trl" in dict(cells(card, "Versions"))
    assert card_of(tmp_path).data.datasets == ["tests/tales"]


def train_with_warnings(*args, **kwargs):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(*args, **kwargs)
    return [str(warning.message) for warning in caught if "model card" in str(warning.message)]


def test_a_card_that_cannot_be_written_costs_no_checkpoint(stories, tmp_path):
    arguments = {"metrics": path_as_a_metric, "max_steps": 2, "final": tmp_path / "final"}
    first, second = run_ranks(train_with_warnings, 2, stories, tmp_path / "run", TP2_SP, **arguments)
    assert len(first) == 2 and all("'/data/tales/accuracy'" in text for text in first) and not second
    Checkpoint(tmp_path / "run" / "checkpoint-2").verify()
    assert not (tmp_path / "run" / "checkpoint-2" / "README.md").exists()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "final").num_parameters() == 260_032
    # The weights came with a card of their own, which the trainer's could not replace.
    assert "Evaluation" not in card_of(tmp_path / "final").text
