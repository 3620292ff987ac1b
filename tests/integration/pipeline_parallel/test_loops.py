"""What loops do around the calls of a pipelined model: inputs made with its parts, arguments of `None`."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.training import local_samples, make_batch, parse_layout, save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, tie_word_embeddings=False)
    return path


def load(path, text):
    config = {} if text is None else {"megatron_config": parse_layout(text)}
    return AutoModelForCausalLM.from_pretrained(path, **config).train()


def embeddings_of_its_own(path, text, prompts):
    """Losses of steps, then of an evaluation; the embedding is frozen for the last step."""
    model, prompt = load(path, text), nn.Parameter(torch.linspace(-1, 1, 64).view(1, 2, 32))
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for seed in range(3):
        own = local_samples(model, make_batch(seed))
        embedding = model.get_input_embeddings()
        embedding.requires_grad_(seed < 2)
        inputs = embedding(own["input_ids"]) * 1.3
        loss = model(inputs_embeds=inputs, labels=own["labels"]).loss
        if seed == 1 and prompts:
            prompted = torch.cat([prompt.expand(len(inputs), -1, -1), embedding(own["input_ids"]) + 0.1], dim=1)
            loss = loss + model(inputs_embeds=prompted).logits.float().square().mean()
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
def test_embeddings_of_its_own(folder, text):
    # Gradients of prompts would be those of the data parallel rank's rows.
    prompts = "dp" not in text
    expected = embeddings_of_its_own(folder, None, prompts)
    for found in run_ranks(lambda: embeddings_of_its_own(folder, text, prompts), 4 if "dp" in text else 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_values_of_embeddings_that_are_elsewhere(folder):
    def on_rank():
        model = load(folder, "pp2")
        inputs = model.get_input_embeddings()(make_batch(0)["input_ids"])
        if type(inputs).__name__ == "OffStageActivation":
            with pytest.raises(UnsupportedError, match="not on this rank.*stage 0"):
                float(inputs.pow(2).mean())
        return type(inputs).__name__

    assert sorted(run_ranks(on_rank, 2)) == ["OffStageActivation", "Tensor"]


def arguments_of_none(path, text):
    """Values of calls with fewer rows than microbatches."""
    model = load(path, text)
    own = {name: value[:3] for name, value in make_batch(0).items()}
    nothing = dict.fromkeys(("labels", "num_items_in_batch", "attention_mask", "position_ids", "shift_labels"))
    found = [
        model(**{**nothing, "input_ids": own["input_ids"]}).logits.float().square().mean(),
        model(**{**nothing, **own}).loss,
        model(**{**nothing, **own, "shift_labels": own["labels"]}).loss,
    ]
    sum(found).backward()
    found.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    with torch.no_grad():
        found.append(model.eval()(**{**nothing, "input_ids": own["input_ids"]}).logits.float().mean())
    return torch.stack([value.detach() for value in found])


@pytest.mark.parametrize("text", ["pp2", "pp2+split"])
def test_arguments_of_none(folder, text):
    expected = arguments_of_none(folder, None)
    for found in run_ranks(lambda: arguments_of_none(folder, text), 2):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


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


def test_logits_of_a_training_call_with_labels(folder):
    def on_rank():
        output = load(folder, "pp2")(**make_batch(0))
        for reading in READINGS:
            with pytest.raises(UnsupportedError, match="no logits in a training step.*without labels"):
                reading(output.logits)
        assert not hasattr(output.logits, "dtype")
        assert output.to_tuple()[0] is output.loss

    run_ranks(on_rank, 2)


PARTS = {
    "mlp": lambda model: model.model.layers[1].mlp.gate_proj.weight.tolist(),
    "self_attn": lambda model: model.model.layers[0].self_attn.q_proj.weight.tolist(),
    "weight": lambda model: model.lm_head.weight.sum().item(),
    "embedding": lambda model: model.get_input_embeddings().weight[0].tolist(),
    "norm": lambda model: float(model.model.norm.weight.mean()),
}


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def give_a_layer_another_part(model):
    for layer in model.model.layers:
        layer.mlp = nn.Identity()


def test_parts_of_other_stages(folder):
    def on_rank():
        model = load(folder, "pp2")
        assert model.lm_head.weight.shape == model.get_input_embeddings().weight.shape == (64, 32)
        assert model.lm_head.weight.dtype == torch.float32
        refused = set()
        for name, read in PARTS.items():
            try:
                read(model)
            except UnsupportedError as error:
                assert "lies on stage" in str(error)
                refused.add(name)
        off_stage_layer = model.model.layers[0 if "self_attn" in refused else 1]
        assert model.model.norm.variance_epsilon == model.config.rms_norm_eps
        assert off_stage_layer.mlp.hidden_size == 32 and not hasattr(off_stage_layer.mlp, "rotary_emb")
        assert off_stage_layer.mlp.gate_proj.weight is dict(off_stage_layer.named_parameters())["mlp.gate_proj.weight"]
        with pytest.raises(UnsupportedError, match="A LlamaMLP was called alone"):
            off_stage_layer.mlp(torch.zeros(1, 1, 32))
        with pytest.raises(UnsupportedError, match="mlp of a LlamaDecoderLayer: it lies on stage"):
            give_a_layer_another_part(model)
        if "self_attn" not in refused:
            with pytest.raises(UnsupportedError, match="weight of a Linear: it lies on stage 1"):
                tie(model)
        return refused

    assert run_ranks(on_rank, 2) == [{"mlp", "weight", "norm"}, {"self_attn", "embedding"}]


def train_one_stage_only(path, text, part):
    """Losses of steps of an optimizer that has what one stage holds."""
    model = load(path, text)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = prepare_optimizer(torch.optim.AdamW(chosen, lr=0.01))
    losses = []
    for seed in range(3):
        loss = model(**local_samples(model, make_batch(seed))).loss
        loss.backward()
        losses.append(torch.nn.utils.clip_grad_norm_(chosen, 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("part", ["lm_head", "layers.0", "embed_tokens"])
@pytest.mark.parametrize("text", ["pp2", "pp2+dp2"])
def test_parameters_of_one_stage(folder, text, part):
    expected = train_one_stage_only(folder, None, part)
    for found in run_ranks(lambda: train_one_stage_only(folder, text, part), 4 if "dp" in text else 2):
        assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("prepared", [False, True])
def test_products_of_all_parameters_are_refused(folder, prepared):
    def on_rank():
        model = load(folder, "pp2")
        with pytest.raises(UnsupportedError, match="LBFGS may combine values of all parameters"):
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
        prepare_optimizer(OfItsOwn(model.parameters(), lr=0.1), elementwise=True).step()

    run_ranks(on_rank, 2)


def step_in_evaluation_mode(path, text):
    """A step of a model without dropout; the rows of the replicas have unequal numbers of labels."""
    model = load(path, text).eval()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    full_batch = make_batch(0)
    full_batch["labels"][0] = -100
    loss = model(**local_samples(model, full_batch)).loss
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        return loss.item(), model(**local_samples(model, make_batch(1))).logits.float().sum().item()


@pytest.mark.parametrize("text", ["pp2", "dp2", "pp2+dp2"])
def test_evaluation_mode_trains_on_the_global_batch(folder, text):
    [(expected, after)] = run_ranks(step_in_evaluation_mode, 1, folder, None)
    config = parse_layout(text)
    found = run_ranks(step_in_evaluation_mode, config.ranks_per_replica * (config.dp_size or 1), folder, text)
    assert all(loss == pytest.approx(expected, rel=1e-5) for loss, _ in found)
    sums = found[0][1] if text == "pp2" else found[0][1] + found[-1][1]
    assert sums == pytest.approx(after, rel=1e-3, abs=1e-3)
