"""Tests of the model API under pipeline parallelism: outputs, memory, state dicts, and rejected calls.

`tests/integration/fuzz/test_gradient_patterns.py` tests training-loop patterns on every layout.
"""

import copy
import functools
import gc
import weakref

import peft
import pytest
import torch
import transformers.trainer
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    CONFIG_MAPPING,
    AutoModelForMaskedLM,
    DynamicCache,
    FlaubertConfig,
    FlaubertWithLMHeadModel,
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
)
from transformers.modeling_outputs import BaseModelOutputWithPast

from hf_megatron import ConfigError, MegatronConfig, RankError, UnsupportedError, local_named_parameters
from hf_megatron.compat.transformers_models import CACHE_OUTPUT
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallelize import parallel_state
from hf_megatron.pipeline_parallel.microbatches import split
from hf_megatron.testing.tiny_config import tiny_config
from tests.helpers.shared_tiny_models import make_tiny_model


@functools.cache
def get_tiny_model(model_type="llama"):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2, batch_size=4, min_layers=2)


def make_config(layout, **changes):
    [config] = parse_layouts(layout)
    return ConfigUnderTest(**{**config.to_dict(), **changes})


def test_gradients_are_flushed_without_copy():
    tiny_model = get_tiny_model()

    def on_rank():
        model = tiny_model.load(megatron_config=make_config("pp2")).train()
        loss = model(**tiny_model.batches[0]).loss
        pipeline, data_ptrs = parallel_state(model).pipeline, {}
        store = pipeline.engine.gradients
        original = type(store).flush

        def flush(self, sums, *args, **kwargs):
            data_ptrs.update({id(p): g.data_ptr() for p, g in zip(self.parameters, sums, strict=True)})
            return original(self, sums, *args, **kwargs)

        type(store).flush = flush
        loss.backward()
        return [parameter.grad.data_ptr() == data_ptrs[id(parameter)] for _, parameter in local_named_parameters(model)]

    for same in run_ranks(on_rank, 2):
        assert same and all(same)


def test_unsupported_backwards_are_rejected():
    tiny_model = get_tiny_model()

    def on_rank():
        model, batch = tiny_model.load(megatron_config=make_config("pp2")).train(), tiny_model.batches[0]
        loss = model(**batch).loss
        loss.backward()
        with pytest.raises(ConfigError, match="twice"):
            loss.backward()
        loss = model(input_ids=batch["input_ids"]).logits.float().square().mean()
        loss.backward()
        with pytest.raises(UnsupportedError, match="a second backward without retain_graph=True"):
            loss.backward()
        with pytest.raises(UnsupportedError, match="create_graph"):
            model(**batch).loss.backward(create_graph=True)

    run_ranks(on_rank, 2)


# Memory


def test_dropped_outputs_are_freed():
    tiny_model = get_tiny_model()

    def on_rank():
        model = tiny_model.load(megatron_config=make_config("pp2"))
        ids = tiny_model.batches[0]["input_ids"]
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
        output = model(**tiny_model.batches[0])
        alive.append(weakref.ref(output.loss.grad_fn))
        del output
        return [reference() is not None for reference in alive]

    for alive in run_ranks(on_rank, 2):
        assert len(alive) == 5 and not any(alive)


# Weights


def test_counts_include_adapters():
    tiny_model = get_tiny_model("llama")
    choices = [{}, {"exclude_embeddings": True}, {"only_trainable": True}]

    def count(**arguments):
        config = peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])
        model = peft.get_peft_model(tiny_model.load(**arguments), config)
        return [model.num_parameters(**choice) for choice in choices]

    assert run_ranks(lambda: count(megatron_config=make_config("pp2")), 2) == [count()] * 2


