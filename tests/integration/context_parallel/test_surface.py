"""Tests of the model API under context parallelism: results match a single process, or the call is rejected."""

import functools

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from hf_megatron import (
    ConfigError,
    MegatronConfig,
    UnsupportedError,
    prepare_optimizer,
    shard_safe,
    token_log_probs,
)
from hf_megatron.context_parallel import attention_dispatch as context_dispatch
from hf_megatron.context_parallel import axis as context_axis
from hf_megatron.context_parallel.sequence_split import ContextStack
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.testing.tiny_model import draw_parameters

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
IDS = torch.randint(1, 64, (2, 13), generator=torch.Generator().manual_seed(1))
SCHEMES = ("p2p", "a2a", "all_gather")


def save_random_model(folder, config, auto=AutoModelForCausalLM):
    torch.manual_seed(0)
    model = auto.from_config(config)
    draw_parameters(model, 0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    return save_random_model(tmp_path_factory.mktemp("surface") / "llama", config)


def copy_gradients(model):
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: gradient.to_dense() if gradient.is_sparse else gradient + 0 for name, gradient in grads.items()}


def run_single_and_parallel(function, path, size=2, auto=AutoModelForCausalLM, **options):
    """Returns the results of `function` on the single-process model and on each rank of the parallelized one."""
    layout = options.pop("layout", {"cp_size": size})
    expected = function(auto.from_pretrained(path, **options))

    def on_rank():
        return function(auto.from_pretrained(path, megatron_config=ConfigUnderTest(**layout), **options))

    return expected, run_ranks(on_rank, ConfigUnderTest(**layout).ranks_per_replica)


def require_close(expected, found):
    for one in found:
        for value, other in zip(one, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=2e-4, atol=2e-5)


def run_forward_calls(model):
    """Training and evaluation calls, a one-token sequence, a KV cache, and `logits_to_keep`."""
    model.train()
    train_output = model(input_ids=IDS)
    train_output.logits.square().mean().backward()
    normalized_output = model(input_ids=IDS, labels=IDS, num_items_in_batch=7)
    normalized_output.loss.backward()
    short_loss = model(input_ids=IDS[:, :1], labels=IDS[:, :1] * 0 - 100, num_items_in_batch=1).loss
    model.eval()
    with torch.no_grad():
        prefill_output = model(input_ids=IDS[:, :6], use_cache=True)
        decode_output = model(input_ids=IDS[:, 6:], past_key_values=prefill_output.past_key_values, use_cache=True)
        eval_output = model(input_ids=IDS, labels=IDS, logits_to_keep=0)
        last_output = model(input_ids=IDS, logits_to_keep=2)
    tensors = [
        train_output.logits,
        normalized_output.loss,
        normalized_output.logits + 0,
        short_loss,
        prefill_output.logits,
        decode_output.logits,
    ]
    tensors += [eval_output.loss, eval_output.logits, last_output.logits, *copy_gradients(model).values()]
    return [value.detach() for value in tensors]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_forward_calls_match_single_process(llama, scheme):
    require_close(*run_single_and_parallel(run_forward_calls, llama, layout={"cp_size": 2, "cp_comm_type": scheme}))


def run_left_padded(model):
    """Left padding, whose queries attend to no key; all positions contribute to the loss."""
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    loss = model(input_ids=IDS, attention_mask=mask, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *copy_gradients(model).values()]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_fully_masked_queries_match_single_process(llama, implementation, scheme):
    layout = {"cp_size": 2, "cp_comm_type": scheme}
    require_close(*run_single_and_parallel(run_left_padded, llama, layout=layout, attn_implementation=implementation))


def compute_log_probs(model):
    labels = IDS.masked_fill(IDS < 20, -100)
    values = token_log_probs(model, labels, input_ids=IDS)
    (values * torch.arange(values.numel()).view_as(values)).sum().backward()
    return [values.detach(), *copy_gradients(model).values()]


@pytest.mark.parametrize("layout", [{"cp_size": 2}, {"cp_size": 2, "tp_size": 2}], ids=["cp2", "tp2+cp2"])
def test_token_log_probs(llama, layout):
    expected, results = run_single_and_parallel(compute_log_probs, llama, layout=layout)
    require_close(expected[:1], [one[:1] for one in results])
    if "tp_size" not in layout:
        require_close(expected, results)


def run_with_router_losses(model):
    output = model(input_ids=IDS, labels=IDS, attention_mask=torch.ones_like(IDS), output_router_logits=True)
    output.loss.backward()
    router_logits = [logits for logits in output.router_logits if logits is not None]
    return [value.detach() for value in (output.loss, output.aux_loss, *router_logits, *copy_gradients(model).values())]


