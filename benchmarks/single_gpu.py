"""Stock transformers against hf_megatron with one rank on one CUDA device: tokens per second, MFU and peak memory.

A single rank does not communicate, so the difference is the overhead or gain of the library's layers on a real
accelerator. The larger shape does not fit in memory twice: each round runs both variants sequentially in separate
processes.
"""

import multiprocessing
import os
import tempfile
import time

import torch

BATCH, SEQUENCE, WARM_UP_STEPS, TIMED_STEPS = 1, 4096, 3, 10
LOSS_TOLERANCE = 2e-2  # both in bf16
SHAPES = {
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": True,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    },
}
DENSE_BF16_TFLOPS = {"A100": 312, "H100": 989, "H200": 989, "B200": 2250}  # vendor figures, without sparsity


def save_random_model(shape, folder, device):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=8192, use_cache=False, dtype="bfloat16")
    with torch.device(device):
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def flops_per_token(config, parameters):
    """Forward and backward: 6 per weight of a matrix product (not an input embedding), and causal attention."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * SEQUENCE
    return 6 * (parameters - embedding) + attention


def train(variant, folder, device, results):
    from transformers import AutoModelForCausalLM

    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    options = {}
    if variant == "hf_megatron":
        import hf_megatron

        options["megatron_config"] = hf_megatron.MegatronConfig(tp_size=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, model.config.vocab_size, (BATCH, SEQUENCE), generator=generator).to(device)
    seconds, losses = [], []
    for _ in range(WARM_UP_STEPS + TIMED_STEPS):
        synchronize()
        start = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    parameters = sum(p.numel() for p in model.parameters())
    results.put({
        "variant": variant,
        "step_ms": 1e3 * sorted(seconds[WARM_UP_STEPS:])[TIMED_STEPS // 2],
        "flops_per_token": flops_per_token(model.config, parameters),
        "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None,
        "first_loss": losses[0],
    })  # fmt: skip


def in_own_process(function, *arguments):
    """Runs the function in a fresh process, which releases all device memory when it ends."""
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{function.__name__}{arguments[:2]} failed with exit status {process.exitcode}")


def peak_flops(given):
    if given:
        return given * 1e12
    name = torch.cuda.get_device_name()
    found = [tflops for device, tflops in DENSE_BF16_TFLOPS.items() if device in name]
    if not found:
        raise SystemExit(f"no peak is known for {name}: give --peak-tflops")
    return found[0] * 1e12


def measure_gpu(models, rounds, layers=None, peak_tflops=None, device="cuda"):
    runs, peak = [], peak_flops(peak_tflops)
    for model in models:
        shape = SHAPES[model] | ({"num_hidden_layers": layers} if layers else {})
        results = multiprocessing.get_context("spawn").SimpleQueue()
        taken = {"stock": [], "hf_megatron": []}
        with tempfile.TemporaryDirectory() as folder:
            in_own_process(save_random_model, shape, folder, device)
            for _ in range(rounds):
                for variant in taken:
                    in_own_process(train, variant, folder, device, results)
                    taken[variant].append(results.get())
        best = {name: sorted(steps, key=lambda s: s["step_ms"])[len(steps) // 2] for name, steps in taken.items()}
        difference = abs(best["stock"]["first_loss"] - best["hf_megatron"]["first_loss"])
        if not difference <= LOSS_TOLERANCE:
            raise SystemExit(f"{model}: the first losses differ by {difference}")
        for entry in best.values():
            entry["tokens_per_second"] = BATCH * SEQUENCE / entry["step_ms"] * 1e3
            entry["mfu"] = entry["tokens_per_second"] * entry["flops_per_token"] / peak
            print(model, {k: round(v, 3) if isinstance(v, float) else v for k, v in entry.items()}, flush=True)
        runs.append({"model": model, "config": shape, "batch": BATCH, "sequence": SEQUENCE, "variants": best})
    return runs
