"""Tests of router losses on all layouts against the single-process run, and of their scopes with microbatches."""

import ast
import contextlib
import functools
import importlib
import inspect
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from hf_megatron import ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.patch_table import PATTERNS
from hf_megatron.losses.router_losses import load_balancing_loss
from hf_megatron.parallelize import parallel_state
from hf_megatron.testing.measure import Measurement, measure
from hf_megatron.testing.tiny_model import draw_parameters
from hf_megatron.testing.tolerances import judge
from tests.parity.losses.test_losses import _make_layout

_SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 1.0,
    "output_router_logits": True,
}
_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
# Model type -> class, config changes.
TYPES = {
    "qwen3_moe": ("Qwen3MoeForCausalLM", {"num_experts": 4}),
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "granitemoe": ("GraniteMoeForCausalLM", {"num_local_experts": 4}),
    "switch_transformers": (
        "SwitchTransformersForConditionalGeneration",
        _T5
        | {
            "num_experts": 4,
            "expert_capacity": 64,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "dropout_rate": 0.0,
            "router_jitter_noise": 0.0,
            "router_z_loss_coef": 1.0,
            "decoder_start_token_id": 0,
        },
    ),
}


def _make_batches(seq2seq):
    batches = []
    for seed in (0, 1):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 64, (5, 12), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, -5:] = mask[3, -2:] = 0
        ids[mask == 0] = 0
        labels = ids.masked_fill((mask == 0) | (torch.rand(ids.shape, generator=generator) < 0.3), -100)
        labels[-1] = -100
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if seq2seq:
            decoder = torch.randint(3, 64, (5, 10), generator=generator)
            batch |= {"labels": decoder, "decoder_input_ids": decoder.roll(1, -1)}
            batch["decoder_attention_mask"] = torch.ones_like(decoder)
        batches.append(batch)
    return batches


def _get_module(cls):
    return importlib.import_module(cls.__module__)


def _load(cls, path, **kwargs):
    model = cls.from_pretrained(path, **kwargs)
    output_router_logits = model.config.output_router_logits
    # Switch ignores `output_router_logits` of its config.
    model.register_forward_pre_hook(
        lambda _, args, given: (args, {"output_router_logits": output_router_logits, **given}), with_kwargs=True
    )
    return model


@contextlib.contextmanager
def _patch_sample_loss(module, rows):
    """Reference of `"sequence"`: calls transformers' function for each sample separately."""
    original = module.load_balancing_loss_func

    def mean_over_samples(gate_logits, num_experts, top_k, attention_mask):
        tokens = attention_mask.shape[1]
        losses = []
        for index in range(len(attention_mask)):
            span = slice(index * tokens, (index + 1) * tokens)
            sample_logits = tuple(logits[span] for logits in gate_logits)
            losses.append(original(sample_logits, num_experts, top_k, attention_mask[index : index + 1]))
        return torch.stack(losses).mean()

    module.load_balancing_loss_func = mean_over_samples
    try:
        yield
    finally:
        module.load_balancing_loss_func = original


# Slices of the batch's five samples, per microbatch and dp rank.
_PARTS = {
    "whole": [[slice(0, 5)]],
    "pp2": [[slice(0, 2)], [slice(2, 5)]],
    "pp2+dp2": [[slice(0, 1), slice(3, 4)], [slice(1, 3), slice(4, 5)]],
}
_MICROBATCHES = 2


