"""Parity tests of context-parallel attention: output and every gradient, in double precision."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_megatron.context_parallel import attention, flash, kernels
from hf_megatron.context_parallel import masks as masks_module
from hf_megatron.context_parallel.attention import ContextGroups, TokenLayout, context_attention
from hf_megatron.context_parallel.kernels import Kernel
from hf_megatron.context_parallel.masks import SequenceMask
from hf_megatron.context_parallel.token_exchange import Passing, take_tokens
from hf_megatron.context_parallel.varlen_batching import JoinedBlocks
from hf_megatron.core.fork_harness import run_ranks
from tests.unit.context_parallel.test_load_balancing import make_masks

# Name -> ranks, ranks that exchange heads (all-to-all), whether keys are all-gathered.
SCHEMES = {
    "p2p": (2, 1, False),
    "a2a": (2, 2, False),
    "all_gather": (2, 1, True),
    "p2p of four": (4, 1, False),
    "a2a+p2p": (4, 2, False),
    "a2a and all_gather": (4, 2, True),
}
# Query heads, key heads, head size of queries and of values, options.
KINDS = {
    "plain": (4, 4, 8, 8, {}),
    "grouped": (4, 2, 8, 8, {}),
    "one head of keys": (4, 1, 8, 8, {}),
    "narrow values": (4, 2, 12, 8, {}),
    "sinks": (4, 2, 8, 8, {"sinks": True}),
    "softcap": (4, 2, 8, 8, {"softcap": 2.0}),
}
BATCH = 2


def make_inputs(kind, length):
    heads, groups, width, narrow, options = KINDS[kind]
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = draw(BATCH, heads, length, width), draw(BATCH, groups, length, width), draw(BATCH, groups, length, narrow)
    return [q, k, v, draw(heads) if options.get("sinks") else None], draw(BATCH, heads, length, narrow).detach()


def compute_reference(kind, length, dense):
    (q, k, v, sinks), direction = make_inputs(kind, length)
    groups, options = q.shape[1] // k.shape[1], KINDS[kind][4]
    scores = q @ k.repeat_interleave(groups, 1).mT * 0.3
    if "softcap" in options:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    scores = scores.masked_fill(~dense.unsqueeze(1), -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(BATCH, -1, length, 1)], -1)
    weights = scores.softmax(-1)
    # A query without any key gets zeros, as in sdpa.
    weights = weights.masked_fill(~dense.any(-1).view(-1, 1, length, 1), 0)[..., :length]
    out = weights @ v.repeat_interleave(groups, 1)
    leaves = [tensor for tensor in (q, k, v, sinks) if tensor is not None]
    return [out.detach(), *torch.autograd.grad(out, leaves, direction)]


def make_context_groups(ranks, heads, gathers):
    """Returns groups of `heads` neighboring ranks for the all-to-all, and rings of ranks that are `heads` apart."""
    neighbours = [tuple(range(first, first + heads)) for first in range(0, ranks, heads)]
    rings = [tuple(range(first, ranks, heads)) for first in range(heads)]
    process_groups = [
        dist.new_subgroups_by_enumeration([list(group) for group in groups])[0] if len(groups[0]) > 1 else None
        for groups in (neighbours, rings)
    ]
    return ContextGroups(process_groups[0], process_groups[1], gathers)


def run_on_ranks(scheme, cases, length, joins=None):
    """Returns the gathered output and gradients for each (kind, mask) case."""
    ranks, heads, gathers = SCHEMES[scheme]

    def on_rank():
        groups, outputs = make_context_groups(ranks, heads, gathers), []
        assert groups.rank == dist.get_rank()
        for kind, name in cases:
            (q, k, v, sinks), direction = make_inputs(kind, length)
            sample, (mask, _) = TokenLayout(groups, length), make_masks(length)[name]
            q, k, v, direction = (take_tokens(t, 2, sample.order, groups.rank) for t in (q, k, v, direction))
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, sinks) if tensor is not None]
            kernel = Kernel(0.3, KINDS[kind][4].get("softcap"), joins)
            out = context_attention(*leaves[:3], sample, mask, kernel, *leaves[3:])
            outputs.append([out.detach(), *torch.autograd.grad(out, leaves, direction)])
        return outputs

    results = run_ranks(on_rank, ranks)
    order = TokenLayout(ContextGroupSizes(ranks, heads), length).order
    merged = []
    for case_idx in range(len(cases)):
        parts = [result[case_idx] for result in results]
        width = max(order.sizes)
        gathered = [
            torch.cat([torch.nn.functional.pad(p, (0, 0, 0, width - p.shape[2])) for p in tensors], 2)[
                :, :, order.natural
            ]
            for tensors in list(zip(*parts, strict=True))[:4]
        ]
        # Gradients of replicated sinks are partial on each rank.
        merged.append(gathered + [sum(tensors) for tensors in list(zip(*parts, strict=True))[4:]])
    return merged


class ContextGroupSizes(ContextGroups):
    """Sizes without process groups."""

    def __init__(self, ranks, heads):
        object.__setattr__(self, "_sizes", (heads, ranks // heads))

    head_ranks = property(lambda self: self._sizes[0])
    ring_ranks = property(lambda self: self._sizes[1])
    ring_rank = 0


def compute_worst_errors(cases, found, length):
    return {
        case: max(
            float((one - other).abs().max())
            for one, other in zip(
                compute_reference(case[0], length, make_masks(length)[case[1]][1]), tensors, strict=True
            )
        )
        for case, tensors in zip(cases, found, strict=True)
    }


CASES = [
    *(("grouped", name) for name in make_masks(16)),
    *((kind, "window") for kind in KINDS),
    ("sinks", "left padding"),
]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_attention_matches_single_process(scheme):
    for length in (61, 3):
        errors = compute_worst_errors(CASES, run_on_ranks(scheme, CASES, length), length)
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.parametrize("scheme", ["p2p", "p2p of four", "a2a", "all_gather"])
def test_joined_blocks_match_single_process(scheme, monkeypatch):
    """Joins all blocks of a step in one call, as for varlen flash kernels on a device."""
    monkeypatch.setattr(masks_module, "TILE", 8)
    errors = compute_worst_errors(CASES, run_on_ranks(scheme, CASES, 61, joins=True), 61)
    assert max(errors.values()) < 1e-12, errors


def test_packed_sequence_takes_two_kernel_calls(monkeypatch):
    """For any number of documents: one call for all causal blocks and one for all full blocks."""
    borders = torch.zeros(1, 64, dtype=torch.bool)
    borders[0, [9, 20, 40]] = True
    mask = SequenceMask.causal(64).documents(borders)
    sample = TokenLayout(ContextGroupSizes(2, 1), 64, mask.borders)
    blocks = list(mask.blocks(sample.ring.parts[0], sample.ring.parts[0]))
    calls = []
    original = kernels.flash_varlen_forward

    def count_blocks(*tensors, edges, **options):
        calls.append(len(edges[0]) - 1)
        return original(*tensors, edges=edges, **options)

    monkeypatch.setattr(kernels, "flash_varlen_forward", count_blocks)
    q = torch.randn(1, 2, sample.ring.sizes[0], 8)
    out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    Kernel(0.3, joins=True).add_forward(out, lse, q, q, q, blocks)
    assert len(blocks) > 4 and len(calls) == 2 and sum(calls) == len(blocks)


def test_varlen_flash_shapes_and_dtypes():
    """Uses fake CUDA tensors, since there may be no device: shapes and dtypes of torch's operators."""
    with FakeTensorMode():
        q = torch.empty(30, 4, 64, device="cuda", dtype=torch.bfloat16)
        k = torch.empty(40, 2, 64, device="cuda", dtype=torch.bfloat16)
        assert flash.supports_varlen_flash(q) and not flash.supports_varlen_flash(q.float())
        assert not flash.supports_varlen_flash(q.narrow(-1, 0, 60))
        options = {"edges": ([0, 10, 30], [0, 10, 40]), "causal": False, "scale": 0.3}
        out, lse = flash.flash_varlen_forward(q, k, k, **options)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (30, 4), torch.float32)
        gradients = flash.flash_varlen_backward(out, q, k, k, out, lse, **options)
        assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, k.shape]


