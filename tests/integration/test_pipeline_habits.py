"""What a plain loop may do to a pipelined model, its losses and its gradients, against one process.

A habit is a step of a loop up to the gradients; two steps of SGD with momentum follow. Compared are the losses, the
gradients of the second step and the weights.
"""

import copy
import dataclasses
import functools
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
import transformers.trainer
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import (
    CONFIG_MAPPING,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RwkvConfig,
    RwkvForCausalLM,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_megatron import ConfigError, MegatronConfig, RankError, UnsupportedError, prepare_optimizer
from hf_megatron.integrations.gate import ConfigUnderTest
from hf_megatron.parallelize import parallel_state
from hf_megatron.pipeline_parallel.microbatches import split
from hf_megatron.verify.check import parse_layouts
from hf_megatron.verify.measure import OPTIMIZERS, Measurement, _full, _gradients, _rows_of_this_rank
from hf_megatron.verify.metric import judge
from hf_megatron.verify.ranks import run_ranks
from tests.shared_twins import make_twin

LAYOUTS = ("pp2", "tp2+pp2", "pp2+dp2+zero1")
PLAIN = LAYOUTS[:2]


@functools.cache
def twin_of(model_type="llama"):
    return make_twin(CONFIG_MAPPING[model_type](), microbatches=2, batch_size=4, min_layers=2)


class Loop:
    """What a habit works with: a model, its optimizer, batches, and which step it is."""

    def __init__(self, model, twin):
        self.model, self.batches, self.step = model.train(), twin.batches, 0
        self.optimizer = prepare_optimizer(OPTIMIZERS["sgd"](model.parameters(), twin.reference.norm))
        self.largest = max(g.abs().max().item() for g in twin.reference.gradients.values() if g is not None)
        self.other = None

    def batch(self, number=0):
        """Another one in each step."""
        return _rows_of_this_rank(self.model, self.batches[(number + self.step) % 2])

    def loss(self, number=0):
        return self.model(**self.batch(number)).loss

    def parameters(self):
        return [p.to_local() if isinstance(p, DTensor) else p for p in self.model.parameters()]

    def penalty(self):
        return sum((p.to_local() if isinstance(p, DTensor) else p).square().sum() for p in self.model.parameters())

    def outside(self, number=0):
        """A loss that the loop computes: its value belongs to the dp rank's rows, which are equally many."""
        batch = self.batch(number)
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1), batch["input_ids"][:, 1:].flatten(), reduction="none")
        return losses.mean()


def outcome(model, twin, habit, observe=None):
    loop = Loop(model, twin)
    losses, gradients = [], {}
    for loop.step in range(2):
        loop.optimizer.zero_grad()
        loss = habit(loop)
        losses.append(0.0 if loss is None else float(loss.detach()) if torch.is_tensor(loss) else loss)
        gradients = _full(model, _gradients(model))
        loop.optimizer.step()
    weights = _full(model, dict(model.named_parameters()))
    return Measurement(sum(losses), 1.0, 1.0, gradients, {"sgd": weights}, without=("",))


def config_of(layout, **changes):
    [config] = parse_layouts(layout)
    return ConfigUnderTest(**{**config.to_dict(), **changes})


def compare(habit, layout, *, reports=True, model_type="llama", **changes):
    """Raises unless a habit gives one process's numbers on every rank; `reports` compares losses too."""
    twin, config = twin_of(model_type), config_of(layout, **changes)
    expected = outcome(twin.load(), twin, habit)
    ranks = run_ranks(
        lambda: outcome(twin.load(megatron_config=config), twin, habit),
        config.ranks_per_replica * (config.dp_size or 1),
    )
    found = ranks[0]
    if not reports:
        found = dataclasses.replace(found, loss=expected.loss)
    judgement = judge(found, expected)
    assert judgement.passed, judgement.report()
    assert any(gradient is not None and gradient.any() for gradient in expected.gradients.values())


# Losses


def with_a_penalty(loop):
    loss = loop.loss()
    (loss + 0.1 * loop.penalty()).backward()
    return loss


def with_a_penalty_computed_first(loop):
    penalty = 0.1 * loop.penalty()
    loss = loop.loss()
    (loss + penalty).backward()
    return loss


