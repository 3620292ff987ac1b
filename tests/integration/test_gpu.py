"""What only a GPU can show; left out without one.

    PYTORCH_NVML_BASED_CUDA_CHECK=1 pytest tests/integration/test_gpu.py

Ranks are forked from this process, which therefore never uses the GPU itself: the variable lets torch ask whether there
is one without using it. Where there are fewer GPUs than ranks, some share one.
"""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from transformers import CONFIG_MAPPING
from trl import DPOTrainer, GRPOConfig, GRPOTrainer, SFTTrainer

from hf_megatron import MegatronConfig, token_kl_divergences, token_log_probs
from hf_megatron.context_parallel.flash import flash_varlen_backward, flash_varlen_forward
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.core.spans import bubble_share
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel.cross_entropy import CrossEntropyOptions, linear_cross_entropy
from hf_megatron.testing.adapters import adapted
from hf_megatron.testing.measure import measure
from hf_megatron.testing.parity import check_tiny_model
from hf_megatron.testing.pipeline_timeline import draw_timeline
from tests.helpers.low_precision import reference_error
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.integration.integrations.trainer import test_resume
from tests.integration.integrations.trl import test_base
from tests.integration.integrations.trl.test_base import completions, layout, preferences, train
from tests.integration.integrations.trl.test_online import REWARDS, SIZES, prompts

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def forks_can_use_the_gpu(monkeypatch):
    """They cannot when this process has used it: says what did."""
    process, use = os.getpid(), torch.cuda._lazy_init

    def refuse():
        assert os.getpid() != process, "the process that forks ranks must not use a GPU"
        use()

    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)


SCHEDULES = ("gpipe", "interleaved_1f1b", "interleaved_zero_bubble", "zbv")
CASES = [
    ("llama", "tp2"),
    ("llama", "tp2+sp"),
    ("llama", "pp2"),
    *(("llama", f"pp2 {schedule}") for schedule in SCHEDULES),
    ("llama", "dp2+zero0"),
    ("llama", "dp2"),
    ("llama", "dp2+zero2"),
    ("llama", "dp2+zero3"),
    ("llama", "cp2"),
    ("llama", "cp2+a2a"),
    ("llama", "cp2+gather"),
    ("llama", "tp2+sp+pp2"),
    ("llama", "pp2+dp2"),
    ("llama", "pp2+cp2"),
    ("llama", "tp2+dp2+zero3"),
    ("gemma2", "tp2+sp"),
    ("gemma2", "pp2"),
    ("gpt2", "tp2"),
    ("qwen3_moe", "tp2"),
    ("qwen3_moe", "dp2+ep2"),
    ("qwen3_moe", "tp2+sp+ep2"),
    ("deepseek_v3", "tp2+sp"),
    ("qwen3_next", "tp2"),
    ("gemma3", "tp2+sp"),
    ("qwen2_5_vl", "pp2"),
    ("mamba2", "tp2"),
    ("nemotron_h", "tp2+sp"),
    ("bert", "tp2+sp"),
    ("modernbert", "pp2"),
    ("t5", "tp2"),
    ("t5", "pp2"),
    ("whisper", "tp2+sp"),
    ("whisper", "pp2"),
]
TASKS = {
    **dict.fromkeys(("gemma3", "qwen2_5_vl"), "image"),
    **dict.fromkeys(("bert", "modernbert"), "masked"),
    "t5": "seq2seq",
    "whisper": "speech",
}
OFFLOADED = {
    "tp2": {"recompute": "full", "offload_activations": True},
    "pp2": {"recompute": "full", "offload_activations": True},
    "tp2+sp": {"recompute": "selective"},
    "dp2+zero2": {"offload_optimizer": True},
    "dp2+zero3": {"recompute": "full", "offload_optimizer": True},
}


def make_config(text):
    text, _, schedule = text.partition(" ")
    [config] = parse_layouts(text)
    return ConfigUnderTest(**config.to_dict() | ({"pipeline_schedule": schedule} if schedule else {}))


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    task = TASKS.get(model_type, "causal")
    return make_tiny_model(CONFIG_MAPPING[model_type](), task=task, microbatches=2, min_layers=4, batch_size=5)


@functools.cache
def get_adapter_tiny_model(method):
    return adapted(get_tiny_model("llama"), method)