def test_scores_are_computed_in_tiles(monkeypatch):
    """Covers the path without a fused kernel, for blocks with more queries than a tile."""
    monkeypatch.setattr(kernels, "TILE", 5)
    cases = [("softcap", name) for name in ("causal", "full", "window", "left padding")]
    errors = compute_worst_errors(cases, run_on_ranks("p2p", cases, 61), 61)
    assert max(errors.values()) < 1e-12, errors


def test_keys_are_sent_before_block_computation():
    """Keys and values are in flight while a block is computed, and waited for after it."""

    def on_rank():
        events = []

        class RecordedPassing(Passing):
            def __init__(self, *args):
                super().__init__(*args)
                events.append("sent")

            def wait(self):
                events.append("waited")
                return super().wait()

        def forward(self, *args, **kwargs):
            events.append("block")
            return stock(self, *args, **kwargs)

        stock, kernels.Kernel.forward = kernels.Kernel.forward, forward
        attention.Passing = RecordedPassing
        groups = make_context_groups(2, 1, False)
        (q, k, v, _), _ = make_inputs("plain", 64)
        sample = TokenLayout(groups, 64)
        q, k, v = (take_tokens(tensor, 2, sample.order, groups.rank).detach() for tensor in (q, k, v))
        context_attention(q, k, v, sample, make_masks(64)["full"][0], Kernel(0.3))
        return [event for event, _ in itertools.groupby(events)]

    assert run_ranks(on_rank, 2) == [["sent", "block", "waited", "block"]] * 2


