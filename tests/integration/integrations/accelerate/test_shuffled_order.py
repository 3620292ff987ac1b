"""Tests of the order of shuffled loops: a single process's on every layout, also after a resume."""

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_megatron import MegatronPlugin
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.integrations.accelerate import checkpoints, shuffled_order

WORLDS = {"tp2": 2, "pp2": 2, "dp2": 2, "tp2+dp2": 4}


def parse(name):
    return None if name is None else parse_layouts(name)[0]


def make_loader(name, sampler=None, *, samples=16, **options):
    """Returns an Accelerator and a prepared loader of batches of four samples over all replicas."""
    plugin = None if name is None else MegatronPlugin(parse(name))
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, **options)
    data, size = torch.arange(samples), 4 // accelerator.num_processes
    choice = {"shuffle": True} if sampler is None else {"sampler": sampler(data)}
    return accelerator, accelerator.prepare(DataLoader(data, batch_size=size, **choice))


def read_epochs(name, sampler=None, rank_seed=0, sabotage=None, **options):
    """Returns two epochs of samples; rank `r` is seeded with `42 + rank_seed * r`."""
    with pytest.MonkeyPatch.context() as patch:
        set_seed(42 + rank_seed * (dist.get_rank() if dist.is_initialized() else 0))
        before = torch.get_rng_state()
        accelerator, loader = make_loader(name, sampler, **options)
        assert torch.equal(torch.get_rng_state(), before)
        if sabotage is not None:
            sabotage(patch)
        return [accelerator.gather_for_metrics(batch).tolist() for _ in range(2) for batch in loader]


def draw_with_replacement(data):
    return RandomSampler(data, replacement=True, num_samples=12)


def draw_weighted(data):
    return WeightedRandomSampler([1.0 + index for index in range(len(data))], len(data), replacement=False)


def draw_subset(data):
    return SubsetRandomSampler(range(len(data)))


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize("sampler", [None, draw_with_replacement, draw_weighted, draw_subset])
def test_order_matches_single_process(name, sampler):
    [expected] = run_ranks(read_epochs, 1, None, sampler)
    assert len(set(map(tuple, expected))) == len(expected)
    assert run_ranks(read_epochs, WORLDS[name], name, sampler) == [expected] * WORLDS[name]


@pytest.mark.parametrize("seedable", [False, True])
def test_order_of_a_configured_loader_matches_single_process(seedable):
    configuration = DataLoaderConfiguration(use_seedable_sampler=seedable)
    [expected] = run_ranks(read_epochs, 1, None, dataloader_config=configuration)
    assert run_ranks(read_epochs, 2, "dp2", dataloader_config=configuration) == [expected] * 2


@pytest.mark.parametrize("name", ["tp2", "dp2"])
@pytest.mark.parametrize("sampler", [None, draw_weighted, draw_subset])
def test_ranks_with_other_seeds_follow_the_first(name, sampler):
    [expected] = run_ranks(read_epochs, 1, None, sampler)
    assert run_ranks(read_epochs, 2, name, sampler, rank_seed=1) == [expected] * 2


def draw_on_each_rank(patch):
    """Seeded fault: each rank shuffles by its own seed."""
    patch.setattr(shuffled_order.dist, "is_initialized", lambda: False)


def test_order_of_each_rank_is_detected():
    [expected] = run_ranks(read_epochs, 1, None)
    assert run_ranks(read_epochs, 2, "dp2", rank_seed=1, sabotage=draw_on_each_rank) != [expected] * 2


