"""Follows the cures that errors of calls of a pipelined model name: the calls then return what one process returns."""

import functools

import pytest
import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    DynamicCache,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    MixtralForCausalLM,
)

from hf_megatron import ConfigError, MegatronError, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.tiny_model import draw_parameters
from tests.helpers.same_step import require_same_step
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.training import make_batch
from tests.integration.cures.test_pipeline_training import load, load_single

BATCH = make_batch(0)
IDS = BATCH["input_ids"]
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def save_model(path, config, cls):
    """Saves a model with random weights; returns the path."""
    torch.manual_seed(0)
    model = cls(config)
    draw_parameters(model)
    model.save_pretrained(path)
    return path


# Modules of the model


def test_modules_called_alone(tiny):
    """The full model is called instead of its base model, or of a module of another stage."""

    def on_rank():
        model, single = load(tiny), load_single(tiny)
        with pytest.raises(UnsupportedError, match="Call the model; without labels it returns logits that you can"):
            model.model(input_ids=IDS)
        if torch.distributed.get_rank() == 0:
            with pytest.raises(UnsupportedError, match=r"called alone, but it lies on .* Call the full model\."):
                model.model.layers[1].mlp(torch.ones(1, 2, 32))
        require_same_step(model, single, BATCH)
        require_same_step(
            model, single, BATCH, lambda one, batch: one(batch["input_ids"], use_cache=False).logits.square().mean()
        )

    run_ranks(on_rank, 2)


def replace_activation(model, layer):
    model.model.layers[layer].mlp.act_fn = nn.Tanh()


def test_off_stage_modules(tiny):
    """A module is changed on the ranks of its stage, or in a model with one stage."""

    def on_rank():
        model, single, rank = load(tiny), load_single(tiny), torch.distributed.get_rank()
        with pytest.raises(UnsupportedError, match="Read or change it on the ranks of that stage, or load the model"):
            replace_activation(model, 1 - rank)
        for layer in (0, 1):
            replace_activation(single, layer)
        replace_activation(model, rank)
        require_same_step(model, single, BATCH)
        model = load(tiny, pp_size=1)
        for layer in (0, 1):
            replace_activation(model, layer)
        require_same_step(model, single, BATCH)

    run_ranks(on_rank, 2)


def swap_layers(model):
    layers = model.model.layers
    layers[0], layers[1] = layers[1], layers[0]


def reverse_layers(model):
    model.model.layers = nn.ModuleList(reversed(list(model.model.layers)))


def test_rearranged_layers(tiny):
    """One stage: layers are exchanged, or reversed."""

    def on_rank():
        with pytest.raises(MegatronError, match=r"bound to its own place\. Load the model with pp_size=1\."):
            swap_layers(load(tiny))
        with pytest.raises(UnsupportedError, match=r"moved or repeated\. Load the model with pp_size=1\."):
            model = load(tiny)
            reverse_layers(model)
            model(**BATCH)
        for rearrange in (swap_layers, reverse_layers):
            model, single = load(tiny, pp_size=1), load_single(tiny)
            rearrange(model)
            rearrange(single)
            require_same_step(model, single, BATCH | {"use_cache": False})

    run_ranks(on_rank, 2)


class HalvedLlama(LlamaForCausalLM):
    def forward(self, input_ids=None, labels=None, **kwargs):
        outputs = super().forward(input_ids, labels=labels, **kwargs)
        if outputs.loss is not None:
            outputs.loss = outputs.loss / 2
        return outputs


def test_replaced_classes(tiny):
    """The model is loaded with the new class, or the function calls the model."""

    def on_rank():
        model = load(tiny)
        model.__class__ = type("Halved", (HalvedLlama, type(model)), {})
        with pytest.raises(UnsupportedError, match="Load it with the new class, or call the model inside your functi"):
            model(**BATCH)
        single = load_single(tiny, HalvedLlama)
        require_same_step(load(tiny, HalvedLlama), single, BATCH)
        require_same_step(load(tiny), load_single(tiny), BATCH, lambda model, batch: model(**batch).loss / 2)

    run_ranks(on_rank, 2)


