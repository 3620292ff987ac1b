"""Runs of the instruction tuning scripts of this folder, and the comparison of what they leave behind.

The scripts reproduce the structure of public ones, in the API of transformers 5. A run on a layout edits them as a user
does: the import, and `megatron_config` in the call that loads the model.
"""

import ast
import json
import random
import runpy
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from hf_megatron import MegatronConfig
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.third_party_scripts import LOSS, UNEQUAL, WEIGHTS, relative_difference

SCRIPTS = Path(__file__).parent
GLOBAL_BATCH = 4
# A safety net on a busy machine, in seconds.
TIMEOUT = 900
WORDS = [f"w{index}" for index in range(60)]
TEMPLATES = (
    "a chat between user and an assistant . USER ASSISTANT : you are helpful system nl instruction input response"
)
# Files that this library adds: the model card, and the name of the newest checkpoint.
ADDED_FILES = {"README.md", "loss.png", "latest"}
SETTINGS = {
    "num_train_epochs": 1,
    "model_max_length": 40,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    # Large enough that rounding in gradients that should be zero does not move weights.
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
    "warmup_steps": 2,
    "lr_scheduler_type": "cosine",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def make_tokenizer(special: dict[str, str], adds_bos: bool) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of words, without a pad token."""
    tokens = [*special.values(), "<|im_start|>", "<|im_end|>", *TEMPLATES.split(), *WORDS]
    tokenizer = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def make_inputs(folder: Path) -> None:
    """Saves tiny models with their tokenizers, and data."""
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1, "eos_token_id": 2}
    grouped = {"num_key_value_heads": 2, "intermediate_size": 48, "tie_word_embeddings": False}
    for name, config_class, fields in (
        ("llama", LlamaConfig, grouped),
        ("qwen3-chat", Qwen3Config, {**grouped, "head_dim": 8}),
    ):
        tokenizer = make_tokenizer(special, adds_bos=name != "qwen3-chat")
        torch.manual_seed(0)
        config = config_class(vocab_size=len(tokenizer), pad_token_id=None, **sizes, **fields)
        model = AutoModelForCausalLM.from_config(config)
        model.generation_config.max_new_tokens = 8
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4) if parameter.dim() > 1 else parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    draw = random.Random(0)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(2, 6)))

    # The last batch of an epoch is not full.
    instructions = [
        {"instruction": sentence(), "input": sentence() if index % 2 else "", "output": sentence()}
        for index in range(30)
    ]
    (folder / "instructions.json").write_text(json.dumps(instructions))
    for name, roles, count in (("chats", ("human", "gpt"), 30), ("qwen", ("user", "assistant"), 30)):
        for split, size in (("", count), ("-eval", 7)):
            chats = [
                {"conversations": [{"from": roles[turn % 2], "value": sentence()} for turn in range(2 + index % 2 * 2)]}
                for index in range(size)
            ]
            (folder / f"{name}{split}.json").write_text(json.dumps(chats))


# Script, model, data, options.
CASES = {
    "alpaca": ("alpaca", "llama", "instructions", {}),
    "fastchat": ("fastchat", "llama", "chats", {"save_strategy": "steps", "save_steps": 2}),
    "llava-lora": ("llava", "llama", "chats", {"lora_enable": True, "lora_r": 4, "version": "v1"}),
    "qwen": ("qwen", "qwen3-chat", "qwen", {"eval_strategy": "steps", "eval_steps": 2}),
    "qwen-lora": ("qwen", "qwen3-chat", "qwen", {"use_lora": True, "lora_r": 4, "gradient_checkpointing": True}),
}
LORA = {"lora_dropout": 0.0}


def edit_script(script: str, layout: MegatronConfig | None, path: Path) -> Path:
    """Writes a script, with the import and the argument if it runs on a layout."""
    tree = ast.parse((SCRIPTS / f"{script}.py").read_text(encoding="utf-8"))
    if layout is not None:
        [call] = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "from_pretrained"
            and "ForCausalLM" in ast.unparse(node.func.value)
        ]
        fields = {name: value for name, value in asdict(layout).items() if value != asdict(MegatronConfig())[name]}
        value = ast.parse(f"hf_megatron.MegatronConfig(**{fields!r})", mode="eval").body
        call.keywords.append(ast.keyword("megatron_config", value))
        tree.body.insert(1, ast.parse("import hf_megatron").body[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)), encoding="utf-8")
    return path


def count_ranks(layout: MegatronConfig | None) -> int:
    return 1 if layout is None else layout.ranks_per_replica * (layout.dp_size or 1)


def make_arguments(case: str, inputs: Path, output: Path, layout: MegatronConfig | None) -> list[str]:
    """Returns the command line of a case, with the same global batch on every layout."""
    script, model, data, options = CASES[case]
    replicas = 1 if layout is None else layout.dp_size or 1
    settings = SETTINGS | {
        "model_name_or_path": inputs / model,
        "data_path": inputs / f"{data}.json",
        "output_dir": output,
        "per_device_train_batch_size": GLOBAL_BATCH // replicas,
        "per_device_eval_batch_size": GLOBAL_BATCH // replicas,
        **(LORA if case.endswith("lora") else {}),
        **({"eval_data_path": inputs / f"{data}-eval.json"} if script == "qwen" else {}),
        **options,
    }
    return [word for key, value in settings.items() for word in (f"--{key}", str(value))]


def run_forked(case: str, inputs: Path, output: Path, layout: MegatronConfig | None, flags=()) -> None:
    """Runs a case on forked ranks, with further command-line `flags`."""
    script = edit_script(CASES[case][0], layout, output.with_name(f"{output.name}.py"))
    arguments = [*make_arguments(case, inputs, output, layout), *flags]

    def on_rank() -> None:
        torch.manual_seed(0)
        sys.argv = [str(script), *arguments]
        runpy.run_path(str(script), run_name="__main__")

    run_ranks(on_rank, count_ranks(layout), timeout=TIMEOUT)


def read_log(output: Path) -> list[dict[str, float]]:
    """Returns what a run logged, from the state that `trainer.save_state()` wrote."""
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    return [{name: v for name, v in entry.items() if not any(part in name for part in UNEQUAL)} for entry in history]


def list_files(output: Path) -> set[str]:
    return {
        str(path.relative_to(output))
        for path in output.rglob("*")
        if path.is_file() and "checkpoint-" not in str(path.relative_to(output))
    }


def read_config(path: Path):
    """Returns a JSON file's values; names that PEFT keeps in sets are sorted."""
    values = json.loads(path.read_text())
    return values | {name: sorted(values[name]) for name in ("target_modules", "modules_to_save") if values.get(name)}


def load_stock(output: Path, base: Path):
    """Loads what a script saved, as a user without this library does."""
    if (output / "adapter_config.json").exists():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), output)
    model, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