@pytest.mark.parametrize("scheme", ["p2p", "a2a"])
def test_router_losses(tmp_path, scheme):
    config = CONFIG_MAPPING["mixtral"](
        **SIZES, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.5
    )
    require_close(
        *run_single_and_parallel(
            run_with_router_losses, save_random_model(tmp_path, config), layout={"cp_size": 2, "cp_comm_type": scheme}
        )
    )


def test_missing_router_gather_is_detected(tmp_path):
    config = CONFIG_MAPPING["mixtral"](
        **SIZES, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.5
    )
    path = save_random_model(tmp_path, config)

    def run_without_router_gather(model):
        if torch.distributed.is_initialized():
            ContextStack.gather_token_outputs = lambda self, part: part
            parallel_state(model).loss.join_tokens = lambda part: part
        output = model(input_ids=IDS, labels=IDS, output_router_logits=True)
        return [output.aux_loss.detach()]

    expected, results = run_single_and_parallel(run_without_router_gather, path)
    assert all(abs(one[0] - expected[0]) > 1e-3 for one in results)


def run_classification(model):
    output = model(input_ids=IDS, labels=torch.tensor([0, 2]))
    output.loss.backward()
    return [value.detach() for value in (output.loss, output.logits, *copy_gradients(model).values())]


def test_classification_head(tmp_path):
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_labels=3, pad_token_id=0)
    path = save_random_model(tmp_path, config, AutoModelForSequenceClassification)
    require_close(*run_single_and_parallel(run_classification, path, auto=AutoModelForSequenceClassification))


def run_with_inputs_embeds(model):
    """Passes `inputs_embeds` that require a gradient."""
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    loss = model(inputs_embeds=embeddings, labels=IDS).loss
    loss.backward()
    return [loss.detach(), embeddings.grad]


def test_inputs_embeds_gradients(llama):
    require_close(*run_single_and_parallel(run_with_inputs_embeds, llama))


def run_checkpointed(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, IDS[:, :9]))
    (first + second).backward()
    return [first.detach(), *copy_gradients(model).values()]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_gradient_checkpointing(llama, tmp_path, kind, reentrant):
    path = llama
    if kind != "llama":
        # Linear attention runs on full sequences.
        config = CONFIG_MAPPING[kind](
            **SIZES,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            num_experts=0,
            mlp_only_layers=[0, 1],
        )
        path = save_random_model(tmp_path, config)
    require_close(
        *run_single_and_parallel(functools.partial(run_checkpointed, reentrant=reentrant), path, dtype=torch.float32)
    )


def dropped(model):
    """Dropout on hidden states: masks differ between ranks, and replicated results stay identical."""
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Dropout(0.5)
    torch.manual_seed(torch.distributed.get_rank())
    model.train()
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
    return [torch.stack(losses), torch.rand(2), *copy_gradients(model).values()]


def test_dropout_losses_agree_across_ranks(tmp_path):
    config = LlamaConfig(**SIZES, num_attention_heads=4)
    path = save_random_model(tmp_path, config)

    def on_rank():
        return dropped(AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(cp_size=2)))

    first, second = run_ranks(on_rank, 2)
    assert len(set(first[0].tolist())) == 3
    for value, other in zip(first, second, strict=True):
        assert torch.equal(value, other)


class RecordingDropout(nn.Dropout):
    """Dropout that records the entries it dropped."""

    @shard_safe
    def forward(self, hidden):
        mask = super().forward(torch.ones_like(hidden))
        self.dropped = (mask == 0).flatten()
        return hidden * mask


def record_dropped_entries(path, sabotage=None):
    if sabotage is not None:
        sabotage()
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(cp_size=2)).train()
    model.model.layers[0].mlp.act_fn = RecordingDropout(0.5)
    model(input_ids=IDS[:, :12], labels=IDS[:, :12])
    return model.model.layers[0].mlp.act_fn.dropped


def share_rng_across_ranks():
    stock = context_axis.StreamOfPart
    context_axis.StreamOfPart = lambda device, rank: stock(device, 0)


def test_dropout_masks_differ_between_ranks(tmp_path):
    path = save_random_model(tmp_path, LlamaConfig(**SIZES, num_attention_heads=4))
    first, second = run_ranks(record_dropped_entries, 2, path)
    assert len(first) == len(second) and not torch.equal(first, second)
    # The seeded fault.
    first, second = run_ranks(record_dropped_entries, 2, path, share_rng_across_ranks)
    assert torch.equal(first, second)


def pass_unknown_attention_argument(path, sabotage=None):
    if sabotage is not None:
        sabotage()
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(cp_size=2))
    attention = model.model.layers[0].self_attn
    add_position_bias = shard_safe(lambda module, args, kwargs: (args, kwargs | {"position_bias": torch.ones(1)}))
    attention.register_forward_pre_hook(add_position_bias, with_kwargs=True)
    try:
        model(input_ids=IDS, labels=IDS)
    except UnsupportedError as error:
        return str(error)
    return ""


