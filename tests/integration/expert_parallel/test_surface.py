"""Tests of expert parallelism: token dispatch, Trainer, checkpoints, generation, and rejected configurations."""

import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from datasets import Dataset
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    JetMoeConfig,
    LlamaConfig,
    LongcatFlashConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

import hf_megatron
from hf_megatron import ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.expert_parallel import token_dispatcher
from hf_megatron.parallel_state import parallel_state
from hf_megatron.testing.tiny_model import draw_parameters
from tests.integration.context_parallel.test_trainer import OPTIONS, collate, make_dataset

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "output_router_logits": True,
}


# Identity experts form a second block on each rank.
WITH_IDENTITY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "num_layers": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "zero_expert_num": 4,
    "moe_topk": 3,
    "routed_scaling_factor": 2.0,
}
CONFIGS = {"qwen3_moe": Qwen3MoeConfig(**SMALL), "longcat_flash": LongcatFlashConfig(**WITH_IDENTITY)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folders = {name: tmp_path_factory.mktemp("experts") / name for name in CONFIGS}
    for name, folder in folders.items():
        model = AutoModelForCausalLM.from_config(CONFIGS[name]).float()
        draw_parameters(model, 0)
        model.save_pretrained(folder)
        assert "model.layers.0.mlp.experts.7.down_proj.weight" in load_file(folder / "model.safetensors")
    return folders


@pytest.fixture(scope="module")
def source(sources):
    return sources["qwen3_moe"]


def parse_layout(text):
    return None if text is None else parse_layouts(text)[0]


def count_ranks(layout):
    return 1 if layout is None else layout.ranks_per_replica * (layout.dp_size or 1)


def load_model(source, layout):
    return AutoModelForCausalLM.from_pretrained(source, **({} if layout is None else {"megatron_config": layout}))


# Token dispatch


def count_sent_tokens(source, layout):
    """Returns per MoE layer the tokens sent, the (token, rank) pairs, the expert slots and the local tokens."""
    model, counts = load_model(source, layout), []
    original = token_dispatcher.AllToAll.dispatch

    def count_and_dispatch(self, hidden, chosen, *args):
        expert_inputs, route = original(self, hidden, chosen, *args)
        pairs = sum(len(set((row // self.experts).tolist())) for row in chosen)
        counts.append((sum(route.sent), pairs, chosen.numel(), len(hidden)))
        return expert_inputs, route

    token_dispatcher.AllToAll.dispatch = count_and_dispatch
    ids = torch.arange(1, 40).view(3, 13)
    with torch.no_grad():
        model.eval()(input_ids=ids)
    return counts


@pytest.mark.parametrize("text", ["dp2+ep2", "dp4+ep4", "tp2+ep2", "tp2+sp+ep2"])
def test_tokens_are_sent_once_per_rank(source, text):
    layout = parse_layout(text)
    rank_counts = run_ranks(count_sent_tokens, count_ranks(layout), source, layout)
    for counts in rank_counts:
        assert len(counts) == SMALL["num_hidden_layers"]
        for sent, pairs, slots, _ in counts:
            assert sent == pairs < slots
    # Tensor-parallel ranks split the tokens; data-parallel ranks have their own.
    tokens = [sum(counts[0][3] for counts in rank_counts), 39 * (layout.dp_size or 1)]
    assert tokens[0] == tokens[1]


def test_ids_without_expert_get_zeros():
    """Tokens routed to ids without an expert (negative or identity) are not sent, and their outputs are zero."""

    def on_rank():
        dispatcher = token_dispatcher.AllToAll(2, dist.group.WORLD)
        chosen = torch.tensor([[0, 4], [5, 4], [-1, 3]])
        hidden = torch.arange(1.0, 7.0).view(3, 2)
        expert_inputs, route = dispatcher.dispatch(hidden, chosen, torch.ones(3, 2))
        assert sorted(route.tokens.tolist()) == [0, 2]
        return dispatcher.combine(expert_inputs.rows * (expert_inputs.experts < 2).sum(1, keepdim=True), route)

    for total in run_ranks(on_rank, 2):
        assert total.tolist() == [[1.0, 2.0], [0.0, 0.0], [5.0, 6.0]]


@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_ranks_hold_experts_from_each_block(blocks):
    """Renumbered by rank, the experts of rank 0 come first, in local order; ids outside the range are kept."""
    expert_blocks = token_dispatcher.ExpertBlocks(8, 2, blocks)
    ranks = [expert_blocks.of_rank(rank) for rank in range(2)]
    assert sorted(torch.cat(ranks).tolist()) == list(range(8))
    assert expert_blocks.by_rank(torch.cat(ranks)).tolist() == list(range(8))
    assert {len(set((rank % (8 // blocks)).tolist())) for rank in ranks} == {4 // blocks}
    assert expert_blocks.by_rank(torch.tensor([[-1, 8], [9, 100]])).tolist() == [[-1, 8], [9, 100]]


def test_rank_load_follows_expert_blocks():
    tokens = torch.tensor([[8, 8, 0, 0, 8, 8, 0, 0], [0, 0, 0, 0, 4, 4, 4, 4]])
    load = hf_megatron.expert_parallel.expert_load.ExpertLoad(
        ("one", "two"), tokens, token_dispatcher.ExpertBlocks(8, 2, 2), 0
    )
    assert load.ranks_over_mean.tolist() == [[2.0, 0.0], [1.0, 1.0]]
    contiguous_load = hf_megatron.expert_parallel.expert_load.ExpertLoad(
        ("one", "two"), tokens, token_dispatcher.ExpertBlocks(8, 2), 0
    )
    assert contiguous_load.ranks_over_mean.tolist() == [[1.0, 1.0], [0.0, 2.0]]


# Trainer


def train(source, output, layout, resume=None, **options):
    model = load_model(source, layout)
    arguments = OPTIONS | {"max_steps": 30, "save_steps": 15, "eval_steps": 15, "learning_rate": 3e-3} | options
    size = 4 // (1 if layout is None else layout.dp_size or 1)
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    trainer = Trainer(
        model,
        TrainingArguments(
            str(output), **arguments | sizes | {"per_device_eval_batch_size": sizes["per_device_train_batch_size"]}
        ),
        train_dataset=make_dataset(64, 0),
        eval_dataset=make_dataset(8, 1),
        data_collator=collate,
    )
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    model.save_pretrained(output / "final")
    names = ("loss", "grad_norm", "eval_loss", "step")
    return [{name: entry[name] for name in names if name in entry} for entry in trainer.state.log_history]


@pytest.fixture(scope="module")
def alone(source):
    output = source.parent / "alone"
    return train(source, output, None), load_file(output / "final" / "model.safetensors")


def require_run(logs, folder, alone, start=0):
    expected = [entry for entry in alone[0] if entry["step"] > start]
    entries = [entry for entry in logs if entry["step"] > start]
    assert len(entries) == len(expected)
    for entry, other in zip(entries, expected, strict=True):
        assert entry == pytest.approx(other, rel=1e-3, abs=1e-4)
    weights = load_file(folder / "model.safetensors")
    squared_error = sum((weights[name] - weight).norm() ** 2 for name, weight in alone[1].items())
    assert squared_error.sqrt() < 2e-3 * sum(weight.norm() ** 2 for weight in alone[1].values()).sqrt()


TRAINER_LAYOUTS = ["dp2+ep2", "dp2+ep2+zero3", "dp2+tp2+sp+ep4"]


@pytest.mark.parametrize("text", TRAINER_LAYOUTS)
def test_trainer_run(source, alone, tmp_path, text):
    layout = parse_layout(text)
    logs = run_ranks(train, count_ranks(layout), source, tmp_path, layout)
    for log in logs:
        require_run(log, tmp_path / "final", alone)


@pytest.fixture(scope="module")
def over_tp(source):
    output = source.parent / "over_tp"
    return output, run_ranks(train, 2, source, output, parse_layout("tp2+ep2"))


def test_trainer_run_with_tp2_ep2(over_tp, alone):
    for log in over_tp[1]:
        require_run(log, over_tp[0] / "final", alone)


@pytest.mark.parametrize("text", ["dp2+ep2", "dp4+ep4", None])
def test_trainer_resumes_with_another_ep_size(source, alone, over_tp, tmp_path, text):
    layout = parse_layout(text)
    resume = functools.partial(train, source, tmp_path / "resumed", layout, over_tp[0] / "checkpoint-15")
    for log in run_ranks(resume, count_ranks(layout)):
        require_run(log, tmp_path / "resumed" / "final", alone, start=15)


def run_sft(source, output, layout):
    ranks = 1 if layout is None else layout.dp_size or 1
    samples = [
        {"input_ids": row["input_ids"], "labels": [-100, *row["input_ids"][1:]]}
        for row in make_dataset(48, 3)
        if row["input_ids"]
    ]
    arguments = SFTConfig(
        str(output),
        max_steps=30,
        per_device_train_batch_size=4 // ranks,
        learning_rate=3e-3,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        save_strategy="no",
        max_length=64,
        dataset_kwargs={"skip_prepare_dataset": True},
        shuffle_dataset=False,
        router_aux_loss_coef=0.0,
    )
    model = load_model(source, layout)
    model.config.output_router_logits = False
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_list(samples), processing_class=_tokenizer(source)
    )
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _tokenizer(source):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = {str(index): index for index in range(64)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="3")), pad_token="0", eos_token="2", bos_token="1"
    )


@pytest.mark.parametrize("text", ["dp2+ep2", "tp2+sp+pp2+dp2+ep4"])
def test_sft_losses(source, tmp_path, text):
    [expected] = run_ranks(run_sft, 1, source, tmp_path, None)
    layout = parse_layout(text)
    for losses in run_ranks(run_sft, count_ranks(layout), source, tmp_path, layout, timeout=240):
        assert len(losses) == 30
        assert losses == pytest.approx(expected, rel=1e-3, abs=1e-4)


# Checkpoints


def train_one_step(source, layout, folder, resume=None):
    model = load_model(source, layout)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    if resume is not None:
        accelerator.load_state(str(resume))
    state = parallel_state(model)
    ids = torch.arange(1, 33).view(4, 8)
    split = ids if state is None else ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
    accelerator.backward(model(input_ids=split, labels=split).loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.save_state(str(folder / "state"))
    accelerator.unwrap_model(model).save_pretrained(folder / "merged")


@pytest.mark.parametrize("model", CONFIGS)
def test_states_move_between_ep_sizes(sources, tmp_path, model):
    """Weights and moments: one step each on ep 1, 2 and 4 matches three single-process steps."""
    source, before = sources[model], None
    for step, text in enumerate(["dp2", "tp2+ep2", "dp4+ep4"]):
        layout, folder = parse_layout(text), tmp_path / str(step)
        folder.mkdir()
        run_ranks(train_one_step, count_ranks(layout), source, layout, folder, before)
        before = folder / "state"
    single, before = tmp_path / "single", None
    for step in range(3):
        folder = single / str(step)
        folder.mkdir(parents=True)
        run_ranks(train_one_step, 1, source, None, folder, before)
        before = folder / "state"
    weights, expected = (load_file(path / "2" / "merged" / "model.safetensors") for path in (tmp_path, single))
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("text", ["dp2+ep2", "dp4+ep4", "dp4+ep2+zero3", "tp2+etp2+dp2+ep2"])
def test_saved_weights_equal_loaded_weights(sources, tmp_path, text, model):
    """Bitwise equal, stored per expert as in the source, and split into the same files as a single-process save."""
    source = sources[model]

    def on_rank():
        ep_model = load_model(source, layout)
        ep_model.save_pretrained(tmp_path / "again")
        ep_model.save_pretrained(tmp_path / "several", max_shard_size="60KB")

    layout = parse_layout(text)
    run_ranks(on_rank, count_ranks(layout))
    load_model(source, None).save_pretrained(tmp_path / "one", max_shard_size="60KB")
    index = "model.safetensors.index.json"
    assert (tmp_path / "several" / index).read_text() == (tmp_path / "one" / index).read_text()
    weights, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "again", source))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())


# Evaluation and generation


def evaluate_uneven_batches(source, layout):
    """Evaluation loop whose ranks have different numbers of batches."""
    configuration = DataLoaderConfiguration(dispatch_batches=False, even_batches=False)
    model = load_model(source, layout)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    data = torch.utils.data.DataLoader(make_dataset(14, 0), batch_size=2, collate_fn=collate)
    model, data = accelerator.prepare(model, data)
    model.eval()
    with warnings.catch_warnings(record=True), torch.no_grad():
        warnings.simplefilter("always")
        return [model(**batch).loss.item() for batch in data]


def test_uneven_evaluation_ends_on_all_ranks(source):
    losses = run_ranks(evaluate_uneven_batches, 2, source, MegatronConfig(dp_size=2, ep_size=2))
    [expected] = run_ranks(evaluate_uneven_batches, 1, source, None)
    # Each rank reads every other batch.
    assert [len(rank_losses) for rank_losses in losses] == [3, 3]
    assert losses[0] == pytest.approx(expected[0:6:2], rel=1e-5) and losses[1] == pytest.approx(
        expected[1:6:2], rel=1e-5
    )


def generate_on_rank(source, layout):
    model = load_model(source, layout).eval()
    prompts = [torch.tensor([[3, 4, 5, 6]]), torch.tensor([[9, 8, 7, 6, 5, 4, 3]])]
    lengths = (4, 12)
    state = parallel_state(model)
    indices = range(2) if state is None else [state.mesh.dp_rank]
    return [model.generate(prompts[i], max_new_tokens=lengths[i], do_sample=False).tolist() for i in indices]


@pytest.mark.parametrize("text", ["dp2+ep2", "dp2+ep2+zero3", "dp2+zero3"])
def test_uneven_generation_matches_single_process(source, text):
    [expected] = run_ranks(generate_on_rank, 1, source, None)
    assert [one for [one] in run_ranks(generate_on_rank, 2, source, parse_layout(text))] == expected


# Rejected configurations

_FEW = {"num_hidden_layers": 2, "hidden_size": 32, "vocab_size": 64, "num_attention_heads": 4}
REJECTED = {
    "no experts": (LlamaConfig(**_FEW), {"dp_size": 2, "ep_size": 2}, ConfigError, "has no MoE layers"),
    "a divisor": (
        Qwen3MoeConfig(**SMALL | {"num_experts": 5}),
        {"dp_size": 2, "ep_size": 2},
        ConfigError,
        "has 5 experts; valid sizes divide them: [1, 5]",
    ),
    "a divisor beside others": (
        LongcatFlashConfig(**WITH_IDENTITY | {"zero_expert_num": 3}),
        {"dp_size": 2, "ep_size": 2},
        ConfigError,
        "has 8 experts and 3 identity experts; valid sizes divide both: [1]",
    ),
    "too many": (Qwen3MoeConfig(**SMALL), {"dp_size": 2, "ep_size": 4}, ConfigError, "ep_size = 4"),
    "jetmoe": (
        JetMoeConfig(**_FEW, kv_channels=8, num_local_experts=4, intermediate_size=48),
        {"dp_size": 2, "ep_size": 2},
        UnsupportedError,
        "is not called like transformers' experts",
    ),
}


@pytest.mark.parametrize("case", REJECTED)
def test_unsupported_configs_are_rejected(case):
    config, fields, error, message = REJECTED[case]

    def on_rank():
        with pytest.raises(error) as raised:
            AutoModelForCausalLM.from_config(config, megatron_config=MegatronConfig(**fields))
        return str(raised.value)

    for text in run_ranks(on_rank, 2):
        assert message in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ep_size": 0}, "ep_size = 0: expected an integer of 1 or more"),
        ({"tp_size": 4, "ep_size": 2, "etp_size": 2}, "etp_size = 2: expected 1 or tp_size = 4"),
        ({"tp_size": 2, "etp_size": 1}, "etp_size = 1: expected 2"),
    ],
)
def test_invalid_sizes_are_rejected(fields, message):
    with pytest.raises(ConfigError, match=message):
        MegatronConfig(**fields)


def test_megatron_etp_default():
    """Megatron shards experts over tp by default."""
    arguments = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4}
    assert MegatronConfig.from_megatron_args(arguments).etp_size == 2
    unsplit_experts = MegatronConfig.from_megatron_args(arguments | {"expert_tensor_parallel_size": 1})
    assert (unsplit_experts.ep_size, unsplit_experts.etp_size) == (4, 1)


def test_replaced_experts_are_rejected(source):
    def on_rank():
        model = load_model(source, MegatronConfig(dp_size=2, ep_size=2))
        model.model.layers[0].mlp.experts.forward = lambda hidden, chosen, weights: hidden
        ids = torch.arange(1, 9).view(1, 8)
        with pytest.raises(UnsupportedError, match=r"experts.forward was replaced.*ep_size=1"):
            model(input_ids=ids, labels=ids)

    run_ranks(on_rank, 2)


def prune_half_the_experts(source, layout, counted):
    model = load_model(source, layout)
    for layer in model.model.layers:
        experts, gate = layer.mlp.experts, layer.mlp.gate
        assert experts.num_experts == SMALL["num_experts"]
        with torch.no_grad():
            experts.gate_up_proj = torch.nn.Parameter(experts.gate_up_proj[::2].contiguous())
            experts.down_proj = torch.nn.Parameter(experts.down_proj[::2].contiguous())
            gate.weight = torch.nn.Parameter(gate.weight[::2].contiguous())
        if counted:
            experts.num_experts = SMALL["num_experts"] // 2
    ids = torch.arange(1, 25).view(4, 6)
    pattern = "tied, untied or replaced" if layout.zero_stage == 3 else "layers.0.mlp.experts.*another number"
    with pytest.raises(UnsupportedError, match=rf"{pattern}.*in (one|a single) process"):
        model(input_ids=ids, output_router_logits=False)


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize("text", ["dp2+ep2", "dp2+ep2+zero3", "tp2+sp+ep2"])
def test_pruned_experts_are_rejected(source, text, counted):
    run_ranks(prune_half_the_experts, 2, source, parse_layout(text), counted)


# Expert load


def counted(source, layout):
    """Counts the tokens per expert in two training forwards, with the library or, in a single process, with hooks."""
    model = load_model(source, layout).train()
    state, tokens = parallel_state(model), {}

    def record(module, args, name):
        counts = torch.bincount(args[1].flatten(), minlength=SMALL["num_experts"])
        tokens[name] = tokens.get(name, 0) + counts

    if state is None:
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_pre_hook(functools.partial(record, name=name))
    for step in range(2):
        ids = torch.arange(1, 53).view(4, 13) + step
        local_ids = ids if state is None else ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
        model(input_ids=local_ids, labels=local_ids).loss.backward()
    with torch.no_grad():
        model.eval()(input_ids=ids)
    if state is None:
        # Includes the evaluation.
        return tokens
    load = hf_megatron.expert_load(model)
    assert not hf_megatron.expert_load(model).tokens.any()
    return dict(zip(load.layers, load.tokens, strict=True)), load.bytes_sent, load.idle


@pytest.mark.parametrize("text", ["dp2+ep2", "tp2+sp+ep2", "dp2+tp2+etp2+ep2", "pp2+dp2+ep2+mb1", "cp2+ep2"])
def test_expert_token_counts(source, text):
    [expected] = run_ranks(count_training_tokens, 1, source)
    layout = parse_layout(text)
    for tokens, sent, idle in run_ranks(counted, count_ranks(layout), source, layout):
        assert tokens.keys() == expected.keys()
        assert all(torch.equal(tokens[name], expected[name]) for name in expected)
        assert sent > 0 and 0 <= idle < 1


def count_training_tokens(source):
    model = AutoModelForCausalLM.from_pretrained(source)
    original_forward = type(model).forward

    def forward(self, *args, **kwargs):
        return original_forward(self, *args, **kwargs) if self.training else None

    type(model).forward = forward
    try:
        return counted(source, None)
    finally:
        type(model).forward = original_forward


def test_trainer_logs_expert_load(source, tmp_path):
    def on_rank():
        model = load_model(source, MegatronConfig(dp_size=2, ep_size=2))
        trainer = Trainer(
            model,
            TrainingArguments(str(tmp_path), **OPTIONS | {"max_steps": 2, "eval_strategy": "no"}),
            train_dataset=make_dataset(16, 0),
            data_collator=collate,
            callbacks=[hf_megatron.ExpertLoadCallback(limit=1.0001, directory=tmp_path / "load")],
        )
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            trainer.train()
        texts = [str(one.message) for one in records if "most for expert" in str(one.message)]
        return trainer.state.log_history[0], texts

    (logs, texts), (_, other_texts) = run_ranks(on_rank, 2)
    assert logs["expert_load/model.layers.1.mlp.experts"] >= logs["expert_load_of_ranks"] >= 1
    assert logs["expert_mib_sent"] > 0 and 0 <= logs["experts_idle"] < 1
    assert texts and not other_texts
    assert texts[0].startswith("model.layers.") and "most for expert" in texts[0]
    assert [path.name for path in sorted((tmp_path / "load").iterdir())] == ["experts-step1.png", "experts-step2.png"]


def test_expert_load_requires_expert_parallelism(source):
    message = (
        r"expert_load: Qwen3MoeForCausalLM has no expert-parallel layers. Load it with MegatronConfig\(ep_size=.*2 or"
    )
    with pytest.raises(ConfigError, match=message):
        hf_megatron.expert_load(AutoModelForCausalLM.from_pretrained(source))

    def count_tokens():
        model = AutoModelForCausalLM.from_pretrained(source, megatron_config=MegatronConfig(ep_size=2)).train()
        rank = parallel_state(model).mesh.dp_rank
        model(input_ids=torch.arange(1, 41).view(2, 20)[rank : rank + 1])
        return hf_megatron.expert_load(model).tokens.sum(1).tolist()

    # 40 tokens choose 3 experts each, in both layers.
    assert run_ranks(count_tokens, 2) == [[120, 120]] * 2
