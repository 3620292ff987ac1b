"""Parity tests of quantized frozen base models: adapter gradients, weights after two steps, and quantized codes."""

import functools
from dataclasses import replace

import pytest
import torch
import transformers
from bitsandbytes.functional import dequantize_4bit
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torchao.quantization import Int8WeightOnlyConfig, PerTensor
from transformers import CONFIG_MAPPING, BitsAndBytesConfig, TorchAoConfig, Trainer, TrainingArguments

from hf_megatron.core.communication.full_tensor import gather_full_tensor
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.core.quantized_weight import QuantizedWeight
from hf_megatron.errors import ConfigError, UnsupportedError
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.tensor_parallel.quantization import eight_bit, four_bit, scheme
from hf_megatron.testing.adapters import METHODS, find_targets
from hf_megatron.testing.parity import check_tiny_model, make_tiny_model, measured
from hf_megatron.testing.tiny_model import draw_parameters

SCHEMES = {
    "nf4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "nf4_double": lambda: BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "fp4": lambda: BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "int8": lambda: BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0),
    "torchao": lambda: TorchAoConfig(Int8WeightOnlyConfig()),
}
SCHEME_LAYOUTS = {
    "nf4": "tp2,tp2+sp,pp2,cp2,dp2+zero0,dp2+zero2,tp2+pp2+dp2",
    "nf4_double": "tp2,tp2+sp,pp2,cp2,dp2",
    "fp4": "tp2,pp2,cp2,dp2",
    "int8": "pp2,cp2,dp2",
    "torchao": "tp2,tp2+sp,pp2,cp2,dp2",
}
CASES = [("llama", name, text) for name, texts in SCHEME_LAYOUTS.items() for text in texts.split(",")]
# Fused projections, biases, fewer key heads than ranks.
CASES += [("phi3", "nf4", "tp2"), ("qwen2", "nf4_double", "tp2+sp"), ("qwen3", "torchao", "tp4")]
# Sizes for which quantization blocks align with the shards of two ranks.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@functools.cache
def make_wide_tiny_model(model_type):
    changes = {name: value for name, value in WIDE.items() if hasattr(CONFIG_MAPPING[model_type](), name)}
    return make_tiny_model(CONFIG_MAPPING[model_type](), changes=changes, microbatches=2, batch_size=4)


def disable_bf16_kernels(model):
    """Disables bitsandbytes' bf16 CPU kernels in evaluation, so that it computes as training does."""
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False
    return model


@functools.cache
def get_tiny_model(model_type, name):
    base = replace(make_wide_tiny_model(model_type), arguments={"quantization_config": SCHEMES[name]()})
    model = get_peft_model(base.load(), METHODS["lora"](find_targets(make_wide_tiny_model(model_type).load(), base)))
    draw_parameters(model, 0, trained_only=True)
    folder = base.directory / f"adapter_{name}"
    model.save_pretrained(folder)

    def adapt(model):
        return PeftModel.from_pretrained(disable_bf16_kernels(model), folder, is_trainable=True).get_base_model()

    return measured(replace(base, adapt=adapt))


@pytest.mark.parametrize(("model_type", "name", "text"), CASES)
def test_adapters_on_quantized_bases(model_type, name, text):
    comparison = check_tiny_model(get_tiny_model(model_type, name), parse_layouts(text)[0])
    assert comparison.passed, comparison.report()


def test_every_scheme_is_covered():
    assert SCHEMES.keys() == SCHEME_LAYOUTS.keys()


def compute_dequantization_error(name, text, sabotage=None):
    """Returns the largest difference of dequantized weights to the single-process weights."""
    tiny_model = replace(make_wide_tiny_model("llama"), arguments={"quantization_config": SCHEMES[name]()})

    def on_rank():
        if sabotage is not None:
            sabotage()
        [config] = parse_layouts(text)
        model = tiny_model.load(megatron_config=ConfigUnderTest(**config.to_dict()))
        linears = sorted(parallel_state(model).placed[scheme.NAME].linears)
        held = [isinstance(model.get_submodule(linear).weight, QuantizedWeight) for linear in linears]
        model.dequantize(torch.float32)
        return all(held), {linear: gather_full_tensor(model.get_submodule(linear).weight) for linear in linears}

    held, weights = run_ranks(on_rank, 2)[0]
    assert held and weights
    reference = tiny_model.load()
    differences = []
    for linear, weight in weights.items():
        stock = reference.get_submodule(linear).weight
        dense = stock.dequantize() if name == "torchao" else dequantize_4bit(stock.data, stock.quant_state)
        differences.append((dense - weight).abs().max().item())
    return max(differences)


