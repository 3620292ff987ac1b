"""Follows the cures that errors of context parallelism name: afterwards loss and gradients equal a single process."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from hf_megatron import ConfigError, UnsupportedError, register_model, shard_safe
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.infer import stated_or_inferred_spec
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.helpers.same_step import require_same_step
from tests.helpers.training import make_batch

BATCH = make_batch(0)
TOKENS = BATCH["input_ids"].shape[1]
CP2 = ConfigUnderTest(cp_size=2)


def load(path, cp_size=2, **options):
    """Loads a model on two ranks: split over the sequence, or else over the batch."""
    config = ConfigUnderTest(cp_size=cp_size, **options.pop("layout", {}))
    return AutoModelForCausalLM.from_pretrained(path, megatron_config=config, **options).train()


def load_single(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, **options).train()


def test_masks_of_four_dims(tiny):
    """`attention_mask` [batch, sequence] instead of [batch, 1, sequence, sequence]."""

    def on_rank():
        model, single = load(tiny), load_single(tiny)
        mask = torch.ones(4, 1, TOKENS, TOKENS).tril() == 1
        with pytest.raises(UnsupportedError, match=r"Pass attention_mask \[batch, sequence\], or use cp_size=1\."):
            model(**BATCH, attention_mask=mask)
        padding = torch.ones(4, TOKENS, dtype=torch.long)
        padding[1, 5:] = 0
        require_same_step(model, single, BATCH | {"attention_mask": padding})
        require_same_step(load(tiny, cp_size=1), single, BATCH | {"attention_mask": mask})

    run_ranks(on_rank, 2)


def add_position_bias(model):
    hook = shard_safe(lambda module, args, kwargs: (args, kwargs | {"position_bias": torch.ones(1)}))
    model.model.layers[0].self_attn.register_forward_pre_hook(hook, with_kwargs=True)
    return model


def read_mask_shape(model):
    @shard_safe
    def shorten(module, args, kwargs):
        mask = kwargs["attention_mask"]
        return args, kwargs | {"attention_mask": mask[..., : mask.shape[-2]]}

    model.model.layers[0].self_attn.register_forward_pre_hook(shorten, with_kwargs=True)
    return model


def test_attention_that_needs_the_full_sequence(tiny):
    """Unknown arguments, reads of the mask and attention maps: cp_size=1, or no megatron_config."""

    def on_rank():
        with pytest.raises(UnsupportedError, match=r"support position_bias\. Load the model with cp_size=1\."):
            add_position_bias(load(tiny))(**BATCH)
        require_same_step(add_position_bias(load(tiny, cp_size=1)), add_position_bias(load_single(tiny)), BATCH)

        with pytest.raises(UnsupportedError, match=r"reads `shape` of its mask.*Load the model with cp_size=1\."):
            read_mask_shape(load(tiny, attn_implementation="eager"))(**BATCH)
        model, single = load(tiny, 1, attn_implementation="eager"), load_single(tiny, attn_implementation="eager")
        require_same_step(read_mask_shape(model), read_mask_shape(single), BATCH)

        with pytest.raises(UnsupportedError, match=r"maps of its tokens\. Load the model without megatron_config\."):
            load(tiny, attn_implementation="eager")(**BATCH, output_attentions=True)
        assert single(**BATCH, output_attentions=True).attentions[0].shape == (4, 4, TOKENS, TOKENS)

    run_ranks(on_rank, 2)


def set_is_causal(model, is_causal):
    model.model.layers[0].self_attn.is_causal = is_causal
    return model


def test_attention_settings(tiny):
    """No attention dropout, and causal attention."""

    def on_rank():
        single = load_single(tiny)
        with pytest.raises(UnsupportedError, match=r"Set it to 0 in the config, or load the model with cp_size=1\."):
            load(tiny, attention_dropout=0.1)(**BATCH)
        require_same_step(load(tiny, attention_dropout=0.0), single, BATCH)

        model = set_is_causal(load(tiny), False)
        with pytest.raises(UnsupportedError, match=r"Set it to True, or use cp_size=1\."):
            model(**BATCH)
        require_same_step(set_is_causal(model, True), single, BATCH)
        require_same_step(set_is_causal(load(tiny, cp_size=1), False), set_is_causal(load_single(tiny), False), BATCH)

    run_ranks(on_rank, 2)


class LlamaWithState(LlamaForCausalLM):
    """A user's class that passes the KV cache under another name."""

    def forward(self, input_ids=None, state=None, **kwargs):
        return super().forward(input_ids, past_key_values=state, **kwargs)


def test_caches_under_another_name(tiny):
    """All tokens in one call without a cache, or cp_size=1."""

    def decode(model):
        state = DynamicCache(config=model.config)
        with torch.no_grad():
            model(BATCH["input_ids"][:, :6], state=state, use_cache=True)
            return model(BATCH["input_ids"][:, 6:], state=state).logits

    def on_rank():
        model, single = (LlamaWithState.from_pretrained(tiny, megatron_config=c).train() for c in (CP2, None))
        with pytest.raises(UnsupportedError, match="Call it with use_cache=False and all tokens, or load it with cp"):
            decode(model)
        require_same_step(model, single, BATCH | {"use_cache": False})
        torch.testing.assert_close(model(**BATCH, use_cache=False).logits[:, 6:] + 0, decode(single))
        model = LlamaWithState.from_pretrained(tiny, megatron_config=ConfigUnderTest(cp_size=1)).train()
        torch.testing.assert_close(decode(model), decode(single))

    run_ranks(on_rank, 2)


def test_comm_types(tiny):
    """Two ranks have no proper divisor for a ring of groups: 'p2p' or 'a2a'."""

    def on_rank():
        with pytest.raises(ConfigError, match=r"cp_comm_type = 'a2a\+p2p'.* Use 'p2p' or 'a2a'\."):
            load(tiny, layout={"cp_comm_type": "a2a+p2p"})
        for scheme in ("p2p", "a2a"):
            require_same_step(load(tiny, layout={"cp_comm_type": scheme}), load_single(tiny), BATCH)

    run_ranks(on_rank, 2)


def scale_tokens(model):
    """Scales the input of every layer by its argument `token_scale`, [batch, tokens]."""

    @shard_safe
    def scale(layer, args, kwargs):
        return (args[0] * kwargs["token_scale"][..., None], *args[1:]), kwargs

    for layer in model.model.layers:
        layer.register_forward_pre_hook(scale, with_kwargs=True)
    return model


def register_llama(**changes):
    """Registers a Llama spec with other fields."""
    register_model("llama", lambda model: stated_or_inferred_spec(model).updated(**changes), replace=True)


def test_layer_arguments_per_token(tiny):
    """An argument with an entry per token is listed in the family's spec."""
    batch = BATCH | {"token_scale": torch.rand(4, TOKENS) + 0.5}

    def on_rank():
        with pytest.raises(UnsupportedError, match="Add it to the family's `per_token_arguments` or `sequence_dims`"):
            load(tiny)(**batch)
        single = scale_tokens(load_single(tiny))
        require_same_step(scale_tokens(load(tiny, cp_size=1)), single, batch)
        register_llama(per_token_arguments=("token_scale",))
        require_same_step(scale_tokens(load(tiny)), single, batch)
        register_llama(per_token_arguments=(), sequence_dims={"token_scale": 1})
        require_same_step(scale_tokens(load(tiny)), single, batch)

    run_ranks(on_rank, 2)
