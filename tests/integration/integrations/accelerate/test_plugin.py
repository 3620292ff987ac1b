"""Tests of `Accelerator(megatron_lm_plugin=MegatronPlugin(...))`: data, gathering and stepping on tp and dp ranks."""

import types

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.tracking import GeneralTracker
from accelerate.utils import DataLoaderConfiguration, MegatronLMPlugin
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM

from hf_megatron import ConfigError, MegatronConfig, MegatronPlugin, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks

# Name -> world size and layout fields.
LAYOUTS = {"tp1 x dp2": (2, {}), "tp2 x dp2": (4, {"tp_size": 2}), "tp2": (2, {"tp_size": 2})}
layouts = pytest.mark.parametrize("name", LAYOUTS)


def make_accelerator(name, **kwargs):
    return Accelerator(cpu=True, megatron_lm_plugin=MegatronPlugin(MegatronConfig(**LAYOUTS[name][1])), **kwargs)


def group_by_dp_rank(name, results):
    """Returns one result per dp rank, after checking that its tensor-parallel ranks agree."""
    size = LAYOUTS[name][1].get("tp_size", 1)
    groups = [results[start : start + size] for start in range(0, len(results), size)]
    assert all(result == group[0] for group in groups for result in group)
    return [group[0] for group in groups]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(12))


class Stub(torch.nn.Linear):
    """A module with the attributes of a model that was loaded with `megatron_config`."""

    def __init__(self, **fields):
        super().__init__(2, 2)
        config = MegatronConfig(**fields)
        self.__dict__["_hf_megatron"] = types.SimpleNamespace(config=config, pipeline=None)
        self.tp_size = config.ranks_per_replica

    def forward(self, rows):
        self.computed_in = super().forward(rows).dtype
        return super().forward(rows)


@layouts
def test_dp_ranks_read_different_batches(name):
    def read_batches():
        accelerator = make_accelerator(name)
        loader = accelerator.prepare(DataLoader(range(8), batch_size=2))
        return [batch.tolist() for batch in loader]

    expected = [[[0, 1], [4, 5]], [[2, 3], [6, 7]]] if "dp2" in name else [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert group_by_dp_rank(name, run_ranks(read_batches, LAYOUTS[name][0])) == expected


@layouts
@pytest.mark.parametrize("seedable", [False, True])
def test_shuffled_epoch_has_every_sample_once(name, seedable):
    def read_epochs():
        import torch.distributed as dist

        # Seedable samplers use the seed of the script's set_seed, which is equal on all ranks.
        torch.manual_seed(0 if seedable else dist.get_rank())
        accelerator = make_accelerator(name, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
        loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))
        return [[sample for batch in loader for sample in batch.tolist()] for _ in range(2)]

    parts = group_by_dp_rank(name, run_ranks(read_epochs, LAYOUTS[name][0]))
    for epoch in range(2):
        samples = [sample for part in parts for sample in part[epoch]]
        assert sorted(samples) == list(range(12)) and samples != list(range(12))


@layouts
def test_iterable_dataset_has_every_sample_once(name):
    def read_samples():
        accelerator = make_accelerator(name)
        return [
            sample for batch in accelerator.prepare(DataLoader(Stream(), batch_size=2)) for sample in batch.tolist()
        ]

    parts = group_by_dp_rank(name, run_ranks(read_samples, LAYOUTS[name][0]))
    assert sorted(sample for part in parts for sample in part) == list(range(12))


def test_dispatch_batches_is_rejected():
    def create_with_dispatching():
        with pytest.raises(UnsupportedError, match="dispatch_batches"):
            make_accelerator("tp2 x dp2", dataloader_config=DataLoaderConfiguration(dispatch_batches=True))

    run_ranks(create_with_dispatching, 4)


