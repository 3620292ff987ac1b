"""Tests of RNG states in training: identical for replicated computations, different for local shards."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, MixtralConfig, Trainer, TrainingArguments
from transformers import default_data_collator as collator

from hf_megatron import local_named_parameters, prepare_optimizer, shard_safe
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallelize import parallel_state
from hf_megatron.testing.measure import measure
from hf_megatron.testing.tiny_model import draw_parameters
from hf_megatron.testing.tolerances import judge
from tests.helpers.dp_training import count_ranks
from tests.integration.integrations.trainer.test_trainer import rows

TP2 = ConfigUnderTest(tp_size=2)
SP2 = ConfigUnderTest(tp_size=2, sequence_parallel=True)
PP2 = ConfigUnderTest(pp_size=2, num_microbatches=2)
DP2 = ConfigUnderTest(dp_size=2)
TP2_PP2 = ConfigUnderTest(tp_size=2, pp_size=2, sequence_parallel=True, num_microbatches=2)
TP = pytest.mark.parametrize("config", [TP2, SP2], ids=["tp2", "tp2+sp"])
EXPERTS = MixtralConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    router_jitter_noise=0.3,
    tie_word_embeddings=False,
)
RATES = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=16, bos_token_id=1, eos_token_id=2)


def make_batch(count=4, part=0, parts=1):
    """Returns the `part`-th of `parts` chunks of a batch of `count` samples."""
    ids = torch.randint(0, 64, (count, 12), generator=torch.Generator().manual_seed(0))
    ids = ids.chunk(parts)[part]
    return {"input_ids": ids, "labels": ids}


def save_model(config, path):
    model = AutoModelForCausalLM.from_config(config).float()
    draw_parameters(model)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    return save_model(EXPERTS, tmp_path_factory.mktemp("experts"))


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return save_model(GPT2, tmp_path_factory.mktemp("gpt2"))


def load(path, config=None, **kwargs):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config, **kwargs)
    model.config.use_cache = False
    return model.train()


def get_rank():
    return dist.get_rank() if dist.is_initialized() else 0


def clone_local_weights(model):
    """Returns clones of this rank's local weights by name."""
    return {name: local_tensor(parameter.detach()).clone() for name, parameter in local_named_parameters(model)}


LAYOUTS = {
    "tp2": (TP2, (None, "full", "selective")),
    "tp2+sp": (SP2, (None, "full", "selective")),
    "tp2+sp+pp2": (TP2_PP2, (None, "full")),
    "pp2, tied": (PP2, (None,)),
    "dp2, stage 0": (ConfigUnderTest(dp_size=2), (None,)),
    "dp2, stage 2": (ConfigUnderTest(dp_size=2, zero_stage=2), (None,)),
    "tp2+sp+dp2": (ConfigUnderTest(tp_size=2, sequence_parallel=True, dp_size=2, zero_stage=1), (None,)),
}


