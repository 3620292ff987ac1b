"""Tests of router bias updates from the expert load, against a hand-written single-process loop."""

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig

from hf_megatron import ConfigError, MegatronConfig, expert_load, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.expert_parallel.padding import RouterPadding
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.testing.tiny_model import draw_parameters

RATE, STEPS = 0.03, 3
NAME = "e_score_correction_bias"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bias") / "model"
    config = DeepseekV3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config).float()
    draw_parameters(model, 0)
    model.save_pretrained(folder)
    return folder


def make_batch(step, state):
    ids = torch.randint(1, 64, (4, 13), generator=torch.Generator().manual_seed(step))
    return ids if state is None else ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]


def copy_biases(model):
    return {name: value.detach().clone() for name, value in model.named_buffers() if name.endswith(NAME)}


def train_by_hand(source):
    model = AutoModelForCausalLM.from_pretrained(source).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    counts = {}

    def count(module, args, name):
        counts[name] = counts.get(name, 0) + torch.bincount(args[1].flatten(), minlength=8)

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(lambda module, args, name=name: count(module, args, name))
    for step in range(STEPS):
        for microbatch in (2 * step, 2 * step + 1):
            ids = make_batch(microbatch, None)
            (model(input_ids=ids, labels=ids).loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, load in counts.items():
            gate = model.get_submodule(name.rpartition(".")[0]).gate
            gate.e_score_correction_bias += RATE * (load.float().mean() - load).sign()
        counts.clear()
    return copy_biases(model)


def train_with_library(source, layout):
    model = AutoModelForCausalLM.from_pretrained(source, megatron_config=layout).train()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    state = parallel_state(model)
    for step in range(STEPS):
        # Discarded batches must not count: skipped step, cleared by the optimizer, cleared by the model.
        ids = make_batch(STEPS + step, state)
        (model(input_ids=ids, labels=ids).loss * (1 if step else float("nan"))).backward()
        (optimizer.step, optimizer.zero_grad, model.zero_grad)[step]()
        optimizer.zero_grad()
        for microbatch in (2 * step, 2 * step + 1):
            ids = make_batch(microbatch, state)
            loss = model(input_ids=ids, labels=ids).loss / 2
            if microbatch == 2 * step and state.cut is None:
                optimizer.zero_grad()
            loss.backward()
        with torch.no_grad():
            # Evaluation must not count.
            model.eval()(input_ids=ids)
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    return copy_biases(model)


LAYOUTS = ["dp2", "tp2", "tp2+sp", "pp2+mb2", "cp2", "dp2+ep2", "tp2+sp+ep2", "dp2+ep2+zero3", "pp2+dp2+ep2+mb2"]


def parse_layout(text, **changes):
    [layout] = parse_layouts(text)
    return ConfigUnderTest(**layout.to_dict() | {"router_bias_update_rate": RATE} | changes)


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("text", LAYOUTS)
def test_biases_match_single_process(source, text, recompute):
    expected, layout = train_by_hand(source), parse_layout(text, recompute=recompute)
    rank_biases = run_ranks(train_with_library, layout.ranks_per_replica * (layout.dp_size or 1), source, layout)
    merged_biases = {}
    for one in rank_biases:
        for name, bias in one.items():
            torch.testing.assert_close(merged_biases.setdefault(name, bias), bias, rtol=0, atol=0)
    assert merged_biases.keys() == expected.keys()
    for name, bias in expected.items():
        torch.testing.assert_close(merged_biases[name], bias, rtol=0, atol=1e-6)
        assert bias.abs().max() > RATE


def make_padded_batch(step, state, *, extra=0, left=False):
    """Returns samples of 4, 7, 10 and 13 tokens, padded to 13 + `extra`; on a layout this dp rank's samples."""
    ids, length = make_batch(step, None), 13 + extra
    batch = {name: torch.zeros(4, length, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    batch["labels"] = torch.full((4, length), -100)
    for sample, tokens in enumerate((4, 7, 10, 13)):
        places = slice(length - tokens, length) if left else slice(tokens)
        batch["input_ids"][sample, places] = batch["labels"][sample, places] = ids[sample, :tokens]
        batch["attention_mask"][sample, places] = 1
    if state is None:
        return batch
    return {name: value.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank] for name, value in batch.items()}


def count_choices(source):
    """Returns the choices of the routers for the tokens that are not padding, by layer, in a single process."""
    model, counts = AutoModelForCausalLM.from_pretrained(source).train(), {}
    for sample, tokens in enumerate((4, 7, 10, 13)):
        handles = [
            module.register_forward_pre_hook(
                lambda module, args, name=name: counts.__setitem__(
                    name, counts.get(name, 0) + torch.bincount(args[1].flatten(), minlength=8)
                )
            )
            for name, module in model.named_modules()
            if name.endswith(".experts")
        ]
        model(input_ids=make_batch(0, None)[sample : sample + 1, :tokens])
        for handle in handles:
            handle.remove()
    return counts


def step_on_padded_batch(source, layout, options, sabotage=None):
    """Returns the router biases after one step, and the expert load if the layout has expert parallelism."""
    if sabotage is not None:
        sabotage()
    model = AutoModelForCausalLM.from_pretrained(source, megatron_config=layout).train()
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    model(**make_padded_batch(0, parallel_state(model), **options)).loss.backward()
    load = expert_load(model).tokens.tolist() if layout.ep_size > 1 else None
    optimizer.step()
    return copy_biases(model), load


PADDED = [{}, {"extra": 6}, {"extra": 3, "left": True}]


@pytest.mark.parametrize("text", ["dp2", "tp2+sp", "pp2+mb2", "cp2", "dp2+ep2", "tp2+ep2", "tp2+sp+ep2", "cp2+ep2"])
def test_padding_counts_neither_in_biases_nor_in_load(source, text):
    """Statistics of routers are those of the tokens that the loss counts, however far samples are padded."""
    counts, layout = count_choices(source), parse_layout(text)
    started = copy_biases(AutoModelForCausalLM.from_pretrained(source))

    def on_rank():
        return [step_on_padded_batch(source, layout, options) for options in PADDED]

    for results in run_ranks(on_rank, layout.ranks_per_replica * (layout.dp_size or 1)):
        for biases, load in results:
            assert load in (None, [load.tolist() for load in counts.values()])
            for name, bias in biases.items():
                chosen = counts[f"{name.removesuffix(f'.gate.{NAME}')}.experts"]
                expected = started[name] + RATE * (chosen.float().mean() - chosen).sign()
                torch.testing.assert_close(bias, expected, rtol=0, atol=1e-6)


def count_padding():
    RouterPadding.drop = lambda self, name, chosen: chosen


@pytest.mark.parametrize("text", ["dp2+ep2"])
def test_counted_padding_is_detected(source, text):
    layout, counts = parse_layout(text), count_choices(source)
    for _, load in run_ranks(step_on_padded_batch, 2, source, layout, PADDED[1], count_padding):
        assert load != [load.tolist() for load in counts.values()]


def test_skipped_step_keeps_biases(source):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(source, megatron_config=parse_layout("dp2+ep2")).train()
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        before, ids = copy_biases(model), make_batch(0, parallel_state(model))
        (model(input_ids=ids, labels=ids).loss * float("nan")).backward()
        optimizer.step()
        return all(torch.equal(bias, before[name]) for name, bias in copy_biases(model).items())

    assert run_ranks(on_rank, 2) == [True, True]


def test_biases_are_saved_and_resumed(source, tmp_path):
    def on_rank(text, folder, resumes):
        layout = parse_layout(text)
        model = AutoModelForCausalLM.from_pretrained(source, megatron_config=layout).train()
        accelerator = Accelerator(cpu=True)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        if resumes:
            accelerator.load_state(str(folder))
            return copy_biases(model)
        ids = make_batch(0, parallel_state(model))
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        optimizer.step()
        accelerator.save_state(str(folder))
        return copy_biases(model)

    saved = run_ranks(on_rank, 2, "dp2+ep2", tmp_path / "state", False)[0]
    assert all(bias.any() for bias in saved.values())
    for rank_biases in run_ranks(on_rank, 2, "tp2+ep2", tmp_path / "state", True):
        assert all(torch.equal(rank_biases[name], bias) for name, bias in saved.items())


def test_model_without_router_bias_is_rejected(tmp_path):
    def on_rank():
        layout = MegatronConfig(tp_size=2, router_bias_update_rate=1e-3)
        with pytest.raises(
            ConfigError, match="router_bias_update_rate = 0.001: no router of LlamaForCausalLM"
        ) as error:
            AutoModelForCausalLM.from_config(config, megatron_config=layout)
        assert str(error.value).endswith("Set it to 0.")
        layout = MegatronConfig(tp_size=2, router_bias_update_rate=0)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, megatron_config=layout).train()
        return train_step(model)

    def train_step(model):
        ids = torch.arange(1, 25).view(2, 12)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()

    config = LlamaConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    expected = train_step(AutoModelForCausalLM.from_pretrained(tmp_path).train())
    for results in run_ranks(on_rank, 2):
        assert results == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("rate", [-1.0, float("nan"), True, "fast"])
def test_invalid_rates_are_rejected(rate):
    with pytest.raises(ConfigError, match="router_bias_update_rate"):
        MegatronConfig(router_bias_update_rate=rate)