@pytest.mark.parametrize("name", ["nf4", "nf4_double", "torchao"])
def test_codes_match_the_unsharded_weight(name):
    assert compute_dequantization_error(name, "tp2") == 0


def use_local_block_scales():
    four_bit.FourBit.complete = lambda self, weight, part: None


def use_local_row_scales():
    eight_bit.Int8Rows.waits = lambda self, part: False


@pytest.mark.parametrize(
    ("name", "sabotage"), [("nf4_double", use_local_block_scales), ("torchao", use_local_row_scales)]
)
def test_local_scales_are_detected(name, sabotage):
    assert compute_dequantization_error(name, "tp2", sabotage) > 1e-4


def test_misaligned_quantization_blocks_are_detected():
    def skip_block_alignment_check():
        four_bit.FourBit.misfit = lambda self, part: None

    tiny_model = replace(
        make_tiny_model(CONFIG_MAPPING["llama"]()),
        arguments={"quantization_config": SCHEMES["nf4"]()},
        adapt=lambda m: m,
    )

    def on_rank():
        skip_block_alignment_check()
        model = tiny_model.load(megatron_config=ConfigUnderTest(tp_size=2))
        model.dequantize(torch.float32)
        return gather_full_tensor(model.model.layers[0].self_attn.o_proj.weight)

    stock = tiny_model.load().model.layers[0].self_attn.o_proj.weight
    assert (run_ranks(on_rank, 2)[0] - dequantize_4bit(stock.data, stock.quant_state)).abs().max() > 1e-2


# User workflows


def train_and_evaluate(folder, tiny_model, text=None, resume=None):
    """Returns the losses of a Trainer run, of its evaluation, and (with `text`) of the merged model."""
    samples = [{name: values[i % 4] for name, values in tiny_model.batches[0].items()} for i in range(16)]
    arguments = {} if text is None else {"megatron_config": ConfigUnderTest(**parse_layouts(text)[0].to_dict())}
    model = prepare_model_for_kbit_training(disable_bf16_kernels(tiny_model.load(**arguments)))
    torch.manual_seed(7)
    model = get_peft_model(model, METHODS["lora"](find_targets(make_wide_tiny_model("llama").load(), tiny_model)))
    settings = {"max_steps": 4, "save_steps": 2, "logging_steps": 1, "per_device_train_batch_size": 4}
    settings |= {"learning_rate": 1e-2, "report_to": [], "use_cpu": True, "gradient_checkpointing": True}
    trainer = Trainer(model, TrainingArguments(folder, **settings), train_dataset=samples, eval_dataset=samples[:4])
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    losses.append(trainer.evaluate()["eval_loss"])
    if text is not None:
        with torch.no_grad():
            losses.append(model.merge_and_unload()(**tiny_model.batches[0]).loss.item())
    return losses


def test_trainer_resumes_on_another_layout_and_merges(tmp_path):
    tiny_model = replace(make_wide_tiny_model("llama"), arguments={"quantization_config": SCHEMES["nf4_double"]()})
    expected = train_and_evaluate(tmp_path / "one", tiny_model)
    split = run_ranks(lambda: train_and_evaluate(tmp_path / "tp", tiny_model, "tp2"), 2)[0]
    assert split[:5] == pytest.approx(expected, rel=1e-5)
    # Merged weights are not quantized again, so the merged model equals the model with the adapter.
    assert split[5] == pytest.approx(split[4], rel=1e-5)
    resumed = run_ranks(
        lambda: train_and_evaluate(tmp_path / "pp", tiny_model, "pp2", str(tmp_path / "tp" / "checkpoint-2")), 2
    )[0]
    assert resumed == pytest.approx(split, rel=1e-5)


@pytest.mark.parametrize("name", ["nf4", "int8", "torchao"])
def test_parameter_counts_match_single_process(name):
    tiny_model = replace(make_wide_tiny_model("llama"), arguments={"quantization_config": SCHEMES[name]()})

    def count_parameters(layout):
        arguments = {} if layout is None else {"megatron_config": layout}
        model = tiny_model.load(**arguments)
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"]))
        return model.num_parameters(), wrapped.get_nb_trainable_parameters()

    layout = {"dp_size": 2} if name == "int8" else {"tp_size": 2}
    assert run_ranks(count_parameters, 2, ConfigUnderTest(**layout)) == run_ranks(count_parameters, 1, None) * 2


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_adapters_use_the_compute_dtype(storage):
    settings = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16, bnb_4bit_quant_storage=storage
    )
    tiny_model = replace(
        make_wide_tiny_model("llama"), arguments={"quantization_config": settings, "dtype": torch.bfloat16}
    )

    def create_adapters(layout):
        arguments = {} if layout is None else {"megatron_config": layout}
        model = prepare_model_for_kbit_training(tiny_model.load(**arguments))
        torch.manual_seed(0)
        wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        return {name: gather_full_tensor(weight) for name, weight in wrapped.named_parameters() if weight.requires_grad}

    expected = run_ranks(create_adapters, 1, None)[0]
    adapters = run_ranks(create_adapters, 2, ConfigUnderTest(tp_size=2))[0]
    assert adapters.keys() == expected.keys() and all(torch.equal(adapters[name], expected[name]) for name in expected)