def divided_with_a_penalty(loop):
    total = 0.0
    for number in range(2):
        loss = loop.loss(number)
        ((loss + 0.1 * loop.penalty()) / 2).backward()
        total += loss.item()
    return total


def two_losses_in_one_backward(loop):
    first, second = loop.loss(), loop.loss(1)
    (first + 3 * second.square()).backward()
    return first + second


def two_losses_in_two_backwards(loop):
    first, second = loop.loss(), loop.loss(1)
    (3 * second).backward()
    (first / 2).backward()
    return first + second


def zero_grad_between_forward_and_backward(loop):
    loss = loop.loss()
    loop.optimizer.zero_grad()
    loss.backward()
    return loss


def zero_grad_of_the_model_between(loop):
    loop.loss(1).backward()
    loss = loop.loss()
    loop.model.zero_grad()
    loss.backward()
    return loss


def a_forward_that_nobody_backpropagates(loop):
    loop.loss(1)
    loss = loop.loss()
    loop.loss(1)
    loss.backward()
    return loss


def an_evaluation_between(loop):
    loss = loop.loss()
    loop.model.eval()
    with torch.no_grad():
        loop.loss(1)
    loop.model.train()
    loss.backward()
    return loss


def the_same_loss_twice(loop):
    loss = loop.loss()
    loss.backward(retain_graph=True)
    (loss / 3).backward()
    return loss


def losses_of_two_models(loop):
    if loop.other is None:
        state = parallel_state(loop.model)
        config = {} if state is None else {"megatron_config": ConfigUnderTest(**state.config.to_dict())}
        loop.other = twin_of().load(**config).train()
    loss = loop.loss() * loop.other(**loop.batch(1)).loss
    loss.backward()
    assert any(parameter.grad is not None for parameter in loop.other.parameters()) or parallel_state(loop.other)
    return loss


def outside_with_a_penalty(loop):
    loss = loop.outside()
    ((loss + 0.1 * loop.penalty()) / 4).backward()
    return None


def outside_twice(loop):
    loss = loop.outside()
    loss.backward(retain_graph=True)
    (loss / 3).backward()
    return None


def inside_and_outside(loop):
    (loop.loss() + loop.outside(1)).backward()
    return None