@pytest.mark.parametrize(("model_type", "text"), CASES)
def test_gpu_ranks_match_single_process_on_cpu(model_type, text):
    comparison = check_tiny_model(get_tiny_model(model_type), make_config(text), device="cuda")
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("text", OFFLOADED)
def test_recompute_and_offload(text):
    layout = ConfigUnderTest(**make_config(text).to_dict() | OFFLOADED[text])
    comparison = check_tiny_model(get_tiny_model("llama"), layout, device="cuda")
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "dp2+zero3", "cp2"])
@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters(method, text):
    comparison = check_tiny_model(get_adapter_tiny_model(method), make_config(text), device="cuda")
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize(
    ("saved", "loaded"), [("tp2 x dp2", "dp2 zero3"), ("dp2", "tp2 x dp2 zero3"), ("dp2 zero3", "tp4")]
)
def test_checkpoints_resume_on_another_layout(stories, tmp_path, saved, loaded):
    options = {"use_cpu": False, "device": "cuda"}
    plain = options | {"save_strategy": "no"}
    [(expected, weights, _)] = run_ranks(test_resume.train, 1, stories, tmp_path / "one", None, **plain)
    first, second = test_resume.LAYOUTS[saved], test_resume.LAYOUTS[loaded]
    run_ranks(test_resume.train, test_resume.count_ranks(first), stories, tmp_path, first, stop=4, **options)
    ranks = test_resume.count_ranks(second)
    result = run_ranks(test_resume.train, ranks, stories, tmp_path, second, resume=True, **options)[0]
    for entry, other in zip(result[0][-2:], expected[-2:], strict=True):
        assert entry == pytest.approx(other, rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(result[1][name], weight.cpu(), rtol=0, atol=3e-4)


@pytest.mark.parametrize("text", ["tp2", "pp2"])
@pytest.mark.parametrize("model_type", ["llama", "t5"])
def test_generated_tokens_match_single_process(model_type, text):
    tiny_model = get_tiny_model(model_type)

    def on_rank(**arguments):
        model = tiny_model.load(**arguments).eval()
        ids = tiny_model.batches[0]["input_ids"][:2].to(model.device)
        return model.generate(ids, max_new_tokens=8, do_sample=False).cpu()

    [expected] = run_ranks(on_rank, 1)
    for tokens in run_ranks(on_rank, 2, megatron_config=make_config(text), device="cuda"):
        assert torch.equal(tokens, expected)


def test_recorded_step(tmp_path):
    """Every computation of a step is recorded once, on a device that works behind the host's back."""
    layout = MegatronConfig(pp_size=2, num_microbatches=4)
    sizes = {"layers": 4, "batch_size": 4, "sequence_length": 16}
    timeline = draw_timeline("llama", layout, tmp_path, device="cuda", echo=lambda line: None, **sizes)
    for spans in timeline.spans:
        kinds = [span.kind for span in spans if span.kind in ("F", "B", "I", "W")]
        assert kinds.count("F") == 4 and 0 < bubble_share(timeline) < 1


@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "cp2", "cp2+a2a", "pp2", "dp2+zero3"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe"])
def test_bf16_error(model_type, text):
    """Attention over cp goes through flash kernels there."""
    tiny_model = get_tiny_model(model_type)

    def on_rank(**arguments):
        model = tiny_model.load(dtype=torch.bfloat16, **arguments)
        return measure(model if arguments else model.cuda(), tiny_model.batches, optimizers=())

    [single] = run_ranks(on_rank, 1, device="cuda")
    measurement = run_ranks(on_rank, 2, megatron_config=make_config(text), device="cuda")[0]
    assert reference_error(measurement, tiny_model.reference) <= 1.5 * reference_error(single, tiny_model.reference)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "width"), [(4, 64), (1, 128)])
