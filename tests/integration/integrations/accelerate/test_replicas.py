"""Tests of the numbers by which scripts share out data, which count replicas, and of collectives over the world."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import ProfileKwargs, set_seed
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModel, AutoModelForCausalLM, Trainer, TrainingArguments

import hf_megatron
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.errors import RankError
from hf_megatron.integrations.accelerate import replicas, shuffled_order
from tests.integration.integrations.trainer.test_trainer import rows

# Layout -> number of ranks.
WORLDS = {"tp2": 2, "cp2": 2, "pp2": 2, "dp2": 2, "tp2+dp2": 4, "pp2+dp2": 4}
layouts = pytest.mark.parametrize("name", WORLDS)


def parse(name):
    return None if name is None else parse_layouts(name)[0]


def count_replicas(name):
    return 2 if name is not None and "dp2" in name else 1


def load(path, name, auto_class=AutoModelForCausalLM):
    return auto_class.from_pretrained(path, megatron_config=parse(name)).train()


def make_arguments(output, **options):
    return TrainingArguments(
        str(output), use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_steps=1, **options
    )


def describe_rank(path, output, name):
    """Returns the replicas that Accelerate and Trainer report, and where this rank is the one of the job."""
    model = load(path, name)
    accelerator, arguments = Accelerator(cpu=True), make_arguments(output)
    trainer = Trainer(model, arguments)
    set_seed(3, device_specific=True)
    counts = (accelerator.num_processes, accelerator.process_index, arguments.world_size, arguments.process_index)
    single = (
        accelerator.is_main_process,
        accelerator.is_local_main_process,
        trainer.is_world_process_zero(),
        trainer.is_local_process_zero(),
        arguments.should_save,
        arguments.should_log,
    )
    return counts, single, accelerator.is_last_process, torch.initial_seed()


@layouts
def test_counts_are_those_of_replicas(stories, tmp_path, name):
    world, count = WORLDS[name], count_replicas(name)
    for rank, (counts, single, is_last, seed) in enumerate(run_ranks(describe_rank, world, stories, tmp_path, name)):
        index = rank // (world // count)
        assert counts == (count, index, count, index)
        assert set(single) == {rank == 0} and is_last == (rank == world - 1)
        assert seed == 3 + index


def test_launched_arguments_count_replicas_before_a_model_exists(tmp_path):
    def create():
        from hf_megatron.integrations.accelerate.launched_script import follow_launcher

        follow_launcher()
        arguments = make_arguments(tmp_path)
        return arguments.world_size, arguments.process_index, arguments.should_save

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_MEGATRON_TP_SIZE", "2")
        assert run_ranks(create, 2) == [(1, 0, True), (1, 0, False)]


def test_each_rank_writes_its_own_trace(stories, tmp_path):
    def profile():
        model = load(stories, "tp2")
        accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(output_trace_dir=str(tmp_path))])
        with accelerator.profile():
            assert accelerator.process_index == 0 and accelerator.prepare(model) is model

    run_ranks(profile, 2)
    assert len(list(tmp_path.iterdir())) == 2


def test_main_process_goes_first_in_a_single_replica(stories, tmp_path):
    def enter():
        model = load(stories, "tp2")
        arguments, mark = make_arguments(tmp_path), tmp_path / "prepared"
        with arguments.main_process_first():
            is_prepared = mark.exists()
            mark.touch()
        return is_prepared, model.config.model_type

    assert [is_prepared for is_prepared, _ in run_ranks(enter, 2)] == [False, True]


# Training by these numbers


class SamplerTrainer(Trainer):
    """A trainer whose sampler shares out the samples by the numbers of its arguments, in a loader that is prepared."""

    def _get_train_sampler(self, *args, **kwargs):
        return DistributedSampler(
            self.train_dataset, num_replicas=self.args.world_size, rank=self.args.process_index, shuffle=True, seed=3
        )


class SharedOutTrainer(SamplerTrainer):
    """A trainer that shares out its samples itself, by the numbers of its arguments."""

    def get_train_dataloader(self):
        size, sampler = 4 // self.args.world_size, self._get_train_sampler()
        return DataLoader(self.train_dataset, batch_size=size, sampler=sampler, collate_fn=self.data_collator)


def count_all_ranks(patch):
    """Seeded fault: counts ranks, as upstream."""
    patch.setattr(replicas, "_ranks_per_replica", lambda: 1)
    patch.setattr(replicas, "is_ours", lambda accelerator: False)


def share_out_twice(patch):
    """Seeded fault: Accelerate shares out batches of samples that are shared out, as upstream."""
    patch.setattr(shuffled_order, "_yield_all_samples", lambda sampler: None)


def train_shared_out(path, output, name, fault=None, trainer_class=SharedOutTrainer):
    with pytest.MonkeyPatch.context() as patch:
        model = load(path, name)
        if fault is not None:
            fault(patch)
        # The sampler deals out samples one at a time: steps have the same samples on any number of replicas.
        arguments = make_arguments(
            output, max_steps=6, lr_scheduler_type="constant", per_device_train_batch_size=4 // count_replicas(name)
        )
        trainer = trainer_class(model, arguments, train_dataset=rows(16, 0))
        trainer.train()
        return [
            value for log in trainer.state.log_history if "loss" in log for value in (log["loss"], log["grad_norm"])
        ]


@pytest.mark.parametrize("name", ["tp2", "pp2", "dp2", "tp2+dp2"])
@pytest.mark.parametrize("trainer_class", [SamplerTrainer, SharedOutTrainer])
def test_trainer_that_shares_out_samples_matches_single_process(stories, tmp_path, name, trainer_class):
    """Trains for six steps of 4 samples out of 16: a prepared loader has another order in its second epoch."""
    [expected] = run_ranks(train_shared_out, 1, stories, tmp_path, None, None, trainer_class)
    for losses in run_ranks(train_shared_out, WORLDS[name], stories, tmp_path, name, None, trainer_class):
        assert losses == pytest.approx(expected, rel=2e-4)


def test_sharing_out_samples_twice_is_detected(stories, tmp_path):
    [expected] = run_ranks(train_shared_out, 1, stories, tmp_path, None, None, SamplerTrainer)
    [losses, _] = run_ranks(train_shared_out, 2, stories, tmp_path, "dp2", share_out_twice, SamplerTrainer)
    assert losses[:2] != pytest.approx(expected[:2], rel=2e-2)


def test_counting_ranks_is_detected(stories, tmp_path):
    with pytest.raises(RankError, match="must share a batch"):
        run_ranks(train_shared_out, 2, stories, tmp_path, "pp2", count_all_ranks)


def pool(model, ids):
    hidden = model(input_ids=ids, attention_mask=torch.ones_like(ids)).last_hidden_state
    return F.normalize(hidden.mean(1), dim=-1)


def gather_by_accelerator(accelerator, passages):
    gathered, start = accelerator.gather(passages.detach()), accelerator.process_index * len(passages)
    return torch.cat([gathered[:start], passages, gathered[start + len(passages) :]]), start


def gather_over(group):
    def gather(accelerator, passages):
        parts = [torch.empty_like(passages) for _ in range(dist.get_world_size(group()))]
        dist.all_gather(parts, passages.detach().contiguous(), group=group())
        rank = dist.get_rank(group())
        parts[rank] = passages
        return torch.cat(parts), rank * len(passages)

    return gather


def train_with_negatives(path, name, gather):
    """Trains with in-batch negatives of all replicas; returns losses, the final norm, and messages of warnings."""
    model = load(path, name, AutoModel)
    accelerator = Accelerator(cpu=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    ids = torch.randint(3, 500, (8, 2, 10), generator=torch.Generator().manual_seed(0))
    data = DataLoader(ids, batch_size=8 // count_replicas(name))
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            for batch in data:
                queries, passages = pool(model, batch[:, 0]), pool(model, batch[:, 1])
                candidates, start = gather(accelerator, passages)
                scores = queries @ candidates.T / 0.05
                loss = F.cross_entropy(scores, torch.arange(len(queries)) + start)
                accelerator.backward(loss)
                norm = accelerator.clip_grad_norm_(model.parameters(), 1e9)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(accelerator.gather(loss.detach()).mean().item())
    messages = [str(one.message) for one in caught if "torch.distributed." in str(one.message)]
    return [*losses, float(norm)], messages, [one.filename for one in caught if "default group" in str(one.message)]


def gather_alone(accelerator, passages):
    return passages, 0


@pytest.mark.parametrize("name", ["tp2", "pp2"])
@pytest.mark.parametrize("gather", [gather_by_accelerator, gather_over(hf_megatron.data_parallel_group)])
def test_negatives_of_replicas_match_single_process(stories, name, gather):
    [(expected, _, _)] = run_ranks(train_with_negatives, 1, stories, None, gather_alone)
    for losses, messages, _ in run_ranks(train_with_negatives, 2, stories, name, gather):
        assert losses == pytest.approx(expected, rel=2e-4)
        assert messages == []


def test_negatives_on_replicas_are_those_of_all_samples(stories):
    """The first loss equals a single process's; later ones differ, because gathered negatives carry no gradient."""
    [(expected, _, _)] = run_ranks(train_with_negatives, 1, stories, None, gather_alone)
    results = run_ranks(train_with_negatives, 4, stories, "tp2+dp2", gather_by_accelerator)
    over_group = run_ranks(train_with_negatives, 4, stories, "tp2+dp2", gather_over(hf_megatron.data_parallel_group))
    for (losses, _, _), (same, messages, _) in zip(results, over_group, strict=True):
        assert losses[0] == pytest.approx(expected[0], rel=2e-5) and losses == pytest.approx(same, rel=1e-6)
        assert messages == []


