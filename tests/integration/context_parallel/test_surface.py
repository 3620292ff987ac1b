"""What a model whose rows several ranks share can be asked for: equal to one process, or refused by name."""

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


def made(folder, config, auto=AutoModelForCausalLM):
    torch.manual_seed(0)
    model = auto.from_config(config)
    draw_parameters(model, 0)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    return made(tmp_path_factory.mktemp("surface") / "llama", config)


def gradients(model):
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {name: gradient.to_dense() if gradient.is_sparse else gradient + 0 for name, gradient in found.items()}


def both(function, path, size=2, auto=AutoModelForCausalLM, **options):
    """What a function makes of a model in one process, and on each rank."""
    layout = options.pop("layout", {"cp_size": size})
    expected = function(auto.from_pretrained(path, **options))

    def on_rank():
        return function(auto.from_pretrained(path, megatron_config=ConfigUnderTest(**layout), **options))

    return expected, run_ranks(on_rank, ConfigUnderTest(**layout).ranks_per_replica)


def require_identical(expected, found):
    for one in found:
        for value, other in zip(one, expected, strict=True):
            torch.testing.assert_close(value, other, rtol=2e-4, atol=2e-5)


def calls(model):
    """Logits of training and evaluation, of a row that is too short to share, of a cache, and of some tokens alone."""
    model.train()
    trained = model(input_ids=IDS)
    trained.logits.square().mean().backward()
    counted = model(input_ids=IDS, labels=IDS, num_items_in_batch=7)
    counted.loss.backward()
    short = model(input_ids=IDS[:, :1], labels=IDS[:, :1] * 0 - 100, num_items_in_batch=1).loss
    model.eval()
    with torch.no_grad():
        cached = model(input_ids=IDS[:, :6], use_cache=True)
        further = model(input_ids=IDS[:, 6:], past_key_values=cached.past_key_values, use_cache=True)
        some = model(input_ids=IDS, labels=IDS, logits_to_keep=0)
        last = model(input_ids=IDS, logits_to_keep=2)
    found = [trained.logits, counted.loss, counted.logits + 0, short, cached.logits, further.logits]
    found += [some.loss, some.logits, last.logits, *gradients(model).values()]
    return [value.detach() for value in found]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_calls_are_those_of_one_process(llama, scheme):
    require_identical(*both(calls, llama, layout={"cp_size": 2, "cp_comm_type": scheme}))


def padded(model):
    """Rows with padding on the left, and one of padding alone; what a query without a key sees is learned from too."""
    mask = torch.ones_like(IDS)
    mask[0, :4] = 0
    loss = model(input_ids=IDS, attention_mask=mask, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *gradients(model).values()]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_queries_without_a_key_are_those_of_the_implementation(llama, implementation, scheme):
    layout = {"cp_size": 2, "cp_comm_type": scheme}
    require_identical(*both(padded, llama, layout=layout, attn_implementation=implementation))


def scored(model):
    labels = IDS.masked_fill(IDS < 20, -100)
    values = token_log_probs(model, labels, input_ids=IDS)
    (values * torch.arange(values.numel()).view_as(values)).sum().backward()
    return [values.detach(), *gradients(model).values()]


@pytest.mark.parametrize("layout", [{"cp_size": 2}, {"cp_size": 2, "tp_size": 2}], ids=["cp2", "tp2+cp2"])
def test_numbers_per_token(llama, layout):
    expected, found = both(scored, llama, layout=layout)
    require_identical(expected[:1], [one[:1] for one in found])
    if "tp_size" not in layout:
        require_identical(expected, found)


def routed(model):
    output = model(input_ids=IDS, labels=IDS, attention_mask=torch.ones_like(IDS), output_router_logits=True)
    output.loss.backward()
    router_logits = [logits for logits in output.router_logits if logits is not None]
    return [value.detach() for value in (output.loss, output.aux_loss, *router_logits, *gradients(model).values())]


@pytest.mark.parametrize("scheme", ["p2p", "a2a"])
def test_router_losses(tmp_path, scheme):
    config = CONFIG_MAPPING["mixtral"](
        **SIZES, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.5
    )
    require_identical(*both(routed, made(tmp_path, config), layout={"cp_size": 2, "cp_comm_type": scheme}))


