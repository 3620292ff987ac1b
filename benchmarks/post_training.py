"""TRL's DPO and GRPO on two CPU ranks: seconds and memory of a step, and of the loss alone, against full logits.

    python benchmarks/post_training.py --out benchmarks/results/post_training_cpu.json
    python benchmarks/post_training.py --rounds 1 --steps 2 --layers 2 --tokens 512

Stock trainers, a randomly initialized Llama with a vocabulary of 32,000, the same samples for all variants. Each round
measures every variant once, in turn and in its own processes; medians over rounds of the busier rank are compared.
Peers are TRL in one process and TRL with DistributedDataParallel. `full logits` is a parallelized model whose head
returns full logits. The loss alone is log-probabilities and entropy of tokens, and a divergence from a teacher, forward
and backward: its memory in addition to hidden states and weights, compared with full logits on every rank.
"""

import argparse
import contextlib
import json
import os
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from datasets import Dataset
from train_step import versions, write_report
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
from workers import forget_peak_memory, give_back_memory, peak_memory_mib

from hf_megatron import token_kl_divergences
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.losses.targets import next_tokens
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel import token_log_probs
from hf_megatron.tensor_parallel.token_log_probs import compute_scores, hooked_call

TOKENIZER = Path(__file__).parents[1] / "tests" / "data" / "stories260K_hf"
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}
LAYOUTS = {"tp2": {"tp_size": 2}, "pp2": {"pp_size": 2, "num_microbatches": 2}, "dp2": {"dp_size": 2}}
FULL = "tp2, full logits"
VARIANTS = ("one process", "TRL with DDP", *LAYOUTS, FULL)
_HALVES = ("TRL with DDP", "dp2")
GIVEN = {
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "save_strategy": "no",
    "disable_tqdm": True,
    "logging_strategy": "no",
    "learning_rate": 1e-5,
}


class Clock(TrainerCallback):
    """Seconds of each step, without the first one, which fills caches."""

    def __init__(self):
        self.seconds, self.begin = [], 0.0

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.seconds.clear()
        self.begin = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self.begin)


def layout_of(variant):
    fields = LAYOUTS.get(variant.partition(",")[0])
    return None if fields is None else ConfigUnderTest(**fields)


def hand_out_logits():
    """Replaces the token scores by ones computed from gathered full logits on every rank."""

    def numbers(logits, targets, wanted, sampling):
        unsharded = (logits.gather(warn=False).float() / sampling.temperature).log_softmax(-1)
        mask = targets != -100
        found = {"log_probs": unsharded.gather(2, targets.clamp(min=0).unsqueeze(2)).squeeze(2)}
        found["entropy"] = -(unsharded.exp() * unsharded).sum(-1)
        found["mean_logits"], found["is_top1"] = unsharded.mean(-1).detach(), unsharded.argmax(-1) == targets
        return tuple(found[name] * mask for name in wanted)

    token_log_probs.token_scores = numbers


def words(count):
    names = ("cat", "dog", "bird", "frog")
    return [f"Once upon a time a {names[index % 4]} lived by the sea and went out every day" for index in range(count)]


def letters(completions, **kwargs):
    return [len(set(text)) / 20 for text in completions]


def make_trainer(name, model, folder, steps, rows):
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    given = GIVEN | {"max_steps": steps, "per_device_train_batch_size": rows}
    if name == "DPO":
        ends = [" and saw the boats" * 6, " but nobody came to see it at all" * 4]
        data = [
            {"prompt": text, "chosen": ends[i % 2], "rejected": ends[1 - i % 2]} for i, text in enumerate(words(64))
        ]
        args = DPOConfig(folder, max_length=160, precompute_ref_log_probs=False, **given)
        return DPOTrainer(model, args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer)
    args = GRPOConfig(folder, num_generations=8, max_completion_length=32, beta=0.04, **given)
    args.generation_kwargs = {"min_new_tokens": 32}
    data = Dataset.from_list([{"prompt": text} for text in words(64)])
    return GRPOTrainer(model, letters, args, data, processing_class=tokenizer)


def run_steps(path, variant, name, steps):
    """Median seconds of a step, and peak memory growth in MiB since before the model was loaded."""
    if variant == FULL:
        hand_out_logits()
    layout = layout_of(variant)
    given = {} if layout is None else {"megatron_config": layout}
    give_back_memory()
    forget_peak_memory()
    before = peak_memory_mib()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **given)
    rows = 8 // (2 if variant in _HALVES else 1)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        trainer = make_trainer(name, model, folder, steps + 1, rows)
        trainer.add_callback(clock)
        trainer.train()
    return statistics.median(clock.seconds), peak_memory_mib() - before


def full_numbers(model, labels, batch):
    logits = model(**batch).logits[:, :-1].float().log_softmax(-1)
    entropy = -(logits.exp() * logits).sum(-1)
    return logits.gather(2, labels[:, 1:, None]).squeeze(2), entropy


