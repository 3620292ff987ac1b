"""Tests of packed activations with sequence parallelism: bitwise identical results, in-place edits still detected."""

import copy
import functools
import gc
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, LlamaConfig

from hf_megatron import ConfigError, MegatronConfig, local_named_parameters, prepare_optimizer, shard_safe
from hf_megatron.compat.torch_autograd import nodes_can_pack
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.compat.torch_memory import storage_key
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.memory import saved_tensor_hooks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel import gathered_input
from hf_megatron.testing.measure import measure
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.integration.core.memory.test_recompute import count_collectives

LAYERS = 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
BOTH = (True, False)
FAMILIES = ["llama", "gpt2", "opt", "gemma2", "qwen3", "olmo2", "mixtral", "t5"]
TASKS = {"t5": "seq2seq"}


def save_model(path, **changes):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SIZES | changes)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def longer(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("longer"), num_hidden_layers=LAYERS + 2)


def load(folder, packs, *, tp_size=2, **fields):
    options = {name: fields.pop(name) for name in ("dtype", "attn_implementation") if name in fields}
    layout = ConfigUnderTest(tp_size=tp_size, sequence_parallel=True, shard_saved_activations=packs, **fields)
    return AutoModelForCausalLM.from_pretrained(folder, megatron_config=layout, **options).train()


def make_ids(length=13, rows=2):
    return torch.randint(0, 64, (rows, length), generator=torch.Generator().manual_seed(0))


def make_mask(length, rows=2):
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, :3] = 0
    return mask


def compute_loss(model, **kwargs):
    return model(input_ids=make_ids(), labels=make_ids(), **kwargs).loss


def gradients(model):
    grads = {name: parameter.grad for name, parameter in local_named_parameters(model) if parameter.grad is not None}
    assert grads
    return {name: local_tensor(grad).clone() for name, grad in grads.items()}


