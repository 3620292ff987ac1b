"""Tests that a flag of Trainer's control that a callback sets on one rank reaches all ranks in the same step."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from hf_megatron import MegatronConfig, RankError
from hf_megatron.compat.patch_registry import PATCH_REGISTRY
from hf_megatron.core.fork_harness import run_ranks

LAYOUTS = [MegatronConfig(tp_size=2), MegatronConfig(pp_size=2), MegatronConfig(dp_size=2, zero_stage=1)]
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=MegatronConfig.layout)
FLAGS = ["should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"]


class OnLastRank(TrainerCallback):
    """Sets a flag in one event of step 3, on the last rank only."""

    def __init__(self, event, flag):
        self.flag = flag
        setattr(self, event, self.set_flag)

    def set_flag(self, args, state, control, **kwargs):
        if state.global_step == 3 and dist.get_rank() == dist.get_world_size() - 1:
            setattr(control, self.flag, True)


class Recorder(TrainerCallback):
    def __init__(self):
        self.events = []

    def on_save(self, args, state, control, **kwargs):
        self.events.append(("save", state.global_step))

    def on_evaluate(self, args, state, control, **kwargs):
        self.events.append(("evaluate", state.global_step))

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.events.append(("log", state.global_step))


def train(path, folder, layout, event, flag, logging_steps=100):
    model = AutoModelForCausalLM.from_pretrained(path, **({} if layout is None else {"megatron_config": layout}))
    samples = [{"input_ids": tokens, "labels": tokens} for tokens in torch.arange(16 * 8).reshape(16, 8) % 64]
    args = TrainingArguments(
        str(folder),
        per_device_train_batch_size=4 if layout is None or layout.dp_size is None else 2,
        num_train_epochs=2,
        logging_steps=logging_steps,
        save_only_model=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    recorder = Recorder()
    trainer = Trainer(model, args, train_dataset=samples, eval_dataset=samples[:4], callbacks=[recorder])
    # Added later than the library's own callbacks.
    trainer.add_callback(OnLastRank(event, flag))
    trainer.train()
    return trainer.state.global_step, recorder.events


def train_all(path, folder, layout):
    """Returns the events of one training per case: each flag after a step, and a stop by a callback that sees a log."""
    cases = [("on_step_end", flag, 100) for flag in FLAGS] + [("on_log", "should_training_stop", 3)]
    return [train(path, folder / str(number), layout, *case) for number, case in enumerate(cases)]


@pytest.fixture(scope="module")
def single(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    [events] = run_ranks(train_all, 1, tiny, folder, None)
    # Each flag has an effect: without one, training takes 8 steps, and saves and logs at its end.
    assert all(case != (8, [("save", 8), ("log", 8)]) for case in events)
    assert events[-1][0] == 3
    return events


@by_layout
def test_flag_of_one_rank_reaches_all(tiny, single, tmp_path, layout):
    assert run_ranks(train_all, 2, tiny, tmp_path, layout) == [single] * 2


def test_seeded_fault_ranks_follow_their_own_flags(tiny, tmp_path):
    """Without the replacement, the rank that stops leaves the other one waiting."""

    def on_rank():
        PATCH_REGISTRY.activate()
        Trainer._maybe_log_save_evaluate = Trainer._maybe_log_save_evaluate.__wrapped__
        return train(tiny, tmp_path, LAYOUTS[0], "on_step_end", "should_training_stop")

    with pytest.raises(RankError):
        run_ranks(on_rank, 2, timeout=20.0)