def test_flash_varlen_blocks(causal, heads, width):
    """Blocks of unequal length in one call of the device's kernel, beside attention written out in fp64."""
    places = [0, 70, 100, 300]

    def on_rank():
        torch.manual_seed(0)
        q, k, v, gradient = (torch.randn(300, count, width, device="cuda") for count in (4, heads, heads, 4))
        low = [tensor.bfloat16() for tensor in (q, k, v)]
        options = {"edges": (places, places), "causal": causal, "scale": 0.2}
        out, lse = flash_varlen_forward(*low, **options)
        gradients = flash_varlen_backward(gradient.bfloat16(), *low, out, lse, **options)
        precise = [tensor.double().requires_grad_() for tensor in low]
        outs, sums = [], []
        for start, stop in zip(places, places[1:], strict=False):
            queries, keys, values = (tensor[start:stop].transpose(0, 1) for tensor in precise)
            keys, values = (tensor.repeat_interleave(4 // heads, 0) for tensor in (keys, values))
            scores = queries @ keys.transpose(1, 2) * 0.2
            if causal:
                scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
            outs.append((scores.softmax(-1) @ values).transpose(0, 1))
            sums.append(scores.logsumexp(-1).transpose(0, 1))
        expected = torch.cat(outs)
        expected.backward(gradient.bfloat16().double())
        pairs = [(out, expected), (lse, torch.cat(sums)), *zip(gradients, [one.grad for one in precise], strict=True)]
        return [((one.double() - other).norm() / other.norm()).item() for one, other in pairs]

    errors = run_ranks(on_rank, 1, device="cuda")[0]
    assert max(errors) < 1e-2 and errors[1] < 1e-4, errors


@pytest.mark.parametrize("chunk_size", [None, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_equals_torch(dtype, chunk_size):
    def on_rank():
        torch.manual_seed(0)
        hidden = torch.randn(256, 64, device="cuda", dtype=dtype, requires_grad=True)
        weight = torch.randn(1000, 64, device="cuda", dtype=dtype, requires_grad=True)
        labels = torch.randint(0, 1000, (256,), device="cuda")
        labels[::5] = -100
        options = CrossEntropyOptions(dist.group.WORLD, 0, 1000, chunk_size=chunk_size)
        loss = linear_cross_entropy(hidden, weight, None, labels, None, options)
        loss.backward()
        gradients = hidden.grad, weight.grad
        hidden.grad = weight.grad = None
        expected = torch.nn.functional.cross_entropy((hidden @ weight.t()).float(), labels)
        expected.backward()
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradients[0], hidden.grad, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradients[1], weight.grad, rtol=tolerance, atol=tolerance)

    run_ranks(on_rank, 1, device="cuda")


@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_token_log_probs_and_divergences(text):
    """Log-probabilities and a divergence of two models, with their gradients, as one process on a CPU has them."""
    tiny_model = get_tiny_model("llama")

    def on_rank(**arguments):
        models = [tiny_model.load(**arguments) for _ in range(2)]
        with torch.no_grad():
            for parameter in models[1].parameters():
                parameter.mul_(0.9)
        batch = {name: tiny_model.batches[0][name].to(models[0].device) for name in ("input_ids", "attention_mask")}
        labels = tiny_model.batches[0]["labels"].to(models[0].device)
        log_probs = token_log_probs(models[0], labels, temperature=0.7, **batch)
        divergences = token_kl_divergences(*models, labels, beta=0.5, **batch)
        (log_probs.sum() + divergences.sum()).backward()
        return log_probs.detach().cpu(), divergences.detach().cpu()

    expected = run_ranks(on_rank, 1)[0]
    for values in run_ranks(on_rank, 2, megatron_config=make_config(text), device="cuda"):
        for one, other in zip(values, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["tp2+sp", "pp2", "cp2", "dp2"])
@pytest.mark.parametrize("trainer_class", [SFTTrainer, DPOTrainer, GRPOTrainer])
def test_trl_trainers(stories, tmp_path, monkeypatch, text, trainer_class):
    """Against one process on a GPU, which draws the same completions; greedy ones where replicas draw their own."""
    monkeypatch.setitem(test_base.CONFIGS, GRPOTrainer, GRPOConfig)
    samples = {SFTTrainer: completions, DPOTrainer: preferences, GRPOTrainer: prompts}[trainer_class]
    options = {"use_cpu": False, "max_steps": 2, "eval_strategy": "no"}
    if trainer_class is GRPOTrainer:
        options |= SIZES | REWARDS | ({"top_k": 1} if text == "dp2" else {})
    arguments = (trainer_class, samples)
    [(expected, weights, _)] = run_ranks(
        train, 1, stories, tmp_path / "one", None, *arguments, device="cuda", **options
    )
    results = run_ranks(train, 2, stories, tmp_path / "two", layout(text), *arguments, device="cuda", **options)
    for log, _, _ in results:
        for entry, other in zip(log, expected, strict=True):
            expected_values = {
                name: value for name, value in other.items() if value is not None and name != "step_time"
            }
            assert {name: entry[name] for name in expected_values} == pytest.approx(expected_values, rel=1e-4, abs=1e-4)
    for name, weight in weights.items():
        difference = results[0][1][name] - weight
        assert difference.pow(2).mean().sqrt() <= 5e-5, name