def test_router_logits_of_some_tokens_are_found(tmp_path):
    config = CONFIG_MAPPING["mixtral"](
        **SIZES, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, router_aux_loss_coef=0.5
    )
    path = made(tmp_path, config)

    def routed_apart(model):
        if torch.distributed.is_initialized():
            ContextStack.gather_token_outputs = lambda self, part: part
            parallel_state(model).loss.join_tokens = lambda part: part
        output = model(input_ids=IDS, labels=IDS, output_router_logits=True)
        return [output.aux_loss.detach()]

    expected, found = both(routed_apart, path)
    assert all(abs(one[0] - expected[0]) > 1e-3 for one in found)


def classified(model):
    output = model(input_ids=IDS, labels=torch.tensor([0, 2]))
    output.loss.backward()
    return [value.detach() for value in (output.loss, output.logits, *gradients(model).values())]


def test_a_classification_head(tmp_path):
    config = LlamaConfig(**SIZES, num_attention_heads=4, num_labels=3, pad_token_id=0)
    path = made(tmp_path, config, AutoModelForSequenceClassification)
    require_identical(*both(classified, path, auto=AutoModelForSequenceClassification))


def prompted(model):
    """Trained embeddings in the place of tokens."""
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    loss = model(inputs_embeds=embeddings, labels=IDS).loss
    loss.backward()
    return [loss.detach(), embeddings.grad]


def test_inputs_that_are_trained(llama):
    require_identical(*both(prompted, llama))


def checkpointed(model, reentrant):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.train()
    first, second = (model(input_ids=ids, labels=ids, use_cache=False).loss for ids in (IDS, IDS[:, :9]))
    (first + second).backward()
    return [first.detach(), *gradients(model).values()]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_layers_that_are_computed_again(llama, tmp_path, kind, reentrant):
    path = llama
    if kind != "llama":
        # Linear attention, which is computed on whole rows.
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
        path = made(tmp_path, config)
    require_identical(*both(functools.partial(checkpointed, reentrant=reentrant), path, dtype=torch.float32))


def dropped(model):
    """Dropout on hidden states: ranks draw apart for their tokens, and alike where they compute alike."""
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Dropout(0.5)
    torch.manual_seed(torch.distributed.get_rank())
    model.train()
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        losses.append(loss.detach())
    return [torch.stack(losses), torch.rand(2), *gradients(model).values()]


def test_ranks_draw_for_their_tokens(tmp_path):
    config = LlamaConfig(**SIZES, num_attention_heads=4)
    path = made(tmp_path, config)

    def on_rank():
        return dropped(AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(cp_size=2)))

    first, second = run_ranks(on_rank, 2)
    assert len(set(first[0].tolist())) == 3
    for value, other in zip(first, second, strict=True):
        assert torch.equal(value, other)


class NotedDropout(nn.Dropout):
    """Keeps which entries it has dropped."""

    @shard_safe
    def forward(self, hidden):
        kept = super().forward(torch.ones_like(hidden))
        self.dropped = (kept == 0).flatten()
        return hidden * kept


def entries_dropped(path, sabotage=None):
    if sabotage is not None:
        sabotage()
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(cp_size=2)).train()
    model.model.layers[0].mlp.act_fn = NotedDropout(0.5)
    model(input_ids=IDS[:, :12], labels=IDS[:, :12])
    return model.model.layers[0].mlp.act_fn.dropped


def one_stream_for_all_ranks():
    stock = context_axis.StreamOfPart
    context_axis.StreamOfPart = lambda device, rank: stock(device, 0)


def test_ranks_drop_other_entries_of_their_tokens(tmp_path):
    path = made(tmp_path, LlamaConfig(**SIZES, num_attention_heads=4))
    first, second = run_ranks(entries_dropped, 2, path)
    assert len(first) == len(second) and not torch.equal(first, second)
    # The seeded fault.
    first, second = run_ranks(entries_dropped, 2, path, one_stream_for_all_ranks)
    assert torch.equal(first, second)


def with_a_further_argument(path, sabotage=None):
    if sabotage is not None:
        sabotage()
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=MegatronConfig(cp_size=2))
    attention = model.model.layers[0].self_attn
    further = shard_safe(lambda module, args, kwargs: (args, kwargs | {"position_bias": torch.ones(1)}))
    attention.register_forward_pre_hook(further, with_kwargs=True)
    try:
        model(input_ids=IDS, labels=IDS)
    except UnsupportedError as error:
        return str(error)
    return ""


