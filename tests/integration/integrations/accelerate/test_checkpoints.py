"""Tests of saving and loading the state of plain Accelerate loops."""

import os
import time
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

import hf_megatron
from hf_megatron import CheckpointError, MegatronConfig
from hf_megatron.checkpoint.discovery import is_committed, latest
from hf_megatron.checkpoint.transaction import prune
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.accelerate import checkpoints as accelerate_checkpoints
from tests.integration.integrations.trainer.test_trainer import rows


class Counter:
    """A custom object registered for checkpointing."""

    def __init__(self):
        self.seen, self.history = 0, torch.zeros(3)

    def state_dict(self):
        return {"seen": self.seen, "history": self.history}

    def load_state_dict(self, state):
        self.seen, self.history = state["seen"], state["history"]


def loop(path, project, config, *, steps, load=None, save_at=(), prepare=None, custom=True):
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config, attention_dropout=0.1).train()
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(str(project), automatic_checkpoint_naming=True, total_limit=2),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [count * accelerator.num_processes for count in (2, 4)], gamma=0.5
    )
    dp_size = 1 if config is None else config.dp_size or 1
    data = DataLoader(rows(32, 0), batch_size=4 // dp_size, shuffle=True)
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    counter = Counter()
    if custom:
        accelerator.register_for_checkpointing(counter)
    if load is not None:
        accelerator.load_state(None if load is True else load)
    done, losses = counter.seen, []
    batches = accelerator.skip_first_batches(data, 2 * done) if done else data
    for batch in batches:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        if accelerator.sync_gradients:
            counter.seen += 1
            if counter.seen in save_at:
                accelerator.save_state()
            if counter.seen >= steps:
                break
    return losses, scheduler.get_last_lr(), counter.seen


LAYOUTS = [MegatronConfig(tp_size=2), MegatronConfig(dp_size=2), MegatronConfig(tp_size=2, dp_size=2, zero_stage=3)]


def count_ranks(config):
    return config.tp_size * (config.dp_size or 1)


@pytest.mark.parametrize("config", LAYOUTS, ids=lambda config: config.layout())
def test_load_state_resumes_bit_identically(stories, tmp_path, config):
    torch.manual_seed(0)
    uninterrupted = run_ranks(loop, count_ranks(config), stories, tmp_path / "whole", config, steps=4)
    run_ranks(loop, count_ranks(config), stories, tmp_path / "parts", config, steps=2, save_at=(1, 2))
    resumed = run_ranks(loop, count_ranks(config), stories, tmp_path / "parts", config, steps=4, load=True)
    for (losses, rate, step_count), (expected, expected_rate, _) in zip(resumed, uninterrupted, strict=True):
        assert losses == expected[4:]
        assert rate == expected_rate and step_count == 4


def test_automatic_naming_prunes_after_the_commit(stories, tmp_path):
    run_ranks(loop, 2, stories, tmp_path, LAYOUTS[1], steps=4, save_at=(1, 2, 3, 4))
    folders = sorted(path.name for path in (tmp_path / "checkpoints").iterdir() if path.is_dir())
    assert folders == ["checkpoint_2", "checkpoint_3"]
    assert all(is_committed(tmp_path / "checkpoints" / name) for name in folders)


def test_all_ranks_wait_for_checkpoint_pruning(stories, tmp_path, monkeypatch):
    """A rank that continued earlier could list folders while they are being removed."""
    removed = tmp_path / "removed"

    def prune_slowly(*args, **kwargs):
        time.sleep(1)
        prune(*args, **kwargs)
        removed.touch()

    monkeypatch.setattr(accelerate_checkpoints, "prune", prune_slowly)

    def save():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=LAYOUTS[1])
        naming = ProjectConfiguration(str(tmp_path / "run"), automatic_checkpoint_naming=True, total_limit=1)
        accelerator = Accelerator(cpu=True, project_config=naming)
        model = accelerator.prepare(model)
        accelerator.save_state()
        was_removed = removed.exists()
        accelerator.load_state(str(tmp_path / "run" / "checkpoints" / "checkpoint_0"))
        return was_removed

    assert run_ranks(save, 2) == [True, True]


def make_accelerator(project, **options):
    naming = ProjectConfiguration(str(project), automatic_checkpoint_naming=True, **options)
    return Accelerator(cpu=True, project_config=naming)


def save_numbered(path, project, config, numbers, load=False):
    """Saves checkpoints whose final norm is filled with their number; returns the value after `load_state()`."""
    model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config)
    accelerator = make_accelerator(project, iteration=numbers[0] if numbers else 0)
    model = accelerator.unwrap_model(accelerator.prepare(model))
    for number in numbers:
        with torch.no_grad():
            model.model.norm.weight.fill_(number)
        accelerator.save_state()
    with torch.no_grad():
        model.model.norm.weight.fill_(-1)
    if load:
        accelerator.load_state()
    return model.model.norm.weight.mean().item()


