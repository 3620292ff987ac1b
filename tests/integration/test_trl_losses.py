"""TRL's trainers whose losses count tokens, pair rows or read whole logits themselves, against one process."""

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from hf_megatron import UnsupportedError
from hf_megatron.integrations import trl_losses
from hf_megatron.verify.ranks import run_ranks

from . import test_trl
from .test_trl import ANIMALS, PLACES, compare, laid_out_reference, layout, preferences, whole_reference

LAYOUTS = ["tp2", "tp2+sp", "pp2", "dp2", "cp2"]
CHAT = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"


@pytest.fixture(autouse=True)
def configs(monkeypatch):
    found = {KTOTrainer: KTOConfig, ORPOTrainer: ORPOConfig, CPOTrainer: CPOConfig, GKDTrainer: GKDConfig}
    for trainer_class, config_class in found.items():
        monkeypatch.setitem(test_trl.CONFIGS, trainer_class, config_class)


def unpaired(count, seed=0):
    """Answers that are good or bad: as many of either in a batch of one rank, and not."""
    rows = preferences(count, seed)
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if number % 3 else "rejected"], "label": bool(number % 3)}
        for number, row in enumerate(rows)
    ]


def conversations(count, seed=0):
    return [
        {
            "messages": [
                {"role": "user", "content": f"Where does the {ANIMALS[n % 5]} live?"},
                {"role": "assistant", "content": f"In the {PLACES[n % 4]}." + " It is happy." * (n % 3)},
            ]
        }
        for n in range(seed, seed + count)
    ]


def tokenizer(path, config):
    return AutoTokenizer.from_pretrained(path, pad_token="</s>", chat_template=CHAT)


def named(path, config):
    return str(path)


@torch.no_grad()
def shrink(model):
    """Makes a student that is not its teacher."""
    for parameter in model.parameters():
        parameter.mul_(0.98)


@pytest.mark.parametrize("text", [*LAYOUTS, "pp2+dp2"])
def test_kto(stories, tmp_path, text):
    options = {"by_name": True} if text == "tp2" else {"ref_model": laid_out_reference}
    compare(stories, tmp_path, text, KTOTrainer, unpaired, **options)


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize("trainer_class", [ORPOTrainer, CPOTrainer])
def test_losses_with_a_term_of_their_own(stories, tmp_path, trainer_class, text):
    compare(stories, tmp_path, text, trainer_class, preferences, processing_class=tokenizer, max_length=64)


@pytest.mark.parametrize("text", LAYOUTS)
def test_gkd_of_given_texts(stories, tmp_path, text):
    teacher = {"tp2": named, "pp2": laid_out_reference}.get(text, whole_reference)
    options = {"lmbda": 0.0, "max_length": 64, "teacher_model": teacher, "processing_class": tokenizer}
    if teacher is named:
        options["prepare"] = shrink
    # Logarithms of both distributions whole: the norm of the third step is off by 2.1e-5 on some processors.
    compare(stories, tmp_path, text, GKDTrainer, conversations, tolerance=5e-5, **options)


GIVEN = {"processing_class": tokenizer, "max_length": 64}
DISTILLED = GIVEN | {"lmbda": 0.0, "teacher_model": whole_reference}


@pytest.mark.parametrize(
    ("trainer_class", "samples", "options", "fault"),
    [
        (KTOTrainer, unpaired, {"ref_model": laid_out_reference}, ("data_parallel_size", lambda trainer: 1)),
        (ORPOTrainer, preferences, GIVEN, ("_spread", lambda trainer: None)),
        (CPOTrainer, preferences, GIVEN, ("_padded_alike", lambda trainer, batch: batch)),
        (GKDTrainer, conversations, DISTILLED, ("_spread", lambda trainer: None)),
    ],
)
def test_a_loss_of_one_rank_differs(stories, tmp_path, monkeypatch, trainer_class, samples, options, fault):
    monkeypatch.setattr(trl_losses, *fault)
    with pytest.raises(AssertionError):
        compare(stories, tmp_path, "dp2", trainer_class, samples, **options)


@pytest.mark.parametrize("given", [{"lmbda": 0.5}, {"lmbda": 0.0, "seq_kd": True}])
def test_gkd_that_generates_is_refused(stories, tmp_path, given):
    def build():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=layout("tp2"))
        args = GKDConfig(str(tmp_path), use_cpu=True, bf16=False, report_to=[], **given)
        with pytest.raises(UnsupportedError, match="GKDTrainer, (lmbda=0.5|seq_kd=True) with megatron_config"):
            rows = Dataset.from_list(conversations(2))
            GKDTrainer(model, str(stories), args=args, train_dataset=rows, processing_class=tokenizer(stories, None))

    run_ranks(build, 2)
