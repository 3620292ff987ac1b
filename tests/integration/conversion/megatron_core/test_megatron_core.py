"""Tests against megatron-core 0.16.1 in its own process: it loads converted checkpoints, and its saves convert back."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_megatron import MegatronConfig
from hf_megatron.conversion import TargetOptions, compare, convert
from hf_megatron.conversion.families import get_family
from hf_megatron.conversion.interfaces import MAIN_WEIGHT, WEIGHT
from hf_megatron.conversion.megatron_core.reader import MegatronCoreReader
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.tiny_models import FAMILIES, VOCABULARY, build_tiny_model, make_config

ROOT = Path(__file__).parents[4]
PADDED = 256
IDS = torch.randint(0, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))

# Classes other than GPTModel have their own tests: test_bert.py, test_mamba.py and test_t5.py.
OTHER_CLASSES = {"megatron-bert", "mamba2", "nemotron_h", "t5", "mt5"}
CHECKED = [case for case in FAMILIES if get_family(make_config(case)).unchecked(make_config(case)) is None]
BUILT = [case for case in CHECKED if FAMILIES[case][0] not in OTHER_CLASSES]
# Tensor parallelism changes the summation order of latent attention.
TOLERANCE = {"deepseek_v2": 3e-6, "deepseek_v2_lite": 3e-6, "deepseek_v3": 3e-6, "deepseek_v3_halves": 3e-6}
EXPERTS = [case for case in BUILT if "num_experts_per_tok" in FAMILIES[case][1]]
LAYOUTS = {"tp1": {}, "tp2": {"tp": 2}, "ep2": {"ep": 2, "dp": 2}}


def run_peer(folder: Path, launches: list[dict]) -> dict:
    """Runs tasks on megatron-core, which must all succeed, and returns the results by launch and task name."""
    folder.mkdir(parents=True)
    (folder / "job.json").write_text(json.dumps({"out": str(folder), "launches": launches}))
    command = [sys.executable, "-m", "tests.megatron_peer.tasks", str(folder / "job.json")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    results = json.loads((folder / "results.json").read_text()) if (folder / "results.json").exists() else {}
    assert result.returncode == 0, f"{json.dumps(results, indent=1)[-4000:]}\n{result.stderr[-2000:]}"
    return {
        launch["name"]: {task["name"]: task for task in done["tasks"]}
        for launch, done in zip(launches, results["launches"], strict=True)
    }


@torch.no_grad()
def compute_logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return model(IDS).logits


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Folder with every family that megatron-core can build: tiny models, conversions, and megatron-core's logits."""
    root = tmp_path_factory.mktemp("core")
    for case in BUILT:
        build_tiny_model(case).save_pretrained(root / case / "hf")
        convert(root / case / "hf", root / case / "core", "megatron_core", options=TargetOptions(tp_size=2))
    for case in ("llama", "gpt2", "qwen3"):
        layout = TargetOptions(tp_size=2, local_names=True)
        convert(root / case / "hf", root / case / "legacy", "megatron_legacy", options=layout)
    launches = []
    for name, ranks in LAYOUTS.items():
        cases = EXPERTS if "ep" in ranks else BUILT
        tasks = [
            {
                "task": "load_logits",
                "name": case,
                "hf": str(root / case / "hf"),
                "padded_vocab": PADDED,
                "load": str(root / case / "core" / "release"),
                "ids": IDS.tolist(),
            }
            for case in cases
        ]
        if name == "tp2":
            tasks += [
                {
                    **task,
                    "name": f"{task['name']}_legacy",
                    "load": str(root / task["name"] / "legacy"),
                    "load_format": "legacy",
                }
                for task in tasks
                if task["name"] in ("llama", "gpt2", "qwen3")
            ]
        launches.append({"name": name, "layout": ranks, "tasks": tasks})
    run_peer(root / "out", launches)
    return root