@pytest.mark.parametrize(("model_type", "layout"), [("llama", "pp2"), ("gemma2", "tp2+pp2"), ("gpt2", "pp2")])
def test_state_dict_and_counts_match_full_model(model_type, layout, tmp_path):
    tiny_model = get_tiny_model(model_type)
    stock = tiny_model.load()
    expected = {name: (tensor.shape, tensor.dtype) for name, tensor in stock.state_dict().items()}
    choices = [{}, {"only_trainable": True}, {"exclude_embeddings": True}]
    choices.append({"only_trainable": True, "exclude_embeddings": True})

    def freeze(model):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("mlp" in name or "embed" in name)
        counts = [model.num_parameters(**choice) for choice in choices]
        return [*counts, transformers.trainer.get_model_param_count(model, trainable_only=True)]

    def on_rank():
        model = tiny_model.load(megatron_config=make_config(layout))
        state_dict = model.state_dict()
        assert list(state_dict) == list(expected)
        assert {name: (tensor.shape, tensor.dtype) for name, tensor in state_dict.items()} == expected
        off_stage = {name: tensor for name, tensor in state_dict.items() if type(tensor).__name__ == "OffStageTensor"}
        assert off_stage and len(off_stage) < len(state_dict)
        copies = {name: tensor.detach().clone().to(torch.float64) for name, tensor in state_dict.items()}
        assert {tensor.dtype for tensor in copies.values()} == {torch.float64}
        name, tensor = next(iter(off_stage.items()))
        assert (copy.deepcopy(tensor) + 1).sum().shape == ()
        for read in (
            lambda: tensor.sum().item(),
            lambda: torch.equal(tensor, tensor),
            lambda: tensor.numpy(),
            lambda: torch.save(state_dict, tmp_path / f"{parallel_state(model).mesh.pp_rank}.pt"),
            lambda: save_file({name: tensor}, tmp_path / "x.safetensors"),
            lambda: torch.zeros(tensor.shape).copy_(tensor),
            lambda: bool((tensor == tensor).all()),
        ):
            with pytest.raises(UnsupportedError, match="pp rank"):
                read()
        with pytest.raises(RuntimeError, match=f"size mismatch for {name}"):
            model.load_state_dict({**state_dict, name: torch.zeros(1)})
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({other: value for other, value in state_dict.items() if other != name})
        with pytest.raises(RuntimeError, match="Unexpected key"):
            model.load_state_dict({**state_dict, f"{name}.more": torch.zeros(1)})
        model.bfloat16()
        assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {
            torch.bfloat16
        }
        return freeze(model.float())

    assert run_ranks(on_rank, make_config(layout).ranks_per_replica) == [freeze(stock)] * len(
        range(make_config(layout).ranks_per_replica)
    )


def test_save_hooks_receive_weights(tmp_path):
    tiny_model = get_tiny_model()

    def on_rank():
        model = tiny_model.load(megatron_config=make_config("pp2"))
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        hook_weights = []
        accelerator.register_save_state_pre_hook(lambda models, weights, folder: hook_weights.append(weights.pop()))
        accelerator.save_state(tmp_path / "saved")
        assert isinstance(model, torch.nn.Module)
        return hook_weights[0]

    expected = tiny_model.load().state_dict()
    state_dict = run_ranks(on_rank, 2)[0]
    assert state_dict.keys() == expected.keys() and all(
        torch.equal(state_dict[name], expected[name]) for name in expected
    )


# Inputs and outputs of calls


def test_cache_requested_in_training():
    tiny_model = get_tiny_model()

    def on_rank():
        model = tiny_model.load(megatron_config=make_config("tp2")).train()
        ids = tiny_model.batches[0]["input_ids"]
        model.config.use_cache = True
        caches = [model(input_ids=ids).past_key_values, model(input_ids=ids, use_cache=True).past_key_values]
        with torch.no_grad():
            caches.append(model(input_ids=ids).past_key_values)
        model.eval()
        return [isinstance(cache, DynamicCache) for cache in [*caches, model(input_ids=ids).past_key_values]]

    assert run_ranks(on_rank, 2) == [[False, True, True, True]] * 2


