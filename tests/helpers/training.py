"""Harness for training-loop patterns that access gradients and weights, run on every layout.

A pattern is a function of a `Loop`. `tests/integration/fuzz/test_patterns.py` runs the patterns of `tests.fuzz`; the
patterns of this harness also compare gradients. All patterns of a file run sequentially from the same weights, in one
job per layout and one single-process job.
"""

import functools
import traceback
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_megatron import local_named_parameters, prepare_optimizer
from hf_megatron.checkpoint.gather_full import gather_to_first
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel.fsdp import full_local
from hf_megatron.parallelize import parallel_state
from hf_megatron.testing.measure import Measurement, _full
from hf_megatron.testing.tolerances import judge
from tests.helpers import dp_training
from tests.helpers.dp_training import clone_parameters, count_ranks, restore_parameters, shard_batch

LAYOUTS = ["tp2", "tp2+sp", "dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3", "tp2+dp2"]
# "+split" selects a schedule that computes input and weight gradients separately, "+chunks" a loss in chunks of tokens.
PIPELINES = ["pp2", "pp2+split", "tp2+pp2", "pp2+dp2+zero0", "pp2+dp2", "pp2+dp2+zero2", "pp2+dp2+zero3"]
FULL_BATCH_LAYOUTS = ["tp2", "tp2+sp", "pp2", "tp2+pp2"]


def parse_layout(text):
    if text.endswith("+chunks"):
        # Neither the tokens of a batch nor those of a sample divide by it.
        return replace(parse_layout(text.removesuffix("+chunks")), loss_chunk_size=5)
    config = dp_training.parse_layout(text.removesuffix("+split"))
    if text.endswith("+split"):
        config = replace(config, pipeline_schedule="interleaved_zero_bubble", virtual_stages=1)
    return config


def save_tiny(path, **fields):
    """Saves a Llama of two layers with random norms."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_attention_heads=4,
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
        | {"num_key_value_heads": 2, "tie_word_embeddings": True}
        | fields,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)


def make_batch(seed, rows=4, length=9):
    """Returns a batch with unequal numbers of labels per sample."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 64, (rows, length), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : int(torch.randint(0, length - 2, (1,), generator=generator))] = -100
    return {"input_ids": ids, "labels": labels}


def gather_full_tensors(model, values):
    """Gathers full weights or gradients by name: on tp rank 0, with pipeline stages on global rank 0 only."""
    state = parallel_state(model)
    values = {name: None if value is None else value.detach().clone() for name, value in values.items()}
    if state is None or state.mesh.pp_size > 1:
        return _full(model, values)
    gathered = {
        name: None if value is None else _gather_full_tensor(state, name, value) for name, value in values.items()
    }
    return gathered if state.mesh.tp_rank == 0 else {}


def _gather_full_tensor(state, name, tensor):
    placement, local = state.placement(name), None
    if state.shards(name):
        local = full_local(tensor, placement.local_shape(tensor.shape, state.axes), state.mesh, state.average(name))
    gathered = gather_to_first(tensor, placement, state.mesh, None, local)
    return None if gathered is None else gathered.clone()


