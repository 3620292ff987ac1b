"""Tests of divergence from a single-process step: none on clean layouts, and randomly drawn faults are named."""

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
    """Folders of each model with a recording of its single-process step."""
    folders = {}
    for config in (LLAMA, EXPERTS):
        folder = tmp_path_factory.mktemp(config.model_type)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        run_ranks(_record, 1, folder / "model", folder / "one", None)
        folders[config.model_type] = folder
    return folders


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


def _count_ranks(sizes):
    layout = MegatronConfig(**sizes)
    return layout.ranks_per_replica * (layout.dp_size or 1)


def _layout_id(value):
    return MegatronConfig(**value).layout() if isinstance(value, dict) else value.model_type


@pytest.mark.parametrize(("config", "sizes"), LAYOUTS, ids=_layout_id)
def test_clean_step_matches_single_process(models, tmp_path, config, sizes):
    folder = models[config.model_type]
    run_ranks(_record, _count_ranks(sizes), folder / "model", tmp_path / "ranks", sizes)
    result = compare_recordings(folder / "one", tmp_path / "ranks")
    assert result.first is None, str(result)
    assert result.only_second == (), str(result)
    # Almost all recorded events are compared; later pipeline stages lack the events of earlier stages.
    assert len(result.only_first) <= 0.1 * result.compared, str(result)


def _record_lora_step(model_folder, folder, sizes, fault=None):
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
    run_ranks(_record_lora_step, 1, folder / "model", tmp_path / "one", None)
    run_ranks(_record_lora_step, 2, folder / "model", tmp_path / "ranks", sizes)
    result = compare_recordings(tmp_path / "one", tmp_path / "ranks")
    assert result.first is None and result.only_second == (), str(result)
    kinds = {kind for kind, name, _ in Recording(tmp_path / "ranks").events if "lora_A" in name}
    assert {"weight before the step", "output", "gradient", "weight after the step"} <= kinds


PARTS = ["input_layernorm", "self_attn.q_proj", "self_attn.o_proj", "self_attn", "mlp"]


def _scale_output(name, rank, factor=1.01):
    """Returns a fault that scales a module's output on one rank, like a reduction that misses a term."""

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


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.01


def _scale_gradient(name, rank):
    def fault(model):
        state = parallel_state(model)
        has_it = state.cut is None or state.cut.owner(f"{name}.") == state.mesh.pp_rank
        if dist.get_rank() == rank and has_it:

            @shard_safe
            def hook(module, args, output):
                first, *others = output if isinstance(output, tuple) else (output,)
                return (
                    (_ScaleGradient.apply(first), *others) if isinstance(output, tuple) else _ScaleGradient.apply(first)
                )

            model.get_submodule(name).register_forward_hook(hook)
            return True
        return False

    return fault


def _change_weight(name, rank):
    def fault(model):
        parameters = dict(model.named_parameters())
        if dist.get_rank() == rank and name in parameters and not parameters[name].is_meta:
            with torch.no_grad():
                local_tensor(parameters[name])[0] += 0.01
            return True
        return False

    return fault


@pytest.mark.parametrize("seed", range(20))
def test_faults_are_named(models, tmp_path, seed):
    rng = random.Random(seed)
    config, sizes = rng.choice(LAYOUTS)
    folder, ranks = models[config.model_type], _count_ranks(sizes)
    layer, part, rank = rng.randrange(config.num_hidden_layers), rng.choice(PARTS), rng.randrange(ranks)
    kind = rng.choice(["output", "gradient of the output", "weight before the step"])
    name = f"model.layers.{layer}.{part}"
    if sizes.get("pp_size", 1) > 1:
        # Use a rank of the stage that has the layer.
        rank = _find_owner(folder / "model", sizes, name, rank)
    if kind == "output":
        fault = _scale_output(name, rank)
    elif kind == "weight before the step":
        name = f"model.layers.{layer}.{rng.choice(['input_layernorm', 'self_attn.k_proj'])}.weight"
        fault = _change_weight(name, rank)
    else:
        fault = _scale_gradient(name, rank)
    done = run_ranks(_record, ranks, folder / "model", tmp_path / "ranks", sizes, fault)
    assert done[rank] and sum(done) == 1
    difference = compare_recordings(folder / "one", tmp_path / "ranks").first
    assert difference is not None and difference.kind == kind, str(difference)
    assert rank in difference.ranks, str(difference)
    if kind == "weight before the step":
        assert (difference.name, difference.ranks) == (name, (rank,))
    elif kind == "output":
        assert difference.name == name and difference.ranks == (rank,), str(difference)
    else:
        # The gradients of its inputs are the first that differ, and are reported at the module below.
        below = (f"model.layers.{layer}.", f"model.layers.{layer - 1}", "model.embed_tokens")
        assert difference.name.startswith(below), str(difference)