def test_tested_families_are_complete():
    model_types = {FAMILIES[case][0] for case in BUILT}
    assert model_types >= {"llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "phi3", "gpt2", "gpt_neox"}
    assert model_types >= {"deepseek_v2", "deepseek_v3", "gpt_oss", "gemma"}
    assert {FAMILIES[case][0] for case in CHECKED} >= OTHER_CLASSES
    others = {model_type for model_type, _ in FAMILIES.values()} - OTHER_CLASSES - model_types
    assert others == {"gemma2", "gemma3_text", "olmo2"}


@pytest.mark.parametrize("case", BUILT)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_match_megatron_core(written, case, layout):
    if layout == "ep2" and case not in EXPERTS:
        # Dense models have no experts to shard: the same run as tp1.
        layout = "tp1"
    expected = compute_logits(written / case / "hf")
    logits = load_file(written / "out" / layout / f"{case}.safetensors")["logits"]
    assert (logits - expected).abs().max() < TOLERANCE.get(case, 1e-6)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("case", ["llama", "gpt2", "qwen3"])
def test_megatron_core_loads_rank_files(written, case):
    logits = load_file(written / "out" / "tp2" / f"{case}_legacy.safetensors")["logits"]
    assert (logits - compute_logits(written / case / "hf")).abs().max() < 1e-6


SAVED = {
    # name -> case, layout of the launch, additional task fields
    "llama_tp2": ("llama", {"tp": 2}, {}),
    "llama_pp2": ("llama", {"pp": 2}, {}),
    "llama_layers": ("llama_mqa", {"tp": 2}, {"non_homogeneous": True}),
    "llama_local": ("qwen3", {}, {"keys": "local"}),
    "moe_ep2": ("qwen3_moe", {"ep": 2, "dp": 2}, {}),
    "moe_local": ("mixtral", {}, {"keys": "local"}),
    "latent": ("deepseek_v3", {}, {}),
    "sinks": ("gpt_oss", {}, {}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints written by megatron-core, and its logits."""
    root = tmp_path_factory.mktemp("saved")
    launches = []
    for name, (case, layout, fields) in SAVED.items():
        config = make_config(case)
        config.architectures = [type(build_tiny_model(case)).__name__]
        config.save_pretrained(root / name / "hf")
        task = {
            "task": "save",
            "name": name,
            "hf": str(root / name / "hf"),
            "padded_vocab": PADDED,
            "dir": str(root / name / "core"),
            "ids": IDS.tolist(),
            **fields,
        }
        launches.append({"name": name, "layout": layout, "tasks": [task]})
    run_peer(root / "out", launches)
    return root


@pytest.mark.parametrize("name", SAVED)
def test_megatron_core_checkpoints_convert_back(saved, tmp_path, name):
    folder = saved / name
    convert(folder / "core", tmp_path / "hf", "hf", config=str(folder / "hf"))
    logits = load_file(saved / "out" / name / f"{name}.safetensors")["logits"]
    assert (logits - compute_logits(tmp_path / "hf")).abs().max() < TOLERANCE.get(SAVED[name][0], 1e-6)
    # Converted to megatron-core's format again, the tensors are bit-equal.
    convert(tmp_path / "hf", tmp_path / "core", "megatron_core", options=TargetOptions(tp_size=2))
    with MegatronCoreReader(folder / "core") as first, MegatronCoreReader(tmp_path / "core") as second:
        names = {key.name for key in first.entries} ^ {key.name for key in second.entries}
        # Local layer specs name the norm before the experts after the linear of dense layers.
        assert all("layernorm" in name or "layer_norm" in name for name in names)
        for key in first.entries.keys() & second.entries.keys():
            one, other = first.read(key), second.read(key)
            if "embeddings" in key.name or "output_layer" in key.name:
                one, other = one[:VOCABULARY], other[:VOCABULARY]
            assert torch.equal(one, other), key


TRAINED = {
    "llama": ("llama", {"tp": 2}, {}),
    "moe": ("qwen3_moe", {}, {}),
    "gpt2": ("gpt2", {"dp": 2}, {}),
}
STEPS = 3
BATCHES = torch.randint(0, VOCABULARY, (STEPS + 2, 2, 24), generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Checkpoints with distributed optimizer state, and the losses of the steps after them."""
    root = tmp_path_factory.mktemp("trained")
    launches = []
    for name, (case, layout, fields) in TRAINED.items():
        config = make_config(case)
        for dropout in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
            if dropout in config.to_dict():
                setattr(config, dropout, 0.0)
        config.architectures = [type(build_tiny_model(case)).__name__]
        config.save_pretrained(root / name / "hf")
        task = {
            "task": "train_save",
            "name": name,
            "hf": str(root / name / "hf"),
            "padded_vocab": PADDED,
            "dir": str(root / name / "core"),
            "ids": BATCHES.tolist(),
            "steps": STEPS,
            "resumed_steps": 2,
            **fields,
        }
        tasks = [task]
        if name == "llama":
            refused = {**task, "name": "refused", "dir": str(root / "refused"), "sharding": "dp_reshardable"}
            tasks.append({**refused, "steps": 1, "resumed_steps": 0})
        launches.append({"name": name, "layout": layout, "tasks": tasks})
    results = run_peer(root / "out", launches)
    return root, results


def resume_training(
    checkpoint: Path, source: Path, layout: dict, batches: torch.Tensor, out: Path | None = None
) -> list[float]:
    """Resumes training from a converted checkpoint as megatron-core would, and returns the loss of each step."""
    from accelerate import Accelerator

    model = AutoModelForCausalLM.from_pretrained(
        source, megatron_config=MegatronConfig(**layout), attn_implementation="eager", dtype=torch.float32
    )
    accelerator = Accelerator(cpu=True)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    plain = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=1e-3))
    accelerator.load_state(checkpoint)
    losses = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if out is not None:
        accelerator.save_state(out)
    return losses


@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"pp_size": 2, "num_microbatches": 2}], ids=["tp2", "pp2"])
@pytest.mark.parametrize("name", TRAINED)
def test_training_resumes_from_megatron_core(trained, tmp_path, name, layout):
    root, results = trained
    folder = root / name
    convert(folder / "core", tmp_path / "sharded", "sharded", config=str(folder / "hf"), verify=True)
    convert(tmp_path / "sharded", tmp_path / "hf", "hf")
    expected = [step["loss"] for step in results[name][name]["resumed"]]
    losses = run_ranks(resume_training, 2, tmp_path / "sharded", tmp_path / "hf", layout, BATCHES[STEPS:])[0]
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_moments_round_trip_bit_equal(trained, tmp_path, name):
    root, _ = trained
    folder = root / name
    convert(folder / "core", tmp_path / "sharded", "sharded", config=str(folder / "hf"))
    convert(tmp_path / "sharded", tmp_path / "core", "megatron_core", options=TargetOptions(tp_size=2))
    with MegatronCoreReader(folder / "core") as first, MegatronCoreReader(tmp_path / "core") as second:
        assert first.entries.keys() == second.entries.keys()
        assert {key.kind for key in first.entries} == {WEIGHT, MAIN_WEIGHT, "exp_avg", "exp_avg_sq"}
        assert first.optimizer.step == second.optimizer.step == STEPS
        assert first.iteration == second.iteration
        for key in first.entries:
            one, other = first.read(key), second.read(key)
            if "embedding.word" in key.name or "output_layer" in key.name:
                one, other = one[:VOCABULARY], other[:VOCABULARY]
            assert torch.equal(one, other), key
    comparison = compare(folder / "core", tmp_path / "core", config=str(folder / "hf"))
    assert comparison.equal, comparison.summary()