def every_argument_is_known():
    class Everything(frozenset):
        def __or__(self, other):
            return self

        def __contains__(self, name):
            return True

    context_dispatch._KNOWN = Everything()


def test_an_argument_that_attention_over_ranks_does_not_know_is_refused(tmp_path):
    path = made(tmp_path, LlamaConfig(**SIZES, num_attention_heads=4))
    assert all(
        "context-parallel attention does not support position_bias" in text
        for text in run_ranks(with_a_further_argument, 2, path)
    )
    # The seeded fault.
    assert run_ranks(with_a_further_argument, 2, path, every_argument_is_known) == ["", ""]


def mixed(hidden):
    """Looks at all tokens of a row."""
    return hidden + hidden.mean(1, keepdim=True)


class MixingNorm(nn.Module):
    def forward(self, hidden):
        return mixed(hidden)


class MixingHead(nn.Linear):
    def forward(self, hidden):
        return super().forward(mixed(hidden))


def after_base(model):
    model.model.register_forward_hook(
        lambda module, args, output: setattr(output, "last_hidden_state", mixed(output[0]))
    )


def in_place_of_base(model):
    stock = model.model.forward

    def forward(*args, **kwargs):
        output = stock(*args, **kwargs)
        output.last_hidden_state = mixed(output.last_hidden_state)
        return output

    model.model.forward = forward


def after_norm(model):
    model.model.norm.register_forward_hook(lambda module, args, output: mixed(output))


def in_place_of_norm(model):
    model.model.norm = MixingNorm()


def before_head(model):
    model.lm_head.register_forward_pre_hook(lambda module, args: (mixed(args[0]),))


def in_place_of_head(model):
    head = MixingHead(32, 64, bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head


def around_head(model):
    stock = model.lm_head.forward
    model.lm_head.forward = lambda hidden: stock(mixed(hidden))


BEHIND = (after_base, in_place_of_base, after_norm, in_place_of_norm, before_head, in_place_of_head, around_head)


@pytest.mark.parametrize("edit", BEHIND, ids=lambda edit: edit.__name__)
def test_what_users_put_after_the_layers_sees_full_sequences(llama, edit):
    def edited(model):
        edit(model)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return [loss.detach(), model.model.layers[0].self_attn.q_proj.weight.grad + 0]

    require_identical(*both(edited, llama, layout={"cp_size": 2, "cp_comm_type": "p2p"}))


def late(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if torch.distributed.is_initialized():
        optimizer = prepare_optimizer(optimizer)
    output = model(input_ids=IDS, labels=IDS)
    output.loss.backward()
    output.logits.sum()
    optimizer.step()
    return output


@pytest.mark.parametrize("layout", [{"cp_size": 2}, {"tp_size": 2}], ids=["cp2", "tp2"])
def test_logits_are_not_read_after_a_step(llama, layout):
    def on_rank():
        output = late(AutoModelForCausalLM.from_pretrained(llama, megatron_config=MegatronConfig(**layout)))
        with pytest.raises(UnsupportedError, match=r"was read after `optimizer.step\(\)`"):
            output.logits.sum()

    run_ranks(on_rank, 2)


def cast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach().float(), *gradients(model).values()]


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_autocast_is_as_near_to_fp32_as_one_process(llama, implementation):
    expected, found = both(cast, llama, attn_implementation=implementation)
    exact = training(AutoModelForCausalLM.from_pretrained(llama, attn_implementation=implementation))

    def distance(values):
        pairs = zip(values, exact, strict=True)
        return sum(float((value - other).norm() / other.norm().clamp(min=1e-6)) for value, other in pairs)

    for one in found:
        assert distance(one) <= 1.5 * distance(expected)


def training(model):
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *gradients(model).values()]


def strided(model):
    """Inputs that do not lie one behind the other."""
    wide = torch.stack([IDS, IDS], -1)[..., 0]
    losses = [model(input_ids=ids, labels=ids).loss for ids in (wide, IDS[:1, ::2], IDS.t().contiguous().t())]
    mask = torch.ones(1, 1, dtype=torch.int64).expand(2, 13)
    losses.append(model(input_ids=IDS, attention_mask=mask, labels=IDS).loss)
    return [torch.stack(losses).detach()]


def test_inputs_may_lie_anyhow(llama):
    require_identical(*both(strided, llama))


