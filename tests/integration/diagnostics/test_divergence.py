"""Where a step beside one process parts from it: nothing on clean layouts, and faults by seed are named."""

import random

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3MoeConfig,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.compat.shard_safe import runs_last, shard_safe
from hf_megatron.compat.torch_distributed import communication_through
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.config import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.off_stage import local_named_parameters
from hf_megatron.data_parallel.distributed_optimizer import prepare_optimizer
from hf_megatron.diagnostics.divergence import compare_recordings
from hf_megatron.diagnostics.recorded_shards import Recording
from hf_megatron.diagnostics.recording import StepRecorder
from hf_megatron.errors import ConfigError
from hf_megatron.integrations.trainer.callbacks.watches import RecordStepCallback
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
LLAMA = LlamaConfig(**SIZES, intermediate_size=48, num_hidden_layers=4)
EXPERTS = Qwen3MoeConfig(
    **SIZES, moe_intermediate_size=16, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, head_dim=8
)
LAYOUTS = [
    (LLAMA, {"tp_size": 2}),
    (LLAMA, {"tp_size": 4}),
    (LLAMA, {"tp_size": 2, "sequence_parallel": True}),
    (LLAMA, {"dp_size": 2}),
    (LLAMA, {"cp_size": 2}),
    (LLAMA, {"cp_size": 2, "tp_size": 2, "sequence_parallel": True}),
    (LLAMA, {"pp_size": 2, "num_microbatches": 2}),
    (LLAMA, {"pp_size": 2, "virtual_stages": 2, "pipeline_schedule": "interleaved_1f1b", "num_microbatches": 2}),
    (LLAMA, {"pp_size": 2, "dp_size": 2, "num_microbatches": 2}),
    (LLAMA, {"tp_size": 2, "dp_size": 2}),
    (EXPERTS, {"dp_size": 2, "ep_size": 2}),
    (EXPERTS, {"tp_size": 2, "dp_size": 2, "ep_size": 2}),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Each model's folder, and a recording of its step in one process."""
    found = {}
    for config in (LLAMA, EXPERTS):
        folder = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        run_ranks(_record, 1, folder / "model", folder / "one", None)
        found[config.model_type] = folder
    return found


def _record(model_folder, folder, sizes, fault=None, calls=1):
    layout = {} if sizes is None else {"megatron_config": ConfigUnderTest(**sizes)}
    model = AutoModelForCausalLM.from_pretrained(model_folder, **layout).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = parallel_state(model)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0)).to(model.device)
    labels = ids.clone()
    labels[0, :9] = -100
    rows = slice(None)
    if state is not None:
        optimizer = prepare_optimizer(optimizer)
        rows = torch.arange(4).tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
    done = fault(model) if fault is not None else None
    with StepRecorder(folder, model, optimizer):
        model(input_ids=ids[rows], labels=labels[rows]).loss.backward()
        optimizer.step()
    return done


def _ranks(sizes):
    layout = MegatronConfig(**sizes)
    return layout.ranks_per_replica * (layout.dp_size or 1)


def _name(value):
    return MegatronConfig(**value).layout() if isinstance(value, dict) else value.model_type


@pytest.mark.parametrize(("config", "sizes"), LAYOUTS, ids=_name)
def test_a_clean_step_parts_nowhere(models, tmp_path, config, sizes):
    folder = models[config.model_type]
    run_ranks(_record, _ranks(sizes), folder / "model", tmp_path / "ranks", sizes)
    found = compare_recordings(folder / "one", tmp_path / "ranks")
    assert found.first is None, str(found)
    assert found.only_second == (), str(found)
    # Of what one process returns next to all is compared; a pipeline's later stages leave out what is before.
    assert len(found.only_first) <= 0.1 * found.compared, str(found)


def _record_adapted(model_folder, folder, sizes, fault=None):
    layout = {} if sizes is None else {"megatron_config": ConfigUnderTest(**sizes)}
    model = AutoModelForCausalLM.from_pretrained(model_folder, **layout)
    torch.manual_seed(1)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, adapter).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    optimizer = optimizer if sizes is None else prepare_optimizer(optimizer)
    if fault is not None:
        fault(model.base_model.model)
    ids = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    with StepRecorder(folder, model, optimizer):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}], ids=["tp2", "pp2"])