@dataclass
class Loop:
    """Model in training with its optimizer, losses and recorded tensors."""

    model: Any
    path: Any = None
    optimizer: Any = None
    losses: list[float] = field(default_factory=list)
    seen: dict[str, torch.Tensor | None] = field(default_factory=dict)

    def __post_init__(self):
        self.optimizer = self.prepare(self.parameters())

    def prepare(self, parameters, make=torch.optim.SGD, **kwargs):
        options = {"lr": 0.05, "weight_decay": 0.1} | ({"momentum": 0.9} if make is torch.optim.SGD else {}) | kwargs
        return prepare_optimizer(make(parameters, **options))

    def parameters(self, part=""):
        return [parameter for name, parameter in self.model.named_parameters() if part in name]

    def loss(self, seed, **kwargs):
        return self.model(**shard_batch(self.model, make_batch(seed)), **kwargs).loss

    def backward(self, seed, factor=1.0):
        loss = self.loss(seed)
        (loss * factor).backward()
        self.losses.append(loss.item())

    def step(self, *seeds):
        """Runs an ordinary step with gradient accumulation over `seeds`."""
        for seed in seeds:
            self.backward(seed)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def see(self, name, tensor):
        """Records a tensor that is replicated on every rank."""
        self.seen[name] = None if tensor is None else torch.as_tensor(tensor).detach().clone().float()

    def rows(self, name, tensor, numbers):
        """Records a batch that is sharded over dp ranks; `numbers` are the local sample indices."""
        state = parallel_state(self.model)
        unsharded = torch.zeros(4, *tensor.shape[1:])
        unsharded[numbers] = tensor.detach().float()
        if state is not None and state.mesh.dp_size > 1:
            torch.distributed.all_reduce(unsharded, group=state.mesh.dp_group)
        self.see(name, unsharded)

    def see_gradients(self, when):
        gradients = gather_full_tensors(
            self.model, {name: parameter.grad for name, parameter in local_named_parameters(self.model)}
        )
        self.seen |= {f"{when}: {name}": gradient for name, gradient in gradients.items()}

    def measurement(self):
        """Returns the measurement after one more backward, which adds to the gradients that the pattern left."""
        self.backward(99)
        self.see_gradients("at the end")
        weights = gather_full_tensors(self.model, dict(local_named_parameters(self.model)))
        weights = {name: weight for name, weight in weights.items() if weight is not None}
        return Measurement(sum(self.losses), 0.0, 0.0, dict(self.seen), {"the habit": weights}), list(self.losses)


def run_patterns(path, text, loop_patterns, **kwargs):
    """Returns the measurement of each pattern, or the error that it raised."""
    model = AutoModelForCausalLM.from_pretrained(
        path, megatron_config=None if text is None else parse_layout(text), **kwargs
    ).train()
    start, results = clone_parameters(model), {}
    for name, loop_pattern in loop_patterns.items():
        model.zero_grad()
        model.requires_grad_(True)
        restore_parameters(model, start)
        loop = Loop(model, path)
        try:
            loop_pattern(loop)
            results[name] = loop.measurement()
        except Exception as error:  # noqa: BLE001
            results[name] = (type(error).__name__, str(error), traceback.format_exc())
    return results


def select_possible(loop_patterns, text, impossible):
    """Returns the patterns possible on a layout; `impossible` maps a substring of the layout to excluded names."""
    excluded = set().union(*(names for part, names in impossible.items() if part in (text or "")))
    return {name: loop_pattern for name, loop_pattern in loop_patterns.items() if name not in excluded}


def make_parameters(loop_patterns, layouts, impossible):
    """Returns parameters `name, text` of a test; ids begin with the layout, which the first tier selects by."""
    return [
        pytest.param(name, text, id=f"{text}-{name}")
        for text in layouts
        for name in select_possible(loop_patterns, text, impossible)
    ]


class PatternRuns:
    """Cached runs of all patterns, one per layout."""

    def __init__(self, path, loop_patterns, impossible=None, **kwargs):
        self.of = functools.cache(
            lambda text: self._run(path, text, select_possible(loop_patterns, text, impossible or {}), **kwargs)
        )

    def _run(self, path, text, loop_patterns, **kwargs):
        if text is None:
            return run_patterns(path, None, loop_patterns, **kwargs)
        return run_ranks(
            run_patterns, count_ranks(parse_layout(text)), path, text, loop_patterns, timeout=300, **kwargs
        )

    def compare(self, text, loop_pattern):
        """Raises if a pattern's run on a layout does not match the single-process run."""
        expected, losses = self.of(None)[loop_pattern]
        results = [rank_result[loop_pattern] for rank_result in self.of(text)]
        for rank_result in results:
            assert isinstance(rank_result[0], Measurement), rank_result[-1]
        for rank_result, rank_losses in results:
            torch.testing.assert_close(torch.tensor(rank_losses), torch.tensor(losses), rtol=1e-5, atol=0)
            if rank_result.weights["the habit"]:
                judgement = judge(rank_result, expected)
                assert judgement.passed, judgement.report()

    def refused(self, text, loop_pattern, match):
        """Raises unless a pattern raised this UnsupportedError on every rank."""
        for rank_results in self.of(text):
            kind, message, trace = rank_results[loop_pattern]
            assert kind == "UnsupportedError", trace
            assert match in message, message
