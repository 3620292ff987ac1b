"""Tests of legacy rank files against megatron-core: its files are read, and it loads converted ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from hf_megatron.conversion.interfaces import Key, MegatronModel, TargetOptions
from hf_megatron.conversion.megatron.splits import tensor_parallel_split
from hf_megatron.conversion.megatron_legacy.reader import MegatronLegacyReader
from tests.helpers.legacy_weights import check_equal, write_checkpoint

ROOT = Path(__file__).parents[4]
PADDED = 256
LAYOUTS = {
    "tp1": {},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2},
    "ep2": {"ep": 2, "dp": 2},
    "tp2_ep2": {"tp": 2, "ep": 2},
    "tp2_pp2": {"tp": 2, "pp": 2},
}
COMMON = {
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT = {
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 32,
    "num_key_value_heads": 4,
}
# A single key-value head is fewer than two tensor-parallel ranks.
CONFIGS = {
    "llama": transformers.LlamaConfig(**COMMON | {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2": transformers.Qwen2Config(**COMMON),
    "qwen3_moe": transformers.Qwen3MoeConfig(**COMMON, **EXPERTS, head_dim=32),
    "deepseek_v3": transformers.DeepseekV3Config(**COMMON | LATENT),
    "gpt2": transformers.GPT2Config(vocab_size=250, n_positions=64, n_embd=64, n_layer=2, n_head=4),
}
WITH_EXPERTS = ("qwen3_moe", "deepseek_v3")
CASES = [(name, layout) for name in CONFIGS for layout in LAYOUTS if name in WITH_EXPERTS or "ep" not in layout]


def run_tasks(folder: Path, launches: dict[str, list[dict]]) -> dict[tuple[str, str], dict]:
    """Runs tasks, which must all succeed, and returns the results by layout and task name."""
    job = {
        "out": str(folder),
        "launches": [{"name": name, "layout": LAYOUTS[name], "tasks": tasks} for name, tasks in launches.items()],
    }
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-m", "tests.megatron_peer.tasks", str(folder / "job.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert (folder / "results.json").is_file(), done.stderr
    results = json.loads((folder / "results.json").read_text())["launches"]
    outcomes = {
        (name, task["name"]): task for name, launch in zip(launches, results, strict=True) for task in launch["tasks"]
    }
    assert not [task for task in outcomes.values() if not task["ok"]]
    return outcomes


def task(kind: str, root: Path, name: str, **further) -> dict:
    ids = torch.randint(0, 250, (2, 16), generator=torch.Generator().manual_seed(0)).tolist()
    return {"task": kind, "name": name, "hf": str(root / "hf" / name), "padded_vocab": PADDED, "ids": ids, **further}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Rank files saved by megatron-core, its arguments, and its tensor splits over two ranks."""
    root = tmp_path_factory.mktemp("legacy")
    for name, config in CONFIGS.items():
        config.save_pretrained(root / "hf" / name)
    launches = {
        layout: [
            task("save", root, name, format="legacy", dir=str(root / f"{name}_{layout}"))
            for name, case_layout in CASES
            if case_layout == layout
        ]
        for layout in LAYOUTS
    }
    launches["tp2"] += [task("keys", root, name, non_homogeneous=True) | {"name": f"{name}_keys"} for name in CONFIGS]
    return root, run_tasks(root / "saved", launches)


@pytest.fixture(scope="module")
def models(saved):
    _, results = saved
    return {name: MegatronModel(results["tp1", name]["args"], gated=name != "gpt2") for name in CONFIGS}


def read(source: Path, model: MegatronModel) -> dict[Key, torch.Tensor]:
    with MegatronLegacyReader(source, model) as reader:
        return {key: reader.read(key) for key in reader.entries}


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_rank_files_merge_to_unsharded_tensors(saved, models, name, layout):
    root, _ = saved
    expected = read(root / f"{name}_tp1", models[name])
    check_equal(read(root / f"{name}_{layout}", models[name]), expected)
    held = torch.load(next((root / f"{name}_tp1").rglob("*.pt")), weights_only=False)["model"]
    tensors = {key: value for key, value in held.items() if torch.is_tensor(value)}
    assert sum(value.numel() for value in tensors.values()) == sum(value.numel() for value in expected.values())
    for key, value in expected.items():
        if key.name in tensors:
            assert torch.equal(tensors[key.name], value)


@pytest.mark.parametrize("name", CONFIGS)
def test_splits_match_megatron_core(saved, name):
    dims = saved[1]["tp2", f"{name}_keys"]["sharded_dims"]
    for key, split_dims in dims.items():
        if ".experts." in key:
            continue
        split = tensor_parallel_split(key)
        assert [dim for dim, _ in split_dims] == ([] if split is None else [split.dim]), key
        if split is not None:
            assert split_dims[0][1] == (4 if split.halves and name != "gpt2" else 2), key


@pytest.fixture(scope="module")
def loaded(saved, models):
    """Logits of checkpoints written by this library and loaded strictly by megatron-core."""
    root, _ = saved
    launches: dict[str, list[dict]] = {layout: [] for layout in LAYOUTS}
    for name, layout in CASES:
        sizes, target = LAYOUTS[layout], root / f"{name}_{layout}_written"
        write_checkpoint(
            target,
            read(root / f"{name}_tp1", models[name]),
            models[name],
            TargetOptions(sizes.get("tp", 1), sizes.get("pp", 1), sizes.get("ep", 1)),
            iteration=None if layout == "pp2" else 1,
            local_names=True,
            expert_tp_size=1,
        )
        launches[layout].append(task("load_logits", root, name, load=str(target), load_format="legacy"))
    return run_tasks(root / "loaded", launches)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_megatron_core_loads_written_files(saved, loaded, name, layout):
    root, _ = saved
    assert loaded[layout, name]["ok"]
    logits = load_file(root / "loaded" / layout / f"{name}.safetensors")["logits"]
    assert torch.equal(logits, load_file(root / "saved" / layout / f"{name}.safetensors")["logits"])