# Modules of a layer that end in an all-reduce or all-to-all, by layout.
REDUCED = [
    (LLAMA, {"tp_size": 2}, ["self_attn.o_proj", "mlp.down_proj"]),
    (LLAMA, {"tp_size": 4}, ["self_attn.o_proj", "mlp.down_proj"]),
    (LLAMA, {"tp_size": 2, "dp_size": 2}, ["self_attn.o_proj", "mlp.down_proj"]),
    (LLAMA, {"tp_size": 2, "pp_size": 2, "num_microbatches": 2}, ["self_attn.o_proj", "mlp.down_proj"]),
    (EXPERTS, {"dp_size": 2, "ep_size": 2}, ["mlp.experts"]),
]


def _drop_communication(name):
    """Returns a fault that drops communication in a module's forward: each rank continues with its local values."""

    def fault(model):
        state = parallel_state(model)
        if state.cut is not None and state.cut.owner(f"{name}.") != state.mesh.pp_rank:
            return False
        inside = []

        def call(original, group, method, args):
            if not inside or method not in ("allreduce", "alltoall_base", "all_to_all_single"):
                return original()
            inputs = [tensor.clone() for tensor in args[0]] if method == "allreduce" else []
            work = original()
            work.wait()
            for tensor, value in zip(args[0], inputs, strict=False):
                tensor.copy_(value)
            if not inputs and args[0].is_floating_point():
                # An all-to-all has no local result: change the received values.
                args[0].mul_(1.01)
            return work

        @shard_safe
        def enter(module, args):
            inside.append(module)

        # Runs after the library's hook, which reduces the output of the module.
        @runs_last
        def leave(module, args, output):
            inside.clear()

        module = model.get_submodule(name)
        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        # Stays active until the rank exits.
        fault.through = communication_through(call, lambda wait, work: wait())
        fault.through.__enter__()
        return True

    return fault


@pytest.mark.parametrize("seed", range(20))
def test_dropped_reductions_are_named(models, tmp_path, seed):
    rng = random.Random(f"dropped {seed}")
    config, sizes, parts = rng.choice(REDUCED)
    folder = models[config.model_type]
    layer, part = rng.randrange(config.num_hidden_layers), rng.choice(parts)
    name = f"model.layers.{layer}.{part}"
    done = run_ranks(
        _record, _count_ranks(sizes), folder / "model", tmp_path / "ranks", sizes, _drop_communication(name)
    )
    assert any(done)
    difference = compare_recordings(folder / "one", tmp_path / "ranks").first
    assert difference is not None and difference.kind == "output", str(difference)
    assert difference.name == name, str(difference)
    assert set(difference.ranks) <= {rank for rank, has_it in enumerate(done) if has_it}


def _find_owner(model_folder, sizes, name, drawn):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(model_folder, megatron_config=ConfigUnderTest(**sizes))
        state = parallel_state(model)
        return state.cut.owner(f"{name}.") == state.mesh.pp_rank

    owners = [rank for rank, has_it in enumerate(run_ranks(on_rank, _count_ranks(sizes))) if has_it]
    return owners[drawn % len(owners)]


def test_nonfinite_values(models, tmp_path):
    """Non-finite values differ if only one recording has them, and are equal if both have them."""
    folder, name = models["llama"], "model.layers.2.self_attn.o_proj"
    fault = _scale_output(name, 1, factor=float("nan"))
    run_ranks(_record, 2, folder / "model", tmp_path / "broken", {"tp_size": 2}, fault)
    result = compare_recordings(folder / "one", tmp_path / "broken")
    assert (result.first.kind, result.first.name) == ("output", name), str(result)
    # For replicated values the first rank of the first recording counts; it gets the NaN with the next all-reduce.
    result = compare_recordings(tmp_path / "broken", folder / "one")
    assert result.first.kind == "output" and result.first.name.startswith("model.layers.2."), str(result)

    def add_nan_hook(model):
        model.get_submodule(name).register_forward_hook(lambda module, args, output: output * torch.nan)
        return True

    run_ranks(_record, 1, folder / "model", tmp_path / "alone", None, add_nan_hook)
    assert compare_recordings(tmp_path / "alone", tmp_path / "alone").first is None