def accept_every_argument():
    class Everything(frozenset):
        def __or__(self, other):
            return self

        def __contains__(self, name):
            return True

    context_dispatch._KNOWN = Everything()


def test_unknown_attention_argument_is_rejected(tmp_path):
    path = save_random_model(tmp_path, LlamaConfig(**SIZES, num_attention_heads=4))
    assert all(
        "context-parallel attention does not support position_bias" in text
        for text in run_ranks(pass_unknown_attention_argument, 2, path)
    )
    # The seeded fault.
    assert run_ranks(pass_unknown_attention_argument, 2, path, accept_every_argument) == ["", ""]


def mix_tokens(hidden):
    """Mixes all tokens of a sequence."""
    return hidden + hidden.mean(1, keepdim=True)


class MixingNorm(nn.Module):
    def forward(self, hidden):
        return mix_tokens(hidden)


class MixingHead(nn.Linear):
    def forward(self, hidden):
        return super().forward(mix_tokens(hidden))


def hook_base(model):
    model.model.register_forward_hook(
        lambda module, args, output: setattr(output, "last_hidden_state", mix_tokens(output[0]))
    )


def replace_base_forward(model):
    stock = model.model.forward

    def forward(*args, **kwargs):
        output = stock(*args, **kwargs)
        output.last_hidden_state = mix_tokens(output.last_hidden_state)
        return output

    model.model.forward = forward


def hook_norm(model):
    model.model.norm.register_forward_hook(lambda module, args, output: mix_tokens(output))


def replace_norm(model):
    model.model.norm = MixingNorm()


def hook_head_input(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (mix_tokens(args[0]),))


def replace_head(model):
    head = MixingHead(32, 64, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head


def wrap_head_forward(model):
    stock = model.lm_head.forward
    model.lm_head.forward = lambda hidden: stock(mix_tokens(hidden))


EDITS_AFTER_LAYERS = (
    hook_base,
    replace_base_forward,
    hook_norm,
    replace_norm,
    hook_head_input,
    replace_head,
    wrap_head_forward,
)


@pytest.mark.parametrize("edit", EDITS_AFTER_LAYERS, ids=lambda edit: edit.__name__)
def test_user_edits_after_layers_see_full_sequences(llama, edit):
    def run_edited(model):
        edit(model)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return [loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad + 0]

    require_close(*run_single_and_parallel(run_edited, llama, layout={"cp_size": 2, "cp_comm_type": "p2p"}))


def step_after_reading_logits(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if torch.distributed.is_initialized():
        optimizer = prepare_optimizer(optimizer)
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    output.logits.sum()
    optimizer.step()
    return output


@pytest.mark.parametrize("layout", [{"cp_size": 2}, {"tp_size": 2}], ids=["cp2", "tp2"])
def test_logits_read_after_step_are_rejected(llama, layout):
    def on_rank():
        output = step_after_reading_logits(
            AutoModelForCausalLM.from_pretrained(llama, megatron_config=MegatronConfig(**layout))
        )
        with pytest.raises(UnsupportedError, match=r"was read after `optimizer.step\(\)`"):
            output.logits.sum()

    run_ranks(on_rank, 2)


def run_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach().float(), *copy_gradients(model).values()]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_autocast_error_is_bounded_by_single_process(llama, implementation):
    expected, results = run_single_and_parallel(run_autocast, llama, attn_implementation=implementation)
    exact = run_training_step(AutoModelForCausalLM.from_pretrained(llama, attn_implementation=implementation))

    def distance(values):
        pairs = zip(values, exact, strict=True)
        return sum(float((value - other).norm() / other.norm().clamp(min=1e-6)) for value, other in pairs)

    for one in results:
        assert distance(one) <= 1.5 * distance(expected)


def run_training_step(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *copy_gradients(model).values()]


def run_strided_inputs(model):
    """Passes non-contiguous inputs and an expanded mask."""
    wide = torch.stack([IDS, IDS], -1)[..., 0]
    losses = [model(input_ids=ids, labels=ids).loss for ids in (wide, IDS[:1, ::2], IDS.t().contiguous().t())]
    mask = torch.ones(1, 1, dtype=torch.int64).expand(2, 13)
    losses.append(model(input_ids=IDS, attention_mask=mask, labels=IDS).loss)
    return [torch.stack(losses).detach()]


def test_noncontiguous_inputs(llama):
    require_close(*run_single_and_parallel(run_strided_inputs, llama))


def compute_input_gradients(model):
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    return list(torch.autograd.grad(model(inputs_embeds=embeddings, labels=IDS).loss, [embeddings]))


def test_autograd_grad_with_inputs_embeds(llama):
    require_close(*run_single_and_parallel(compute_input_gradients, llama))


def test_mask_batch_size_mismatch_raises(llama):
    def call(model):
        with pytest.raises(IndexError):
            model(input_ids=IDS, attention_mask=torch.tensor([[1] * 12 + [0]]), labels=IDS)
        return []

    run_single_and_parallel(call, llama)


@pytest.mark.parametrize("entries", [9, 20])
def test_mask_length_mismatch_raises(llama, entries):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(llama, megatron_config=MegatronConfig(cp_size=2))
        with pytest.raises(ConfigError, match=rf"attention_mask \(1, {entries}\): expected \[batch, 13\]"):
            model(input_ids=IDS[:1], attention_mask=torch.ones(1, entries), labels=IDS[:1])

    run_ranks(on_rank, 2)


def hook_mlp(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)


def replace_mlp_forward(model):
    model.model.layers[0].mlp.forward = lambda hidden: hidden.flip(1)


def clear_is_causal(model):
    model.model.layers[0].self_attn.is_causal = False


def run_short_lengths(model):
    losses = []
    for length in (2, 3, 4, 5):
        loss = model(input_ids=IDS[:1, :length], labels=IDS[:1, :length]).loss
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *copy_gradients(model).values()]