LOSSES = [
    with_a_penalty,
    with_a_penalty_computed_first,
    divided_with_a_penalty,
    two_losses_in_one_backward,
    two_losses_in_two_backwards,
    zero_grad_between_forward_and_backward,
    zero_grad_of_the_model_between,
    a_forward_that_nobody_backpropagates,
    an_evaluation_between,
    the_same_loss_twice,
    losses_of_two_models,
    outside_with_a_penalty,
    outside_twice,
    inside_and_outside,
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("habit", LOSSES, ids=lambda habit: habit.__name__)
def test_losses(habit, layout):
    compare(habit, layout)


@pytest.mark.parametrize("habit", [with_a_penalty, two_losses_in_one_backward], ids=lambda habit: habit.__name__)
@pytest.mark.parametrize("layout", ["pp2+dp2+zero0", "pp2+dp2+zero2", "pp2+dp2+zero3", "gemma2 pp2", "split pp2"])
def test_losses_on_other_layouts(habit, layout):
    """Other stages of ZeRO, a tied embedding, a split backward."""
    what, _, text = layout.rpartition(" ")
    changes = {"pipeline_schedule": "interleaved_zero_bubble", "virtual_stages": 1} if what == "split" else {}
    if habit is with_a_penalty and "zero3" in text:
        # The penalty of this rank's part of a weight is not summed over the ranks that hold the others.
        habit = two_losses_in_two_backwards
    model_type = what if what == "gemma2" else "gpt2" if what == "split" else "llama"
    compare(habit, text, model_type=model_type, **changes)


# Gradients


def grad_is_set_to_none(loop):
    for parameter in loop.model.parameters():
        parameter.grad = None
    loss = loop.loss()
    loss.backward()
    return loss


def zeros_are_kept(loop):
    loop.optimizer.zero_grad(set_to_none=False)
    loss = loop.loss()
    loss.backward()
    return loss


def zeros_of_the_model_are_kept(loop):
    loop.model.zero_grad(set_to_none=False)
    loss = loop.loss()
    loss.backward()
    return loss


def clipped_by_value(loop):
    loss = loop.loss()
    loss.backward()
    torch.nn.utils.clip_grad_value_(loop.model.parameters(), 0.3 * loop.largest)
    return loss


def doubled_by_hooks(loop):
    """Once for each gradient, and not for each microbatch: a square would tell the difference."""
    calls = []
    handles = [p.register_hook(lambda g: calls.append(1) or g * g.abs()) for p in loop.model.parameters()]
    loss = loop.loss()
    (loss / 2).backward()
    assert len(calls) == len(handles)
    for handle in handles:
        handle.remove()
    return loss


def steps_in_hooks(loop):
    """An optimizer in backward: what is left in `.grad` is compared as usual."""

    def step(parameter):
        with torch.no_grad():
            parameter.sub_(parameter.grad, alpha=1e-3)

    handles = [p.register_post_accumulate_grad_hook(step) for p in loop.model.parameters()]
    loss = loop.loss() + loop.outside(1)
    loss.backward()
    for handle in handles:
        handle.remove()
    return None


def asked_of_autograd(loop):
    parameters = list(loop.model.parameters())
    loss = loop.loss()
    found = torch.autograd.grad(loss / 2, parameters)
    assert all(parameter.grad is None for parameter in parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    return loss


def asked_of_autograd_in_parts(loop):
    parameters = list(loop.model.parameters())
    loss = loop.loss()
    for index, parameter in enumerate(parameters):
        last = index == len(parameters) - 1
        [parameter.grad] = torch.autograd.grad(loss, [parameter], retain_graph=not last)
    return loss


def asked_of_autograd_outside(loop):
    parameters = list(loop.model.parameters())
    found = torch.autograd.grad(loop.outside(), parameters)
    for parameter, gradient in zip(parameters, found, strict=True):
        parameter.grad = gradient
    return None


def backward_of_some(loop):
    parameters = [p for name, p in loop.model.named_parameters() if "mlp" in name]
    loss = loop.loss()
    loss.backward(inputs=parameters)
    return loss


GRADIENTS = [
    grad_is_set_to_none,
    zeros_are_kept,
    zeros_of_the_model_are_kept,
    clipped_by_value,
    doubled_by_hooks,
    steps_in_hooks,
    asked_of_autograd,
    asked_of_autograd_in_parts,
    asked_of_autograd_outside,
    backward_of_some,
]


@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize("habit", GRADIENTS, ids=lambda habit: habit.__name__)
def test_gradients(habit, layout):
    compare(habit, layout)


def test_gradients_are_handed_over_without_a_copy():
    twin = twin_of()

    def on_rank():
        model = twin.load(megatron_config=config_of("pp2")).train()
        loss = model(**twin.batches[0]).loss
        pipeline, kept = parallel_state(model).pipeline, {}
        store = pipeline.engine.gradients
        original = type(store).hand_over

        def hand_over(self, sums, *args, **kwargs):
            kept.update({id(p): g.data_ptr() for p, g in zip(self.parameters, sums, strict=True)})
            return original(self, sums, *args, **kwargs)

        type(store).hand_over = hand_over
        loss.backward()
        return [parameter.grad.data_ptr() == kept[id(parameter)] for parameter in model.parameters()]

    for same in run_ranks(on_rank, 2):
        assert same and all(same)


@pytest.mark.parametrize("habit", [asked_of_autograd, asked_of_autograd_outside, doubled_by_hooks, backward_of_some])
def test_gradients_that_ranks_average_are_not_handed_out(habit):
    twin = twin_of()

    def on_rank():
        loop = Loop(twin.load(megatron_config=config_of("pp2+dp2+zero1")), twin)
        with pytest.raises(UnsupportedError, match="dp_size|averaged over"):
            habit(loop)

    run_ranks(on_rank, 4)


def test_what_no_pipeline_can_do():
    twin = twin_of()

    def on_rank():
        loop = Loop(twin.load(megatron_config=config_of("pp2")), twin)
        loss = loop.loss()
        loss.backward()
        with pytest.raises(ConfigError, match="twice"):
            loss.backward()
        loss = loop.outside()
        loss.backward()
        with pytest.raises((ConfigError, RuntimeError), match="twice|second time"):
            loss.backward()
        with pytest.raises(UnsupportedError, match="create_graph"):
            loop.loss().backward(create_graph=True)

    run_ranks(on_rank, 2)


# Inputs that are trained


def embeddings_of(loop, number=0):
    """The same for every layout: drawn, not looked up."""
    batch = loop.batches[(number + loop.step) % 2]
    generator = torch.Generator().manual_seed(7)
    width = loop.model.config.hidden_size
    drawn = torch.randn(*batch["input_ids"].shape, width, generator=generator)
    whole = {"drawn": drawn, "attention_mask": batch["attention_mask"], "labels": batch["labels"]}
    return _rows_of_this_rank(loop.model, whole)


def gradients_of_inputs(model, twin, kind):
    """Of a leaf, or of a soft prompt that embeddings are made of, for two steps."""
    loop = Loop(model, twin)
    found = []
    for loop.step in range(2):
        batch = embeddings_of(loop)
        prompt = torch.ones(model.config.hidden_size, requires_grad=True)
        embeddings = batch["drawn"].requires_grad_() if kind == "leaf" else batch["drawn"] * prompt
        arguments = {"inputs_embeds": embeddings, "attention_mask": batch["attention_mask"]}
        if kind == "outside":
            loss = model(**arguments).logits.float().square().mean()
        else:
            loss = model(**arguments, labels=batch["labels"]).loss
        if kind == "asked":
            [gradient] = torch.autograd.grad(loss / 4, [prompt])
            found.append(gradient)
            continue
        (loss / 4).backward()
        trained = embeddings if kind == "leaf" else prompt
        found.append(trained.grad)
    return [gradient.clone() for gradient in found]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["leaf", "prompt", "outside", "asked"])
def test_trained_inputs(kind, layout):
    twin, config = twin_of(), config_of(layout)
    expected = gradients_of_inputs(twin.load(), twin, kind)

    def on_rank():
        model = twin.load(megatron_config=config)
        if config.dp_size and kind != "leaf":
            # Nobody reduces the gradient of a prompt that is the loop's own.
            with pytest.raises(UnsupportedError, match="parameters of the model"):
                gradients_of_inputs(model, twin, kind)
            return None
        return parallel_state(model).mesh.dp_rank, gradients_of_inputs(model, twin, kind)

    ranks = run_ranks(on_rank, config.ranks_per_replica * (config.dp_size or 1))
    if config.dp_size and kind == "leaf":
        by_rank = dict(ranks)
        ranks = [(0, [torch.cat(parts) for parts in zip(by_rank[0], by_rank[1], strict=True)])]
    elif config.dp_size:
        return
    for _, found in ranks:
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def test_trained_inputs_with_a_split_backward():
    twin = twin_of("gpt2")
    config = config_of("pp2", pipeline_schedule="interleaved_zero_bubble", virtual_stages=1)
    expected = gradients_of_inputs(twin.load(), twin, "prompt")
    for found in run_ranks(lambda: gradients_of_inputs(twin.load(megatron_config=config), twin, "prompt"), 2):
        for one, other in zip(found, expected, strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


# Memory


def test_outputs_are_freed_when_they_are_dropped():
    twin = twin_of()

    def on_rank():
        model = twin.load(megatron_config=config_of("pp2"))
        ids = twin.batches[0]["input_ids"]
        gc.collect()
        gc.disable()
        alive = []
        for context in (torch.no_grad, torch.enable_grad):
            with context():
                output = model(input_ids=ids)
            alive.append(weakref.ref(output.logits))
            if output.logits.grad_fn is not None:
                output.logits.sum().backward()
                alive.append(weakref.ref(output.logits.grad_fn))
                output = model(input_ids=ids)
                alive.append(weakref.ref(output.logits.grad_fn))
            del output
        model.train()
        output = model(**twin.batches[0])
        alive.append(weakref.ref(output.loss.grad_fn))
        del output
        return [reference() is not None for reference in alive]

    for alive in run_ranks(on_rank, 2):
        assert len(alive) == 5 and not any(alive)


# Weights


def weights_edited_between_steps(loop):
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(0.9)
    loss = loop.loss()
    loss.backward()
    return loss


def an_average_of_weights(loop):
    """Kept over state dicts, loaded in the second step."""
    present = loop.model.state_dict()
    if loop.other is None:
        loop.other = {name: tensor.detach().clone() for name, tensor in present.items()}
    for name, tensor in present.items():
        loop.other[name].mul_(0.5).add_(tensor, alpha=0.5)
    if loop.step == 1:
        loop.model.load_state_dict(loop.other)
    loss = loop.loss()
    loss.backward()
    return loss


def parts_of_a_state_dict(loop):
    """Full tensors for every name, then for some."""
    if loop.other is None:
        loop.other = twin_of().load().state_dict()
    parts = {name: tensor * 0.9 for name, tensor in loop.other.items() if "mlp" in name or loop.step == 0}
    result = loop.model.load_state_dict(parts, strict=loop.step == 0)
    assert set(result.missing_keys) == loop.other.keys() - parts.keys() and not result.unexpected_keys
    loss = loop.loss()
    loss.backward()
    return loss


def frozen_between_steps(loop):
    for name, parameter in loop.model.named_parameters():
        parameter.requires_grad_(("mlp" in name) == (loop.step == 1))
    loss = loop.loss()
    loss.backward()
    return loss


def in_double_precision(loop):
    """From the second step on, and an evaluation in the first one's precision before."""
    with torch.no_grad():
        before = loop.loss().item()
    if loop.step == 1:
        loop.model.double()
    loss = loop.loss()
    loss.backward()
    return loss.detach() + before


WEIGHTS = [
    weights_edited_between_steps,
    an_average_of_weights,
    parts_of_a_state_dict,
    frozen_between_steps,
    in_double_precision,
]


@pytest.mark.parametrize("layout", PLAIN)
@pytest.mark.parametrize("habit", WEIGHTS, ids=lambda habit: habit.__name__)
def test_weights(habit, layout):
    compare(habit, layout)


@pytest.mark.parametrize(("model_type", "layout"), [("llama", "pp2"), ("gemma2", "tp2+pp2"), ("gpt2", "pp2")])
def test_state_dict_and_counts_are_the_whole_models(model_type, layout, tmp_path):
    twin = twin_of(model_type)
    stock = twin.load()
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in stock.state_dict().items()}
    choices = [{}, {"only_trainable": True}, {"exclude_embeddings": True}]
    choices.append({"only_trainable": True, "exclude_embeddings": True})

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name or "embed" in name)
        counts = [model.num_parameters(**choice) for choice in choices]
        return [*counts, transformers.trainer.get_model_param_count(model, trainable_only=True)]

    def on_rank():
        model = twin.load(megatron_config=config_of(layout))
        found = model.state_dict()
        assert list(found) == list(expected)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == expected
        absent = {name: tensor for name, tensor in found.items() if type(tensor).__name__ == "AbsentTensor"}
        assert absent and len(absent) < len(found)
        copied = {name: tensor.detach().clone().to(torch.float64) for name, tensor in found.items()}
        assert {tensor.dtype for tensor in copied.values()} == {torch.float64}
        name, tensor = next(iter(absent.items()))
        assert (copy.deepcopy(tensor) + 1).sum().shape == ()
        for read in (
            lambda: tensor.sum().item(),
            lambda: torch.equal(tensor, tensor),
            lambda: tensor.numpy(),
            lambda: torch.save(found, tmp_path / f"{parallel_state(model).mesh.pp_rank}.pt"),
            lambda: save_file({name: tensor}, tmp_path / "x.safetensors"),
            lambda: torch.zeros(tensor.shape).copy_(tensor),
            lambda: bool((tensor == tensor).all()),
        ):
            with pytest.raises(UnsupportedError, match="pp rank"):
                read()
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
            model.load_state_dict({**found, name: torch.zeros(1)})
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({other: value for other, value in found.items() if other != name})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict({**found, f"{name}.more": torch.zeros(1)})
        model.bfloat16()
        assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {
            torch.bfloat16
        }
        return freeze(model.float())

    assert run_ranks(on_rank, config_of(layout).ranks_per_replica) == [freeze(stock)] * len(
        range(config_of(layout).ranks_per_replica)
    )


