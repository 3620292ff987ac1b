"""Tests of the replica check: ranks with differing replicated tensors are named, on layouts of all axes."""

import random
from functools import partial

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.off_stage import local_named_parameters
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer, sharded
from hf_megatron.diagnostics.nonfinite_hooks import nonfinite_weights
from hf_megatron.diagnostics.replica_check import RANDOM, WEIGHT, ReplicaCheck
from hf_megatron.errors import ConfigError, RankError
from hf_megatron.integrations.trainer.callbacks.replicas import ReplicaCallback
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
LLAMA = LlamaConfig(**SIZES, intermediate_size=48, num_hidden_layers=2)
EXPERTS = Qwen3MoeConfig(
    **SIZES, moe_intermediate_size=16, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=8
)
DRAWS = LlamaConfig(**SIZES, intermediate_size=48, num_hidden_layers=2, attention_dropout=0.1)
TIED = LlamaConfig(**SIZES, intermediate_size=48, num_hidden_layers=2, tie_word_embeddings=True)
# Each layout has four ranks; tp4 replicates the two key-value heads.
LAYOUTS = [
    (DRAWS, {"tp_size": 2, "dp_size": 2}),
    (LLAMA, {"tp_size": 4}),
    (LLAMA, {"dp_size": 4, "zero_stage": 0}),
    (LLAMA, {"dp_size": 4, "zero_stage": 1}),
    (LLAMA, {"dp_size": 4, "zero_stage": 3, "dp_replicate_size": 2}),
    (LLAMA, {"cp_size": 2, "dp_size": 2}),
    (TIED, {"pp_size": 2, "dp_size": 2}),
    (TIED, {"pp_size": 2, "tp_size": 2, "sequence_parallel": True}),
    (EXPERTS, {"dp_size": 4, "ep_size": 2}),
    (EXPERTS, {"tp_size": 2, "dp_size": 2, "ep_size": 2}),
]


def _flip_bit(tensor, generator):
    """Flips one bit of one entry."""
    entries = local_tensor(tensor).detach().view(-1).view(torch.int32)
    entry = int(torch.randint(len(entries), (), generator=generator))
    entries[entry] ^= 1 << int(torch.randint(31, (), generator=generator))


def _train_model(config, sizes, steps=2, dtype=torch.float32):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, megatron_config=ConfigUnderTest(**sizes)).train()
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0)).to(model.device)
    for _ in range(steps):
        rows = ids.tensor_split(sizes.get("dp_size", 1))[get_dp_rank(model)]
        model(input_ids=rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def get_dp_rank(model):
    return parallel_state(model).mesh.dp_rank


def _check_flips_on_rank(config, sizes, seeds):
    """Flips a bit per seed.

    Returns the differences before all changes, the rank, changed tensor and differences of each seed, and the
    differences after all changes.
    """
    model, optimizer = _train_model(config, sizes)
    check = ReplicaCheck(model, optimizer)
    clean = check.differences()
    results = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rank = random.Random(seed).randrange(torch.distributed.get_world_size())
        changed = None
        if torch.distributed.get_rank() == rank:
            tensors = {("weight", name): parameter for name, parameter in local_named_parameters(model)}
            for leaf in sharded(optimizer).leaves:
                moments = optimizer.state[leaf.tensor].items()
                tensors |= {("moment", f"{kind} of {leaf.name}"): value for kind, value in moments if kind != "step"}
            tensors |= {("buffer", name): buffer for name, buffer in model.named_buffers()}
            changed = random.Random(seed).choice(sorted(name for name in tensors if tensors[name].numel()))
            tensor = tensors[changed]
            before = local_tensor(tensor).detach().clone()
            _flip_bit(tensor, generator)
        results.append((rank, changed, check.differences()))
        if changed is not None:
            local_tensor(tensor).detach().copy_(before)
    return clean, results, check.differences()


@pytest.mark.parametrize(
    ("config", "sizes"),
    LAYOUTS,
    ids=lambda value: getattr(value, "model_type", None) or MegatronConfig(**value).layout(),
)
def test_flipped_bit_is_named(config, sizes):
    ranks = run_ranks(_check_flips_on_rank, 4, config, sizes, range(20))
    clean, trials, after = ranks[0]
    assert clean == after == []
    holders = set()
    for seed, (rank, _, differences) in enumerate(trials):
        kind, name = ranks[rank][1][seed][1]
        assert all(other[1][seed][2] == differences for other in ranks)
        if not differences:
            # No other rank has these entries.
            holders.add(1)
            continue
        [one] = differences
        holders.add(len(one.holders))
        assert one.kind == kind and name in (one.name, _replace_tied_name(one.name))
        assert rank in one.ranks and (one.ranks == (rank,) if len(one.holders) > 2 else one.ranks == one.holders)
        assert one.kind in str(one) and one.name in str(one)
    assert holders - {1}


def _replace_tied_name(name):
    return name.replace("model.embed_tokens.weight", "lm_head.weight")


def test_unshared_entries_are_not_compared():
    """With ZeRO-3, tp and pp, shards that differ between ranks are not reported."""
    for config, sizes in ((LLAMA, {"dp_size": 4, "zero_stage": 3}), (LLAMA, {"tp_size": 2, "pp_size": 2})):
        clean, trials, _ = run_ranks(_check_flips_on_rank, 4, config, sizes, ())[0]
        assert clean == [] and trials == []


def _check_fault_on_rank(kind):
    model, optimizer = _train_model(LLAMA, {"dp_size": 2, "tp_size": 2}, dtype=torch.bfloat16)
    check = ReplicaCheck(model, optimizer)
    check()
    first = torch.distributed.get_rank() == 1
    if first and kind == "main weight":
        leaf = next(leaf for leaf in sharded(optimizer).leaves if leaf.name == "model.norm.weight")
        leaf.tensor[0] += 1
    if first and kind == "random state":
        torch.rand(3)
    check()


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("main weight", r"main weight model.norm.weight: ranks 0, 1 differ"),
        ("random state", r"random state torch: ranks 0, 1"),
    ],
)
def test_check_raises_on_all_ranks(kind, message):
    with pytest.raises(RankError, match=message) as error:
        run_ranks(_check_fault_on_rank, 4, kind)
    assert str(error.value).count("ReplicaError") >= 4


