"""Tests of a class of a script with a value head, whose loss needs targets that are no labels."""

import pickle
import warnings
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaModel, LlamaPreTrainedModel
from transformers.utils import ModelOutput

from hf_megatron import RankError, UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.models.fingerprint import describe_model
from hf_megatron.testing.automatic_check import run_request
from hf_megatron.testing.tiny_config import tiny_config
from tests.helpers.dp_training import clone_parameters, count_ranks, parameters_unchanged, shard_batch


@dataclass
class ValueOutput(ModelOutput):
    loss: Tensor | None = None
    logits: Tensor | None = None
    value: Tensor | None = None


def compute_loss(outputs, labels, returns):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten()) + F.mse_loss(outputs.value, returns)


class LlamaWithValue(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.v_head = nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None, returns=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        outputs = ValueOutput(logits=self.lm_head(hidden), value=self.v_head(hidden).squeeze(-1))
        if labels is not None:
            outputs.loss = compute_loss(outputs, labels, returns)
        return outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("value_head")
    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING["llama"]())
    config.initializer_range = 0.2
    LlamaWithValue(config).save_pretrained(folder)
    return folder


def load(path, text, unverified="allow"):
    config = {} if text is None else {"megatron_config": replace(parse_layouts(text)[0], unverified=unverified)}
    with warnings.catch_warnings():
        # Without a comparison, as parity is compared here.
        warnings.simplefilter("ignore")
        return LlamaWithValue.from_pretrained(path, **config).train()


def make_batch():
    ids = torch.randint(3, 60, (4, 12), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, "returns": (ids % 7).float()}


def prepare(model, text):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    return optimizer if text is None else prepare_optimizer(optimizer)


def train(path, text, is_inside, fault=None):
    """Trains for three steps, with the loss in the model or in the script; returns the losses and gradient norms."""
    model = load(path, text)
    optimizer, numbers = prepare(model, text), []
    if fault is not None:
        fault(model)
    for _ in range(3):
        batch = shard_batch(model, make_batch())
        if is_inside:
            loss = model(**batch).loss
        else:
            loss = compute_loss(model(input_ids=batch["input_ids"]), batch["labels"], batch["returns"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        numbers.append((loss.item(), float(norm)))
    return numbers


def mean_over_replicas(results, text):
    replicas = 2 if "dp2" in text else 1
    per_replica = torch.tensor(results)[:: len(results) // replicas]
    return [tuple(step) for step in per_replica.mean(0).tolist()]


def compare(path, text, is_inside, fault=None):
    [expected] = run_ranks(train, 1, path, None, is_inside)
    results = run_ranks(train, count_ranks(parse_layouts(text)[0]), path, text, is_inside, fault)
    assert mean_over_replicas(results, text) == [pytest.approx(step, rel=1e-4) for step in expected]


@pytest.mark.parametrize(
    ("text", "is_inside"),
    [
        *((text, True) for text in ("tp2", "pp2")),
        *((text, False) for text in ("tp2", "dp2", "dp2+zero3", "tp2+dp2")),
    ],
)
def test_value_head_matches_single_process(folder, text, is_inside):
    compare(folder, text, is_inside)


def test_values_of_a_pipeline_are_rejected_by_name(folder):
    def on_rank():
        batch = make_batch()
        with pytest.raises(UnsupportedError, match="no attribute 'value': .* Load the model with pp_size=1"):
            compute_loss(load(folder, "pp2")(input_ids=batch["input_ids"]), batch["labels"], batch["returns"])

    run_ranks(on_rank, 2)


def drop_head_gradient(model):
    """Seeded fault: the value head's gradient does not reach the layers."""
    model.v_head.register_full_backward_hook(lambda module, inputs, outputs: tuple(0 * each for each in inputs))


def test_comparison_notices_lost_gradient(folder):
    with pytest.raises((AssertionError, RankError)):
        compare(folder, "tp2", True, drop_head_gradient)


@pytest.mark.parametrize("text", ["dp2", "dp2+zero3"])
def test_values_of_local_samples_are_rejected(folder, text):
    def on_rank():
        model = load(folder, text)
        optimizer, before = prepare(model, text), clone_parameters(model)
        with pytest.raises(UnsupportedError, match="LlamaWithValue adds a term to its loss that covers the samples of"):
            model(**shard_batch(model, make_batch())).loss.backward()
            optimizer.step()
        return parameters_unchanged(model, before)

    assert run_ranks(on_rank, 2) == [True, True]


class LlamaWithOptionalValue(LlamaWithValue):
    """Has a loss without returns, which are 0 by default."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, returns=None, **kwargs):
        outputs = super().forward(input_ids, attention_mask)
        if labels is not None:
            outputs.loss = compute_loss(
                outputs, labels, torch.zeros_like(outputs.value) if returns is None else returns
            )
        return outputs


class LlamaWithDict(LlamaWithOptionalValue):
    """Returns a plain dict."""

    def forward(self, *args, **kwargs):
        return dict(super().forward(*args, **kwargs))


def check_class(folder, tmp_path, model_class):
    """Runs the check of a model that is loaded on tp2, without its subprocess; returns its exit code."""
    with torch.device("meta"):
        model = model_class(LlamaConfig.from_pretrained(folder))
    request = {
        "class": model_class,
        "config_class": LlamaConfig,
        "config": model.config.to_dict(),
        "layouts": "tp2",
        "parts": [part.digest for part in describe_model(model).features({}).parts],
    }
    path = tmp_path / "request.pkl"
    path.write_bytes(pickle.dumps(request))
    return run_request(str(path))


def test_check_needs_a_loss_without_returns(folder, tmp_path, capsys):
    assert check_class(folder, tmp_path, LlamaWithValue) == 1
    report = capsys.readouterr().out
    assert "The check calls LlamaWithValue with its model type's inputs and labels only. Give other arguments" in report
    # Follows the advice.
    assert check_class(folder, tmp_path, LlamaWithOptionalValue) == 0, capsys.readouterr().out


def test_check_accepts_outputs_in_a_dict(folder, tmp_path, capsys):
    assert check_class(folder, tmp_path, LlamaWithDict) == 0, capsys.readouterr().out