@contextlib.contextmanager
def _patch_global_loss(module, parts, z_loss):
    """Reference of `"global"` and the z-loss: the formulas of Megatron."""
    original = module.load_balancing_loss_func
    so_far, calls = [], []

    def mean_over_parts(gate_logits, experts, top_k, attention_mask):
        tokens = attention_mask.shape[1]
        batch_size = len(attention_mask)
        total = 0.0
        microbatches = _PARTS[parts] if torch.is_grad_enabled() else [[slice(0, batch_size)]]
        counts = so_far if torch.is_grad_enabled() else []
        for ranks in microbatches:
            mixed = []
            for part in ranks:
                mask = attention_mask[part].flatten().float()
                chunk = slice(part.start * tokens, part.stop * tokens)
                logits = [layer[chunk].float() for layer in gate_logits]
                probabilities = sum((layer.softmax(-1) * mask[:, None]).sum(0) for layer in logits)
                chosen = sum(
                    (torch.zeros_like(layer).scatter_(1, layer.topk(top_k).indices, 1.0) * mask[:, None]).sum(0)
                    for layer in logits
                )
                z = sum((layer.logsumexp(-1).square() * mask).sum() for layer in logits) / mask.sum()
                mixed.append((part, probabilities / (mask.sum() * len(logits)), z))
                counts.append((chosen.detach(), mask.sum() * len(logits)))
            shares = sum(chosen for chosen, _ in counts) / sum(count for _, count in counts)
            for part, probabilities, z in mixed:
                weight = (part.stop - part.start) / batch_size
                total = total + weight * (experts * (shares * probabilities).sum() + z_loss * z)
        calls.append(torch.is_grad_enabled())
        if sum(calls) == _MICROBATCHES:
            so_far.clear()
            calls.clear()
        return total

    module.load_balancing_loss_func = mean_over_parts
    try:
        yield
    finally:
        module.load_balancing_loss_func = original


@functools.cache
def _make_reference(model_type, folder, form="batch", parts="whole", z_loss=0.0):
    name, changes = TYPES[model_type]
    config = AutoConfig.for_model(model_type, **_SMALL, **changes)
    cls = getattr(transformers, name)
    path = folder / model_type
    torch.manual_seed(0)
    model = cls(config).float()
    draw_parameters(model, 0)
    model.save_pretrained(path)
    batches = _make_batches(config.is_encoder_decoder)
    form = {
        "batch": contextlib.nullcontext(),
        "sequence": _patch_sample_loss(_get_module(cls), 5),
        "global": _patch_global_loss(_get_module(cls), parts, z_loss),
    }[form]
    with form:
        model = _load(cls, path)
        reference = measure(model, batches)
        output = model.train()(**batches[0])
    plain = _load(cls, path, output_router_logits=False)
    assert abs(measure(plain, batches, ()).loss - reference.loss) > 1e-2, "the router loss counts for nothing"
    return cls, path, batches, reference, output.get("aux_loss", torch.tensor(0.0)).item()