def test_megatron_core_resumes_from_converted_checkpoint(trained, tmp_path):
    """Converts a Megatron checkpoint to a sharded one of this library and back into its distributed optimizer."""
    root, results = trained
    launches = []
    for name in ("llama", "gpt2"):
        folder, layout = root / name, TRAINED[name][1]
        convert(folder / "core", tmp_path / name / "sharded", "sharded", config=str(folder / "hf"))
        convert(
            tmp_path / name / "sharded", tmp_path / name / "core", "megatron_core", options=TargetOptions(tp_size=2)
        )
        task = {
            "task": "train_save",
            "name": name,
            "hf": str(folder / "hf"),
            "padded_vocab": PADDED,
            "load": str(tmp_path / name / "core" / f"iter_{STEPS:07d}"),
            "load_optimizer": True,
            "first_step": STEPS,
            "ids": BATCHES.tolist(),
            "steps": 2,
            "dir": str(tmp_path / name / "again"),
        }
        launches.append({"name": name, "layout": layout, "tasks": [task]})
    again = run_peer(tmp_path / "out", launches)
    for name in ("llama", "gpt2"):
        expected = [step["loss"] for step in results[name][name]["resumed"]]
        assert [step["loss"] for step in again[name][name]["steps"]] == pytest.approx(expected, abs=1e-6)


def test_expert_parallel_training_resumes_in_megatron_core(trained, tmp_path):
    """Trains one step from Megatron's checkpoint on two expert-parallel ranks, and the next step in Megatron on two."""
    root, results = trained
    folder, (first, second) = root / "moe", [step["loss"] for step in results["moe"]["moe"]["resumed"]]
    convert(folder / "core", tmp_path / "sharded", "sharded", config=str(folder / "hf"))
    convert(tmp_path / "sharded", tmp_path / "hf", "hf")
    launches = []
    for name, layout in (("dp2", {"dp_size": 2, "ep_size": 2}), ("tp2", {"tp_size": 2, "ep_size": 2})):
        out = tmp_path / name
        batches = BATCHES[STEPS : STEPS + 1]
        losses = run_ranks(resume_training, 2, tmp_path / "sharded", tmp_path / "hf", layout, batches, out / "state")[0]
        assert losses == pytest.approx([first], abs=1e-5)
        convert(out / "state", out / "core", "megatron_core", options=TargetOptions(ep_size=2))
        task = {
            "task": "train_save",
            "name": name,
            "hf": str(folder / "hf"),
            "padded_vocab": PADDED,
            "load": str(next((out / "core").glob("iter_*"))),
            "load_optimizer": True,
            "first_step": STEPS + 1,
            "ids": BATCHES.tolist(),
            "steps": 1,
            "dir": str(out / "again"),
        }
        launches.append({"name": name, "layout": {"ep": 2, "dp": 2}, "tasks": [task]})
    again = run_peer(tmp_path / "out", launches)
    for name in ("dp2", "tp2"):
        assert [step["loss"] for step in again[name][name]["steps"]] == pytest.approx([second], abs=1e-5)


