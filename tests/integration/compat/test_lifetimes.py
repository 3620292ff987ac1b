"""Tests of lifetimes: file descriptors, threads, hooks and memory after many models in one process."""

import ctypes
import gc
import os
import threading
import weakref

import psutil
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.optim import optimizer as torch_optimizer
from transformers import AutoModelForCausalLM

import hf_megatron
from hf_megatron import ConfigError, MegatronConfig, prepare_optimizer
from hf_megatron.compat.instance_patches import INSTANCE_PATCHES
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.runtime import RUNTIME
from hf_megatron.parallel_state import parallel_state
from hf_megatron.pipeline_parallel.executor import Execution

LAYOUTS = (
    MegatronConfig(tp_size=2),
    MegatronConfig(tp_size=2, sequence_parallel=True),
    MegatronConfig(pp_size=2),
    MegatronConfig(dp_size=2, zero_stage=3),
    MegatronConfig(dp_size=2),
)
MODELS, SETTLED = 15, 5


def make_batch():
    ids = torch.arange(24).view(4, 6)
    return {"input_ids": ids, "labels": ids}


def train(path, config):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    optimizer = prepare_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    model.train()(**make_batch()).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return weakref.ref(model)


def resident():
    # Returns freed memory to the system, so that only memory in use is counted.
    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_info().rss


def count_live_bytes():
    """Returns the bytes of all live tensors, counting each storage once."""
    storages = {}
    for item in gc.get_objects():
        if type(item) in (torch.Tensor, torch.nn.Parameter):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def measure_usage():
    gc.collect()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": psutil.Process().num_threads(),
        "Python's threads": threading.active_count(),
        "step hooks": len(torch_optimizer._global_optimizer_pre_hooks),
        "tensor bytes": count_live_bytes(),
        "models": len(RUNTIME.models),
        "patched instances": len(PATCH_REGISTRY.instances),
    }


def test_dropped_models_leak_nothing(stories):
    def on_rank():
        usages = []
        for number in range(MODELS):
            model = train(stories, LAYOUTS[number % len(LAYOUTS)])
            usages.append(measure_usage() | {"resident": resident()})
            assert model() is None, f"model {number} is still there"
        return usages

    for usages in run_ranks(on_rank, 2, timeout=600):
        settled, last = usages[SETTLED - 1], usages[-1]
        growth = (last.pop("resident") - settled.pop("resident")) / 2**20
        # A decrease is no leak: a memory-mapped file is closed with its last tensor.
        assert all(last[name] <= count for name, count in settled.items()), (settled, last)
        assert growth < 20, f"{growth:.1f} MiB more resident memory"


def test_models_with_equal_layouts_share_groups(stories):
    def on_rank():
        load = AutoModelForCausalLM.from_pretrained
        first, second = (load(stories, megatron_config=MegatronConfig(tp_size=2)) for _ in range(2))
        assert parallel_state(first).mesh is parallel_state(second).mesh
        expected = first(**make_batch()).loss.item()
        del first
        gc.collect()
        assert second(**make_batch()).loss.item() == expected
        name, weight = next(iter(second.named_parameters()))
        # DTensor's sharding propagation may return a cached result on the first model's mesh.
        assert weight.detach().clone().full_tensor().shape == weight.shape, name

    run_ranks(on_rank, 2)


def test_accelerator_after_dropped_model_is_stock(stories):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=MegatronConfig(tp_size=2))
        before = dict(os.environ)
        assert Accelerator(cpu=True).parallelism_config is not None
        AcceleratorState._reset_state()
        del model
        assert Accelerator(cpu=True).parallelism_config is None
        assert {name for name in os.environ if name.startswith(("HF_MEGATRON", "MEGATRON"))} == set()
        changed = {name for name in os.environ.keys() | before.keys() if os.environ.get(name) != before.get(name)}
        assert {name for name in changed if "MEGATRON" in name or name == "ACCELERATE_USE_CPU"} == set()

    run_ranks(on_rank, 2)


def test_accelerator_uses_latest_live_layout(stories):
    def on_rank():
        load = AutoModelForCausalLM.from_pretrained
        first = load(stories, megatron_config=MegatronConfig(tp_size=2))
        second = load(stories, megatron_config=MegatronConfig(dp_size=2))
        assert Accelerator(cpu=True).parallelism_config.tp_size == 1
        AcceleratorState._reset_state()
        del second
        assert Accelerator(cpu=True).parallelism_config.tp_size == 2
        return first is not None

    assert run_ranks(on_rank, 2) == [True, True]


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4]], ids=lambda layout: layout.layout())
def test_disable_restores_model_attributes(stories, layout):
    def on_rank():
        stock = AutoModelForCausalLM.from_pretrained(stories)
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=layout).train()
        patched = {name: vars(model).get(name) for name in INSTANCE_PATCHES}
        expected = model(**make_batch()).loss.item()
        model.zero_grad()
        hooks = len(torch_optimizer._global_optimizer_pre_hooks)
        hf_megatron.disable()
        assert len(torch_optimizer._global_optimizer_pre_hooks) == hooks - 1
        for name in INSTANCE_PATCHES:
            same = vars(model).get(name) is vars(stock).get(name) or vars(model).get(name) == vars(stock).get(name)
            assert same, name
        assert model.loss_function is stock.loss_function
        with pytest.raises(ConfigError, match=r"hf_megatron.enable\(\) first"):
            model(**make_batch())
        hf_megatron.enable()
        assert {name: vars(model).get(name) for name in INSTANCE_PATCHES} == patched
        assert model(**make_batch()).loss.item() == expected

    run_ranks(on_rank, 2)


def test_pipeline_batch_is_freed_with_its_outputs(stories):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=MegatronConfig(pp_size=2))
        executions, original = [], Execution.__init__

        def init(self, *args, **kwargs):
            original(self, *args, **kwargs)
            executions.append(weakref.ref(self))

        Execution.__init__ = init
        gc.collect()
        gc.disable()
        for training in (False, True):
            model.train(training)
            for _ in range(3):
                with torch.set_grad_enabled(training):
                    output = model(**make_batch())
                if training:
                    output.loss.backward()
                model.zero_grad()
            logits = model(input_ids=make_batch()["input_ids"]).logits
            logits.sum().backward()
            del output, logits
        return len(executions), sum(reference() is not None for reference in executions)

    assert run_ranks(on_rank, 2) == [(8, 0)] * 2