@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_unavailable_cache_raises_when_read(text):
    tiny_model = get_tiny_model()

    def on_rank():
        ids = tiny_model.batches[0]["input_ids"]
        model = tiny_model.load(megatron_config=make_config(text)).train()
        model.config.use_cache = True
        kwargs = {"input_ids": ids, "labels": ids, "use_cache": True} if text == "pp2" else {"input_ids": ids}
        output = model(**kwargs)
        for read in (len, list, bool, lambda cache: cache.layers):
            with pytest.raises(UnsupportedError, match="No KV cache is available"):
                read(output.past_key_values)
        with pytest.raises(UnsupportedError, match="No KV cache is available"):
            model(input_ids=ids, past_key_values=output.past_key_values)
        # The order of outputs matches a single process.
        assert list(model(input_ids=ids)) == ["logits", CACHE_OUTPUT]
        assert list(model(input_ids=ids, use_cache=False)) == ["logits"]
        if text == "tp2":
            assert list(model(input_ids=ids, output_hidden_states=True))[1:] == [CACHE_OUTPUT, "hidden_states"]
            assert len(model(input_ids=ids, return_dict=False)) == 2

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_packed_documents_in_training(text):
    def on_rank():
        model = get_tiny_model().load(megatron_config=make_config(text)).train()
        batch = get_tiny_model().batches[0]
        ids = batch["input_ids"]
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        packed = {"input_ids": ids, "labels": ids, "position_ids": positions % 5}
        model.config.use_cache = True
        with pytest.raises(UnsupportedError, match="position_ids of packed documents"):
            model(**packed)
        model(**{**packed, "position_ids": positions})
        losses = [model(**packed, use_cache=False).loss.item()]
        model.config.use_cache = False
        losses.append(model(**packed).loss.item())
        return losses

    stock = get_tiny_model().load().train()
    ids = get_tiny_model().batches[0]["input_ids"]
    positions = torch.arange(ids.shape[1]).expand_as(ids) % 5
    expected = stock(input_ids=ids, labels=ids, position_ids=positions, use_cache=False).loss.item()
    for losses in run_ranks(on_rank, 2):
        assert losses == pytest.approx([expected] * 2, rel=1e-5)


CALLS_WITH_A_CACHE = {
    "evaluation": (False, False, {}),
    "training without gradients": (True, False, {}),
    "asked for": (True, True, {"use_cache": True}),
    "asked for, tuple": (True, True, {"return_dict": False}),
}


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2"])
def test_packed_documents_joined_by_cache(text):
    """A single process with a cache treats packed documents as one; a pipeline, without the cache, must reject them."""

    def make_packed_batch():
        ids = get_tiny_model().batches[0]["input_ids"]
        return {"input_ids": ids, "labels": ids, "position_ids": torch.arange(ids.shape[1]).expand_as(ids) % 5}

    def read_loss(model, name):
        training, has_gradients, changes = CALLS_WITH_A_CACHE[name]
        model.train(training)
        model.config.use_cache = True
        with torch.set_grad_enabled(has_gradients):
            return model(**make_packed_batch(), **changes)[0].item()

    def on_rank():
        model, losses = get_tiny_model().load(megatron_config=make_config(text)), {}
        for name in CALLS_WITH_A_CACHE:
            if text == "pp2":
                with pytest.raises(UnsupportedError, match="position_ids of packed documents"):
                    read_loss(model, name)
            else:
                losses[name] = read_loss(model, name)
        # Gradient checkpointing disables the cache in a single process too.
        model.gradient_checkpointing_enable()
        return losses | {"checkpointed": model.train()(**make_packed_batch()).loss.item()}

    stock = get_tiny_model().load()
    expected = {name: read_loss(stock, name) for name in CALLS_WITH_A_CACHE}
    stock.gradient_checkpointing_enable()
    expected["checkpointed"] = stock.train()(**make_packed_batch()).loss.item()
    assert expected["evaluation"] != pytest.approx(expected["checkpointed"], rel=1e-3)
    for losses in run_ranks(on_rank, 2):
        assert losses == pytest.approx({name: expected[name] for name in losses}, rel=1e-5)