def test_adapters_are_compared(models, tmp_path, sizes):
    folder = models["llama"]
    run_ranks(_record_adapted, 1, folder / "model", tmp_path / "one", None)
    run_ranks(_record_adapted, 2, folder / "model", tmp_path / "ranks", sizes)
    found = compare_recordings(tmp_path / "one", tmp_path / "ranks")
    assert found.first is None and found.only_second == (), str(found)
    kinds = {kind for kind, name, _ in Recording(tmp_path / "ranks").events if "lora_A" in name}
    assert {"weight before the step", "output", "gradient", "weight after the step"} <= kinds


PARTS = ["input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "self_attn", "mlp"]


def _scaled_output(name, rank, factor=1.01):
    """A rank's module returns a little more: what a reduction that lost a part looks like."""

    def fault(model):
        state = parallel_state(model)
        has_it = state.cut is None or state.cut.owner(f"{name}.") == state.mesh.pp_rank
        if dist.get_rank() == rank and has_it:

            @shard_safe
            def hook(module, args, output):
                first, *others = output if isinstance(output, tuple) else (output,)
                return (first * factor, *others) if isinstance(output, tuple) else first * factor

            model.get_submodule(name).register_forward_hook(hook)
            return True
        return False

    return fault


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def _scaled_gradient(name, rank):
    def fault(model):
        state = parallel_state(model)
        has_it = state.cut is None or state.cut.owner(f"{name}.") == state.mesh.pp_rank
        if dist.get_rank() == rank and has_it:

            @shard_safe
            def hook(module, args, output):
                first, *others = output if isinstance(output, tuple) else (output,)
                return (_Scaled.apply(first), *others) if isinstance(output, tuple) else _Scaled.apply(first)

            model.get_submodule(name).register_forward_hook(hook)
            return True
        return False

    return fault


def _stale(name, rank):
    def fault(model):
        found = dict(model.named_parameters())
        if dist.get_rank() == rank and name in found and not found[name].is_meta:
            with torch.no_grad():
                local_tensor(found[name])[0] += 0.01
            return True
        return False

    return fault


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_named(models, tmp_path, seed):
    drawn = random.Random(seed)
    config, sizes = drawn.choice(LAYOUTS)
    folder, ranks = models[config.model_type], _ranks(sizes)
    layer, part, rank = drawn.randrange(config.num_hidden_layers), drawn.choice(PARTS), drawn.randrange(ranks)
    kind = drawn.choice(["output", "gradient of the output", "weight before the step"])
    name = f"model.layers.{layer}.{part}"
    if sizes.get("pp_size", 1) > 1:
        # The rank that has the layer, of the replica that was drawn.
        rank = _owner(folder / "model", sizes, name, rank)
    if kind == "output":
        fault = _scaled_output(name, rank)
    elif kind == "weight before the step":
        name = f"model.layers.{layer}.{drawn.choice(['input_layernorm', 'self_attn.k_proj'])}.weight"
        fault = _stale(name, rank)
    else:
        fault = _scaled_gradient(name, rank)
    done = run_ranks(_record, ranks, folder / "model", tmp_path / "ranks", sizes, fault)
    assert done[rank] and sum(done) == 1
    found = compare_recordings(folder / "one", tmp_path / "ranks").first
    assert found is not None and found.kind == kind, str(found)
    assert rank in found.ranks, str(found)
    if kind == "weight before the step":
        assert (found.name, found.ranks) == (name, (rank,))
    elif kind == "output":
        assert found.name == name and found.ranks == (rank,), str(found)
    else:
        # What is below it: its own inputs' gradients are the first that differ.
        below = (f"model.layers.{layer}.", f"model.layers.{layer - 1}", "model.embed_tokens")
        assert found.name.startswith(below), str(found)


# What of a layer ends in a reduction or an exchange over an axis, by layout.
REDUCED = [
    (LLAMA, {"tp_size": 2}, ["self_attn.o_proj", "mlp.down_proj"]),
    (LLAMA, {"tp_size": 4}, ["self_attn.o_proj", "mlp.down_proj"]),
    (LLAMA, {"tp_size": 2, "dp_size": 2}, ["self_attn.o_proj", "mlp.down_proj"]),
    (LLAMA, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}, ["self_attn.o_proj", "mlp.down_proj"]),
    (EXPERTS, {"dp_size": 2, "ep_size": 2}, ["mlp.experts"]),
]