def test_hooks_of_a_save_get_the_weights(tmp_path):
    twin = twin_of()

    def on_rank():
        model = twin.load(megatron_config=config_of("pp2"))
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        seen = []
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: seen.append(weights.pop()))
        accelerator.save_state(tmp_path / "saved")
        assert isinstance(model, torch.nn.Module)
        return seen[0]

    expected = twin.load().state_dict()
    found = run_ranks(on_rank, 2)[0]
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# What enters and leaves a call


def packed(config):
    """Two documents in each row, told by their positions only; the config asks for a cache."""
    model = twin_of().load(**({} if config is None else {"megatron_config": config})).train()
    model.config.use_cache = True
    ids = torch.arange(4 * 12).view(4, 12) % 7 + 3
    positions = torch.arange(6).repeat(4, 2)
    batch = _rows_of_this_rank(model, {"input_ids": ids, "position_ids": positions, "labels": ids})
    arguments = {"use_cache": False} if config is None else {}
    output = model(**batch, **arguments)
    assert output.get("past_key_values") is None
    leaking = model(**batch | {"position_ids": torch.arange(12).expand(len(batch["labels"]), 12)}).loss
    return output.loss.item(), leaking.item()


@pytest.mark.parametrize("layout", ["tp2", "pp2", "dp2"])
def test_packed_rows_do_not_see_each_other_in_a_plain_loop(layout):
    """In one process `use_cache=True` of the config makes one document of them."""
    config = config_of(layout)
    expected, other = packed(None)
    assert abs(expected - other) > 1e-3
    for found in run_ranks(lambda: packed(config), 2):
        assert found == pytest.approx((expected, other), rel=1e-6)