def test_non_reshardable_optimizer_is_rejected(trained, tmp_path):
    from hf_megatron import CheckpointError

    root, _ = trained
    with pytest.raises(CheckpointError, match="--dist-ckpt-optim-fully-reshardable"):
        convert(root / "refused", tmp_path / "sharded", "sharded", config=str(root / "llama" / "hf"))
    convert(root / "refused", tmp_path / "sharded", "sharded", config=str(root / "llama" / "hf"), optimizer=False)


def compute_parallel_logits(folder: Path, config: dict) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, megatron_config=MegatronConfig(**config)).eval()
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize(
    ("case", "config"),
    [
        ("llama", {"tp_size": 2}),
        ("llama", {"pp_size": 2}),
        ("qwen3_moe", {"tp_size": 2}),
        ("qwen3_moe", {"pp_size": 2}),
        ("qwen3_moe", {"tp_size": 2, "ep_size": 2}),
        ("qwen3_moe", {"dp_size": 2, "ep_size": 2}),
    ],
    ids=str,
)
def test_from_pretrained_reads_megatron_core(written, case, config):
    expected = compute_logits(written / case / "hf")
    for logits in run_ranks(compute_parallel_logits, 2, written / case / "core", config):
        assert torch.allclose(logits, expected, atol=1e-5)
    one = AutoModelForCausalLM.from_pretrained(written / case / "core", megatron_config=MegatronConfig())
    assert one.generation_config.eos_token_id == 2 and one.dtype == torch.float32
    half = AutoModelForCausalLM.from_pretrained(
        written / case / "core", megatron_config=MegatronConfig(), torch_dtype=torch.bfloat16
    )
    assert half.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.allclose(one.eval()(IDS).logits, expected, atol=1e-5)


def save_parallel_model(source: Path, target: Path, config: dict) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, megatron_config=MegatronConfig(**config))
    model.save_pretrained(target, format="megatron_core", options=TargetOptions(tp_size=2))


@pytest.mark.parametrize("config", [{"tp_size": 2}, {"pp_size": 2}, {"dp_size": 2, "zero_stage": 3}], ids=str)
@pytest.mark.parametrize("case", ["llama_tied", "qwen3_moe", "gpt2"])
def test_save_pretrained_writes_megatron_core(written, tmp_path, case, config):
    run_ranks(save_parallel_model, 2, written / case / "hf", tmp_path / "core", config)
    comparison = compare(written / case / "core", tmp_path / "core")
    assert comparison.equal, comparison.summary()
    assert compare(written / case / "hf", tmp_path / "core").equal


def test_moments_survive_every_format(trained, tmp_path):
    root, _ = trained
    folder = root / "llama"
    convert(folder / "core", tmp_path / "dcp", "dcp", config=str(folder / "hf"))
    convert(tmp_path / "dcp", tmp_path / "sharded", "sharded")
    convert(tmp_path / "sharded", tmp_path / "core", "megatron_core")
    comparison = compare(folder / "core", tmp_path / "core", config=str(folder / "hf"))
    assert comparison.equal, comparison.summary()
    # Weight, fp32 main weight and two moments per parameter.
    assert comparison.compared == 4 * 21


def train_in_bf16(source: Path, target: Path, steps: int, checkpoint: Path | None) -> list[float]:
    from accelerate import Accelerator

    model = AutoModelForCausalLM.from_pretrained(
        source, megatron_config=MegatronConfig(dp_size=2), dtype=torch.bfloat16
    )
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    if checkpoint is not None:
        accelerator.load_state(checkpoint)
    losses = []
    for batch in BATCHES[:steps]:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerator.save_state(target)
    return losses


def test_bf16_main_weights_survive_conversion(tmp_path):
    build_tiny_model("llama", torch.bfloat16).save_pretrained(tmp_path / "hf")
    run_ranks(train_in_bf16, 2, tmp_path / "hf", tmp_path / "state", 2, None)
    convert(tmp_path / "state", tmp_path / "core", "megatron_core")
    with MegatronCoreReader(tmp_path / "core") as reader:
        dtypes = {key.kind: entry.dtype for key, entry in reader.entries.items()}
    assert (dtypes[WEIGHT], dtypes[MAIN_WEIGHT]) == (torch.bfloat16, torch.float32)
    convert(tmp_path / "core", tmp_path / "again", "sharded", verify=True)
    assert compare(tmp_path / "state", tmp_path / "again").equal
    expected = run_ranks(train_in_bf16, 2, tmp_path / "hf", tmp_path / "one", 3, tmp_path / "state")
    assert run_ranks(train_in_bf16, 2, tmp_path / "hf", tmp_path / "other", 3, tmp_path / "again") == expected
