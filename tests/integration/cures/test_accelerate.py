"""Tests that follow the cures of errors in Accelerate loops."""

import pytest
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

from hf_megatron import CheckpointError, ConfigError, MegatronConfig, MegatronPlugin, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.accelerate.environment import export_layout
from hf_megatron.integrations.accelerate.launched_script import follow_launcher
from tests.helpers.dp_training import load_model
from tests.helpers.single_steps import compare_steps, measure_step
from tests.integration.integrations.accelerate.test_checkpoints import LAYOUTS, make_accelerator, save_numbered

TP2, DP2 = MegatronConfig(tp_size=2), MegatronConfig(dp_size=2)


def measure_prepared(accelerator, model):
    return measure_step(accelerator.prepare(model), accelerator.backward)


def test_plugin_is_removed(stories):
    def on_rank():
        model = load_model(stories, TP2)
        with pytest.raises(UnsupportedError, match="fsdp_plugin=.*Remove the plugin"):
            Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        return measure_prepared(Accelerator(cpu=True), model)

    compare_steps(stories, on_rank)


def test_dispatch_batches_is_left_unset():
    def on_rank():
        def read(**options):
            plugin = MegatronPlugin(MegatronConfig(tp_size=2))
            accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, **options)
            return [batch.tolist() for batch in accelerator.prepare(DataLoader(range(8), batch_size=2))]

        with pytest.raises(UnsupportedError, match="dispatch_batches=True .*Leave it unset; each replica then reads"):
            read(dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
        return read(dataloader_config=DataLoaderConfiguration())

    assert run_ranks(on_rank, 4) == [[[0, 1], [4, 5]]] * 2 + [[[2, 3], [6, 7]]] * 2


def test_accelerator_is_created_after_the_model_or_with_a_plugin(stories):
    def create_before():
        accelerator = Accelerator(cpu=True)
        message = r"Create it after the model, pass it megatron_lm_plugin=MegatronPlugin\(...\), or .*in a new process"
        with pytest.raises(ConfigError, match=message):
            accelerator.prepare(load_model(stories, TP2))

    def create_after():
        model = load_model(stories, TP2)
        return measure_prepared(Accelerator(cpu=True), model)

    def create_with_plugin():
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronPlugin(TP2))
        return measure_prepared(accelerator, load_model(stories, TP2))

    run_ranks(create_before, 2)
    compare_steps(stories, create_after)
    compare_steps(stories, create_with_plugin)


def test_accelerator_and_model_get_the_same_config(stories):
    def on_rank():
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=MegatronPlugin(TP2))
        with pytest.raises(
            ConfigError, match="Pass the same MegatronConfig to both, or create it after the model in a"
        ):
            accelerator.prepare(load_model(stories, DP2))
        return measure_prepared(accelerator, load_model(stories, TP2))

    compare_steps(stories, on_rank)


def test_model_is_loaded_with_the_config_of_the_plugin(stories):
    def on_rank():
        plugin = MegatronPlugin(MegatronConfig(dp_size=2, zero_stage=2))
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        with pytest.raises(ConfigError, match=r"Load it with the plugin's config: megatron_config=plugin\.config"):
            accelerator.prepare(load_model(stories, DP2))
        return measure_prepared(accelerator, load_model(stories, plugin.config))

    compare_steps(stories, on_rank)


def test_checkpoint_of_save_state_is_loaded(stories, tmp_path):
    def on_rank():
        model = load_model(stories, TP2)
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        state = accelerator.save_state(str(tmp_path / "state"))
        if accelerator.is_main_process:
            (tmp_path / "weights").mkdir()
        model.save_pretrained(tmp_path / "weights")
        message = "Pass a folder that save_state wrote, or load weights with from_pretrained"
        with pytest.raises(CheckpointError, match=message):
            accelerator.load_state(str(tmp_path / "weights"))
        steps = [measure_step(load_model(tmp_path / "weights", TP2))]
        with torch.no_grad():
            model.model.norm.weight.zero_()
        accelerator.load_state(str(state))
        return [*steps, measure_step(model)]

    compare_steps(stories, on_rank)