def test_ties_changed_after_loading(tiny):
    """`tie_word_embeddings` is an argument of `from_pretrained`."""

    def on_rank():
        model = load(tiny)
        model.config.tie_word_embeddings = False
        with pytest.raises(UnsupportedError, match=r"Pass tie_word_embeddings to from_pretrained\(\)\."):
            model.tie_weights()
        untied = {"tie_word_embeddings": False}
        # The file has no head, whose values are drawn at loading.
        model, single = load(tiny, options=untied, strict_loading=False), load_single(tiny, **untied)
        with torch.no_grad():
            for one in (model, single) if torch.distributed.get_rank() == 1 else (single,):
                one.lm_head.weight.copy_(torch.linspace(-1, 1, 64 * 32).view(64, 32))
        require_same_step(model, single, BATCH)

    run_ranks(on_rank, 2)


# Arguments of a call


def test_tensors_of_unknown_samples(tiny):
    """A tensor is left out, gets a batch dim, or the batch is not split."""

    def on_rank():
        model, single = load(tiny, num_microbatches=2), load_single(tiny)
        with pytest.raises(ConfigError, match="Leave it out, give it a batch dimension, or set num_microbatches=1"):
            model(**BATCH, sample_weights=torch.ones(4))
        require_same_step(model, single, BATCH)
        require_same_step(model, single, BATCH | {"sample_weights": torch.ones(4, 1)})
        model = load(tiny, num_microbatches=1)
        require_same_step(model, single, BATCH | {"sample_weights": torch.ones(4)})

    run_ranks(on_rank, 2)


def test_other_targets(tmp_path):
    """Losses are computed from logits, or without `num_items_in_batch`."""
    path = save_model(tmp_path, CONFIG_MAPPING["llama"](**SIZES), LlamaForQuestionAnswering)
    targets = {"start_positions": torch.tensor([0, 1, 2, 3]), "end_positions": torch.tensor([4, 4, 4, 8])}

    def compute_loss(model, batch):
        return nn.functional.cross_entropy(model(batch["input_ids"]).start_logits, targets["start_positions"])

    def on_rank():
        model, single = load(path, LlamaForQuestionAnswering), load_single(path, LlamaForQuestionAnswering)
        with pytest.raises(UnsupportedError, match="Call the model without these and compute the loss from its logit"):
            model(IDS, **targets, other_labels=targets["start_positions"])
        require_same_step(model, single, {"input_ids": IDS}, compute_loss)
        with pytest.raises(UnsupportedError, match=r"have a different number of terms\. Leave it out\."):
            model(IDS, **targets, num_items_in_batch=4)
        require_same_step(model, single, {"input_ids": IDS} | targets)

    run_ranks(on_rank, 2)


def test_logits_of_a_training_step(tiny):
    """A loss of one's own is computed from a call without labels."""

    def compute_loss(model, batch):
        logits = model(batch["input_ids"]).logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def on_rank():
        model = load(tiny)
        with pytest.raises(UnsupportedError, match="Call it without labels to compute your own loss from its logits"):
            model(**BATCH).logits.sum()
        require_same_step(model, load_single(tiny), BATCH, compute_loss)

    run_ranks(on_rank, 2)


def test_trained_masks(tiny):
    """Gradients of a mask: schedules that do not split the backward."""

    def compute_loss(model, batch):
        mask = (torch.zeros(4, 1, 9, 9) + torch.full((9, 9), -1e9).triu(1)).requires_grad_()
        loss = model(**batch, attention_mask=mask).loss
        [gradient] = torch.autograd.grad(loss, mask, retain_graph=True)
        compute_loss.gradients.append(gradient)
        return loss

    compute_loss.gradients = []

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"inputs_embeds only\. Use '1f1b' or 'interleaved_1f1b'\."):
            compute_loss(load(tiny, pipeline_schedule="interleaved_zero_bubble", virtual_stages=1), BATCH)
        single = load_single(tiny)
        for schedule in ("1f1b", "interleaved_1f1b"):
            layers = {"virtual_stages": 1} if schedule == "interleaved_1f1b" else {}
            require_same_step(load(tiny, pipeline_schedule=schedule, **layers), single, BATCH, compute_loss)
            torch.testing.assert_close(*compute_loss.gradients[-2:], rtol=1e-4, atol=1e-6)

    run_ranks(on_rank, 2)