def train_new_head(path, name):
    """Trains a classifier with a new head as Accelerate's examples do; returns the losses of two epochs."""
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=None if name is None else MegatronPlugin(parse(name)))
    set_seed(42)
    samples = [{"input_ids": torch.full((4,), k + 3), "labels": torch.tensor(k % 2)} for k in range(16)]
    loader = DataLoader(samples, shuffle=True, batch_size=4 // accelerator.num_processes)
    model = AutoModelForSequenceClassification.from_pretrained(path, megatron_config=parse(name), pad_token_id=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for batch in (batch for _ in range(2) for batch in loader):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
    return losses


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_example_loop_matches_single_process(stories, name):
    [expected] = run_ranks(train_new_head, 1, stories, None)
    for losses in run_ranks(train_new_head, 2, stories, name):
        assert losses == pytest.approx(expected, rel=2e-5)


class EpochSampler(torch.utils.data.Sampler):
    """A sampler with an order per epoch, passed by `set_epoch`."""

    def __init__(self, data):
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.data)

    def __iter__(self):
        generator = torch.Generator().manual_seed(100 + self.epoch)
        return iter(torch.randperm(len(self.data), generator=generator).tolist())


def read_rest_of_epoch(name, dispatch):
    configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator, loader = make_loader(name, EpochSampler, dataloader_config=configuration)
    loader.iteration = 2
    return [accelerator.gather(batch).tolist() for batch in accelerator.skip_first_batches(loader, 1)]


@pytest.mark.parametrize("name", ["tp2", "dp2", "tp2+dp2"])
def test_epoch_reaches_a_sampler_behind_skipped_batches(name):
    [expected] = run_ranks(read_rest_of_epoch, 1, None, False)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(102)).tolist()
    assert [sample for batch in expected for sample in batch] == order[4:]
    assert run_ranks(read_rest_of_epoch, WORLDS[name], name, False) == [expected] * WORLDS[name]


def test_epoch_reaches_the_sampler_of_dispatched_batches():
    order = torch.randperm(16, generator=torch.Generator().manual_seed(102)).tolist()
    for batches in run_ranks(read_rest_of_epoch, 2, "dp2", True):
        # As upstream, a dispatching loader skips batches of one rank.
        assert [sample for batch in batches for sample in batch] == order[2:]


def read_rest_by_upstream(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffled_order, "list_samplers", lambda loader: [])
        return read_rest_of_epoch(name, False)


def test_epoch_that_does_not_reach_the_sampler_is_detected():
    [expected] = run_ranks(read_rest_of_epoch, 1, None, False)
    assert run_ranks(read_rest_by_upstream, 2, "dp2") != [expected] * 2


def train_epochs(path, folder, name, *, resume=None):
    """Returns the losses of each epoch; the state is saved at the end of the first one."""
    kwargs = {} if name is None else {"megatron_config": parse(name)}
    plugin = None if name is None else MegatronPlugin(parse(name))
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    set_seed(3)
    ids = torch.randint(0, 512, (16, 6))
    data = [{"input_ids": row, "labels": row} for row in ids]
    loader = DataLoader(data, batch_size=4 // accelerator.num_processes, shuffle=True)
    model = AutoModelForCausalLM.from_pretrained(path, **kwargs)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader)
    if resume is not None:
        accelerator.load_state(resume)
    losses = []
    for epoch in range(0 if resume is None else 1, 4):
        losses.append([])
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(accelerator.gather(loss.detach()).mean().item())
        if epoch == 0 and resume is None:
            accelerator.save_state(folder)
    return losses


@pytest.mark.parametrize("name", ["tp2", "dp2"])
def test_epochs_after_a_resume_at_their_border_have_their_order(stories, tmp_path, name):
    [expected] = run_ranks(train_epochs, 1, stories, tmp_path / "stock", None)
    uninterrupted = run_ranks(train_epochs, 2, stories, tmp_path / name, name)
    assert all(
        losses == pytest.approx(wanted, rel=1e-5) for losses, wanted in zip(uninterrupted[0], expected, strict=True)
    )
    resumed = run_ranks(train_epochs, 2, stories, tmp_path / name, name, resume=tmp_path / name)
    assert resumed == [losses[1:] for losses in uninterrupted]


def test_state_restored_again_in_a_new_epoch_is_detected(stories, tmp_path):
    """Seeded fault: the random state is restored after the epoch has drawn its order from it."""

    def resume():
        checkpoints.skips_batches = lambda loader: True
        return train_epochs(stories, tmp_path, "tp2", resume=tmp_path)

    uninterrupted = run_ranks(train_epochs, 2, stories, tmp_path, "tp2")
    for losses, wanted in zip(run_ranks(resume, 2), uninterrupted, strict=True):
        assert losses[0] == wanted[1] and losses[1:] != wanted[2:]