def _dropped(name):
    """What ranks send each other in a module's forward does not arrive: each goes on with what it has itself."""

    def fault(model):
        state = parallel_state(model)
        if state.cut is not None and state.cut.owner(f"{name}.") != state.mesh.pp_rank:
            return False
        inside = []

        def call(original, group, method, args):
            if not inside or method not in ("allreduce", "alltoall_base", "all_to_all_single"):
                return original()
            own = [tensor.clone() for tensor in args[0]] if method == "allreduce" else []
            work = original()
            work.wait()
            for tensor, value in zip(args[0], own, strict=False):
                tensor.copy_(value)
            if not own and args[0].is_floating_point():
                # Rows came back that nobody has computed.
                args[0].mul_(1.01)
            return work

        @shard_safe
        def enter(module, args):
            inside.append(module)

        # Behind the library's own, which reduces what the module has returned.
        @runs_last
        def leave(module, args, output):
            inside.clear()

        module = model.get_submodule(name)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        # For as long as the rank lives.
        fault.through = communication_through(call, lambda wait, work: wait())
        fault.through.__enter__()
        return True

    return fault


@pytest.mark.parametrize("seed", range(20))
def test_dropped_reductions_are_named(models, tmp_path, seed):
    drawn = random.Random(f"dropped {seed}")
    config, sizes, parts = drawn.choice(REDUCED)
    folder = models[config.model_type]
    layer, part = drawn.randrange(config.num_hidden_layers), drawn.choice(parts)
    name = f"model.layers.{layer}.{part}"
    done = run_ranks(_record, _ranks(sizes), folder / "model", tmp_path / "ranks", sizes, _dropped(name))
    assert any(done)
    found = compare_recordings(folder / "one", tmp_path / "ranks").first
    assert found is not None and found.kind == "output", str(found)
    assert found.name == name, str(found)
    assert set(found.ranks) <= {rank for rank, has_it in enumerate(done) if has_it}


def _owner(model_folder, sizes, name, drawn):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(model_folder, megatron_config=ConfigUnderTest(**sizes))
        state = parallel_state(model)
        return state.cut.owner(f"{name}.") == state.mesh.pp_rank

    having = [rank for rank, has_it in enumerate(run_ranks(on_rank, _ranks(sizes))) if has_it]
    return having[drawn % len(having)]


def test_numbers_that_are_not_finite(models, tmp_path):
    """In either recording; in both they are alike."""
    folder, name = models["llama"], "model.layers.2.self_attn.o_proj"
    fault = _scaled_output(name, 1, factor=float("nan"))
    run_ranks(_record, 2, folder / "model", tmp_path / "broken", {"tp_size": 2}, fault)
    found = compare_recordings(folder / "one", tmp_path / "broken")
    assert (found.first.kind, found.first.name) == ("output", name), str(found)
    # Of what ranks of the first recording have twice the first rank's counts, which gets it with the next sum.
    found = compare_recordings(tmp_path / "broken", folder / "one")
    assert found.first.kind == "output" and found.first.name.startswith("model.layers.2."), str(found)

    def broken(model):
        model.get_submodule(name).register_forward_hook(lambda module, args, output: output * torch.nan)
        return True

    run_ranks(_record, 1, folder / "model", tmp_path / "alone", None, broken)
    assert compare_recordings(tmp_path / "alone", tmp_path / "alone").first is None


@pytest.mark.parametrize("seed", range(20))
def test_swapped_layers_of_a_checkpoint_are_named(models, tmp_path, seed):
    drawn = random.Random(seed)
    config, sizes = drawn.choice(LAYOUTS)
    folder = models[config.model_type]
    one, other = sorted(drawn.sample(range(config.num_hidden_layers), 2))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    layers = model.model.layers
    layers[one], layers[other] = layers[other], layers[one]
    model.save_pretrained(tmp_path / "swapped")
    run_ranks(_record, _ranks(sizes), tmp_path / "swapped", tmp_path / "ranks", sizes)
    found = compare_recordings(folder / "one", tmp_path / "ranks").first
    # Norms are all ones when a model is new, whichever layer's they are.
    assert found.kind == "weight before the step" and found.name.startswith(f"model.layers.{one}."), str(found)
    assert f"it equals model.layers.{other}." in str(found), str(found)


RESUMED = {
    "tp2": {"tp_size": 2},
    "tp2+sp+pp2": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2},
    "dp2": {"dp_size": 2},
    "cp2": {"cp_size": 2},
    "tp2+dp2": {"tp_size": 2, "dp_size": 2},
}