def test_skipped_modules_match_transformers():
    """torchao matches skipped names against weight names, bitsandbytes against module names."""
    skipped_modules = ["o_proj", "lm_head"]
    cases = {
        "nf4": BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skipped_modules),
        "torchao": TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=skipped_modules),
        "weights": TorchAoConfig(Int8WeightOnlyConfig(), modules_to_not_convert=["o_proj.weight", "lm_head"]),
    }

    # Saved in this process: only the first rank of a job would save its weights.
    plain = make_wide_tiny_model("llama")

    def on_rank():
        quantized_linears = {}
        for name, settings in cases.items():
            tiny_model = replace(plain, arguments={"quantization_config": settings})
            model = tiny_model.load(megatron_config=ConfigUnderTest(tp_size=2))
            quantized_linears[name] = parallel_state(model).placed[scheme.NAME].linears
        return quantized_linears

    for name, linears in run_ranks(on_rank, 2)[0].items():
        stock = replace(plain, arguments={"quantization_config": cases[name]}).load()
        kinds = {linear: type(module.weight) for linear, module in stock.named_modules() if "_proj" in linear}
        assert linears == {linear for linear, kind in kinds.items() if kind is not torch.nn.Parameter}, name


def test_unsupported_configurations_raise(tmp_path):
    tiny_model = make_wide_tiny_model("llama")
    narrow = make_tiny_model(CONFIG_MAPPING["llama"]())
    stock = replace(tiny_model, arguments={"quantization_config": SCHEMES["nf4"]()}).load()
    stock.save_pretrained(tmp_path / "quantized")
    cls = transformers.LlamaForCausalLM

    def on_rank():
        errors = []

        def load(folder, settings, **layout):
            try:
                model = cls.from_pretrained(
                    folder, quantization_config=settings, megatron_config=ConfigUnderTest(**layout)
                )
            except (UnsupportedError, ConfigError) as error:
                errors.append(str(error))
                return None
            return model

        load(narrow.directory, SCHEMES["nf4"](), tp_size=2)
        load(tiny_model.directory, SCHEMES["int8"](), tp_size=2)
        load(tiny_model.directory, BitsAndBytesConfig(load_in_8bit=True), pp_size=2)
        load(tiny_model.directory, SCHEMES["nf4"](), dp_size=2, zero_stage=3)
        load(tiny_model.directory, TorchAoConfig(Int8WeightOnlyConfig(granularity=PerTensor())), tp_size=2)
        load(tiny_model.directory, "nf4", tp_size=2)
        load(tmp_path / "quantized", None, tp_size=2)
        model = load(tiny_model.directory, SCHEMES["nf4"](), tp_size=2)
        wrapped = get_peft_model(model, METHODS["lora"](find_targets(tiny_model.load(), tiny_model)))
        attempts = (
            lambda: model.model.layers[0].self_attn.q_proj.weight * 2,
            lambda: model.save_pretrained(tmp_path / "base"),
            lambda: torch.save(model.state_dict(), tmp_path / "state.pt"),
            lambda: wrapped.merge_adapter(),
            lambda: wrapped.add_adapter("second", METHODS["dora"](find_targets(tiny_model.load(), tiny_model))),
        )
        for attempt in attempts:
            with pytest.raises(UnsupportedError) as error:
                attempt()
            errors.append(str(error.value))
        return errors

    messages = run_ranks(on_rank, 2)[0]
    expected = (
        "gate_proj.weight [90, 64] over tp_size = 2|down_proj.weight [64, 90] over tp_size = 2: quantization blocks",
        "one scale per token, and a rank has 128 of its 256 entries",
        "input columns with a value above llm_int8_threshold = 6.0",
        "zero_stage = 3: FSDP2 would shard the quantized weights",
        "Use Int8WeightOnlyConfig() with one scale per row",
        "quantization_config = 'nf4' is not valid: expected a dict or a transformers config",
        "The checkpoint is quantized",
        "mul is not supported on a quantized weight",
        "save_pretrained does not support a LlamaForCausalLM with quantized weights",
        "A quantized weight cannot be pickled",
        "merge_adapter with a quantized base",
        "with a quantized base",
    )
    assert len(messages) == len(expected), messages
    for text, words in zip(messages, expected, strict=True):
        assert any(part in text for part in words.split("|")), (text, words)