def test_a_cache_that_is_asked_for_in_training():
    def on_rank():
        model = twin_of().load(megatron_config=config_of("tp2")).train()
        ids = twin_of().batches[0]["input_ids"]
        model.config.use_cache = True
        caches = [model(input_ids=ids).past_key_values, model(input_ids=ids, use_cache=True).past_key_values]
        with torch.no_grad():
            caches.append(model(input_ids=ids).past_key_values)
        model.eval()
        return [cache is not None for cache in [*caches, model(input_ids=ids).past_key_values]]

    assert run_ranks(on_rank, 2) == [[False, True, True, True]] * 2


def tuples(model, batch):
    model.config.output_router_logits = True
    found = []
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            values = model(**batch, return_dict=False, use_cache=False)
        found.append([value.item() for value in values[:2]])
        assert len(values) >= 3
    return found


def test_tuples_have_the_order_of_one_process():
    twin = twin_of("mixtral")
    config = config_of("pp2", num_microbatches=1)
    expected = tuples(twin.load(), twin.batches[0])
    for found in run_ranks(lambda: tuples(twin.load(megatron_config=config), twin.batches[0]), 2):
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_calls_that_are_refused_before_the_schedule():
    """On every rank alike, by the name of what it is, and the model trains on."""
    twin = twin_of()

    def on_rank():
        model = twin.load(megatron_config=config_of("pp2")).train()
        batch = twin.batches[0]
        ids = batch["input_ids"]
        with pytest.raises(UnsupportedError, match="Call the whole model"):
            model.model(input_ids=ids)
        for name, tensor in {
            "cu_seq_lens_q": torch.arange(len(ids)),
            "weights_of_rows": torch.ones(len(ids)),
            "attention_mask": torch.ones(len(ids) + 1, ids.shape[1]),
        }.items():
            with pytest.raises(ConfigError, match=f"{name} of shape"):
                model(**batch | {name: tensor})
        output = model(**batch)
        model(**batch).loss.backward()
        return output.loss.item()

    losses = run_ranks(on_rank, 2)
    assert losses == [pytest.approx(twin.load().train()(**twin.batches[0]).loss.item(), rel=1e-6)] * 2