def compare_runs(case: str, inputs: Path, output: Path, single: Path) -> None:
    """Compares logs, files and the model that stock transformers loads with the single-process run."""
    log, expected_log = read_log(output), read_log(single)
    assert [entry.keys() for entry in log] == [entry.keys() for entry in expected_log]
    for entry, reference in zip(log, expected_log, strict=True):
        for name, value in reference.items():
            assert relative_difference(name, entry[name], value) <= LOSS, (name, entry, reference)
    assert list_files(output) - list_files(single) <= ADDED_FILES and list_files(single) <= list_files(output)
    for name in sorted(list_files(single)):
        if name.endswith(".json") and name != "trainer_state.json":
            assert read_config(output / name) == read_config(single / name), name
        elif name.endswith(".safetensors"):
            weights, reference = load_file(output / name), load_file(single / name)
            assert weights.keys() == reference.keys()
            for key, value in reference.items():
                assert torch.allclose(weights[key], value, rtol=0, atol=WEIGHTS), (
                    key,
                    (weights[key] - value).abs().max(),
                )
        elif name == "non_lora_trainables.bin":
            weights, reference = (torch.load(folder / name, weights_only=True) for folder in (output, single))
            assert weights.keys() == reference.keys()
            for key, value in reference.items():
                assert type(weights[key]) is torch.Tensor
                assert torch.allclose(weights[key], value, rtol=0, atol=WEIGHTS), key
    base = inputs / CASES[case][1]
    tokenizer = AutoTokenizer.from_pretrained(output if (output / "tokenizer.json").exists() else base)
    batch = tokenizer("USER : w1 w2 w3", return_tensors="pt")
    batch.pop("token_type_ids", None)
    model, reference = load_stock(output, base), load_stock(single, base)
    with torch.no_grad():
        assert torch.allclose(model(**batch).logits, reference(**batch).logits, atol=1e-3)
    assert torch.equal(*(m.generate(**batch, do_sample=False, max_new_tokens=8) for m in (model, reference)))
