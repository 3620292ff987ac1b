"""Tests of batch-aware labels: derived labels, counted loss terms and unaffected operations."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.core.axes import Axes
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.mesh import ParallelMesh
from hf_megatron.losses.batch_loss import BatchLoss, LossDenominators
from hf_megatron.losses.inline_losses import BatchLabels, know_batch
from hf_megatron.losses.targets import count_terms, with_codebooks

CLASSES = 5


def _make_data(kind):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, CLASSES, generator=generator)
    labels = torch.randint(0, CLASSES, (7,), generator=generator)
    labels[[2, 5, 6]] = -100
    other = torch.rand(7, CLASSES, generator=generator)
    return logits, {"classes": labels, "numbers": other, "probabilities": other / other.sum(-1, keepdim=True)}[kind]


WEIGHTS = torch.tensor([0.5, 1.0, 2.0, 0.1, 3.0])
LOSSES = {
    "cross entropy": ("classes", nn.CrossEntropyLoss()),
    "class weights": ("classes", nn.CrossEntropyLoss(weight=WEIGHTS)),
    "smoothed": ("classes", nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2)),
    "probabilities": ("probabilities", nn.CrossEntropyLoss(weight=WEIGHTS)),
    "log likelihood": ("classes", lambda logits, labels: F.nll_loss(logits.log_softmax(-1), labels)),
    "squares": ("numbers", nn.MSELoss()),
    "differences": ("numbers", nn.L1Loss()),
    "smooth": ("numbers", nn.SmoothL1Loss()),
    "huber": ("numbers", nn.HuberLoss()),
    "binary": ("numbers", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS)),
    "divergence": ("probabilities", lambda z, y: F.kl_div(z.log_softmax(-1), y, reduction="batchmean")),
    "by position": ("classes", lambda logits, labels: F.cross_entropy(logits, labels, None, None, -100)),
    "by name": ("classes", lambda logits, labels: F.cross_entropy(input=logits, target=labels)),
    "two rows": ("classes", lambda logits, labels: F.cross_entropy(logits, labels.view(1, -1).squeeze(0).long())),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_is_the_mean_over_all_ranks(name):
    kind, function = LOSSES[name]
    logits, labels = _make_data(kind)
    logits.requires_grad_()
    expected = function(logits, labels)
    (expected * 3).backward()

    def on_rank():
        axes = Axes.of(MegatronConfig(dp_size=2), dist.get_rank())
        batch = BatchLoss(ParallelMesh.get_or_create(axes, "cpu"), None, False, "batch")
        local_logits, targets = (tensor.split([5, 2])[dist.get_rank()] for tensor in (logits.detach().clone(), labels))
        local_logits.requires_grad_()
        loss = function(local_logits, know_batch(targets, batch))
        (loss * 3).backward()
        assert type(loss) is torch.Tensor and batch.terms == 1
        return loss.item(), local_logits.grad

    results = run_ranks(on_rank, 2)
    assert [loss for loss, _ in results] == [pytest.approx(expected.item(), rel=1e-5)] * 2
    # Data parallelism averages the gradients over ranks afterwards.
    torch.testing.assert_close(torch.cat([gradient for _, gradient in results]) / 2, logits.grad, rtol=1e-5, atol=1e-6)


class SingleRankMesh:
    """Mesh stub with a single rank."""

    class axes:
        size = staticmethod(lambda name: 1)

    dp_size = 1


def _make_single_rank_batch():
    return BatchLoss(SingleRankMesh(), False, False, "batch")


@pytest.mark.parametrize(
    "change",
    [
        lambda labels: labels.view(-1),
        lambda labels: labels[..., 1:].contiguous(),
        lambda labels: labels.to(torch.int32),
        lambda labels: labels.clamp(0, 3),
        lambda labels: torch.where(labels > 2, labels, torch.tensor(-100)),
        lambda labels: F.pad(labels, (0, 1), value=-100),
        lambda labels: labels.split(2)[0],
        lambda labels: labels.masked_fill(labels == 0, -100).squeeze(-1).long(),
        lambda labels: torch.full_like(labels, -100),
        # A buffer for copies of the labels.
        lambda labels: labels.new_zeros(2, *labels.shape).fill_(-100),
    ],
)
def test_derived_labels_keep_the_batch(change):
    plain, batch = torch.arange(8).view(4, 2), _make_single_rank_batch()
    derived = change(know_batch(plain, batch))
    assert type(derived) is BatchLabels and derived.batch is batch
    assert torch.equal(derived.as_subclass(torch.Tensor), change(plain))


@pytest.mark.parametrize(
    "use",
    [
        lambda labels: labels != -100,
        lambda labels: labels.sum(),
        lambda labels: F.embedding(labels, torch.ones(8, 3)),
        lambda labels: F.one_hot(labels, 8),
        lambda labels: torch.zeros(8).gather(0, labels.view(-1)),
        lambda labels: labels.new_zeros(labels.shape),
        lambda labels: torch.cat([labels, labels]),
    ],
)
def test_other_results_are_plain_tensors(use):
    """Decoder inputs are derived from labels and must stay plain tensors."""
    plain = torch.arange(8).view(4, 2)
    result = use(know_batch(plain, _make_single_rank_batch()))
    assert type(result) is torch.Tensor and torch.equal(result, use(plain))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_sum_and_none_reductions_are_rejected(reduction):
    logits, labels = _make_data("classes")
    with pytest.raises(UnsupportedError, match=f"cross_entropy.reduction='{reduction}'.*without labels"):
        F.cross_entropy(logits, know_batch(labels, _make_single_rank_batch()), reduction=reduction)


def test_sum_is_allowed_when_terms_are_counted():
    logits, labels = _make_data("classes")
    batch = _make_single_rank_batch()
    batch.has_caller_count = True
    loss = F.cross_entropy(logits, know_batch(labels, batch), reduction="sum")
    torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum"))


def test_microbatch_loss_uses_global_term_count():
    logits, labels = _make_data("classes")
    batch = _make_single_rank_batch()
    with batch.with_denominators(LossDenominators({"labels": 8}, 2, {"labels": labels})):
        loss = F.cross_entropy(logits, know_batch(labels, batch))
        torch.testing.assert_close(loss, F.cross_entropy(logits, labels, reduction="sum") / 8)
        assert batch.used == {"labels"}
        with pytest.raises(UnsupportedError, match="Expected 4 loss terms for the labels, got 7"):
            F.cross_entropy(logits, know_batch(labels.clamp(min=0), batch))
    assert batch.microbatch_denominators is None


def test_half_precision_is_accumulated_in_fp32():
    logits = torch.randn(4096, CLASSES)
    labels = torch.randint(0, CLASSES, (4096,))
    loss = F.cross_entropy(logits.bfloat16(), know_batch(labels, _make_single_rank_batch()))
    torch.testing.assert_close(loss, F.cross_entropy(logits.bfloat16().float(), labels))


def test_torch_functions_are_not_patched():
    assert torch.jit.script(nn.CrossEntropyLoss())(*_make_data("classes")) > 0
    assert F.cross_entropy.__module__ == "torch.nn.functional"


def test_codebook_labels_have_separate_names_and_counts():
    labels = torch.tensor([[[1, -100], [2, -100]], [[3, 4], [-100, -100]]])
    arguments = {"labels": labels}
    assert with_codebooks(arguments) == ("labels", "labels.0", "labels.1")
    assert [int(count_terms(name, arguments, shifts=False)) for name in with_codebooks(arguments)] == [4, 3, 1]
    assert int(count_terms("labels.0", arguments, shifts=True)) == 1
    batch_labels = know_batch(labels, None)
    assert [batch_labels[..., book].contiguous().view(-1).argument for book in (0, -1)] == ["labels.0", "labels.1"]
    assert batch_labels[:, 0].argument == batch_labels[0, 0].argument == "labels"
    # Labels with one class per token, or with class probabilities, have no codebooks.
    assert with_codebooks({"labels": labels[..., 0]}) == with_codebooks({"labels": labels.float()}) == ("labels",)