def test_added_buffers_are_compared():
    """The set of compared tensors may change between two checks."""

    def on_rank():
        model, optimizer = _train_model(LLAMA, {"tp_size": 2})
        check = ReplicaCheck(model, optimizer)
        check()
        model.register_buffer("counted", torch.zeros(3))
        check()
        if torch.distributed.get_rank() == 1:
            model.counted += 1
        return check.differences()

    [one] = run_ranks(on_rank, 2)[0]
    assert (one.kind, one.name, one.ranks) == ("buffer", "counted", (0, 1))


def test_trainer_stops_at_failing_step(tmp_path):
    ids = torch.randint(3, 64, (32, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]

    class Flips(ReplicaCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            if state.global_step == 3 and torch.distributed.get_rank() == 1:
                with torch.no_grad():
                    local_tensor(model.model.norm.weight)[0] *= 1.5

    def train(callback):
        model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=ConfigUnderTest(tp_size=2))
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, max_steps=6, save_strategy="no", report_to=[], use_cpu=True
        )
        Trainer(model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[callback]).train()

    run_ranks(partial(train, ReplicaCallback(2)), 2)
    with pytest.raises(RankError, match=r"weight model.norm.weight: ranks 0, 1 differ"):
        run_ranks(partial(train, Flips(2)), 2)


def test_invalid_callbacks_are_rejected():
    with pytest.raises(ConfigError, match="expected 1 or more"):
        ReplicaCallback(0)
    with pytest.raises(ConfigError, match="the ranks of a parallelized model"):
        ReplicaCallback().on_train_begin(None, None, None, model=torch.nn.Linear(2, 2))


def _compare_changed_weight_on_rank(sizes, change):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=ConfigUnderTest(**sizes)).train()
    check = ReplicaCheck(model)
    if dist.get_rank() == 1:
        weight = local_tensor(model.model.layers[1].input_layernorm.weight)
        with torch.no_grad():
            weight.copy_(torch.arange(len(weight)))
            change(weight)
    elif sizes.get("pp_size", 1) == 1:
        with torch.no_grad():
            weight = local_tensor(model.model.layers[1].input_layernorm.weight)
            weight.copy_(torch.arange(len(weight)))
    return [str(one) for one in check.differences() if one.kind == WEIGHT]


def _change_opposite_bits(weight):
    bits = weight.view(torch.int32)
    bits[3] += 1 << 10
    bits[9] -= 1 << 10


MOVED = {
    "swapped": lambda weight: weight.copy_(weight[[1, 0, *range(2, len(weight))]]),
    "reversed": lambda weight: weight.copy_(weight.flip(0)),
    "opposite": _change_opposite_bits,
}


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"dp_size": 2}], ids=["tp2", "dp2"])
@pytest.mark.parametrize("change", MOVED)
def test_moved_values_are_detected(sizes, change):
    differences = run_ranks(_compare_changed_weight_on_rank, 2, sizes, MOVED[change])
    name = "weight model.layers.1.input_layernorm.weight: ranks 0, 1 differ without a majority"
    assert differences == [[name]] * 2


def _check_adapters_on_rank(sizes):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LLAMA, megatron_config=ConfigUnderTest(**sizes))
    torch.manual_seed(1)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, adapter).train()
    optimizer = prepare_optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3))
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    check = ReplicaCheck(model, optimizer)
    clean = [str(one) for one in check.differences() if one.kind != RANDOM]
    name = "model.layers.1.mlp.down_proj.lora_B.default.weight"
    parameter = dict(model.named_parameters())[f"base_model.model.{name}"]
    if dist.get_rank() == 1:
        with torch.no_grad():
            local_tensor(parameter)[0, 0] += 1
            state = parallel_state(model)
            local_tensor(dict(model.named_parameters())[f"base_model.model.{KEY}"])[2, 5] = torch.nan
        [(_, nonfinite)] = nonfinite_weights(model, state)
        return clean, list(map(str, check.differences())), str(nonfinite)
    return clean, list(map(str, check.differences())), ""


KEY = "model.layers.0.self_attn.k_proj.weight"


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=["tp2", "tp2+sp"])
def test_adapters(sizes):
    (clean, first, _), (_, second, nonfinite) = run_ranks(_check_adapters_on_rank, 2, sizes)
    assert clean == []
    assert first == second
    assert any("model.layers.1.mlp.down_proj.lora_B.default.weight" in one for one in first)
    assert all(KEY not in one for one in first)
    # Rank 1 has the second half of the 16 rows of the weight.
    assert f"weight {KEY} at [10, 5]" in nonfinite
