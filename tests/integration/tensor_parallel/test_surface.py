"""Tests of the model API under tensor parallelism, in the order of docs/surface.md."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_megatron import CheckpointError, ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.checkpoint.gather_full import full_state_dict, gather_to_first
from hf_megatron.compat.torch_dtensor import dtensor_handlers
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.torch import dtensor_ops
from hf_megatron.parallelize import parallel_state

TP2 = MegatronConfig(tp_size=2)
SP2 = MegatronConfig(tp_size=2, sequence_parallel=True)


def make_batch():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 512, (2, 9), generator=generator)
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def load(stories, config=None, **kwargs):
    return AutoModelForCausalLM.from_pretrained(stories, megatron_config=config, **kwargs)


def require_close(a, b, tolerance=2e-5):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def compare_with_stock(stories, check, config=TP2, **kwargs):
    """Runs `check` on the stock model and on each rank; the results must agree."""
    expected = check(load(stories, **kwargs))
    for result in run_ranks(lambda: check(load(stories, config, **kwargs)), config.tp_size):
        require_close(result, expected)


def test_counts_and_embeddings(stories):
    def check(model):
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert embedding is model.model.embed_tokens and head is model.lm_head
        assert embedding.weight is head.weight, "tied"
        model.tie_weights()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        return torch.tensor([model.num_parameters(), *embedding.weight.shape, head.out_features, head.in_features])

    compare_with_stock(stories, check)


def test_set_embeddings(stories):
    def check(model):
        model.set_input_embeddings(model.get_input_embeddings())
        model.set_output_embeddings(model.get_output_embeddings())
        return model(**make_batch()).loss.detach()

    compare_with_stock(stories, check)


@pytest.mark.parametrize("config", [TP2, SP2], ids=["tp2", "tp2+sp"])
def test_inputs_embeds_hidden_states_and_tuples(stories, config):
    def check(model):
        one = make_batch()
        embeds = model.get_input_embeddings()(one.pop("input_ids"))
        outputs = model(inputs_embeds=embeds, **one)
        as_tuple = model(inputs_embeds=embeds, return_dict=False, **one)
        assert isinstance(as_tuple, tuple)
        return torch.stack([outputs.loss.detach(), as_tuple[0].detach()])

    compare_with_stock(stories, check, config)


def test_output_hidden_states(stories):
    def check(model):
        with torch.no_grad():
            outputs = model(**make_batch(), output_hidden_states=True)
        return torch.stack(list(outputs.hidden_states))

    compare_with_stock(stories, check)


def test_hidden_states_with_sequence_parallel_are_rejected(stories):
    def check():
        model = load(stories, SP2)
        with pytest.raises(UnsupportedError, match="output_hidden_states"):
            model(**make_batch(), output_hidden_states=True)

    run_ranks(check, 2)


def test_output_attentions_is_rejected(stories):
    def check():
        model = load(stories, TP2, attn_implementation="eager")
        with pytest.raises(UnsupportedError, match="output_attentions"):
            model(**make_batch(), output_attentions=True)

    run_ranks(check, 2)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_implementations(stories, implementation):
    compare_with_stock(stories, lambda model: model(**make_batch()).loss.detach(), attn_implementation=implementation)


@pytest.mark.parametrize("config", [TP2, SP2], ids=["tp2", "tp2+sp"])
def test_left_padding(stories, config):
    def check(model):
        one = make_batch()
        one["attention_mask"][0, :4] = 0
        one["labels"] = one["labels"].masked_fill(one["attention_mask"] == 0, -100)
        return model(**one).loss.detach()

    compare_with_stock(stories, check, config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtype(stories, dtype):
    def on_rank():
        model = load(stories, TP2, dtype=dtype)
        assert model.dtype is dtype
        return full_state_dict(model)

    expected = load(stories, dtype=dtype).state_dict()
    full_weights = run_ranks(on_rank, 2)[0]
    assert all(torch.equal(full_weights[name], tensor) and tensor.dtype is dtype for name, tensor in expected.items())


@pytest.mark.parametrize("cast", ["half", "bfloat16", "to"])
def test_casting(stories, cast):
    def change(model):
        return model.to(torch.bfloat16) if cast == "to" else getattr(model, cast)()

    def on_rank():
        model = change(load(stories, TP2))
        loss = model(**make_batch()).loss
        loss.backward()
        return full_state_dict(model), loss.item()

    stock = change(load(stories))
    full_weights, loss = run_ranks(on_rank, 2)[0]
    assert all(torch.equal(full_weights[name], tensor) for name, tensor in stock.state_dict().items())
    assert loss == pytest.approx(stock(**make_batch()).loss.item(), rel=2e-2)


def test_state_dict_round_trip_with_full_tensors(stories):
    def on_rank():
        model = load(stories, TP2)
        local_weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.manual_seed(0)
        full = {name: torch.randn(tensor.shape) for name, tensor in local_weights.items()}
        full["lm_head.weight"] = full["model.embed_tokens.weight"]
        model.load_state_dict(full)
        gathered = full_state_dict(model)
        assert all(torch.equal(gathered[name], full[name]) for name in gathered)
        model.load_state_dict(local_weights)
        with pytest.raises((ConfigError, RuntimeError), match="up_proj|shape"):
            model.load_state_dict({**full, "model.layers.0.mlp.up_proj.weight": torch.zeros(3, 3)})
        return model(**make_batch()).loss.item()

    expected = load(stories)(**make_batch()).loss.item()
    assert run_ranks(on_rank, 2) == pytest.approx([expected] * 2, rel=1e-6)


def test_deepcopy_is_independent(stories):
    def check(model):
        duplicate = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0)
        loss = duplicate(**make_batch()).loss
        loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        return loss.detach()

    compare_with_stock(stories, check)


def test_frozen_parameters_have_no_gradients(stories):
    def compute_gradients(model):
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.model.norm.requires_grad_(True)
        for parameter in model.model.layers[2].mlp.down_proj.parameters():
            parameter.requires_grad_(True)
        model(**make_batch()).loss.backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    def on_rank():
        model = load(stories, SP2)
        state = parallel_state(model)
        return {
            name: None if grad is None else gather_to_first(grad, state.shardings[name].placement, state.mesh)
            for name, grad in compute_gradients(model).items()
        }

    expected, full_gradients = compute_gradients(load(stories)), run_ranks(on_rank, 2)[0]
    for name, gradient in expected.items():
        assert (gradient is None) == (full_gradients[name] is None), name
        if gradient is not None:
            require_close(full_gradients[name], gradient)


def test_reading_logits_in_training_gathers_and_warns_once(stories):
    def on_rank():
        model = load(stories, TP2).train()
        outputs = model(**make_batch())
        assert tuple(outputs.logits.shape) == (2, 9, 512)
        with pytest.warns(UserWarning, match="gathered"):
            read = outputs.logits.argmax(-1)
        outputs.loss.backward()
        return read

    expected = load(stories)(**make_batch()).logits.argmax(-1)
    for tokens in run_ranks(on_rank, 2):
        assert torch.equal(tokens, expected)


def test_external_loss_gradients(stories):
    def check(model):
        one = make_batch()
        labels = one.pop("labels")
        logits = model.train()(**one).logits
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        state = parallel_state(model)
        name = "model.layers.1.self_attn.q_proj.weight"
        gradient = dict(model.named_parameters())[name].grad
        if state is None:
            return gradient
        full = gather_to_first(gradient, state.shardings[name].placement, state.mesh)
        return full if full is not None else torch.zeros(64, 64)

    expected = check(load(stories))
    require_close(run_ranks(lambda: check(load(stories, SP2)), 2)[0], expected)


@pytest.mark.parametrize(
    "config", [TP2, MegatronConfig(dp_size=2), MegatronConfig(pp_size=2)], ids=["tp2", "dp2", "pp2"]
)
def test_label_smoothing_as_a_loss_argument(stories, config):
    """transformers accepts the argument and ignores it."""

    def check(model):
        return model(**make_batch(), label_smoothing=0.3).loss.detach()

    expected = check(load(stories))
    for loss in run_ranks(lambda: check(load(stories, config)), 2):
        require_close(loss, expected)


def test_subfolder_variant_and_loading_info(stories, tmp_path):
    import shutil

    shutil.copytree(stories, tmp_path / "sub")
    (tmp_path / "sub" / "model.safetensors").rename(tmp_path / "sub" / "model.fp32.safetensors")

    def check():
        model, info = load(tmp_path, TP2, subfolder="sub", variant="fp32", output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]
        model.save_pretrained(tmp_path / "out", variant="x")
        return model(**make_batch()).loss.item()

    expected = load(stories)(**make_batch()).loss.item()
    assert run_ranks(check, 2) == pytest.approx([expected] * 2, rel=1e-6)
    assert load(tmp_path / "out", variant="x")(**make_batch()).loss.item() == pytest.approx(expected, rel=1e-6)


def test_sequence_classification(stories, tmp_path):
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(stories, num_labels=3, pad_token_id=2).save_pretrained(tmp_path)
    one = make_batch() | {"labels": torch.tensor([0, 2])}

    def run(config):
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path, megatron_config=config).train()
        outputs = model(**one)
        outputs.loss.backward()
        return outputs.loss.detach(), outputs.logits.detach(), model.model.norm._parameters["weight"].grad

    expected = run(None)
    for config in (TP2, SP2):
        for loss, logits, gradient in run_ranks(lambda c=config: [to_local(v) for v in run(c)], 2):
            require_close(loss, expected[0])
            require_close(logits, expected[1])
            require_close(gradient, expected[2])


def to_local(value):
    return value.to_local() if hasattr(value, "to_local") else value


def test_missing_weights_raise(stories):
    def check():
        # Missing heads are initialized instead: see test_save_load.py.
        with pytest.raises(CheckpointError, match="missing .*layers"):
            AutoModelForCausalLM.from_pretrained(stories, num_hidden_layers=7, megatron_config=TP2)

    run_ranks(check, 2)


def test_parameter_without_sharding_raises_before_first_step(stories):
    from hf_megatron import PlanError

    def check():
        model = load(stories, TP2)
        model.extra = torch.nn.Linear(2, 2)
        with torch.no_grad():
            model.eval()(**make_batch())
        for mode in (True, False):
            with pytest.raises(PlanError, match="extra.weight"):
                model.train(mode)(**make_batch())

    run_ranks(check, 2)


NORMS = {
    "columns": lambda weight: weight.norm(dim=0).sum(),
    "rows": lambda weight: weight.norm(dim=1).sum(),
    "weighted": lambda weight: 0.5 * torch.linalg.vector_norm(weight, dim=0).sum() + 1,
    "mean": lambda weight: weight.norm(dim=1, keepdim=True).mean(),
    "full": lambda weight: weight.norm(),
}


def sum_norms(model):
    """Returns the value of each norm over four weights, and the gradients of their sum."""
    weights = [model.get_parameter(f"model.layers.0.{name}.weight") for name in ("self_attn.q_proj", "mlp.down_proj")]
    weights += [model.model.embed_tokens.weight]
    values = [sum(norm(weight) for weight in weights) for norm in NORMS.values()]
    sum(values).backward()
    gradients = [
        weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad for weight in weights
    ]
    return [value.item() for value in values], [gradient.clone() for gradient in gradients]


def test_norms_along_a_dim(stories):
    values, gradients = sum_norms(load(stories))
    for rank_values, rank_gradients in run_ranks(lambda: sum_norms(load(stories, TP2)), 2):
        assert rank_values == pytest.approx(values, rel=1e-5)
        for gradient, expected in zip(rank_gradients, gradients, strict=True):
            require_close(gradient, expected)


def test_norms_of_shards_are_detected(stories, monkeypatch):
    monkeypatch.setattr(dtensor_ops, "_norms", dtensor_ops._stock)
    # An earlier test may have installed the overrides in this process, from which the ranks are forked.
    if (operator := torch.ops.aten.linalg_vector_norm.default) in dtensor_handlers():
        monkeypatch.setitem(dtensor_handlers(), operator, dtensor_ops._stock)
    with pytest.raises(AssertionError):
        test_norms_along_a_dim(stories)


@pytest.mark.parametrize("config", [TP2, MegatronConfig(dp_size=2)], ids=["tp2", "dp2"])
def test_repeated_layers_need_an_entry_of_the_cache(stories, config):
    """With the error's cures."""

    def repeat(layout=None):
        model = load(stories, layout).train()
        model.model.layers[2] = copy.deepcopy(model.model.layers[1])
        return model

    def measure(model, renumbers):
        if renumbers:
            model.model.layers[2].self_attn.layer_idx = 2
        else:
            model.config.use_cache = False
        return model(**make_batch()).loss.item()

    def on_rank():
        model = repeat(config)
        with pytest.raises(UnsupportedError, match="Several modules of `layers` have layer_idx = 1"):
            model(**make_batch())
        return [measure(model if renumbers else repeat(config), renumbers) for renumbers in (True, False)]

    expected = [measure(repeat(), renumbers) for renumbers in (True, False)]
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-5)] * 2