@layouts
def test_gather_is_over_dp_and_drops_padding_samples(name):
    def gather():
        accelerator = make_accelerator(name)
        loader = accelerator.prepare(DataLoader(range(7), batch_size=2))
        tensors, objects, nested = [], [], []
        for batch in loader:
            tensors += accelerator.gather_for_metrics(batch).tolist()
            objects += accelerator.gather_for_metrics([f"sample {i}" for i in batch.tolist()])
            nested += accelerator.gather_for_metrics({"ids": (batch, batch[:, None])})["ids"][1][:, 0].tolist()
        everything = accelerator.gather(torch.tensor([dist.get_rank()]))
        scalar = accelerator.gather(torch.tensor(float(dist.get_rank())))
        return tensors, objects, nested, everything.tolist(), scalar.reshape(-1).tolist()

    world, fields = LAYOUTS[name]
    tp = fields.get("tp_size", 1)
    for rank, (tensors, objects, nested, everything, scalar) in enumerate(run_ranks(gather, world)):
        assert tensors == nested == list(range(7)) and objects == [f"sample {i}" for i in range(7)]
        assert everything == scalar == list(range(rank % tp, world, tp))


@layouts
def test_reduce_counts_each_batch_once(name):
    def reduce_counts():
        accelerator = make_accelerator(name)
        local_count = torch.tensor([1.0 + accelerator.process_index])
        return [accelerator.reduce({"count": local_count}, kind)["count"].item() for kind in ("sum", "mean", "max")]

    expected = [3.0, 1.5, 2.0] if "dp2" in name else [1.0, 1.0, 1.0]
    assert run_ranks(reduce_counts, LAYOUTS[name][0]) == [expected] * LAYOUTS[name][0]


@layouts
def test_scheduler_steps_once_per_replica_and_optimizer_step(name):
    def record_rates():
        accelerator = make_accelerator(name, gradient_accumulation_steps=2)
        weight = torch.nn.Parameter(torch.ones(1))
        optimizer = torch.optim.SGD([weight], lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, DataLoader(range(8), batch_size=1))
        steps = []
        for _ in loader:
            with accelerator.accumulate():
                accelerator.backward((weight * 0.0).sum())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            steps.append((accelerator.sync_gradients, scheduler.get_last_lr()[0]))
        return steps

    batches = 4 if "dp2" in name else 8
    replicas = 8 // batches
    expected = [(step % 2 == 0, 0.5 ** (step // 2 * replicas)) for step in range(1, batches + 1)]
    assert run_ranks(record_rates, LAYOUTS[name][0]) == [expected] * LAYOUTS[name][0]


@layouts
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_parallelized_model_is_not_wrapped_by_accelerate(name, precision):
    def prepare():
        accelerator = make_accelerator(name, mixed_precision=precision)
        model = Stub(**LAYOUTS[name][1])
        prepared = accelerator.prepare(model)
        assert prepared is model and not isinstance(prepared, DistributedDataParallel)
        assert prepared(torch.ones(1, 2)).dtype == torch.float32
        computed_in = model.computed_in
        # Unwrapping restores the forward without mixed precision.
        assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False) is model
        model(torch.ones(1, 2))
        return computed_in, model.computed_in

    expected = torch.bfloat16 if precision == "bf16" else torch.float32
    assert run_ranks(prepare, LAYOUTS[name][0]) == [(expected, torch.float32)] * LAYOUTS[name][0]


def test_plain_model_becomes_ddp_with_data_parallelism():
    def prepare():
        accelerator = make_accelerator("tp1 x dp2")
        plain = torch.nn.Linear(2, 2)
        prepared = accelerator.prepare(plain)
        assert isinstance(prepared, DistributedDataParallel) and accelerator.unwrap_model(prepared) is plain

    run_ranks(prepare, 2)


def test_skip_first_batches():
    def skip_batches():
        accelerator = make_accelerator("tp2 x dp2")
        loader = accelerator.prepare(DataLoader(range(16), batch_size=2))
        first = [batch.tolist() for batch in skip_first_batches(loader, 3)]
        return first, [batch.tolist() for batch in accelerator.skip_first_batches(loader, 3)]

    expected = [([[12, 13]], [[12, 13]]), ([[14, 15]], [[14, 15]])]
    assert group_by_dp_rank("tp2 x dp2", run_ranks(skip_batches, 4)) == expected


class Notes(GeneralTracker):
    name = "notes"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.logged = []

    @property
    def tracker(self):
        return self.logged

    def store_init_configuration(self, values):
        self.logged.append(("config", values))

    def log(self, values, step=None, **kwargs):
        self.logged.append((step, values))


def test_trackers_log_once():
    def log():
        notes = Notes()
        accelerator = make_accelerator("tp2 x dp2", log_with=notes)
        accelerator.init_trackers("run", config={"lr": 0.1})
        accelerator.log({"loss": 1.5}, step=3)
        assert accelerator.is_main_process == (dist.get_rank() == 0)
        accelerator.end_training()
        return notes.logged

    assert run_ranks(log, 4) == [[("config", {"lr": 0.1}), (3, {"loss": 1.5})], [], [], []]


def test_mismatched_accelerator_and_model_layouts_are_rejected():
    def prepare():
        accelerator = make_accelerator("tp2")
        with pytest.raises(ConfigError, match="1 ranks per replica.*created for 2"):
            accelerator.prepare(Stub())
        with pytest.raises(ConfigError, match=r"zero_stage = 3 \(plugin: 1\).*plugin.config"):
            accelerator.prepare(Stub(tp_size=2, zero_stage=3))
        accelerator.prepare(Stub(tp_size=2, dp_size=1))
        with pytest.raises(ConfigError, match="tp_size=4"):
            Accelerator(cpu=True, megatron_lm_plugin=MegatronPlugin(tp_size=4))

    run_ranks(prepare, 2)


def test_plugin_leaves_the_scheme_of_context_parallelism_to_the_model(stories):
    def prepare():
        plugin = MegatronPlugin(cp_size=2)
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=plugin.config)
        Accelerator(cpu=True, megatron_lm_plugin=plugin).prepare(model)

    run_ranks(prepare, 2)


def test_model_with_another_scheme_than_the_plugins_is_rejected():
    def prepare():
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronPlugin(cp_size=2, cp_comm_type="p2p"))
        with pytest.raises(ConfigError, match=r"cp_comm_type = 'all_gather' \(plugin: 'p2p'\)"):
            accelerator.prepare(Stub(cp_size=2, dp_size=1, cp_comm_type="all_gather"))

    run_ranks(prepare, 2)