FAULTS = (
    "merge",
    "dead",
    "hop",
    "swapped",
    "window",
    "sinks in each block",
    "sinks of other heads",
    "copies",
    "joined",
)


@pytest.mark.parametrize("fault", FAULTS)
def test_seeded_faults_are_detected(fault, monkeypatch):
    cases = [("grouped", "window"), ("sinks", "left padding"), ("grouped", "left padding")]
    if fault == "sinks of other heads":
        cases = [("sinks", "causal")]
    elif fault in ("copies", "joined"):
        cases = [("one head of keys", "causal")]
    references = [compute_reference(kind, 64, make_masks(64)[name][1]) for kind, name in cases]
    scheme, joins = "p2p", None
    if fault == "merge":
        monkeypatch.setattr(
            kernels, "add_block", lambda out, lse, part, part_lse: (out.add_(part), lse.copy_(part_lse))
        )
    elif fault == "sinks in each block":
        monkeypatch.setattr(Kernel, "add_forward", _add_sink_per_block(Kernel.add_forward))
    elif fault == "sinks of other heads":
        scheme = "a2a"
        monkeypatch.setattr(attention.dist, "get_rank", lambda group=None: 0 if group is not None else stock_rank())
        monkeypatch.setattr(attention.ContextGroups, "rank", property(lambda self: stock_rank()))
    elif fault == "copies":
        scheme = "a2a"
        monkeypatch.setattr(
            torch.Tensor, "repeat_interleave", _keep_first_copy_gradient(torch.Tensor.repeat_interleave)
        )
    elif fault == "joined":
        joins = True
        monkeypatch.setattr(JoinedBlocks, "causal", False)
    elif fault == "dead":
        stock = Kernel.forward

        def forward(self, *args, mask, **kwargs):
            out, lse = stock(self, *args, mask=mask, **kwargs)
            return out, lse.masked_fill(lse == -torch.inf, 0)

        monkeypatch.setattr(Kernel, "forward", forward)
    elif fault == "hop":
        monkeypatch.setattr(attention._RingGradients, "result", _use_last_sent_gradients)
    elif fault == "swapped":
        monkeypatch.setattr(attention, "_ring_steps", _flip_keys(attention._ring_steps))
    else:
        monkeypatch.setattr(attention.SequenceMask, "window", lambda self, size: self)
    outputs = run_on_ranks("p2p of four" if fault == "hop" else scheme, cases, 64, joins)
    errors = [
        max(float((one - other).abs().max()) for one, other in zip(right, tensors, strict=True))
        for right, tensors in zip(references, outputs, strict=True)
    ]
    assert max(errors) > 1e-3


stock_rank = dist.get_rank


def _add_sink_per_block(stock):
    """Adds the weight of a sink in every ring step."""

    def add_forward(self, out, lse, *tensors):
        stock(self, out, lse, *tensors)
        with_sink = torch.logaddexp(lse, torch.zeros_like(lse))
        out *= torch.exp(lse - with_sink).unsqueeze(-1)
        lse.copy_(with_sink)

    return add_forward


def _keep_first_copy_gradient(stock):
    """Propagates gradients through the first copy of a repeated head only."""

    def repeat_interleave(self, copies, dim):
        parts = [self if number == 0 else self.detach() for number in range(copies)]
        return torch.stack(parts, dim + 1).flatten(dim, dim + 1)

    return repeat_interleave


def _use_last_sent_gradients(ring_gradients):
    """Returns the gradients sent last instead of the received gradients of local keys and values."""
    ring_gradients.in_flight.wait()
    return attention._unpacked(
        ring_gradients.layout,
        ring_gradients.layout.groups.ring_rank,
        ring_gradients._sent,
        ring_gradients.k,
        ring_gradients.v,
    )


def _flip_keys(around):
    def flip_keys(row, k, v):
        for other, keys, values in around(row, k, v):
            yield other, keys.flip(2), values

    return flip_keys


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_host_masks_move_to_the_device(softcap):
    """Runs on meta tensors, which check shapes and devices as on any accelerator."""
    q, k, v, gradient, out = (torch.empty(2, 4, 8, 16, device="meta") for _ in range(5))
    options = {"causal": False, "mask": torch.ones(2, 1, 8, 8, dtype=torch.bool)}
    kernel = Kernel(0.25, softcap)
    output, lse = kernel.forward(q, k, v, **options)
    gradients = kernel.backward(gradient, q, k, v, out, lse, **options)
    assert [tensor.shape for tensor in (output, *gradients)] == [q.shape] * 4