@pytest.mark.parametrize("seed", range(20))
def test_swapped_checkpoint_layers_are_named(models, tmp_path, seed):
    rng = random.Random(seed)
    config, sizes = rng.choice(LAYOUTS)
    folder = models[config.model_type]
    one, other = sorted(rng.sample(range(config.num_hidden_layers), 2))
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    layers = model.model.layers
    layers[one], layers[other] = layers[other], layers[one]
    model.save_pretrained(tmp_path / "swapped")
    run_ranks(_record, _count_ranks(sizes), tmp_path / "swapped", tmp_path / "ranks", sizes)
    difference = compare_recordings(folder / "one", tmp_path / "ranks").first
    # Norm weights of a new model are all ones, so swapped norms do not differ.
    assert difference.kind == "weight before the step" and difference.name.startswith(f"model.layers.{one}."), str(
        difference
    )
    assert f"it equals model.layers.{other}." in str(difference), str(difference)


RESUMED = {
    "tp2": {"tp_size": 2},
    "tp2+sp+pp2": {"tp_size": 2, "sequence_parallel": True, "pp_size": 2, "num_microbatches": 2},
    "dp2": {"dp_size": 2},
    "cp2": {"cp_size": 2},
    "tp2+dp2": {"tp_size": 2, "dp_size": 2},
}


class _StaleShard(TrainerCallback):
    """Restores the local shard of a weight from before the checkpoint was loaded."""

    def __init__(self, model, name):
        self.name, self.before = name, local_tensor(dict(model.named_parameters())[name]).detach().clone()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            local_tensor(dict(model.named_parameters())[self.name]).copy_(self.before)


def _resume(model_folder, folder, sizes, draws=(None,), stop=False):
    """Trains two steps, or resumes from there for a third one, which is recorded, once per draw."""
    faults = []
    rows = [{"input_ids": [place, 5, place, 9] * 4, "labels": [place, 5, place, 9] * 4} for place in range(12)]
    for draw in draws:
        layout = {} if sizes is None else {"megatron_config": ConfigUnderTest(**sizes)}
        model = AutoModelForCausalLM.from_pretrained(model_folder, **layout)
        state, callbacks = parallel_state(model), []
        if not stop:
            callbacks.append(RecordStepCallback(folder / str(draw), [2]))
        if draw is not None:
            rng = random.Random(f"{sizes} {draw}")
            local_names = {name for name, _ in local_named_parameters(model)}
            name = f"model.layers.{rng.randrange(4)}.{rng.choice(['self_attn.v_proj', 'mlp.up_proj'])}.weight"
            rank = rng.randrange(dist.get_world_size())
            if rank == dist.get_rank() and name in local_names:
                callbacks.append(_StaleShard(model, name))
            faults.append((name, rank, rank == dist.get_rank() and name in local_names))
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
    return faults


@pytest.fixture(scope="module")
def resumed(models, tmp_path_factory):
    """Folder of a run that was stopped on tp2 after two steps, with a single-process recording of its third step."""
    folder = tmp_path_factory.mktemp("resumed")
    run_ranks(_resume, 2, models["llama"] / "model", folder / "first", RESUMED["tp2"], stop=True)
    run_ranks(_resume, 1, models["llama"] / "model", folder / "one", None)
    return folder


@pytest.mark.parametrize("layout", RESUMED)
def test_stale_shards_after_resume_are_named(models, resumed, layout):
    sizes, folder = RESUMED[layout], resumed / layout
    draws = [None, *range(4)]
    ranks = run_ranks(_resume, _count_ranks(sizes), models["llama"] / "model", folder, sizes, draws)
    one = resumed / "one" / "None" / "step2"
    clean = compare_recordings(one, folder / "None" / "step2")
    assert clean.first is None, str(clean)
    for draw, faults in enumerate(zip(*ranks, strict=True)):
        name, rank, _ = faults[0]
        difference = compare_recordings(one, folder / str(draw) / "step2").first
        if not faults[rank][2]:
            # The layer is on another stage.
            assert difference is None, str(difference)
        else:
            assert (difference.kind, difference.name, difference.ranks) == ("weight before the step", name, (rank,)), (
                str(difference)
            )


def test_command_and_invalid_recordings(models, tmp_path):
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