def test_stock_plugin_and_environment_layouts(monkeypatch):
    def read_sizes(plugin):
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        layout = accelerator.parallelism_config
        again = Accelerator(cpu=True).parallelism_config
        assert (again.dp_shard_size, again.tp_size) == (layout.dp_shard_size, layout.tp_size)
        return layout.dp_shard_size, layout.tp_size

    assert run_ranks(read_sizes, 4, MegatronLMPlugin(tp_degree=2)) == [(2, 2)] * 4
    with pytest.raises(Exception, match="train_iters"):
        run_ranks(read_sizes, 2, MegatronLMPlugin(train_iters=3))
    monkeypatch.setenv("HF_MEGATRON_TP_SIZE", "2")
    assert run_ranks(read_sizes, 4, None) == [(2, 2)] * 4
    monkeypatch.setenv("HF_MEGATRON_TP_SIZE", "1")
    assert run_ranks(read_sizes, 2, None) == [(2, 1)] * 2


def test_single_process_needs_no_layout(monkeypatch):
    assert Accelerator(cpu=True, megatron_lm_plugin=MegatronPlugin(zero_stage=0)).parallelism_config is None
    with pytest.raises(ConfigError, match="the job has 1"):
        Accelerator(cpu=True, megatron_lm_plugin=MegatronPlugin(tp_size=2))
    with pytest.raises(TypeError, match="MegatronLMPlugin"):
        Accelerator(cpu=True, megatron_lm_plugin=3)


@pytest.mark.parametrize("number", [0, 2, 5])
def test_skipped_stream_batches_match_single_process(number):
    def skip_batches():
        accelerator = make_accelerator("tp2")
        loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
        skipped = accelerator.skip_first_batches(loader, number), skip_first_batches(loader, number)
        return [[batch.tolist() for batch in remaining] for remaining in skipped]

    expected = [[row, row + 1] for row in range(2 * number, 12, 2)]
    assert run_ranks(skip_batches, 2) == [[expected] * 2] * 2