class BoolReadCounter(TorchDispatchMode):
    """Counts reads of boolean scalars; each read is a host-device sync."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.bool:
            self.count += 1
        return func(*args, **(kwargs or {}))


def count_bool_reads(model, **more):
    ids = torch.arange(8).expand(2, -1)
    with BoolReadCounter() as counter:
        model(input_ids=ids, use_cache=False, **more)
    return counter.count


def test_packing_check_adds_no_host_sync():
    positions, tiny_model = torch.arange(8).expand(2, -1), get_tiny_model()

    def on_rank():
        model, stock = tiny_model.load(megatron_config=make_config("tp2")).train(), tiny_model.load().train()
        counts = [count_bool_reads(model), count_bool_reads(model, position_ids=positions)]
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 4), 10**6))
        return [*counts, count_bool_reads(stock), count_bool_reads(model, attention_mask=torch.ones(2, 8))]

    default_reads, position_reads, stock, masked = run_ranks(on_rank, 2)[0]
    # The checks of all inputs are read at once per call (`tests/unit/data_parallel/test_packed_sequences.py`), and
    # transformers adds no read.
    assert position_reads == default_reads and stock == 1 and masked <= position_reads


def test_label_width_mismatch_raises_on_every_stage():
    tiny_model = get_tiny_model()
    ids = tiny_model.batches[0]["input_ids"]

    def on_rank():
        model, results = tiny_model.load(megatron_config=make_config("pp2")).train(), []
        for width in (ids.shape[1] - 1, ids.shape[1]):
            try:
                results.append(model(input_ids=ids, labels=ids[:, :width]).loss.item())
            except ValueError as error:
                results.append(str(error))
        return results

    for message, loss in run_ranks(on_rank, 2):
        assert "expected a label per token" in message and loss > 0


def run_tuple_outputs(model, batch):
    model.config.output_router_logits = True
    losses = []
    for training in (True, False):
        model.train(training)
        with torch.set_grad_enabled(training):
            values = model(**batch, return_dict=False, use_cache=False)
        losses.append([value.item() for value in values[:2]])
        assert len(values) >= 3
    return losses


def test_tuple_outputs_match_single_process():
    tiny_model = get_tiny_model("mixtral")
    config = make_config("pp2", num_microbatches=1)
    expected = run_tuple_outputs(tiny_model.load(), tiny_model.batches[0])
    for losses in run_ranks(
        lambda: run_tuple_outputs(tiny_model.load(megatron_config=config), tiny_model.batches[0]), 2
    ):
        for one, other in zip(losses, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_invalid_calls_are_rejected_before_schedule():
    """Every rank raises with the name of the argument, and the model can still train afterwards."""
    tiny_model = get_tiny_model()

    def on_rank():
        model = tiny_model.load(megatron_config=make_config("pp2")).train()
        batch = tiny_model.batches[0]
        ids = batch["input_ids"]
        with pytest.raises(UnsupportedError, match="Call the model"):
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
    assert losses == [pytest.approx(tiny_model.load().train()(**tiny_model.batches[0]).loss.item(), rel=1e-6)] * 2


def test_aux_loss_backward_is_rejected():
    tiny_model = get_tiny_model("mixtral")

    def on_rank():
        model = tiny_model.load(megatron_config=make_config("pp2", router_aux_loss_scope="sequence")).train()
        model.config.output_router_logits = True
        output = model(**tiny_model.batches[0])
        with pytest.raises(UnsupportedError, match="outputs.aux_loss"):
            (output.loss + output.aux_loss).backward()

    run_ranks(on_rank, 2)


def test_multi_dim_positions_are_split_by_sample():
    positions = torch.arange(3 * 4 * 5).view(3, 4, 5)
    batch = {"input_ids": torch.zeros(4, 5), "position_ids": positions, "cache_position": torch.arange(4)}
    halves = split(batch, 2)
    assert torch.equal(torch.cat([part["position_ids"] for part in halves], dim=1), positions)
    assert all(torch.equal(part["cache_position"], batch["cache_position"]) for part in halves)
    microbatches = split({**batch, "position_ids": torch.arange(5)[None], "cu_seq_lens_q": torch.arange(5)}, 1)
    assert microbatches[0]["cu_seq_lens_q"].shape == (5,)


# Layer loops that a pipeline cannot split


def make_backbone_forward(change):
    """Minimal Llama backbone; `change(index, layer_output)` returns the input of the next layer."""

    def forward(self, input_ids=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        positions = torch.arange(input_ids.shape[1])[None]
        rotary = self.rotary_emb(hidden_states, positions)
        for index, layer in enumerate(self.layers):
            hidden_states = change(index, layer(hidden_states, position_embeddings=rotary, position_ids=positions))
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))

    return forward


def unpacked(index, output):
    """Unpacks the layer output; a batch of two samples unpacks like two values."""
    hidden_states, _ = output
    return hidden_states


def add_after_layer(layer):
    return lambda index, output: output + 0.5 if index == layer else output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (add_after_layer(0), None),
        (add_after_layer(1), "changes hidden states between its layers 1 and 2"),
        (lambda index, output: output.mul_(1.5) if index == 1 else output, "changes hidden states between"),
        (unpacked, "unpacks several outputs"),
        (lambda index, output: output[1] if index == 1 else output[0], "unpacks several outputs"),
    ],
    ids=["elsewhere", "added", "in place", "unpacked", "second value"],
)
def test_custom_layer_loops(monkeypatch, change, message):
    tiny_model = get_tiny_model()
    monkeypatch.setattr(LlamaModel, "forward", make_backbone_forward(change))
    batch = {name: tensor[:2] for name, tensor in tiny_model.batches[0].items()}

    def on_rank():
        model = tiny_model.load(
            megatron_config=make_config("pp2", pipeline_partition=(2, 1), num_microbatches=1)
        ).train()
        if message is not None:
            with pytest.raises(UnsupportedError, match=message):
                model(**batch)
            return None
        return model(**batch).loss.item()

    expected = None if message else pytest.approx(tiny_model.load().train()(**batch).loss.item(), rel=1e-6)
    assert run_ranks(on_rank, 2) == [expected] * 2


TINY = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("cls", "config", "message"),
    [
        (
            FlaubertWithLMHeadModel,
            FlaubertConfig(vocab_size=64, emb_dim=32, n_layers=2, n_heads=2, pre_norm=True),
            "adds the sublayer outputs of a layer after its last sublayer",
        ),
        (LlamaForSequenceClassification, LlamaConfig(**TINY, num_attention_heads=2, pad_token_id=0), None),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_unsupported_types_are_rejected(tmp_path, cls, config, message):
    """Raises on every rank at loading or in the first call; classification works without labels."""
    cls(config).save_pretrained(tmp_path)
    ids = torch.arange(24).view(4, 6) + 3

    def on_rank():
        model = cls.from_pretrained(tmp_path, megatron_config=make_config("pp2")).train()
        return model(input_ids=ids).logits.shape

    if message is None:
        assert run_ranks(on_rank, 2) == [cls(config)(input_ids=ids).logits.shape] * 2
        return
    with pytest.raises(RankError, match=message) as raised:
        run_ranks(on_rank, 2)
    assert all(f"rank {rank} failed" in str(raised.value) for rank in (0, 1))


def test_split_error_precedes_verification_error(tmp_path):
    AutoModelForMaskedLM.from_config(tiny_config(CONFIG_MAPPING["funnel"]())).save_pretrained(tmp_path)

    def on_rank():
        with pytest.raises(UnsupportedError, match="'funnel' does not support pipeline parallelism: its decoder"):
            AutoModelForMaskedLM.from_pretrained(tmp_path, megatron_config=MegatronConfig(pp_size=2))

    run_ranks(on_rank, 2)