def asked_for(model):
    embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
    return list(torch.autograd.grad(model(inputs_embeds=embeddings, labels=IDS).loss, [embeddings]))


def test_gradients_of_inputs_may_be_asked_for(llama):
    require_identical(*both(asked_for, llama))


def test_a_mask_of_other_rows_is_an_error(llama):
    def call(model):
        with pytest.raises(IndexError):
            model(input_ids=IDS, attention_mask=torch.tensor([[1] * 12 + [0]]), labels=IDS)
        return []

    both(call, llama)


@pytest.mark.parametrize("entries", [9, 20])
def test_a_mask_of_another_length_is_named(llama, entries):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(llama, megatron_config=MegatronConfig(cp_size=2))
        with pytest.raises(ConfigError, match=rf"attention_mask \(1, {entries}\): expected \[batch, 13\]"):
            model(input_ids=IDS[:1], attention_mask=torch.ones(1, entries), labels=IDS[:1])

    run_ranks(on_rank, 2)


def hooked(model):
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * 2)


def exchanged(model):
    model.model.layers[0].mlp.forward = lambda hidden: hidden.flip(1)


def without_causal(model):
    model.model.layers[0].self_attn.is_causal = False


def of_lengths(model):
    losses = []
    for length in (2, 3, 4, 5):
        loss = model(input_ids=IDS[:1, :length], labels=IDS[:1, :length]).loss
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *gradients(model).values()]


def test_short_samples_of_blocks_that_are_full(tmp_path):
    """What is given beside hidden states (ALiBi) has the length of a short row's parts in another dim."""
    config = CONFIG_MAPPING["bloom"](vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    require_identical(*both(of_lengths, made(tmp_path, config)))


def padded_after_full(model):
    """Rows of the same shape of which ranks hold other numbers of tokens."""
    mask = torch.ones_like(IDS)
    mask[:, :5] = 0
    losses = []
    for given in ({}, {"attention_mask": mask}, {"attention_mask": mask.flip(1)}, {}):
        loss = model.train()(input_ids=IDS, labels=IDS, use_cache=False, **given).loss
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("scheme", ["p2p", "a2a"])
def test_stages_of_rows_that_are_cut_otherwise(llama, scheme):
    layout = {"cp_size": 2, "cp_comm_type": scheme, "pp_size": 2, "num_microbatches": 2}
    require_identical(*both(padded_after_full, llama, layout=layout))


def with_dropout(model):
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    model.train()


REFUSED = {
    "a hook": (hooked, {}, "forward hook of model.layers.0.mlp"),
    "an exchanged function": (exchanged, {}, "model.layers.0.mlp.forward was replaced"),
    "maps": (None, {"output_attentions": True}, "each rank has only the attention maps of its tokens"),
    "hidden states": (None, {"output_hidden_states": True}, "between layers each rank has only its tokens"),
    "a mask of four dims": (None, {"attention_mask": torch.ones(2, 1, 13, 13).tril() == 1}, "a mask (2, 1, 13, 13)"),
    "a flag of sdpa": (without_causal, {}, "is_causal = False"),
    "dropout of attention": (with_dropout, {}, "attention dropout of 0.1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_see_some_tokens_is_refused(llama, case):
    change, arguments, message = REFUSED[case]

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(llama, megatron_config=MegatronConfig(cp_size=2))
        if change is not None:
            change(model)
        with pytest.raises(UnsupportedError) as raised:
            model(input_ids=IDS, labels=IDS, **arguments)
        return str(raised.value)

    for text in run_ranks(on_rank, 2):
        assert message in text and "cp_size=1" in text or "megatron_config" in text


def test_a_hook_that_is_shard_safe(llama):
    def doubled(model):
        @shard_safe
        def double(module, args, output):
            return output * 2

        model.model.layers[0].mlp.register_forward_hook(double)
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        return [loss.detach(), *gradients(model).values()]

    require_identical(*both(doubled, llama))


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
def test_layouts_that_cannot_be(llama, case):
    fields, message = LAYOUTS[case]

    def on_rank():
        with pytest.raises(ConfigError) as raised:
            AutoModelForCausalLM.from_pretrained(llama, megatron_config=MegatronConfig(**fields))
        return str(raised.value)

    for text in run_ranks(on_rank, fields["cp_size"]):
        assert message in text