def test_stock_checkpoint_is_resumed_in_one_process_or_an_older_one_is(stories, tmp_path):
    run_ranks(save_numbered, 2, stories, tmp_path, LAYOUTS[1], [0, 1])
    run_ranks(save_numbered, 1, stories, tmp_path, None, [2])

    def on_rank():
        model = load_model(stories, LAYOUTS[1])
        accelerator = make_accelerator(tmp_path)
        model = accelerator.unwrap_model(accelerator.prepare(model))
        older = str(tmp_path / "checkpoints" / "checkpoint_1")
        message = rf"Resume it in a single process, or pass load_state\('{older}'\), the newest checkpoint"
        with pytest.raises(CheckpointError, match=message):
            accelerator.load_state()
        accelerator.load_state(older)
        return model.model.norm.weight.mean().item()

    assert run_ranks(on_rank, 2) == [1.0] * 2
    assert run_ranks(save_numbered, 1, stories, tmp_path, None, [], True) == [2.0]


class UnevenStream(IterableDataset):
    """A stream that ends at another sample on each rank, unless it is truncated."""

    def __init__(self, length=None):
        self.length = length

    def __iter__(self):
        return iter(range(self.length or 4 + 4 * torch.distributed.get_rank()))


def read_uneven(recwarn, dataset, **options):
    """Returns the batches of this rank, and the warnings about shards of unequal length."""
    recwarn.clear()
    configuration = DataLoaderConfiguration(**options)
    plugin = MegatronPlugin(DP2)
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin, dataloader_config=configuration)
    batches = [batch.tolist() for batch in accelerator.prepare(DataLoader(dataset, batch_size=2))]
    return batches, [str(each.message) for each in recwarn if "ran out of data first" in str(each.message)]


def test_shards_of_equal_length_are_used(recwarn):
    def on_rank():
        results = [read_uneven(recwarn, range(6), even_batches=even) for even in (False, True)]
        streams = [UnevenStream(), UnevenStream(8)]
        return results, [read_uneven(recwarn, stream, dispatch_batches=False) for stream in streams]

    for (uneven, warned), (even, silent) in run_ranks(on_rank, 2)[0]:
        assert len(warned) == 1 and silent == [] and len(even) == 2 > len(uneven)
        assert warned[0].endswith("Use shards of equal length (even_batches=True, or truncate the IterableDataset).")


def test_zero_stage_2_gives_full_tensors_to_reduce(stories):
    def on_rank(stage):
        model = load_model(stories, MegatronConfig(dp_size=2, zero_stage=stage))
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        if stage == 3:
            with pytest.raises(UnsupportedError, match="Use zero_stage=2, where each rank holds the full tensor"):
                accelerator.reduce(model.model.norm.weight.detach())
            return None
        return accelerator.reduce(model.model.norm.weight.detach(), "mean")

    run_ranks(on_rank, 2, 3)
    expected = AutoModelForCausalLM.from_pretrained(stories).model.norm.weight
    for reduced in run_ranks(on_rank, 2, 2):
        assert torch.equal(reduced, expected)


def train_in_launch(path):
    export_layout(TP2)
    follow_launcher()
    config = AutoConfig.from_pretrained(path)
    with pytest.raises(UnsupportedError, match="Create it with `from_pretrained`, or with an Auto class's `from_conf"):
        Accelerator(cpu=True).prepare(LlamaForCausalLM(config))
    steps = []
    for create in (AutoModelForCausalLM.from_config, LlamaForCausalLM.from_pretrained):
        model = create(config if create == AutoModelForCausalLM.from_config else path)
        model.load_state_dict(AutoModelForCausalLM.from_pretrained(path).state_dict())
        steps.append(measure_prepared(Accelerator(cpu=True), model))
    return steps


def test_launched_script_creates_the_model_by_an_auto_class(stories):
    compare_steps(stories, train_in_launch, 2, stories)


def train_stock_module(expects_error):
    module = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 2)).sum().backward()
    before = module.weight.detach().clone()
    if expects_error:
        follow_launcher()
        with pytest.raises(UnsupportedError, match="SGD trains weights of no parallelized model.*Start the script"):
            optimizer.step()
        return torch.equal(module.weight, before)
    optimizer.step()
    return not torch.equal(module.weight, before)


@pytest.mark.parametrize("expects_error", [True, False])
def test_script_without_a_parallelized_model_is_started_without_launcher(expects_error):
    assert run_ranks(train_stock_module, 2, expects_error) == [True, True]


def test_local_sgd_is_disabled_on_replicas(stories):
    def on_rank():
        model = load_model(stories, DP2)
        accelerator = Accelerator(cpu=True)
        with pytest.raises(UnsupportedError, match="LocalSGD is not supported on 2 data-parallel ranks.*enabled=False"):
            LocalSGD(accelerator, model, 2)
        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=False) as local:
            local.step()
        return measure_prepared(accelerator, model)

    compare_steps(stories, on_rank)