@pytest.mark.parametrize(
    ("text", "recompute"), [(text, recompute) for text, (_, kinds) in LAYOUTS.items() for recompute in kinds]
)
def test_replicated_weights_stay_equal(experts, text, recompute):
    """Trains fifty steps with router jitter and dropout on ranks with different seeds."""
    config, _ = LAYOUTS[text]

    def train():
        layout = ConfigUnderTest(**config.to_dict() | {"recompute": recompute})
        tied = {"tie_word_embeddings": True} if "tied" in text else {}
        model = load(experts, layout, attention_dropout=0.1, **tied)
        mesh = parallel_state(model).mesh
        torch.manual_seed(get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        if layout.dp_size:
            optimizer = prepare_optimizer(optimizer)
        before = clone_local_weights(model)
        for _ in range(50):
            optimizer.zero_grad()
            model(**make_batch(mesh.pp_size * mesh.dp_size, mesh.dp_rank, mesh.dp_size)).loss.backward()
            optimizer.step()
        after = clone_local_weights(model)
        assert not any(torch.equal(before[name], part) for name, part in after.items())
        return mesh.tp_rank, after, parallel_state(model).shardings

    results = run_ranks(train, count_ranks(config))
    compared = set()
    for one, (tp_rank, weights, shardings) in enumerate(results):
        for other_tp_rank, others, _ in results[:one]:
            for name in weights.keys() & others.keys():
                is_replicated = tp_rank == other_tp_rank or not shardings[name].placement.is_split
                assert torch.equal(weights[name], others[name]) == is_replicated, name
                assert weights[name].isfinite().all()
                compared.add(name)
    # Pipeline stages share tied weights only.
    assert compared == (
        {"model.embed_tokens.weight"} if "tied" in text else results[0][1].keys() | results[-1][1].keys()
    )


def add_embedding_noise(model):
    """Adds NEFTune noise in a user's forward hook."""

    def add(module, args, output):
        return output + torch.zeros_like(output).uniform_(-0.3, 0.3) if module.training else None

    model.get_input_embeddings().register_forward_hook(add)


def add_input_noise(model):
    """Adds noise to tensors that all tp ranks hold: the inputs of blocks and of linears, as adapters see them."""

    def add(module, args, kwargs):
        name = "hidden_states" if "hidden_states" in kwargs else None
        value = kwargs[name] if name else args[0]
        value = value * (torch.rand_like(value) + 0.5) if module.training else value
        return (args, kwargs | {name: value}) if name else ((value, *args[1:]), kwargs)

    for layer in model.model.layers:
        for module in (layer.self_attn, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.mlp.gate):
            module.register_forward_pre_hook(add, with_kwargs=True)


def set_jitter_noise(model):
    for layer in model.model.layers:
        layer.mlp.jitter_noise = 0.4


@TP
@pytest.mark.parametrize("prepare", [None, add_embedding_noise, add_input_noise, set_jitter_noise])
def test_shared_noise_matches_single_process(experts, config, prepare):
    """Compares loss, gradients, weights and the final RNG state: the noise itself equals the single-process noise."""

    def run(config=None):
        model = load(experts, config)
        if prepare is not None:
            prepare(model)
        torch.manual_seed(get_rank())
        return measure(model, [make_batch()], is_silent=False), torch.get_rng_state()

    expected, state = run()
    assert expected.loss != pytest.approx(expected.eval_loss, rel=1e-3), "nothing was drawn"
    (measurement, first), (_, second) = run_ranks(run, 2, config)
    judgement = judge(measurement, expected)
    assert judgement.passed, judgement.report()
    assert torch.equal(first, state) and torch.equal(second, state)


@TP
def test_recomputation_replays_random_numbers(experts, config):
    """Compares gradients with and without recomputation, with noise in full-sequence blocks too."""

    def run(recompute):
        layout = ConfigUnderTest(**config.to_dict() | {"recompute": recompute})
        model = load(experts, layout, attention_dropout=0.3)
        add_input_noise(model)
        for seed in (0, 1):
            torch.manual_seed(seed)
            # The second forward runs before the first one's backward.
            loss = model(**make_batch()).loss
            torch.manual_seed(5)
            model(**make_batch(2)).loss.backward()
            loss.backward()
        return [local_tensor(parameter.grad) for parameter in model.parameters()]

    def compare():
        plain = run(None)
        for recompute in ("full", "selective"):
            for gradient, expected in zip(run(recompute), plain, strict=True):
                torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
        return True

    assert run_ranks(compare, 2) == [True, True]


def record_masks(model):
    """Returns masks of a dropout rate that is set, and noise of hooks that are added, after loading."""
    masks = {}

    def make_recorder(name):
        @shard_safe
        def hook(module, args, output):
            noise = torch.rand(output.shape if isinstance(output, torch.Tensor) else output[0].shape)
            masks[name] = noise

        return hook

    layer = model.transformer.h[1]
    for name in ("attn.c_attn", "attn.c_proj", "attn", "mlp.c_fc", "mlp.act", "mlp.c_proj", "mlp"):
        layer.get_submodule(name).register_forward_hook(make_recorder(name))
    model.transformer.wte.register_forward_hook(make_recorder("embedding"))
    model.transformer.ln_f.register_forward_hook(make_recorder("norm"))
    layer.mlp.dropout.p = 0.5
    layer.mlp.dropout.register_forward_hook(
        shard_safe(lambda module, args, output: masks.__setitem__("dropout", output == 0))
    )
    torch.manual_seed(get_rank())
    model(**make_batch()).loss.backward()
    return masks


@TP
def test_local_masks_differ_between_ranks(gpt2, config):
    first, second = run_ranks(lambda: record_masks(load(gpt2, config, **dict.fromkeys(RATES, 0.0))), 2)
    identical = {name for name in first if torch.equal(first[name], second[name])}
    assert first["dropout"].any() and not first["dropout"].all()
    blocks = {"attn.c_proj", "attn", "mlp.c_proj", "mlp", "dropout"}
    assert identical == {"embedding", "norm"} | (set() if config.sequence_parallel else blocks)


def measure_losses(path, config, rate=0.3):
    model = load(path, config, **dict.fromkeys(RATES, rate))
    mesh = None if config is None else parallel_state(model).mesh
    samples = make_batch(2) if mesh is None else make_batch(2, mesh.dp_rank, mesh.dp_size)
    losses = []
    with torch.no_grad():
        for seed in range(200):
            torch.manual_seed(1000 * seed + get_rank())
            losses.append(model(**samples).loss.item())
    losses = torch.tensor(losses, dtype=torch.float64)
    if mesh is not None and mesh.dp_size > 1:
        # Each rank's mean is over its local samples, which have equally many labels on all ranks.
        dist.all_reduce(losses, group=mesh.dp_group)
        losses /= mesh.dp_size
    return losses


def paired_z_score(found, expected):
    """Returns the absolute difference of paired means in standard errors."""
    difference = found - expected
    return abs(difference.mean() / difference.std() * len(difference) ** 0.5).item()


@pytest.fixture(scope="module")
def fitted(gpt2, tmp_path_factory):
    """A model overfitted to its batch, so that dropout masks raise its loss."""
    model = load(gpt2)
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(**make_batch(2)).loss
        loss.backward()
        optimizer.step()
    assert loss < 0.5
    path = tmp_path_factory.mktemp("fitted")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def one_process(fitted):
    return measure_losses(fitted, None)


@pytest.mark.parametrize("config", [TP2, SP2, PP2, DP2, TP2_PP2], ids=["tp2", "tp2+sp", "pp2", "dp2", "tp2+sp+pp2"])
def test_loss_distribution_matches_single_process(fitted, one_process, config):
    losses, *others = run_ranks(measure_losses, count_ranks(config), fitted, config, timeout=200)
    assert all(torch.equal(losses, other) for other in others)
    assert paired_z_score(losses, one_process) < 4
    assert losses.std().item() == pytest.approx(one_process.std().item(), rel=0.3)
    assert losses.unique().numel() == len(losses)


def test_other_dropout_rate_is_detected(fitted, one_process):
    assert paired_z_score(measure_losses(fitted, None, 0.28), one_process) > 4


@pytest.mark.parametrize("config", [TP2, PP2, TP2_PP2], ids=["tp2", "pp2", "tp2+sp+pp2"])
def test_rng_state_is_shared_and_replayed(gpt2, config):
    def train(seed):
        model = load(gpt2, config, **RATES)
        torch.manual_seed(seed + 100 * get_rank())
        losses = []
        for _ in range(2):
            loss = model(**make_batch()).loss
            loss.backward()
            losses.append(loss.item())
        return losses, torch.rand(3).tolist()

    def on_rank():
        return train(0), train(0), train(1)

    results = run_ranks(on_rank, count_ranks(config))
    assert all(other == results[0] for other in results)
    first, again, another = results[0]
    assert first == again and first[0] != another[0] and first[1] != another[1]
    assert first[0][0] != first[0][1]


def test_stages_and_microbatches_draw_different_masks(gpt2):
    """Every dropout call of every stage and microbatch draws its own mask."""

    def on_rank():
        model = load(gpt2, PP2, attn_implementation="eager", **RATES)
        # The first call runs a trial forward with dropout, which must not be recorded.
        model(**make_batch()).loss.backward()
        masks, dropout = [], nn.functional.dropout

        def record_dropout(x, *args, **kwargs):
            output = dropout(torch.ones_like(x), *args, **kwargs)
            masks.append((output == 0).flatten()[:64].tolist())
            return x * output

        nn.functional.dropout = record_dropout
        torch.manual_seed(0)
        model(**make_batch()).loss.backward()
        return masks

    first, second = run_ranks(on_rank, 2)
    masks = [tuple(mask) for mask in (*first, *second)]
    assert len(masks) >= 14 and len(set(masks)) == len(masks)


def test_pipeline_without_dropout_keeps_rng_state(stories):
    def on_rank():
        model = load(stories, PP2)
        torch.manual_seed(7)
        model(**make_batch()).loss.backward()
        return torch.rand(1).item()

    torch.manual_seed(7)
    assert run_ranks(on_rank, 2) == [torch.rand(1).item()] * 2


def test_trainer_neftune_noise(stories, tmp_path):
    """Compares every logged loss and gradient norm with `neftune_noise_alpha` in a model-parallel group."""

    def train(config, output):
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config)
        arguments = TrainingArguments(
            str(output),
            per_device_train_batch_size=2,
            max_steps=3,
            logging_steps=1,
            neftune_noise_alpha=20.0,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(model, arguments, train_dataset=rows(6, 0), data_collator=collator)
        trainer.train()
        return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]

    [expected] = run_ranks(functools.partial(train, None), 1, tmp_path)
    for config in (TP2, SP2):
        for logs in run_ranks(functools.partial(train, config), 2, tmp_path):
            for values, reference in zip(logs, expected, strict=True):
                assert values == pytest.approx(reference, rel=2e-5)
