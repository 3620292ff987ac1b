"""Tests of the forward hooks of parallelized models: their number and their declared order."""

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import ENTER_ORDER, EXIT_ORDER

LAYOUTS = {
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "dp2": {"dp_size": 2},
    "dp2+zero3": {"dp_size": 2, "zero_stage": 3},
    "cp2": {"cp_size": 2},
    "pp2": {"pp_size": 2},
    "tp2+dp2": {"tp_size": 2, "dp_size": 2},
}


def inspect_hooks(layout):
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
    )
    model = LlamaForCausalLM._from_config(config, megatron_config=layout)
    pre_hooks = [
        hook for hook in model._forward_pre_hooks.values() if hook.__func__.__module__.startswith("hf_megatron")
    ]
    post_hooks = [hook for hook in model._forward_hooks.values() if hook.__func__.__module__.startswith("hf_megatron")]
    is_first = next(iter(model._forward_pre_hooks.values())) in pre_hooks
    return model.parallel_hooks().rows(), str(model.parallel_hooks()), len(pre_hooks), len(post_hooks), is_first


@pytest.mark.parametrize("text", LAYOUTS)
def test_model_hooks_follow_declared_order(text):
    ranks = 4 if text == "tp2+dp2" else 2
    for rows, printed, pre_hook_count, post_hook_count, is_first in run_ranks(inspect_hooks, ranks, LAYOUTS[text]):
        # With ZeRO-3, a second hook computes the full logits before FSDP2's own hook runs.
        assert (pre_hook_count, post_hook_count, is_first) == (1, 2 if text == "dp2+zero3" else 1, True)
        for when, order in (("before", ENTER_ORDER), ("after", EXIT_ORDER)):
            names = [name for row, name, _ in rows if row == when]
            assert set(names) <= {*order} and names == sorted(names, key=order.index)
        assert {"enabled", "loss", "data parallel"} <= {name for _, name, _ in rows}
        lines = printed.splitlines()
        assert lines[: len(rows)] == [line for line in lines if line.startswith(("before", "after"))]
