"""Tests of ZeRO-3: weights are full only within the model's forward, and FSDP2 allocates its buffers once."""

import contextlib

import pytest
import torch

from hf_megatron.compat.transformers_models import CACHE_OUTPUT
from tests.helpers.training import PatternRuns, make_batch, shard_batch

LAYOUTS = ["dp2+zero3", "tp2+dp2+zero3"]


def call_layer_before_first_forward(loop):
    with torch.no_grad():
        loop.model.model.layers[0](torch.zeros(1, 3, 32))


def call_embedding(loop):
    loop.step(0)
    rows = shard_batch(loop.model, make_batch(1))
    embeds = loop.model.get_input_embeddings()(rows["input_ids"])
    loop.model(inputs_embeds=embeds, labels=rows["labels"]).loss.backward()


def call_head(loop):
    loop.step(0)
    loop.model.get_output_embeddings()(torch.zeros(1, 3, 32))


def call_mlp(loop):
    loop.step(0)
    with torch.no_grad():
        loop.model.model.layers[0].mlp(torch.zeros(1, 3, 32))


def call_base_model(loop):
    loop.step(0)
    loop.model.model(input_ids=make_batch(0)["input_ids"])


def call_layer(loop):
    """Calls a layer again on its inputs and adds the result to the loss."""
    layer, calls = loop.model.model.layers[1], []
    hook = layer.register_forward_pre_hook(lambda module, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    loss = loop.loss(0)
    hook.remove()
    [(args, kwargs)] = calls
    output = layer(*(value.detach() for value in args), **{**kwargs, CACHE_OUTPUT: None})
    # All ranks have equally many samples, so that the mean over ranks is the global mean.
    (loss + output.float().pow(2).mean()).backward()
    loop.losses.append(loss.item())
    loop.see_gradients("of the loss and the layer")
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def cast_after_forward(loop):
    loop.step(0)
    loop.model.double()
    loop.step(1)


def clamp_in_forward(loop):
    """A hook of the user edits the unsharded weight, in the first forward."""
    layer = loop.model.model.layers[0].mlp.down_proj

    def clamp(module, args):
        with torch.no_grad():
            module.weight.clamp_(-0.01, 0.01)

    hook = layer.register_forward_pre_hook(clamp)
    try:
        loop.step(0)
    finally:
        hook.remove()


def clamp_in_later_forward(loop):
    loop.step(0)
    clamp_in_forward(loop)


# Order matters: the first pattern needs a model before its first forward, the last one makes the model unusable.
LOOP_PATTERNS = {
    function.__name__: function
    for function in (
        call_layer_before_first_forward,
        call_embedding,
        call_head,
        call_mlp,
        call_base_model,
        call_layer,
        clamp_in_forward,
        clamp_in_later_forward,
        cast_after_forward,
    )
}


@pytest.fixture(scope="module")
def runs(tiny):
    return PatternRuns(tiny, LOOP_PATTERNS)


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize(
    ("loop_pattern", "match"),
    [
        ("call_layer_before_first_forward", "model.layers.0 was called before the model's first forward"),
        ("call_embedding", "model.embed_tokens "),
        ("call_head", "lm_head "),
        ("call_mlp", "model.layers.0.mlp.gate_proj "),
        ("call_base_model", "model.embed_tokens "),
        ("clamp_in_forward", "was edited during the forward of a model with zero_stage=3"),
        ("clamp_in_later_forward", "was edited during the forward of a model with zero_stage=3"),
        ("cast_after_forward", "was cast after its first forward"),
    ],
)
def test_unsupported_calls_are_rejected(runs, loop_pattern, match, text):
    runs.refused(text, loop_pattern, match)


def test_layer_call_gathers_its_weights(runs):
    runs.compare("dp2+zero3", "call_layer")


def accumulate(loop, between):
    """Accumulates two microbatches; `between` runs after the first."""
    # A single process has no gradients to reduce.
    with getattr(loop.model, "no_sync", contextlib.nullcontext)():
        (loop.loss(0) / 2).backward()
        between()
    (loop.loss(1) / 2).backward()
    loop.see_gradients("of the second microbatch")
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def discard_by_optimizer(loop):
    accumulate(loop, loop.optimizer.zero_grad)


def discard_by_model(loop):
    accumulate(loop, loop.model.zero_grad)


def clip_between(loop):
    accumulate(loop, lambda: torch.nn.utils.clip_grad_norm_(loop.model.parameters(), 1.0))


ACCUMULATIONS = {f.__name__: f for f in (discard_by_optimizer, discard_by_model, clip_between)}


@pytest.fixture(scope="module")
def accumulations(tiny):
    return PatternRuns(tiny, ACCUMULATIONS)


@pytest.mark.parametrize("name", ["discard_by_optimizer", "discard_by_model"])
def test_gradients_are_discarded_inside_no_sync(accumulations, name):
    accumulations.compare("dp2+zero3", name)


def test_clipping_inside_no_sync_is_rejected(accumulations):
    accumulations.refused("dp2+zero3", "clip_between", "inside no_sync")