def test_an_auxiliary_loss_has_no_backward_of_its_own():
    twin = twin_of("mixtral")

    def on_rank():
        model = twin.load(megatron_config=config_of("pp2", auxiliary_loss="sequence")).train()
        model.config.output_router_logits = True
        output = model(**twin.batches[0])
        with pytest.raises(UnsupportedError, match="outputs.aux_loss"):
            (output.loss + output.aux_loss).backward()

    run_ranks(on_rank, 2)


def test_positions_of_several_dims_are_cut_along_their_rows():
    three = torch.arange(3 * 4 * 5).view(3, 4, 5)
    batch = {"input_ids": torch.zeros(4, 5), "position_ids": three, "cache_position": torch.arange(4)}
    parts = split(batch, 2)
    assert torch.equal(torch.cat([part["position_ids"] for part in parts], dim=1), three)
    assert all(torch.equal(part["cache_position"], batch["cache_position"]) for part in parts)
    whole = split({**batch, "position_ids": torch.arange(5)[None], "cu_seq_lens_q": torch.arange(5)}, 1)
    assert whole[0]["cu_seq_lens_q"].shape == (5,)


# Loops over layers that a pipeline cannot cut


def with_a_loop(change):
    """Llama's backbone in short; `change(index, what the layer returned)` is what enters the next layer."""

    def forward(self, input_ids=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1])[None]
        rotary = self.rotary_emb(hidden_states, positions)
        for index, layer in enumerate(self.layers):
            hidden_states = change(index, layer(hidden_states, position_embeddings=rotary, position_ids=positions))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))

    return forward