def test_offloaded_caches(tiny):
    """A cache that stays on the device."""

    def on_rank():
        model, single = load(tiny).eval(), load_single(tiny).eval()
        with torch.no_grad():
            offloaded = DynamicCache(config=model.config)
            offloaded.offloading = True
            with pytest.raises(UnsupportedError, match="Use offloading=False: each rank holds the cache of its own la"):
                model(IDS, past_key_values=offloaded)
            logits = []
            for one in (model, single):
                cache = DynamicCache(config=one.config, offloading=False)
                one(IDS[:, :4], past_key_values=cache)
                logits.append(one(IDS[:, 4:], past_key_values=cache).logits)
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)

    run_ranks(on_rank, 2)


# Mixture of experts


def test_router_losses(tmp_path):
    """Router losses that are defined per sequence, per step or per microbatch, or a batch that is not split."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.5}
    config = CONFIG_MAPPING["mixtral"](**SIZES, **experts, num_key_value_heads=2)
    path = save_model(tmp_path, config, MixtralForCausalLM)
    batch = BATCH | {"output_router_logits": True, "use_cache": False}

    def on_rank():
        model, single = load(path, num_microbatches=2), load_single(path)
        with pytest.raises(ConfigError, match=r"'sequence' .*'global' .*'microbatch' .*or num_microbatches=1\."):
            model(**batch)
        require_same_step(load(path, num_microbatches=1), single, batch)

        def compute_loss(model, batch):
            if model is not single:
                return model(**batch).loss
            # The loss of a single process, over two halves of the batch, with their shares of the targets.
            parts = [{name: part(value) for name, value in batch.items()} for part in (first_half, second_half)]
            counts = [(part["labels"][:, 1:] != -100).sum() for part in parts]
            loss = 0.0
            for part, count in zip(parts, counts, strict=True):
                outputs = model(**part)
                aux_loss = outputs.aux_loss * 0.5
                loss = loss + (outputs.loss - aux_loss) * count / sum(counts) + aux_loss / 2
            return loss

        model = load(path, num_microbatches=2, router_aux_loss_scope="microbatch")
        require_same_step(model, single, batch, compute_loss)
        losses = {}
        for scope in ("sequence", "global"):
            for microbatches in (1, 2):
                model = load(path, num_microbatches=microbatches, router_aux_loss_scope=scope)
                loss = model(**batch).loss
                loss.backward()
                losses[scope, microbatches] = loss.item()
        assert losses["sequence", 1] == pytest.approx(losses["sequence", 2], rel=1e-5)

    run_ranks(on_rank, 2)


def first_half(value):
    return value[:2] if isinstance(value, torch.Tensor) else value


def second_half(value):
    return value[2:] if isinstance(value, torch.Tensor) else value


# Encoder-decoders


@functools.cache
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task="seq2seq", microbatches=2)


def test_encoders():
    """The model is called, or the encoder without gradients, whose output is on every rank."""
    tiny_model = get_tiny_model("bart")
    batch = tiny_model.batches[0]
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}

    def on_rank():
        model, single = tiny_model.load(megatron_config=ConfigUnderTest(pp_size=2)).train(), tiny_model.load().train()
        with pytest.raises(UnsupportedError, match=r"Call the model, or the encoder under torch.no_grad\(\)\."):
            model.get_encoder()(**inputs)
        require_same_step(model, single, batch)
        model.eval()
        single.eval()
        with torch.no_grad():
            torch.testing.assert_close(model.get_encoder()(**inputs)[0], single.get_encoder()(**inputs)[0])
            outputs = model(**batch)
            with pytest.raises(UnsupportedError, match=r"Call model.get_encoder\(\) under torch.no_grad\(\), which re"):
                outputs.encoder_last_hidden_state.sum()
            torch.testing.assert_close(
                model.get_encoder()(**inputs).last_hidden_state, single(**batch).encoder_last_hidden_state
            )

    run_ranks(on_rank, 2)


def test_layerdrop():
    """No layer is left out, or the model has one stage."""
    tiny_model = get_tiny_model("bart")
    layerdrop = {"encoder_layerdrop": 0.3, "decoder_layerdrop": 0.3}

    def on_rank():
        config = ConfigUnderTest(pp_size=2)
        with pytest.raises(UnsupportedError, match="Load it with encoder_layerdrop=0.0, decoder_layerdrop=0.0 or laye"):
            tiny_model.load(megatron_config=config, **layerdrop).train()(**tiny_model.batches[0])
        model = tiny_model.load(megatron_config=config, **dict.fromkeys(layerdrop, 0.0)).train()
        require_same_step(model, tiny_model.load().train(), tiny_model.batches[0])

    run_ranks(on_rank, 2)