def test_short_samples_with_alibi(tmp_path):
    """The ALiBi tensor passed with the hidden states has the length of a short sequence's shards in another dim."""
    config = CONFIG_MAPPING["bloom"](vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    require_close(*run_single_and_parallel(run_short_lengths, save_random_model(tmp_path, config)))


def run_padded_and_unpadded(model):
    """Batches of one shape whose padding changes the number of tokens per rank."""
    mask = torch.ones_like(IDS)
    mask[:, :5] = 0
    losses = []
    for mask_kwargs in ({}, {"attention_mask": mask}, {"attention_mask": mask.flip(1)}, {}):
        loss = model.train()(input_ids=IDS, labels=IDS, use_cache=False, **mask_kwargs).loss
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("scheme", ["p2p", "a2a"])
def test_pipeline_with_changing_sequence_splits(llama, scheme):
    layout = {"cp_size": 2, "cp_comm_type": scheme, "pp_size": 2, "num_microbatches": 2}
    require_close(*run_single_and_parallel(run_padded_and_unpadded, llama, layout=layout))


def enable_attention_dropout(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()


REJECTED = {
    "a hook": (hook_mlp, {}, "forward hook of model.layers.0.mlp"),
    "an exchanged function": (replace_mlp_forward, {}, "model.layers.0.mlp.forward was replaced"),
    "maps": (None, {"output_attentions": True}, "each rank has only the attention maps of its tokens"),
    "hidden states": (None, {"output_hidden_states": True}, "between layers each rank has only its tokens"),
    "a mask of four dims": (None, {"attention_mask": torch.ones(2, 1, 13, 13).tril() == 1}, "a mask (2, 1, 13, 13)"),
    "a flag of sdpa": (clear_is_causal, {}, "is_causal = False"),
    "dropout of attention": (enable_attention_dropout, {}, "attention dropout of 0.1"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_partial_token_views_are_rejected(llama, case):
    change, arguments, message = REJECTED[case]

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(llama, megatron_config=MegatronConfig(cp_size=2))
        if change is not None:
            change(model)
        with pytest.raises(UnsupportedError) as raised:
            model(input_ids=IDS, labels=IDS, **arguments)
        return str(raised.value)

    for text in run_ranks(on_rank, 2):
        assert message in text and "cp_size=1" in text or "megatron_config" in text


def test_shard_safe_hook(llama):
    def run_with_hook(model):
        @shard_safe
        def double(module, args, output):
            return output * 2

        model.model.layers[0].mlp.register_forward_hook(double)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return [loss.detach(), *copy_gradients(model).values()]

    require_close(*run_single_and_parallel(run_with_hook, llama))


LAYOUTS = {
    "heads": ({"cp_size": 3, "cp_comm_type": "a2a"}, "cp_size = 3 does not divide the 4 attention heads"),
    "sizes": ({"cp_size": 4, "hierarchical_context_parallel_sizes": (2, 2)}, "needs cp_comm_type='a2a+p2p'"),
    "product": (
        {"cp_size": 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 4)},
        "2 x 4 is not cp_size = 4",
    ),
    "scheme": ({"cp_size": 2, "cp_comm_type": "ring"}, "expected None, 'p2p', 'a2a', 'all_gather' or 'a2a+p2p'"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_invalid_layouts_are_rejected(llama, case):
    fields, message = LAYOUTS[case]

    def on_rank():
        with pytest.raises(ConfigError) as raised:
            AutoModelForCausalLM.from_pretrained(llama, megatron_config=MegatronConfig(**fields))
        return str(raised.value)

    for text in run_ranks(on_rank, fields["cp_size"]):
        assert message in text
