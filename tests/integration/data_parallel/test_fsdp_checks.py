"""Stage 3: weights are whole within the model's forward only, and FSDP2's buffers are made once."""

import pytest
import torch

from tests.helpers.training import PatternRuns, local_samples, make_batch

LAYOUTS = ["dp2+zero3", "tp2+dp2+zero3"]


def called_before_the_first_forward(loop):
    with torch.no_grad():
        loop.model.model.layers[0](torch.zeros(1, 3, 32))


def embedding_called(loop):
    loop.step(0)
    rows = local_samples(loop.model, make_batch(1))
    embeds = loop.model.get_input_embeddings()(rows["input_ids"])
    loop.model(inputs_embeds=embeds, labels=rows["labels"]).loss.backward()


def head_called(loop):
    loop.step(0)
    loop.model.get_output_embeddings()(torch.zeros(1, 3, 32))


def part_of_a_layer_called(loop):
    loop.step(0)
    with torch.no_grad():
        loop.model.model.layers[0].mlp(torch.zeros(1, 3, 32))


def base_model_called(loop):
    loop.step(0)
    loop.model.model(input_ids=make_batch(0)["input_ids"])


def layer_called(loop):
    """Once more on what it was given, beside the loss."""
    layer, seen = loop.model.model.layers[1], []
    hook = layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    loss = loop.loss(0)
    hook.remove()
    [(args, kwargs)] = seen
    output = layer(*(value.detach() for value in args), **{**kwargs, "past_key_values": None})
    # Rows are as many on each rank, so that the mean over ranks is that of all.
    (loss + output.float().pow(2).mean()).backward()
    loop.losses.append(loss.item())
    loop.see_gradients("of the loss and the layer")
    loop.optimizer.step()
    loop.optimizer.zero_grad()


def cast_later(loop):
    loop.step(0)
    loop.model.double()
    loop.step(1)


# In this order: the first needs a model that never ran, the last leaves one that cannot.
LOOP_PATTERNS = {
    function.__name__: function
    for function in (
        called_before_the_first_forward,
        embedding_called,
        head_called,
        part_of_a_layer_called,
        base_model_called,
        layer_called,
        cast_later,
    )
}


@pytest.fixture(scope="module")
def runs(tiny):
    return PatternRuns(tiny, LOOP_PATTERNS)


@pytest.mark.parametrize("text", LAYOUTS)
@pytest.mark.parametrize(
    ("loop_pattern", "match"),
    [
        ("called_before_the_first_forward", "model.layers.0 was called before the model's first forward"),
        ("embedding_called", "model.embed_tokens "),
        ("head_called", "lm_head "),
        ("part_of_a_layer_called", "model.layers.0.mlp.gate_proj "),
        ("base_model_called", "model.embed_tokens "),
        ("cast_later", "was cast after its first forward"),
    ],
)
def test_refused(runs, loop_pattern, match, text):
    runs.refused(text, loop_pattern, match)


def test_a_layer_gathers_its_weights_itself(runs):
    runs.compare("dp2+zero3", "layer_called")