def compute_errors(folder, model_type, layout, sabotage=None, **changes):
    """Compares ranks with the single-process run; returns judgment and largest relative error of `outputs.aux_loss`."""
    form, z_loss = changes.get("router_aux_loss_scope", "batch"), changes.get("router_z_loss_coef", 0.0)
    parts = layout if form == "global" and layout in _PARTS else "whole"
    cls, path, batches, reference, aux_loss = _make_reference(model_type, folder, form, parts, z_loss)
    config = _make_layout(layout, **changes)

    def on_rank():
        if sabotage is not None:
            sabotage()
        model = _load(cls, path, megatron_config=config)
        measured = measure(model, batches)
        state = parallel_state(model)
        samples = {
            name: value.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank] for name, value in batches[0].items()
        }
        reported = model.train()(**samples).get("aux_loss")
        return measured, 0.0 if reported is None else reported.item()

    results = run_ranks(on_rank, config.ranks_per_replica * (config.dp_size or 1))
    assert len({measured.loss for measured, _ in results}) == 1
    judged = judge(Measurement(**{**vars(results[0][0]), "eval_loss": reference.eval_loss}), reference)
    return judged, max(abs(other - aux_loss) for _, other in results) / max(abs(aux_loss), 1e-30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("routers")


def check(*args, **kwargs):
    judged, aux_loss = compute_errors(*args, **kwargs)
    assert judged.passed, judged.worst
    assert aux_loss < 1e-5


@pytest.mark.parametrize("layout", ["dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3", "tp2", "tp2+sp", "tp2+sp+dp2"])
def test_batch_scope(folder, layout):
    check(folder, "qwen3_moe", layout)


@pytest.mark.parametrize("model_type", [name for name in TYPES if name != "qwen3_moe"])
def test_model_families(folder, model_type):
    check(folder, model_type, "dp2")


@pytest.mark.parametrize("layout", ["pp2", "pp2+dp2"])
def test_pipeline_with_one_microbatch(folder, layout):
    check(folder, "qwen3_moe", layout, num_microbatches=1)


@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2", "tp2+sp+pp2", "pp2+dp2", "dp2+zero3"])
def test_sequence_scope(folder, layout):
    check(folder, "qwen3_moe", layout, router_aux_loss_scope="sequence")


@pytest.mark.parametrize("layout", ["pp2", "tp2+pp2"])
def test_evaluation_loss_covers_global_batch(folder, layout):
    cls, path, batches, *_ = _make_reference("qwen3_moe", folder)

    def losses(**kwargs):
        model = _load(cls, path, **kwargs)
        values = []
        for training in (False, True):
            with torch.no_grad():
                output = model.train(training)(**batches[0])
            values += [output.loss, output.aux_loss]
        return torch.stack(values)

    expected = losses()
    for values in run_ranks(lambda: losses(megatron_config=_make_layout(layout)), 4 if "tp" in layout else 2):
        torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def test_several_microbatches_raise_by_default(folder):
    cls, path, batches, *_ = _make_reference("qwen3_moe", folder)

    def on_rank():
        model = cls.from_pretrained(path, megatron_config=_make_layout("pp2")).train()
        with pytest.raises(ConfigError, match="router_aux_loss_scope='sequence'.*'microbatch'.*num_microbatches=1"):
            model(**batches[0])
        model.config.output_router_logits = False
        return model(**batches[0]).loss.item()

    assert len(set(run_ranks(on_rank, 2))) == 1


@pytest.mark.parametrize("layout", ["dp2", "tp2", "tp2+sp", "cp2", "dp2+ep2", "dp2+zero3", "pp2", "pp2+dp2"])
def test_global_scope(folder, layout):
    check(folder, "qwen3_moe", layout, router_aux_loss_scope="global", router_z_loss_coef=0.125, num_microbatches=2)


def test_stale_expert_counts_are_detected(folder):
    def sabotage():
        from hf_megatron.losses.batch_loss import BatchLoss

        BatchLoss.end_step = lambda self: None

    with pytest.raises(AssertionError):
        check(folder, "qwen3_moe", "dp2", router_aux_loss_scope="global", sabotage=sabotage)


def test_z_loss_without_router_loss_raises(folder):
    cls, path, *_ = _make_reference("qwen3_moe", folder)

    def on_rank():
        with pytest.raises(ConfigError, match="router_z_loss_coef = 0.1: Qwen3MoeForCausalLM has no router loss"):
            cls.from_pretrained(
                path, output_router_logits=False, megatron_config=_make_layout("dp2", router_z_loss_coef=0.1)
            )

    run_ranks(on_rank, 2)


@pytest.mark.parametrize(
    ("name", "value"),
    [("router_aux_loss_scope", "sequence"), ("router_z_loss_coef", 0.1), ("router_bias_update_rate", 1e-3)],
)
def test_router_settings_on_one_rank_raise(folder, name, value):
    cls, path, *_ = _make_reference("qwen3_moe", folder)
    with pytest.raises(ConfigError, match=f"MegatronConfig.{name} = .* in a job of one rank"):
        cls.from_pretrained(path, megatron_config=MegatronConfig(**{name: value}))


def test_unknown_scope_raises():
    with pytest.raises(ConfigError, match="router_aux_loss_scope = 'step'"):
        _make_layout("dp2", router_aux_loss_scope="step")


def _use_local_statistics():
    from hf_megatron.losses.batch_loss import BatchLoss

    BatchLoss.sum = lambda self, part: part


def _drop_sum_gradient():
    from hf_megatron.core.communication import mean_grad_ops

    mean_grad_ops._Sum.backward = staticmethod(lambda ctx, gradient: (gradient, None))


@pytest.mark.parametrize("fault", [_use_local_statistics, _drop_sum_gradient])
def test_local_statistics_are_detected(folder, fault):
    with pytest.raises(AssertionError):
        check(folder, "qwen3_moe", "dp2", sabotage=fault)


def test_equal_microbatch_weights_are_detected(folder):
    """Seeded fault: microbatches have equal weight, whatever their number of samples."""

    def sabotage():
        from hf_megatron.losses.batch_loss import BatchLoss

        BatchLoss.row_mean = lambda self, total, rows: total / rows

    with pytest.raises(AssertionError):
        check(folder, "qwen3_moe", "dp2", router_aux_loss_scope="sequence", sabotage=sabotage)


def _list_router_losses():
    """Yields file, name, arguments and body of each router loss function in transformers."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "load_balancing_loss_func" in text or "z_loss_func" in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.FunctionDef) and node.name.endswith("_loss_func"):
                    body = [part for part in node.body if not isinstance(getattr(part, "value", None), ast.Constant)]
                    yield path.stem, node.name, ast.unparse(node.args), "\n".join(map(ast.unparse, body))


@pytest.mark.parametrize("layout", ["dp2", "pp2"])
@pytest.mark.parametrize(
    ("class_name", "changes"),
    [
        ("DogeForCausalLM", {"is_moe": True}),
        ("NllbMoeForConditionalGeneration", {}),
        ("ProphetNetForCausalLM", {"eps": 0.1}),
    ],
)
def test_batch_coupled_models_raise(folder, class_name, changes, layout):
    cls = getattr(transformers, class_name)
    config = cls.config_class(**changes)

    def on_rank():
        with pytest.raises(UnsupportedError, match="Load it with dp_size=1 and pp_size=1"):
            cls._from_config(config, megatron_config=_make_layout(layout))

    run_ranks(on_rank, 2)


# Models that are unsupported if the batch is split.
_UNREPLACED = ("modeling_doge", "modeling_nllb_moe")


def test_transformers_router_losses_share_one_form():
    definitions, forms = list(_list_router_losses()), {}
    for stem, name, arguments, body in definitions:
        if stem not in _UNREPLACED:
            forms.setdefault((name, arguments, body), []).append(stem)
    assert len(definitions) >= 30
    assert sorted(map(len, forms.values())) == [1, 1, len(definitions) - 4]


def test_router_losses_are_patched_on_import_and_restored():
    functions = [
        (f"transformers.models.{stem.removeprefix('modeling_')}.{stem}", name, stem not in _UNREPLACED)
        for stem, name, *_ in _list_router_losses()
    ]
    # In a new interpreter: half of the modules are imported before the library, the others after it.
    program = f"""
import importlib
functions = {functions!r}
early, late = functions[::2], functions[1::2]
stock = {{}}
for module, name, _ in early:
    stock[module, name] = getattr(importlib.import_module(module), name)
import hf_megatron
from hf_megatron.compat.patch_registry import PATCH_REGISTRY

def replaced(module, name):
    return getattr(importlib.import_module(module), name).__code__.co_name == f"{{name}}[losses.router_losses]"

PATCH_REGISTRY.activate()
for _ in range(2):
    for module, name, is_replaced in functions:
        assert replaced(module, name) == is_replaced, (module, name)
        if is_replaced:
            stock.setdefault((module, name), PATCH_REGISTRY.targets[f"{{module}}:{{name}}"].original)
    hf_megatron.disable()
    for module, name, _ in functions:
        function = getattr(importlib.import_module(module), name)
        assert function is stock.get((module, name), function) and not replaced(module, name), (module, name)
    hf_megatron.enable()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.parametrize(
    ("module", "parameters", "expected"),
    [
        ("transformers.models.own.modeling_own", "gate_logits, num_experts=None, top_k=2, attention_mask=None", True),
        ("transformers.models.own.modeling_own", "gate_logits, num_experts, num_keys, top_k, attention_mask", False),
        ("transformers.models.own.deep.modeling_own", "gate_logits, num_experts, top_k, attention_mask", False),
        ("transformers_modules.own.modeling_own", "gate_logits, num_experts, top_k, attention_mask", False),
    ],
)
def test_pattern_matches_name_and_signature(module, parameters, expected):
    (pattern,) = PATTERNS
    _, *arguments = inspect.signature(load_balancing_loss).parameters
    assert tuple(arguments) == pattern.parameters
    defining, importing = types.ModuleType(module), types.ModuleType("transformers.models.other.modeling_other")
    exec(f"def {pattern.attribute}({parameters}): pass", vars(defining))
    setattr(importing, pattern.attribute, getattr(defining, pattern.attribute))
    patch = pattern.get_patch(defining) if pattern.matches(module) else None
    assert (patch is not None) == expected
    assert patch is None or patch.target == f"{module}:{pattern.attribute}"
    assert pattern.get_patch(importing) is None
