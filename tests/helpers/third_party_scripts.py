"""Third-party training scripts on layouts, compared with single-process runs: `python -m
tests.helpers.third_party_scripts FOLDER`.

FOLDER holds transformers' example scripts (`run_clm.py`, `run_mlm.py`, `run_glue.py`, `run_translation.py`, which
require `evaluate` and `scikit-learn`); TRL's `sft.py`, `dpo.py`, `kto.py` and `reward.py` come from the installed
package. The only edits are `import hf_megatron` and the argument `megatron_config` of the call that loads the model;
with `--launched` the scripts are unedited, as `python -m hf_megatron` runs them. Every logged value and the final
weights are compared.
"""

import argparse
import ast
import json
import math
import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainerCallback,
)
from transformers import trainer as transformers_trainer

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.integrations.accelerate.environment import export_layout
from hf_megatron.integrations.accelerate.launched_script import run_script

DATA = Path(__file__).parents[1] / "data"
STORIES = DATA / "stories260K_hf"
CAUSAL, MASKED = "tp2,tp2+sp,dp2,pp2,tp2+pp2", "tp2,tp2+sp,pp2,dp2"
TRL = ("sft.py", "dpo.py", "kto.py", "reward.py")
# Keys are SCRIPT:MODEL for transformers' scripts, and SCRIPT for TRL's.
LAYOUTS = {
    "run_clm.py:stories": CAUSAL,
    "run_clm.py:mamba2": CAUSAL,
    "run_clm.py:bamba": CAUSAL,
    "run_mlm.py:bert": MASKED,
    "run_mlm.py:modernbert": MASKED,
    "run_mlm.py:roberta": MASKED,
    "run_glue.py:bert": MASKED,
    # The model computes its own loss, which does not support a split batch.
    "run_glue.py:deberta-v2": "tp2,tp2+sp",
    "run_translation.py:t5": MASKED,
    "run_translation.py:bart": MASKED,
} | dict.fromkeys(TRL, CAUSAL)
# Global batch sizes over data-parallel ranks; the last evaluation batch is not full.
TRAIN_ROWS, EVAL_ROWS = 4, 4
UNEQUAL = ("runtime", "per_second", "flos", "model_preparation_time")
LOSS, WEIGHTS = 2e-5, 3e-5
SETTINGS = {
    "max_steps": 4,
    "logging_steps": 1,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-3,
    # Large enough that round-off in gradients that should be zero does not move weights.
    "adam_epsilon": 1e-4,
    "max_grad_norm": 0.5,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


class _AddLayout(ast.NodeTransformer):
    """Adds `megatron_config` to the call that loads the model, `from_pretrained` or TRL's `model_init_kwargs`."""

    def __init__(self) -> None:
        self.count = 0

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        function = node.func
        owner = getattr(getattr(function, "value", None), "id", "")
        if isinstance(function, ast.Attribute) and function.attr == "from_pretrained" and owner.startswith("AutoModel"):
            self._add(node)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        self.generic_visit(node)
        if getattr(node.targets[0], "id", "") == "model_init_kwargs" and isinstance(node.value, ast.Call):
            self._add(node.value)
        return node

    def _add(self, call: ast.Call) -> None:
        call.keywords.append(ast.keyword("megatron_config", ast.Name("LAYOUT", ast.Load())))
        self.count += 1


def compile_script(script: Path, is_parallelized: bool):
    """Compiles a script, unedited or with the import and the argument."""
    tree = ast.parse(script.read_text(encoding="utf-8"))
    if is_parallelized:
        transformer = _AddLayout()
        tree = transformer.visit(tree)
        assert transformer.count == 1, f"{script.name} loads {transformer.count} models"
        future = sum(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
        docstring = ast.get_docstring(tree) is not None
        tree.body.insert(future + docstring, ast.parse("import hf_megatron").body[0])
        ast.fix_missing_locations(tree)
    return compile(tree, str(script), "exec")


class _Recorder(TrainerCallback):
    """Callback that records every number logged by a Trainer."""

    log: list[dict[str, float]] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        values = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.log.append({n: v for n, v in values.items() if not any(part in n for part in UNEQUAL)})


def run_and_log(
    script: Path, arguments: list[str], folder: Path, layout=None, launched: bool = False
) -> list[dict[str, float]]:
    """Runs a script with command-line `arguments` and returns its log."""
    os.chdir(folder)
    torch.manual_seed(0)
    sys.argv = [str(script), *arguments]
    recorder = _Recorder()
    _Recorder.log = []
    transformers_trainer.DEFAULT_CALLBACKS.append(recorder)
    if launched:
        export_layout(layout)
        run_script(str(script), arguments, layout)
    else:
        namespace = {"__name__": "__main__", "__file__": str(script), "LAYOUT": layout}
        exec(compile_script(script, layout is not None), namespace)
    return _Recorder.log


# Tiny sizes, no dropout: its masks would differ between layouts.
_SIZES = {"vocab_size": 512, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 1}
_ATTENTION = {"num_attention_heads": 4, "intermediate_size": 48}
_WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_MIXERS = {"expand": 2, "num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 8}
_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 48}
MODELS = {
    "bert": {**_SIZES, **_ATTENTION, **_WITHOUT_DROPOUT},
    "roberta": {**_SIZES, **_ATTENTION, **_WITHOUT_DROPOUT},
    "modernbert": {**_SIZES, **_ATTENTION, "global_attn_every_n_layers": 2, "local_attention": 8},
    "deberta-v2": {
        **_SIZES,
        **_ATTENTION,
        **_WITHOUT_DROPOUT,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "share_att_key": True,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "position_buckets": 8,
    },
    "mamba2": {**_SIZES, **_MIXERS},
    "bamba": {
        **{**_SIZES, **_ATTENTION, "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_chunk_size": 8},
        **{"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_expand": 2},
    },
    "t5": {
        **{"vocab_size": 512, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2},
        **{"dropout_rate": 0.0, "decoder_start_token_id": 1, "pad_token_id": 1, "eos_token_id": 2},
    },
    "bart": {
        **{"vocab_size": 512, "d_model": 32, "dropout": 0.0, "decoder_start_token_id": 1, "pad_token_id": 1},
        **{f"{stack}_{name}": size for stack in ("encoder", "decoder") for name, size in _STACK.items()},
        **{"bos_token_id": 1, "eos_token_id": 2, "forced_eos_token_id": 2},
    },
}
_CLASSES = {
    "run_clm.py": AutoModelForCausalLM,
    "run_mlm.py": AutoModelForMaskedLM,
    "run_translation.py": AutoModelForSeq2SeqLM,
}


def make_models(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(STORIES)
    tokenizer.add_special_tokens({"mask_token": "<unk>", "pad_token": "<s>", "cls_token": "<s>", "sep_token": "</s>"})
    for case in (name for name in LAYOUTS if ":" in name):
        script, _, kind = case.partition(":")
        if kind in MODELS:
            torch.manual_seed(0)
            config = CONFIG_MAPPING[kind](**MODELS[kind])
            _CLASSES.get(script, AutoModelForSequenceClassification).from_config(config).save_pretrained(folder / case)
            tokenizer.save_pretrained(folder / case)


def make_data(folder: Path) -> None:
    text = (DATA / "tinystories_sample.txt").read_text(encoding="utf-8").replace("<|endoftext|>", "\n")
    lines = [line.strip() for line in text.splitlines() if len(line.split()) > 20]
    (folder / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    sentences = [part.strip() for line in lines for part in line.replace("\t", " ").split(".") if len(part) > 20]
    rows = [{"sentence": part.replace(",", ""), "label": index % 3 % 2} for index, part in enumerate(sentences)]
    table = "\n".join(["sentence,label", *(f"{row['sentence']},{row['label']}" for row in rows)])
    (folder / "glue.csv").write_text(table.replace('"', ""), encoding="utf-8")
    for name, changed in (("sft", False), ("dpo", True)):
        (folder / name).mkdir()
        pairs = [
            {"prompt": first + ".", "chosen" if changed else "completion": f" {second}."}
            | ({"rejected": f" {first[: 10 + index % 7]}."} if changed else {})
            for index, (first, second) in enumerate(zip(sentences, sentences[1:], strict=False))
        ]
        # Full batches only: DPO averages the losses and metrics of a partial batch over ranks.
        for split, count in (("train", 24 if changed else 23), ("test", 8 if changed else 7)):
            lines = "\n".join(json.dumps(pair) for pair in pairs[:count])
            (folder / name / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "kto").mkdir()
    (folder / "reward").symlink_to(folder / "dpo")
    for split, count in (("train", 24), ("test", 8)):
        rows = [
            json.dumps({"prompt": f"{first}.", "completion": f" {second[: None if good else 12]}.", "label": good})
            for first, second, good in zip(sentences[:count], sentences[1:], [True, False, True] * count, strict=False)
        ]
        (folder / "kto" / f"{split}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    pairs = [{"translation": {"en": one, "de": other}} for one, other in zip(sentences, sentences[1:], strict=False)]
    (folder / "pairs.json").write_text("\n".join(map(json.dumps, pairs)), encoding="utf-8")
    # `evaluate.load("accuracy")` loads this local folder instead of the metric on the Hub.
    for metric, text in (("accuracy", _ACCURACY), ("sacrebleu", _BLEU)):
        (folder / metric).mkdir()
        (folder / metric / f"{metric}.py").write_text(text, encoding="utf-8")


_ACCURACY = """
import datasets
import evaluate


class Accuracy(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""

# The share of equal characters, sensitive to a single changed token.
_BLEU = """
import datasets
import evaluate


class Bleu(evaluate.Metric):
    def _info(self):
        text = datasets.Value("string")
        features = datasets.Features({"predictions": text, "references": [text]})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        pairs = [(a, b) for found, [wanted] in zip(predictions, references) for a, b in zip(found, wanted)]
        return {"score": sum(a == b for a, b in pairs) / max(len(pairs), 1) + sum(map(len, predictions))}
"""


def make_arguments(name: str, folder: Path, output: Path, dp_size: int) -> list[str]:
    """Returns the command line of a script; the global batch size is the same for every `dp_size`."""
    settings = SETTINGS | {
        "output_dir": output,
        "per_device_train_batch_size": TRAIN_ROWS // dp_size,
        "per_device_eval_batch_size": EVAL_ROWS // dp_size,
    }
    if name in TRL:
        settings |= {
            "model_name_or_path": STORIES,
            "dataset_name": folder / name.removesuffix(".py"),
            "max_length": 256,
            "dtype": "float32",
            "bf16": False,
            "gradient_checkpointing": False,
            "eval_strategy": "steps",
            "eval_steps": 4,
        }
    else:
        settings |= {"do_train": True, "do_eval": True, "max_train_samples": 30, "max_eval_samples": 7, "seed": 3}
        script = name.partition(":")[0]
        file = folder / {"run_glue.py": "glue.csv", "run_translation.py": "pairs.json"}.get(script, "text.txt")
        settings |= {"train_file": file, "validation_file": file, "cache_dir": folder / "cache"}
        if script == "run_translation.py":
            settings |= {"source_lang": "en", "target_lang": "de", "predict_with_generate": True}
            settings |= {"max_source_length": 32, "max_target_length": 24, "generation_max_length": 12}
        else:
            settings[{"run_clm.py": "block_size"}.get(script, "max_seq_length")] = 32
        settings |= {"model_name_or_path": STORIES if name.endswith(":stories") else folder / name}
    flags = [[f"--{key}", str(value)] for key, value in settings.items()]
    return [word for flag in flags for word in flag]


def load_weights(output: Path) -> dict[str, torch.Tensor]:
    # Some scripts create subfolders.
    [file] = [*output.rglob("model.safetensors"), *output.rglob("adapter_model.safetensors")]
    return load_file(file)


def relative_difference(name: str, found: float, expected: float) -> float:
    if math.isnan(found) and math.isnan(expected):
        return 0.0
    # Rewards are differences of sums over many tokens and need a larger denominator.
    return abs(found - expected) / max(abs(expected), 1.0 if "reward" in name else 1e-2)


def compare_layout(
    script: Path, folder: Path, text: str, expected=None, *, launched: bool = False, flags=(), case=None
):
    """Compares a run on layout `text` with the single-process run.

    Returns:
        The largest relative difference of a logged value with its name, the largest absolute difference of a weight,
        the number of compared values, and the single-process result to pass as `expected`.
    """
    case = case or script.name
    kind = "-" + case.partition(":")[2] + "-adapter" * bool(flags)
    layouts = {"one": None, text: next(iter(parse_layouts(text)), None)}
    if expected is None:
        output_dir = folder / f"{script.stem}-one{kind}"
        [log] = run_ranks(
            run_and_log, 1, script, [*make_arguments(case, folder, output_dir, 1), *flags], folder, timeout=600
        )
        expected = log, load_weights(output_dir)
    layout = layouts[text]
    output = folder / f"{script.stem}-{text}{kind}{'-launched' * launched}"
    arguments = [*make_arguments(case, folder, output, layout.dp_size or 1), *flags]
    ranks = layout.ranks_per_replica * (layout.dp_size or 1)
    [layout_log, *_] = run_ranks(run_and_log, ranks, script, arguments, folder, layout, launched, timeout=600)
    assert [entry.keys() for entry in layout_log] == [entry.keys() for entry in expected[0]], (layout_log, expected[0])
    differences = [
        (relative_difference(name, entry[name], reference[name]), name)
        for entry, reference in zip(layout_log, expected[0], strict=True)
        for name in reference
    ]
    weights, reference = load_weights(output), expected[1]
    assert weights.keys() == reference.keys()
    weight_error = max((weights[name] - reference[name]).abs().max().item() for name in reference)
    return max(differences), weight_error, len(differences), expected


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of transformers' example scripts")
    parser.add_argument("--scripts", default=",".join(LAYOUTS), help="keys of LAYOUTS, joined by commas")
    parser.add_argument("--steps", type=int, default=SETTINGS["max_steps"])
    parser.add_argument("--layouts", help="instead of those that each script is promised to be equal on")
    parser.add_argument("--launched", action="store_true", help="without any edit")
    args = parser.parse_args()
    torch.set_num_threads(1)
    SETTINGS["max_steps"] = args.steps
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        make_models(folder)
        make_data(folder)
        print(f"| script | layout | numbers | largest difference | of | weights apart | |\n|{'---|' * 7}", flush=True)
        for name in args.scripts.split(","):
            expected = None
            script = find_trl_script(name) if name in TRL else args.folder.resolve() / name.partition(":")[0]
            for text in (args.layouts or LAYOUTS[name]).split(","):
                try:
                    result = compare_layout(script, folder, text, expected, launched=args.launched, case=name)
                    (worst, value_name), weight_error, count, expected = result
                except Exception as error:  # noqa: BLE001 - a row of the table
                    print(f"| {name} | {text} | | | | | {type(error).__name__}: {str(error)[-600:]} |", flush=True)
                    continue
                judgment = "equal" if worst <= LOSS and weight_error <= WEIGHTS else "DIFFERS"
                print(
                    f"| {name} | {text} | {count} | {worst:.1e} | {value_name} | {weight_error:.1e} | {judgment} |",
                    flush=True,
                )


def find_trl_script(name: str) -> Path:
    """Returns the path of a script of the installed TRL."""
    return Path(find_spec("trl").origin).parent / "scripts" / name


if __name__ == "__main__":
    main()