def assert_identical(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


class RepackCounter:
    """Counts the tensors that are saved in packed form (`kept`) and how often one is unpacked (`made`)."""

    def __init__(self):
        self.kept = self.made = 0

    def __enter__(self):
        counts, original_init, original_unpack = (
            self,
            saved_tensor_hooks.Remade.__init__,
            saved_tensor_hooks.Remade.unpack,
        )
        self.originals = original_init, original_unpack

        def init(one, *args):
            counts.kept += 1
            original_init(one, *args)

        def unpack(one):
            counts.made += 1
            return original_unpack(one)

        saved_tensor_hooks.Remade.__init__, saved_tensor_hooks.Remade.unpack = init, unpack
        return self

    def __exit__(self, *error):
        saved_tensor_hooks.Remade.__init__, saved_tensor_hooks.Remade.unpack = self.originals


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that are created inside the context and still exist; views of parameters do not count."""

    def __init__(self, model):
        super().__init__()
        self.seen = {storage_key(local_tensor(parameter)): None for parameter in model.parameters()}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        outputs = function(*args, **(kwargs or {}))
        for tensor in outputs if isinstance(outputs, tuple | list) else (outputs,):
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in self.seen:
                storage = tensor.untyped_storage()
                # The weak reference also keeps the storage key from being reused.
                self.seen[storage_key(tensor)] = StorageWeakRef(storage), storage.nbytes()
        return outputs

    @property
    def bytes(self):
        gc.collect()
        # gloo's threads release sent tensors shortly after the wait for them returns.
        time.sleep(0.1)
        return sum(size for reference, size in filter(None, self.seen.values()) if not reference.expired())


@pytest.mark.parametrize("model_type", FAMILIES)
def test_packed_activations_match_plain(model_type):
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type](), task=TASKS.get(model_type, "causal"), microbatches=2)

    def on_rank():
        results = {}
        for packs in BOTH:
            layout = ConfigUnderTest(tp_size=2, sequence_parallel=True, shard_saved_activations=packs)
            with RepackCounter() as count:
                results[packs] = measure(tiny_model.load(megatron_config=layout), tiny_model.batches)
            assert bool(count.made) == packs
        return results

    for results in run_ranks(on_rank, 2):
        packed, plain = results[True], results[False]
        assert (packed.loss, packed.eval_loss, packed.norm) == (plain.loss, plain.eval_loss, plain.norm)
        assert_identical(
            *({name: value for name, value in one.gradients.items() if value is not None} for one in (packed, plain))
        )
        for name, weights in plain.weights.items():
            assert_identical(packed.weights[name], weights)


def test_wrong_shard_is_detected(folder, monkeypatch):
    gather = gathered_input.all_gather

    def on_rank():
        expected = load(folder, False)
        compute_loss(expected).backward()
        model = load(folder, True)
        loss = compute_loss(model)
        monkeypatch.setattr(gathered_input, "all_gather", lambda *args: gather(*args).roll(1, 1))
        loss.backward()
        with pytest.raises(AssertionError):
            assert_identical(gradients(model), gradients(expected))

    run_ranks(on_rank, 2)


ROWS, LENGTH = 2, 48


def measure_layer_bytes(folder, longer, packs, tp_size):
    """Returns the bytes that a forward saves per additional layer."""
    shorter, more = (
        measure_saved_bytes(load(path, packs, tp_size=tp_size, dtype=torch.bfloat16)) for path in (folder, longer)
    )
    return (more - shorter) / 2


def measure_saved_bytes(model, make=lambda model: model(input_ids=make_ids(LENGTH, ROWS)).logits):
    with LiveBytes(model) as alive:
        output = make(model)
    total = alive.bytes
    del output
    return total


def estimate_layer_bytes(tp_size, tokens=ROWS * LENGTH, sizes=SIZES):
    """Returns the estimated saved bytes of one layer by cause, 2 bytes per entry unless fp32 is named."""
    h, f, head_dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    heads, pairs = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    return {
        "two norms: input in fp32, result before the weight, scale": 2 * (6 * h + 4) * tokens // tp_size,
        "shards of two gathered inputs": 2 * 2 * tokens * h // tp_size,
        "queries, keys, values": 2 * tokens * (heads + 2 * pairs) * head_dim // tp_size,
        "attention's output": 2 * tokens * heads * head_dim // tp_size,
        "attention's sums, in fp32": 4 * tokens * heads // tp_size,
        "gate and up": 2 * 2 * tokens * f // tp_size,
        "activation and product": 0 if nodes_can_pack() else 2 * 2 * tokens * f // tp_size,
    }


@pytest.mark.parametrize("tp_size", [2, 4])
def test_layer_bytes_match_estimate(folder, longer, tp_size, monkeypatch):
    expected = estimate_layer_bytes(tp_size)

    def on_rank():
        layer_bytes = {packs: measure_layer_bytes(folder, longer, packs, tp_size) for packs in BOTH}
        with monkeypatch.context() as patch:
            patch.setattr("hf_megatron.tensor_parallel.region.may_pack", lambda: False)
            return layer_bytes | {"fault": measure_layer_bytes(folder, longer, True, tp_size)}

    for layer_bytes in run_ranks(on_rank, tp_size):
        assert layer_bytes[True] == sum(expected.values())
        assert layer_bytes["fault"] == layer_bytes[False] > 1.3 * layer_bytes[True]


@pytest.mark.parametrize("autocast", BOTH)
def test_repeated_heads_are_saved_once(folder, autocast):
    def forward(model):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(input_ids=make_ids(LENGTH, ROWS), attention_mask=make_mask(LENGTH)).logits

    def on_rank():
        with_mask = {packs: measure_saved_bytes(load(folder, packs), forward) for packs in BOTH}
        monkeypatch = pytest.MonkeyPatch()
        monkeypatch.setattr("hf_megatron.tensor_parallel.region.keep_heads_once", lambda x: None)
        repeated = measure_saved_bytes(load(folder, True), forward)
        monkeypatch.undo()
        return with_mask, repeated

    for with_mask, repeated in run_ranks(on_rank, 2):
        heads, pairs = SIZES["num_attention_heads"] // 2, SIZES["num_key_value_heads"] // 2
        entries = ROWS * LENGTH * 2 * (heads - pairs) * SIZES["head_dim"]
        assert repeated - with_mask[True] == nodes_can_pack() * LAYERS * entries * (2 if autocast else 4)
        assert repeated < with_mask[False]


def test_attention_mask(folder):
    def run(model):
        loss = compute_loss(model, attention_mask=make_mask(13))
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    assert_packed_matches_plain(folder, run)


def test_docs_figure():
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "head_dim": 128}
    sizes |= {"num_attention_heads": 128, "num_key_value_heads": 8}
    figure = f"{sum(estimate_layer_bytes(8, 8192, sizes).values()) / 2**30:.2f}"
    assert figure == ("0.52" if nodes_can_pack() else "0.72")
    assert (f"these are {figure} GiB" if nodes_can_pack() else f"before, it is {figure}") in (
        Path(__file__).parents[4] / "docs" / "sequence_parallel.md"
    ).read_text()


def test_one_extra_gather_per_block(folder):
    def on_rank():
        counts = {}
        for packs in BOTH:
            for recompute in (None, "selective", "full"):
                model = load(folder, packs, recompute=recompute)
                loss, forward = count_collectives(lambda model=model: compute_loss(model))
                _, backward = count_collectives(loss.backward)
                counts[packs, recompute] = gradients(model), forward, backward
        return counts

    for counts in run_ranks(on_rank, 2):
        expected, forward, backward = counts[False, None]
        for (packs, recompute), (grads, sent, returned) in counts.items():
            assert_identical(grads, expected)
            assert sent == forward
            if recompute != "full":
                more = {name: count - backward[name] for name, count in returned.items() if count != backward[name]}
                assert list(more.values()) == [2 * LAYERS] * packs
        assert counts[True, "full"][2] == counts[False, "full"][2], "checkpointing has the first word"


def assert_packed_matches_plain(folder, run, ranks=2, **fields):
    """Asserts that `run(model)` returns identical tensors with packed and with plain activations."""

    def on_rank():
        results = []
        for packs in BOTH:
            model = load(folder, packs, **fields)
            with RepackCounter() as count:
                results.append(run(model))
            assert bool(count.made) == packs
        return results

    for packed, plain in run_ranks(on_rank, ranks):
        assert_identical(packed, plain)
        assert packed


def test_retained_graphs(folder):
    def run(model):
        loss = compute_loss(model)
        loss.backward(retain_graph=True)
        first = gradients(model)
        loss.backward()
        second = gradients(model)
        assert_identical(second, {name: 2 * gradient for name, gradient in first.items()})
        with pytest.raises(RuntimeError, match="twice"):
            loss.backward()
        return second

    assert_packed_matches_plain(folder, run)


def test_partial_backward_frees_gathered_input(folder):
    """An input gathered by a partial backward is freed when another block gathers, and with the graph."""
    gathered_bytes = 4 * make_ids().numel() * SIZES["hidden_size"]

    def run(model):
        weights = dict(local_named_parameters(model))
        grads, extra_bytes = {}, []
        with LiveBytes(model) as alive:
            loss = compute_loss(model)
            before = alive.bytes
            for layer in (1, 0):
                name = f"model.layers.{layer}.self_attn.k_proj.weight"
                (gradient,) = torch.autograd.grad(loss, [weights[name]], retain_graph=True)
                grads[name] = local_tensor(gradient).clone()
                del gradient
                extra_bytes.append(alive.bytes - before - sum(tensor.nbytes for tensor in grads.values()))
            loss.backward()
            loss.detach_()
            after = alive.bytes
        return grads | gradients(model), extra_bytes, after

    def on_rank():
        (packed, extra_bytes, after), (plain, extra_bytes_plain, after_plain) = (
            run(load(folder, packs)) for packs in BOTH
        )
        assert_identical(packed, plain)
        first, second = (one - other for one, other in zip(extra_bytes, extra_bytes_plain, strict=True))
        assert first == gathered_bytes >= second, "one gathered input at a time"
        assert after == after_plain

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(folder, dtype):
    def run(model):
        with torch.autocast("cpu", dtype):
            loss = compute_loss(model)
        loss.backward()
        return gradients(model) | {"loss": loss.detach()}

    assert_packed_matches_plain(folder, run)


def test_bytes_under_autocast(folder):
    def forward(model):
        with torch.autocast("cpu", torch.bfloat16):
            return model(input_ids=make_ids(LENGTH, ROWS)).logits

    def on_rank():
        return [measure_saved_bytes(load(folder, packs), forward) for packs in BOTH]

    for packed, plain in run_ranks(on_rank, 2):
        gathered_bytes = 2 * ROWS * LENGTH * SIZES["hidden_size"]
        # Five linears of each layer keep a copy of their gathered input in bf16, and a shard in fp32 stays.
        assert plain - packed > LAYERS * 4 * gathered_bytes


# Tensors that a loop edits: the module, and its input, its output or the name of its parameter.
EDITS = {
    "norm's input": ("input_layernorm", "input"),
    "shard": ("input_layernorm", "output"),
    "gathered": ("self_attn.q_proj", "input"),
    "gate": ("mlp.gate_proj", "output"),
    "activation": ("mlp.act_fn", "output"),
    "up": ("mlp.up_proj", "output"),
    "product": ("mlp.down_proj", "input"),
    "norm's weight": ("input_layernorm", "weight"),
    "column's weight": ("self_attn.q_proj", "weight"),
    "row's weight": ("mlp.down_proj", "weight"),
}


def hook_tensor(module, place, act):
    """Registers a hook that calls `act` with the module's input, output or parameter `place`."""
    if place == "input":
        module.register_forward_pre_hook(shard_safe(lambda module, args: act(args[0])))
    elif place == "output":
        module.register_forward_hook(shard_safe(lambda module, args, output: act(output)))
    else:
        module.register_forward_hook(lambda module, args, output: act(local_tensor(module._parameters[place])))


def add_one(tensor):
    with torch.no_grad():
        tensor.add_(1)


@pytest.mark.parametrize("packs", BOTH)
def test_inplace_edits_after_forward(folder, packs):
    def on_rank():
        for what, (name, place) in EDITS.items():
            model = load(folder, packs)
            caught = []
            hook_tensor(
                model.model.layers[0].get_submodule(name), place, lambda tensor, caught=caught: caught.append(tensor)
            )
            loss = compute_loss(model)
            add_one(caught[0])
            if what == "shard" and not packs:
                loss.backward()
                continue
            with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
                loss.backward()
            torch.distributed.barrier()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("packs", BOTH)
@pytest.mark.parametrize("factor", ["gate_proj", "up_proj", "act_fn"])
def test_inplace_edits_in_forward(folder, packs, factor):
    def on_rank():
        model = load(folder, packs)
        mlp, caught = model.model.layers[0].mlp, []
        hook_tensor(mlp.get_submodule(factor), "output", caught.append)
        hook_tensor(mlp.down_proj, "input", lambda tensor: add_one(caught[0]))
        loss = compute_loss(model)
        with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
            loss.backward()

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("packs", BOTH)
def test_inplace_edits_between_readers(folder, packs):
    def on_rank():
        model = load(folder, packs)
        hook_tensor(model.model.layers[0].self_attn.k_proj, "input", add_one)
        loss = compute_loss(model)
        with pytest.raises(RuntimeError, match="modified (by an )?inplace"):
            loss.backward()

    run_ranks(on_rank, 2)


def test_inplace_edit_before_saving(folder):
    def run(model):
        hook_tensor(model.model.layers[0].self_attn.q_proj, "input", add_one)
        compute_loss(model).backward()
        return gradients(model)

    assert_packed_matches_plain(folder, run)


def freeze_all(model):
    model.requires_grad_(False)


def freeze_columns(model):
    for layer in model.model.layers:
        for linear in (layer.self_attn.q_proj, layer.self_attn.v_proj, layer.mlp.gate_proj):
            linear.requires_grad_(False)


def freeze_rows_and_norms(model):
    for layer in model.model.layers:
        for module in (layer.mlp.down_proj, layer.self_attn.o_proj, layer.input_layernorm):
            module.requires_grad_(False)


def freeze_first_layer(model):
    model.get_input_embeddings().requires_grad_(False)
    model.model.layers[0].requires_grad_(False)


@pytest.mark.parametrize("freeze", [freeze_all, freeze_columns, freeze_rows_and_norms, freeze_first_layer])
def test_frozen_weights(folder, freeze):
    def run(model):
        freeze(model)
        embeds = model.get_input_embeddings()(make_ids()).detach()
        embeds.requires_grad_(freeze is not freeze_first_layer)
        with LiveBytes(model) as alive:
            loss = model(inputs_embeds=embeds, labels=make_ids()).loss
            saved_bytes = alive.bytes
        loss.backward()
        embeds_grad = {} if embeds.grad is None else {"embeds": embeds.grad}
        grads = {n: local_tensor(p.grad).clone() for n, p in local_named_parameters(model) if p.grad is not None}
        return {"kept": saved_bytes, "gradients": embeds_grad | grads}

    def on_rank():
        packed, plain = (run(load(folder, packs)) for packs in BOTH)
        assert plain["gradients"]
        assert_identical(packed["gradients"], plain["gradients"])
        assert packed["kept"] < plain["kept"]

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("freeze", [lambda model: None, freeze_columns], ids=["trained", "frozen"])
def test_hooks_around_matmuls(folder, freeze, monkeypatch):
    """torch 2.11 has no access to what a node saved; hooks give the same results and keep as little memory."""

    def run(model):
        freeze(model)
        with LiveBytes(model) as alive:
            loss = compute_loss(model)
            saved_bytes = alive.bytes
        loss.backward()
        return saved_bytes, gradients(model)

    def on_rank():
        plain_bytes, expected = run(load(folder, False))
        monkeypatch.setattr(saved_tensor_hooks, "nodes_can_pack", lambda: False)
        with RepackCounter() as count:
            saved_bytes, found = run(load(folder, True))
        assert count.made and saved_bytes < plain_bytes
        assert_identical(found, expected)

    run_ranks(on_rank, 2)


class MatmulWithOwnNode(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.flatten(0, 1).t() @ x.flatten(0, 1)


def test_unknown_matmuls_are_packed_by_hooks(folder, monkeypatch):
    def on_rank():
        replacement = shard_safe(lambda x, weight, bias=None: MatmulWithOwnNode.apply(x, weight))
        monkeypatch.setattr(torch.nn.functional, "linear", replacement)
        model, plain = load(folder, True), load(folder, False)
        first, then, unpacked = (measure_saved_bytes(one) for one in (model, model, plain))
        assert then < first and then < unpacked
        for one in (model, plain):
            compute_loss(one).backward()
        for name, gradient in gradients(plain).items():
            torch.testing.assert_close(gradients(model)[name], gradient)

    run_ranks(on_rank, 2)


def test_adapter_hook(folder):
    """A low-rank adapter in a hook of a frozen linear reads the gathered input and may save it in any form."""

    def run(model):
        model.requires_grad_(False)
        q_proj, generator = model.model.layers[0].self_attn.q_proj, torch.Generator().manual_seed(1)
        down = torch.randn(SIZES["hidden_size"], 2, generator=generator).requires_grad_()
        up = torch.randn(2, SIZES["hidden_size"], generator=generator).requires_grad_()
        q_proj.register_forward_hook(lambda module, args, output: output + args[0] @ down @ up)
        compute_loss(model).backward()
        return {"down": down.grad, "up": up.grad}

    assert_packed_matches_plain(folder, run)


def test_user_saved_tensor_hooks_take_precedence(folder):
    def on_rank():
        all_shapes = []
        for packs in BOTH:
            model, shapes = load(folder, packs), []
            hooks = torch.autograd.graph.saved_tensors_hooks(
                lambda t, shapes=shapes: shapes.append(t.shape) or t, tuple
            )
            with hooks:
                compute_loss(model)
            all_shapes.append(shapes)
        assert all_shapes[0] == all_shapes[1] != []

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("name", ["self_attn.q_proj", "mlp", "mlp.act_fn", "mlp.down_proj", "post_attention_layernorm"])
def test_checkpoint_inside_layer(folder, name):
    def run(model):
        for layer in model.model.layers:
            module = layer.get_submodule(name)
            module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
        compute_loss(model).backward()
        return gradients(model)

    assert_packed_matches_plain(folder, run)


def test_nothing_is_packed_without_grad(folder):
    def on_rank():
        model = load(folder, True)
        with RepackCounter() as count:
            with torch.no_grad():
                model(input_ids=make_ids())
            model.eval().generate(make_ids(), max_new_tokens=3, pad_token_id=0)
        assert not count.kept
        compute_loss(copy.deepcopy(model).train()).backward()

    run_ranks(on_rank, 2)


def test_user_hooks_run_once(folder):
    def on_rank():
        all_calls = []
        for packs in BOTH:
            model, calls = load(folder, packs), []
            all_calls.append(calls)
            for name in ("input_layernorm", "mlp.act_fn", "mlp.up_proj", "self_attn"):
                module = model.model.layers[0].get_submodule(name)
                module.register_forward_hook(lambda *args, calls=calls, name=name: calls.append(name))
            compute_loss(model).backward()
        assert all_calls[0] == all_calls[1] != []

    run_ranks(on_rank, 2)


def train_two_steps(model):
    """Returns the losses of two steps of two microbatches each and the local weights after them."""
    optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = {}
    for step in range(2):
        for part in range(2):
            loss = compute_loss(model)
            loss.backward()
            losses[f"loss {step} {part}"] = loss.detach()
        optimizer.step()
        optimizer.zero_grad()
    return losses | {
        name: local_tensor(parameter).detach().clone() for name, parameter in local_named_parameters(model)
    }


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_data_parallel(folder, zero_stage):
    assert_packed_matches_plain(folder, train_two_steps, ranks=4, zero_stage=zero_stage, dp_size=2)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble", "zbv"])
def test_pipelines(longer, schedule):
    def run(model):
        return {name: tensor for name, tensor in train_two_steps(model).items() if tensor.numel()}

    assert_packed_matches_plain(longer, run, ranks=4, pp_size=2, num_microbatches=2, pipeline_schedule=schedule)


def test_compiled_layers(folder):
    def on_rank():
        expected = load(folder, False)
        compute_loss(expected).backward()
        model = load(folder, True)
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        compute_loss(model).backward()
        grads = gradients(model)
        for name, tensor in gradients(expected).items():
            torch.testing.assert_close(grads[name], tensor, rtol=1e-5, atol=1e-7)

    run_ranks(on_rank, 2)


def test_packing_defaults():
    layout = MegatronConfig(tp_size=2, sequence_parallel=True)
    assert layout.packs_activations("nccl") and not layout.packs_activations("gloo")
    assert MegatronConfig(tp_size=2, sequence_parallel=True, shard_saved_activations=True).packs_activations("gloo")
    assert not MegatronConfig(tp_size=2, sequence_parallel=True, shard_saved_activations=False).packs_activations(
        "nccl"
    )
    assert not MegatronConfig(tp_size=2).packs_activations("nccl")
    with pytest.raises(ConfigError, match="shard_saved_activations = 1: expected True or False"):
        MegatronConfig(tp_size=2, sequence_parallel=True, shard_saved_activations=1)
    with pytest.raises(ConfigError, match="shard_saved_activations = True: needs sequence_parallel"):
        MegatronConfig(tp_size=2, shard_saved_activations=True)
