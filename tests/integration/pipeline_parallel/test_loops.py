"""Tests of training loops around a pipelined model: user-computed embeddings, `None` arguments, off-stage modules."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.training import make_batch, parse_layout, save_tiny, shard_batch


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, tie_word_embeddings=False)
    return path


def load(path, text):
    config = {} if text is None else {"megatron_config": parse_layout(text)}
    return AutoModelForCausalLM.from_pretrained(path, **config).train()


def run_user_embeddings(path, text, prompts):
    """Trains and evaluates on embeddings computed by the loop; the embedding is frozen in the last step."""
    model, prompt = load(path, text), nn.Parameter(torch.linspace(-1, 1, 64).view(1, 2, 32))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for seed in range(3):
        local_batch = shard_batch(model, make_batch(seed))
        embedding = model.get_input_embeddings()
        embedding.requires_grad_(seed < 2)
        inputs = embedding(local_batch["input_ids"]) * 1.3
        loss = model(inputs_embeds=inputs, labels=local_batch["labels"]).loss
        if seed == 1 and prompts:
            prompt_embeds = torch.cat(
                [prompt.expand(len(inputs), -1, -1), embedding(local_batch["input_ids"]) + 0.1], dim=1
            )
            loss = loss + model(inputs_embeds=prompt_embeds).logits.float().square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    if prompt.grad is not None:
        losses.append(prompt.grad.norm())
    with torch.no_grad():
        full_batch = make_batch(5)
        inputs = model.eval().get_input_embeddings()(full_batch["input_ids"]) / 2
        losses.append(model(inputs_embeds=inputs, labels=full_batch["labels"]).loss)
        tokens = model.generate(inputs_embeds=inputs, max_new_tokens=3, do_sample=False, pad_token_id=0)
        losses += tokens.flatten().float()
    return torch.stack(losses)


@pytest.mark.parametrize("text", ["pp2", "pp2+split", "pp2+dp2"])
def test_user_computed_embeddings(folder, text):
    # With data parallelism, prompt gradients would cover the local samples only.
    prompts = "dp" not in text
    expected = run_user_embeddings(folder, None, prompts)
    for losses in run_ranks(lambda: run_user_embeddings(folder, text, prompts), 4 if "dp" in text else 2):
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)


def test_off_stage_embedding_values_raise(folder):
    def on_rank():
        model = load(folder, "pp2")
        inputs = model.get_input_embeddings()(make_batch(0)["input_ids"])
        if type(inputs).__name__ == "OffStageActivation":
            with pytest.raises(UnsupportedError, match="not on this rank.*stage 0"):
                float(inputs.pow(2).mean())
        return type(inputs).__name__

    assert sorted(run_ranks(on_rank, 2)) == ["OffStageActivation", "Tensor"]


def run_none_arguments(path, text):
    """Runs calls with fewer samples than microbatches and most arguments `None`."""
    model = load(path, text)
    samples = {name: value[:3] for name, value in make_batch(0).items()}
    none_kwargs = dict.fromkeys(("labels", "num_items_in_batch", "attention_mask", "position_ids", "shift_labels"))
    values = [
        model(**{**none_kwargs, "input_ids": samples["input_ids"]}).logits.float().square().mean(),
        model(**{**none_kwargs, **samples}).loss,
        model(**{**none_kwargs, **samples, "shift_labels": samples["labels"]}).loss,
    ]
    sum(values).backward()
    values.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    with torch.no_grad():
        values.append(model.eval()(**{**none_kwargs, "input_ids": samples["input_ids"]}).logits.float().mean())
    return torch.stack([value.detach() for value in values])


@pytest.mark.parametrize("text", ["pp2", "pp2+split"])
def test_none_arguments(folder, text):
    expected = run_none_arguments(folder, None)
    for values in run_ranks(lambda: run_none_arguments(folder, text), 2):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


READINGS = (
    lambda logits: logits[:, -1],
    lambda logits: logits.shape,
    lambda logits: logits.dtype,
    lambda logits: logits.to("cpu"),
    lambda logits: logits.float(),
    lambda logits: logits * 2,
    lambda logits: 1.0 - logits,
    lambda logits: -logits,
    lambda logits: logits > 0,
    lambda logits: len(logits),
    lambda logits: list(logits),
    lambda logits: torch.logsumexp(logits, -1),
    lambda logits: torch.nn.functional.cross_entropy(logits, torch.zeros(4, dtype=torch.long)),
    lambda logits: torch.ones(4) + logits,
    lambda logits: torch.ones(4) @ logits,
    lambda logits: torch.stack([logits]),
)


def test_training_logits_with_labels_raise(folder):
    def on_rank():
        output = load(folder, "pp2")(**make_batch(0))
        for reading in READINGS:
            with pytest.raises(UnsupportedError, match="no logits in a training step.*without labels"):
                reading(output.logits)
        assert not hasattr(output.logits, "dtype")
        assert output.to_tuple()[0] is output.loss

    run_ranks(on_rank, 2)


WEIGHT_READS = {
    "mlp": lambda model: model.model.layers[1].mlp.gate_proj.weight.tolist(),
    "self_attn": lambda model: model.model.layers[0].self_attn.q_proj.weight.tolist(),
    "weight": lambda model: model.lm_head.weight.sum().item(),
    "embedding": lambda model: model.get_input_embeddings().weight[0].tolist(),
    "norm": lambda model: float(model.model.norm.weight.mean()),
}


def tie_head(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def replace_layer_mlps(model):
    for layer in model.model.layers:
        layer.mlp = nn.Identity()


def test_off_stage_modules(folder):
    def on_rank():
        model = load(folder, "pp2")
        assert model.lm_head.weight.shape == model.get_input_embeddings().weight.shape == (64, 32)
        assert model.lm_head.weight.dtype == torch.float32
        unreadable = set()
        for name, read in WEIGHT_READS.items():
            try:
                read(model)
            except UnsupportedError as error:
                assert "lies on stage" in str(error)
                unreadable.add(name)
        off_stage_layer = model.model.layers[0 if "self_attn" in unreadable else 1]
        assert model.model.norm.variance_epsilon == model.config.rms_norm_eps
        assert off_stage_layer.mlp.hidden_size == 32 and not hasattr(off_stage_layer.mlp, "rotary_emb")
        assert off_stage_layer.mlp.gate_proj.weight is dict(off_stage_layer.named_parameters())["mlp.gate_proj.weight"]
        with pytest.raises(UnsupportedError, match="A LlamaMLP was called alone"):
            off_stage_layer.mlp(torch.zeros(1, 1, 32))
        with pytest.raises(UnsupportedError, match="mlp of a LlamaDecoderLayer: it lies on stage"):
            replace_layer_mlps(model)
        if "self_attn" not in unreadable:
            with pytest.raises(UnsupportedError, match="weight of a Linear: it lies on stage 1"):
                tie_head(model)
        return unreadable

    assert run_ranks(on_rank, 2) == [{"mlp", "weight", "norm"}, {"self_attn", "embedding"}]


def train_matching_parameters(path, text, part):
    """Trains only the parameters whose name contains `part`, which are all on one stage."""
    model = load(path, text)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = prepare_optimizer(torch.optim.AdamW(trainable, lr=0.01))
    losses = []
    for seed in range(3):
        loss = model(**shard_batch(model, make_batch(seed))).loss
        loss.backward()
        losses.append(torch.nn.utils.clip_grad_norm_(trainable, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("part", ["lm_head", "layers.0", "embed_tokens"])
@pytest.mark.parametrize("text", ["pp2", "pp2+dp2"])
def test_optimizer_with_one_stage_parameters(folder, text, part):
    expected = train_matching_parameters(folder, None, part)
    for losses in run_ranks(lambda: train_matching_parameters(folder, text, part), 4 if "dp" in text else 2):
        assert losses == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("prepared", [False, True])
def test_non_elementwise_optimizers_are_rejected(folder, prepared):
    def on_rank():
        model = load(folder, "pp2")
        with pytest.raises(UnsupportedError, match="LBFGS is not supported: it combines values of all parameters"):
            optimizer = torch.optim.LBFGS(model.parameters())
            if prepared:
                prepare_optimizer(optimizer)
            optimizer.step(lambda: model(**make_batch(0)).loss)

        class OfItsOwn(torch.optim.SGD):
            pass

        with pytest.raises(UnsupportedError, match="OfItsOwn .* values of all parameters|OfItsOwn is not known"):
            optimizer = OfItsOwn(model.parameters(), lr=0.1)
            if prepared:
                prepare_optimizer(optimizer)
            optimizer.step()
        for declaration in ("elementwise", "layer_wise"):
            prepare_optimizer(OfItsOwn(model.parameters(), lr=0.1), **{declaration: True}).step()

    run_ranks(on_rank, 2)


def step_in_evaluation_mode(path, text):
    """Runs a training step in eval mode; the replicas have unequal numbers of labels."""
    model = load(path, text).eval()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    full_batch = make_batch(0)
    full_batch["labels"][0] = -100
    loss = model(**shard_batch(model, full_batch)).loss
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        return loss.item(), model(**shard_batch(model, make_batch(1))).logits.float().sum().item()


@pytest.mark.parametrize("text", ["pp2", "dp2", "pp2+dp2"])
def test_eval_mode_trains_on_global_batch(folder, text):
    [(expected, after)] = run_ranks(step_in_evaluation_mode, 1, folder, None)
    config = parse_layout(text)
    results = run_ranks(step_in_evaluation_mode, config.ranks_per_replica * (config.dp_size or 1), folder, text)
    assert all(loss == pytest.approx(expected, rel=1e-5) for loss, _ in results)
    sums = results[0][1] if text == "pp2" else results[0][1] + results[-1][1]
    assert sums == pytest.approx(after, rel=1e-3, abs=1e-3)