def full_divergence(student, teacher, batch):
    own = student(**batch).logits[:, :-1].float().log_softmax(-1)
    with torch.no_grad():
        other = teacher(**batch).logits[:, :-1].float().log_softmax(-1)
    mixture = torch.logaddexp(own, other) - torch.log(torch.tensor(2.0))
    terms = F.kl_div(mixture, own, log_target=True, reduction="none")
    return (terms + F.kl_div(mixture, other, log_target=True, reduction="none")).sum(-1) / 2


def loss_alone(path, variant, kind, tokens):
    """Peak memory of a forward and backward in MiB, and its seconds, for models with one narrow layer."""
    layout = ConfigUnderTest(tp_size=2, loss_chunk_size=512)
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, megatron_config=layout)]
    if kind == "divergence":
        models.append(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, megatron_config=layout))
    ids = torch.randint(3, 32000, (tokens // 512, 512), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids}

    def loss():
        if kind == "divergence":
            found = (
                full_divergence(*models, batch) if variant == "full" else token_kl_divergences(*models, ids, **batch)
            )
            return found.sum()
        if variant == "full":
            log_probs, entropy = full_numbers(models[0], ids, batch)
        elif variant == "backbone":
            return hidden_states(models[0], ids, batch).sum()
        else:
            call = hooked_call(models[0], **batch)
            (log_probs, entropy), _ = compute_scores(models[0], call, next_tokens(ids), ("log_probs", "entropy"))
        return (log_probs - 0.01 * entropy).sum()

    # Gradients of weights exist in every variant.
    for parameter in models[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    give_back_memory()
    forget_peak_memory()
    before, begin = peak_memory_mib(), time.perf_counter()
    loss().backward()
    return peak_memory_mib() - before, time.perf_counter() - begin


def hidden_states(model, ids, batch):
    return model.model(**batch).last_hidden_state


def save(folder, layers, width):
    torch.manual_seed(0)
    config = LlamaConfig(**(MODEL | width), num_hidden_layers=layers, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    path = Path(folder) / f"model-{layers}-{config.hidden_size}"
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(path)
    return path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = save(folder, given.layers, {})
        steps = {(name, variant): [] for name in ("DPO", "GRPO") for variant in VARIANTS}
        losses = {(kind, variant): [] for kind in ("numbers", "divergence") for variant in ("hf_megatron", "full")}
        losses |= {("numbers", "backbone"): []}
        for number in range(given.rounds):
            for (name, variant), found in steps.items():
                ranks = 1 if variant == "one process" else 2
                measured = run_ranks(run_steps, ranks, path, variant, name, given.steps, timeout=1800)
                found.append((max(seconds for seconds, _ in measured), max(memory for _, memory in measured)))
                print(
                    f"round {number + 1}, {name}, {variant}: {found[-1][0]:.2f} s, {found[-1][1]:.0f} MiB", flush=True
                )
            narrow = save(folder, 1, {"hidden_size": 64, "intermediate_size": 64, "head_dim": 8})
            for (kind, variant), found in losses.items():
                measured = run_ranks(loss_alone, 2, narrow, variant, kind, given.tokens, timeout=1800)
                found.append((max(memory for memory, _ in measured), max(seconds for _, seconds in measured)))
                print(
                    f"round {number + 1}, {kind}, {variant}: {found[-1][0]:.0f} MiB, {found[-1][1]:.2f} s", flush=True
                )
    report = {
        "model": MODEL | {"num_hidden_layers": given.layers},
        "rows_of_a_step": 8,
        "steps": {},
        "loss": {"tokens": given.tokens},
        "cores": os.cpu_count(),
        "threads_per_rank": 1,
        "rounds": given.rounds,
        "versions": versions() | {"trl": metadata.version("trl")},
    }
    for (name, variant), found in steps.items():
        alone = steps[name, "one process"]
        report["steps"].setdefault(name, {})[variant] = {
            "seconds": round(statistics.median(seconds for seconds, _ in found), 3),
            "memory_mib": round(statistics.median(memory for _, memory in found), 1),
            "seconds_beside_one_process": ratio(found, alone, 0),
            "memory_beside_one_process": ratio(found, alone, 1),
        }
    for (kind, variant), found in losses.items():
        row = {"extra_memory_mib": round(statistics.median(memory for memory, _ in found), 1)}
        row["seconds"] = round(statistics.median(seconds for _, seconds in found), 3)
        if variant == "hf_megatron":
            row["memory_beside_full_logits"] = ratio(found, losses[kind, "full"], 0)
        report["loss"].setdefault(kind, {})[variant] = row
    print(json.dumps(report, indent=2))
    if given.out is not None:
        write_report(given.out, report)


def ratio(found, other, place):
    """Median over the rounds of the ratio within a round."""
    return round(statistics.median(one[place] / two[place] for one, two in zip(found, other, strict=True)), 3)


if __name__ == "__main__":
    main()