def test_collective_over_the_world_is_reported_once(stories):
    [(expected, _, _)] = run_ranks(train_with_negatives, 1, stories, None, gather_alone)
    (losses, messages, files), (_, others, _) = run_ranks(
        train_with_negatives, 2, stories, "tp2", gather_over(lambda: None)
    )
    assert losses[0] != pytest.approx(expected[0], rel=1e-2)
    assert len(messages) == 1 and "group=hf_megatron.data_parallel_group()" in messages[0]
    assert "torch.distributed.all_gather over" in messages[0] and files == [__file__]
    assert others == []
    # On data-parallel ranks alone, the world has one rank per replica.
    assert [
        messages for _, messages, _ in run_ranks(train_with_negatives, 2, stories, "dp2", gather_over(lambda: None))
    ] == [[], []]


@pytest.mark.parametrize(("name", "lines"), [("tp2", 1), ("dp2", 0)])
def test_counts_are_announced_once(stories, name, lines, capfd):
    def load_twice():
        load(stories, name)
        load(stories, name)

    run_ranks(load_twice, 2)
    assert capfd.readouterr().err.count("hf_megatron.data_parallel_group()") == lines


def test_group_without_a_model():
    def get_group():
        return hf_megatron.data_parallel_group() is dist.group.WORLD

    assert hf_megatron.data_parallel_group() is None
    assert run_ranks(get_group, 2) == [True, True]