def test_automatic_naming_adds_no_other_files(stories, tmp_path):
    """Loops and Accelerate list the folder; the next save removes the `latest` pointer of an earlier version."""
    folder = tmp_path / "checkpoints"
    run_ranks(save_numbered, 2, stories, tmp_path, LAYOUTS[1], [8, 9, 10])
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_10", "checkpoint_8", "checkpoint_9"]
    (folder / "latest").write_text("checkpoint_8\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_ranks(save_numbered, 2, stories, tmp_path, LAYOUTS[1], [], True) == [10.0] * 2
        assert run_ranks(save_numbered, 2, stories, tmp_path, LAYOUTS[1], [11], True) == [11.0] * 2
    assert sorted(int(name.split("_")[1]) for name in os.listdir(folder)) == [8, 9, 10, 11]


@pytest.mark.parametrize("pointer", [False, True], ids=["new", "with a pointer"])
def test_stock_accelerate_continues_sharded_checkpoint_folder(stories, tmp_path, pointer):
    run_ranks(save_numbered, 2, stories, tmp_path, LAYOUTS[1], [0, 1])
    if pointer:
        (tmp_path / "checkpoints" / "latest").write_text("checkpoint_1\n")

    def save_and_load_stock(is_active):
        if is_active:
            # Patches are active, as after another model was parallelized.
            PATCH_REGISTRY.activate()
        else:
            hf_megatron.disable()
        accelerator = make_accelerator(tmp_path, total_limit=3, iteration=2)
        module = accelerator.unwrap_model(accelerator.prepare(torch.nn.Linear(2, 2)))
        for value in (2.0, 3.0):
            torch.nn.init.constant_(module.weight, value)
            accelerator.save_state()
        torch.nn.init.zeros_(module.weight)
        accelerator.load_state()
        return module.weight.mean().item()

    # The pointer of an earlier version can only be removed while the patches are active.
    assert run_ranks(save_and_load_stock, 1, pointer) == [3.0]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]


def test_newest_sharded_or_stock_checkpoint_is_loaded(stories, tmp_path):
    run_ranks(save_numbered, 2, stories, tmp_path, LAYOUTS[1], [0, 1])
    assert run_ranks(save_numbered, 1, stories, tmp_path, None, [], True) == [1.0]
    run_ranks(save_numbered, 1, stories, tmp_path, None, [2])
    assert run_ranks(save_numbered, 1, stories, tmp_path, None, [], True) == [2.0]

    def load_rejected():
        with pytest.raises(CheckpointError, match="checkpoint_2 was written by plain Accelerate.*checkpoint_1'"):
            save_numbered(stories, tmp_path, LAYOUTS[1], [], True)

    run_ranks(load_rejected, 2)
    (tmp_path / "checkpoints" / "checkpoint_2" / "random_states_0.pkl").unlink()

    def load_with_warning():
        with pytest.warns(UserWarning, match="checkpoint_2 is passed over for .*checkpoint_1"):
            return save_numbered(stories, tmp_path, LAYOUTS[1], [], True)

    assert run_ranks(load_with_warning, 2) == [1.0] * 2


def test_saving_twice_keeps_both_and_loads_the_last(stories, tmp_path):
    def save_twice():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=LAYOUTS[1])
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        first = accelerator.save_state(str(tmp_path / "state"))
        with torch.no_grad():
            model.model.norm.weight.fill_(3.0)
        second = accelerator.save_state(str(tmp_path / "state"))
        with torch.no_grad():
            model.model.norm.weight.fill_(5.0)
        accelerator.load_state(str(tmp_path / "state"))
        return first.name, second.name, model.model.norm.weight.mean().item()

    assert run_ranks(save_twice, 2) == [("state", "state.1", 3.0)] * 2


def test_checkpoint_may_be_named_latest(stories, tmp_path):
    def save(folder, names):
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=LAYOUTS[1])
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        saved = []
        for value, name in enumerate(names):
            with torch.no_grad():
                model.model.norm.weight.fill_(value)
            saved.append(accelerator.save_state(str(folder / name)).name)
        with torch.no_grad():
            model.model.norm.weight.fill_(5.0)
        accelerator.load_state(str(folder / "latest"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            newest = latest(folder)
        return saved, newest.name, model.model.norm.weight.mean().item()

    results = run_ranks(
        lambda: [save(tmp_path / names[0], names) for names in (["latest"] * 2, ["other", "latest"])], 2
    )
    assert results == [[(["latest", "latest.1"], "latest.1", 1.0), (["other", "latest.1"], "latest.1", 1.0)]] * 2
    assert (tmp_path / "latest" / "latest").is_dir() and (tmp_path / "other" / "latest").is_file()


def test_state_that_needs_pickle_is_rejected(stories, tmp_path):
    class Odd:
        def state_dict(self):
            return {"function": print}

        def load_state_dict(self, state):
            pass

    def save():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=LAYOUTS[1])
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        accelerator.register_for_checkpointing(Odd())
        with pytest.raises(CheckpointError, match="state.custom.0.function"):
            accelerator.save_state(str(tmp_path / "state"))

    run_ranks(save, 2)
    assert not list(tmp_path.iterdir())


def test_folder_without_manifest_is_rejected(stories, tmp_path):
    def load():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=LAYOUTS[0])
        accelerator = Accelerator(cpu=True)
        accelerator.prepare(model)
        with pytest.raises(CheckpointError, match="manifest"):
            accelerator.load_state(str(tmp_path))

    run_ranks(load, 2)


def test_save_model_writes_full_weights(stories, tmp_path):
    from safetensors.torch import load_file

    def save():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=LAYOUTS[2])
        accelerator = Accelerator(cpu=True)
        model = accelerator.prepare(model)
        assert accelerator.unwrap_model(model) is model
        accelerator.save_model(model, str(tmp_path))

    run_ranks(save, 4)
    saved, original = load_file(tmp_path / "model.safetensors"), load_file(stories / "model.safetensors")
    assert all(torch.equal(saved[name], original[name]) for name in original)