def unpacked(index, output):
    """Two rows unpack as well as two values do."""
    hidden_states, _ = output
    return hidden_states


def added_behind(layer):
    return lambda index, output: output + 0.5 if index == layer else output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (added_behind(0), None),
        (added_behind(1), "changes hidden states between its layers 1 and 2"),
        (lambda index, output: output.mul_(1.5) if index == 1 else output, "changes hidden states between"),
        (unpacked, "unpacks several values"),
        (lambda index, output: output[1] if index == 1 else output[0], "unpacks several values"),
    ],
    ids=["elsewhere", "added", "in place", "unpacked", "second value"],
)
def test_loops_over_layers(monkeypatch, change, message):
    twin = twin_of()
    monkeypatch.setattr(LlamaModel, "forward", with_a_loop(change))
    batch = {name: tensor[:2] for name, tensor in twin.batches[0].items()}

    def on_rank():
        model = twin.load(megatron_config=config_of("pp2", pipeline_partition=(2, 1), num_microbatches=1)).train()
        if message is not None:
            with pytest.raises(UnsupportedError, match=message):
                model(**batch)
            return None
        return model(**batch).loss.item()

    expected = None if message else pytest.approx(twin.load().train()(**batch).loss.item(), rel=1e-6)
    assert run_ranks(on_rank, 2) == [expected] * 2


def test_question_answering_is_refused_by_name(tmp_path):
    config = copy.deepcopy(twin_of().config)
    LlamaForQuestionAnswering(config).save_pretrained(tmp_path)
    ids, positions = twin_of().batches[0]["input_ids"], torch.zeros(4, dtype=torch.int64)

    def on_rank():
        layout = config_of("pp2")
        model = LlamaForQuestionAnswering.from_pretrained(tmp_path, megatron_config=layout)
        with pytest.raises(UnsupportedError, match="LlamaForQuestionAnswering"):
            model(input_ids=ids, start_positions=positions, end_positions=positions)

    run_ranks(on_rank, 2)


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("cls", "config", "message"),
    [
        (RobertaForMaskedLM, RobertaConfig(**TINY, num_attention_heads=2), "the head of RobertaForMaskedLM is tied to"),
        (ModernBertForMaskedLM, ModernBertConfig(**TINY, num_attention_heads=2, pad_token_id=0), "is tied to"),
        (RwkvForCausalLM, RwkvConfig(**TINY, attention_hidden_size=32, context_length=32), "unpacks several values"),
        (LlamaForSequenceClassification, LlamaConfig(**TINY, num_attention_heads=2, pad_token_id=0), None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_types_are_refused_by_name(tmp_path, cls, config, message):
    """When they are loaded or first called, on every rank; classification works without labels."""
    cls(config).save_pretrained(tmp_path)
    ids = torch.arange(24).view(4, 6) + 3

    def on_rank():
        model = cls.from_pretrained(tmp_path, megatron_config=config_of("pp2")).train()
        return model(input_ids=ids).logits.shape

    if message is None:
        assert run_ranks(on_rank, 2) == [cls(config)(input_ids=ids).logits.shape] * 2
        return
    with pytest.raises(RankError, match=message) as raised:
        run_ranks(on_rank, 2)
    assert all(f"rank {rank} failed" in str(raised.value) for rank in (0, 1))


def test_why_a_type_cannot_be_cut_comes_before_how_to_check_it(tmp_path):
    config = BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    BertForMaskedLM(config).save_pretrained(tmp_path)

    def on_rank():
        with pytest.raises(UnsupportedError, match="'bert' cannot be cut: its heads compute their losses"):
            BertForMaskedLM.from_pretrained(tmp_path, megatron_config=MegatronConfig(pp_size=2))

    run_ranks(on_rank, 2)