class _StaleShard(TrainerCallback):
    """Puts back what a rank held of a weight before the checkpoint was read."""

    def __init__(self, model, name):
        self.name, self.before = name, local_tensor(dict(model.named_parameters())[name]).detach().clone()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            local_tensor(dict(model.named_parameters())[self.name]).copy_(self.before)


def _resume(model_folder, folder, sizes, draws=(None,), stop=False):
    """Trains two steps, or goes on from there for a third, which is recorded, once for each draw."""
    reported = []
    rows = [{"input_ids": [place, 5, place, 9] * 4, "labels": [place, 5, place, 9] * 4} for place in range(12)]
    for draw in draws:
        layout = {} if sizes is None else {"megatron_config": ConfigUnderTest(**sizes)}
        model = AutoModelForCausalLM.from_pretrained(model_folder, **layout)
        state, callbacks = parallel_state(model), []
        if not stop:
            callbacks.append(RecordStepCallback(folder / str(draw), [2]))
        if draw is not None:
            drawn = random.Random(f"{sizes} {draw}")
            held = {name for name, _ in local_named_parameters(model)}
            name = f"model.layers.{drawn.randrange(4)}.{drawn.choice(['self_attn.v_proj', 'mlp.up_proj'])}.weight"
            rank = drawn.randrange(dist.get_world_size())
            if rank == dist.get_rank() and name in held:
                callbacks.append(_StaleShard(model, name))
            reported.append((name, rank, rank == dist.get_rank() and name in held))
        arguments = TrainingArguments(
            str(folder.parent / "run"),
            per_device_train_batch_size=4 // (1 if state is None else state.mesh.dp_size),
            max_steps=2 if stop else 3,
            learning_rate=1e-2,
            save_steps=2,
            save_strategy="steps" if stop else "no",
            report_to=[],
            use_cpu=True,
        )
        Trainer(model, arguments, default_data_collator, rows, callbacks=callbacks).train(
            resume_from_checkpoint=None if stop else str(folder.parent / "run" / "checkpoint-2")
        )
    return reported


@pytest.fixture(scope="module")
def resumed(models, tmp_path_factory):
    """A run that was stopped on tp2 after two steps, and a recording of its third in one process."""
    folder = tmp_path_factory.mktemp("resumed")
    run_ranks(_resume, 2, models["llama"] / "model", folder / "first", RESUMED["tp2"], stop=True)
    run_ranks(_resume, 1, models["llama"] / "model", folder / "one", None)
    return folder


@pytest.mark.parametrize("layout", RESUMED)
def test_stale_shards_after_a_resume_are_named(models, resumed, layout):
    sizes, folder = RESUMED[layout], resumed / layout
    draws = [None, *range(4)]
    ranks = run_ranks(_resume, _ranks(sizes), models["llama"] / "model", folder, sizes, draws)
    one = resumed / "one" / "None" / "step2"
    clean = compare_recordings(one, folder / "None" / "step2")
    assert clean.first is None, str(clean)
    for draw, reported in enumerate(zip(*ranks, strict=True)):
        name, rank, _ = reported[0]
        found = compare_recordings(one, folder / str(draw) / "step2").first
        if not reported[rank][2]:
            # Another stage has the layer.
            assert found is None, str(found)
        else:
            assert (found.kind, found.name, found.ranks) == ("weight before the step", name, (rank,)), str(found)


def test_the_command_and_what_is_no_recording(models, tmp_path):
    folder = models["llama"]
    run_ranks(_record, 2, folder / "model", tmp_path / "ranks", {"tp_size": 2})
    same = CliRunner().invoke(app, ["debug", "compare", str(folder / "one"), str(tmp_path / "ranks")])
    assert same.exit_code == 0 and "0 differ" in same.output
    wrong = CliRunner().invoke(app, ["debug", "compare", str(folder / "one"), str(tmp_path)])
    assert wrong.exit_code == 2 and "has no recording" in wrong.output
    with pytest.raises(ConfigError, match="already has a recording"):
        StepRecorder(folder / "one", AutoModelForCausalLM.from_config(LLAMA))
    with pytest.raises(ConfigError, match="matches no module name"):
        StepRecorder(tmp_path / "new", AutoModelForCausalLM.from_config(LLAMA), modules="nothing")
    (tmp_path / "ranks" / "rank00001.json").unlink()
    with pytest.raises(ConfigError, match="rank 1 is missing"):
        compare_recordings(folder / "one", tmp_path / "ranks")
