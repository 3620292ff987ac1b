"""Tests of a plain model's backward beside data-parallel models: what it costs, and that it is still checked."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_megatron import UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import untracked_leaves
from tests.helpers.python_calls import count_calls
from tests.helpers.training import make_batch, parse_layout, shard_batch

DEPTHS = (4, 12)
LAYOUTS = ["dp2", "dp2+zero3"]


def make_llama(depth, vocabulary=64):
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=depth, vocab_size=vocabulary)).train()


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Model of as many layers as the deeper plain one: a search of either would show in the counts."""
    path = tmp_path_factory.mktemp("deep")
    make_llama(DEPTHS[1]).save_pretrained(path)
    return path


def count_backward(plain):
    ids = torch.arange(32).view(2, 16)
    for _ in range(2):
        plain(input_ids=ids, labels=ids).loss.backward()
    return count_calls(plain(input_ids=ids, labels=ids).loss.backward)


@pytest.mark.parametrize("text", LAYOUTS)
def test_backward_costs_the_same_beside_parallelized_models(deep, text):
    """The calls do not grow with the layers of either model, and hardly with the number of models."""

    def on_rank():
        plain = [make_llama(depth) for depth in DEPTHS]
        counts, models = [[count_backward(model) for model in plain]], []
        for _ in range(2):
            models.append(AutoModelForCausalLM.from_pretrained(deep, megatron_config=parse_layout(text)).train())
            # The graph of a policy is usually alive while a value model runs its backward.
            ids = torch.arange(32).view(2, 16)
            loss = models[-1](**shard_batch(models[-1], {"input_ids": ids, "labels": ids})).loss
            counts.append([count_backward(model) for model in plain])
            loss.backward()
            counts.append([count_backward(model) for model in plain])
        return counts

    for counts in run_ranks(on_rank, 2):
        alone, *beside = counts
        assert all(shallow == pytest.approx(deep_one, abs=2) for shallow, deep_one in counts), counts
        # One walk of the deeper model's graph takes more than 1000 calls, one of its modules more than 300.
        assert all(shallow - alone[0] < 200 for shallow, _ in beside), counts


def _head_losses(model, plain, which):
    """Returns a loss whose graph reaches the parallelized model behind all layers of the plain one."""
    batch = shard_batch(model, make_batch(0))
    hidden = model(**batch).logits if which == "outputs" else model.model(input_ids=batch["input_ids"])[0]
    size = plain.config.hidden_size
    return F.cross_entropy(plain(inputs_embeds=hidden[..., :size]).logits[:, -1], batch["input_ids"][:, 0] % 64)


@pytest.mark.parametrize(("text", "which"), [(text, "outputs") for text in LAYOUTS] + [("dp2", "base model")])
@pytest.mark.parametrize("fault", [False, True])
def test_plain_model_behind_a_parallelized_one_is_rejected(tiny, text, which, fault):
    """With the fault, torch's answer is ignored, and nothing rejects the untracked parameters."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(text)).train()
        model(**shard_batch(model, make_batch(0))).loss.backward()
        plain = make_llama(DEPTHS[0])
        gradients = [parameter.grad for parameter in plain.parameters()]
        loss = _head_losses(model, plain, which)
        if fault:
            untracked_leaves.runs_any = lambda nodes: False
            loss.backward()
            # Reductions end in the background: wait for the other rank before this process ends.
            dist.barrier()
            return
        with pytest.raises(UnsupportedError, match="is not one of its parameters"):
            loss.backward()
        # Nothing was accumulated before.
        assert all(parameter.grad is before for parameter, before in zip(plain.parameters(), gradients, strict=True))
        # A backward of the plain model alone is still allowed, and the model itself still trains.
        ids = torch.arange(32).view(2, 16)
        plain(input_ids=ids, labels=ids).loss.backward()
        model(**shard_batch(model, make_batch(1))).loss.backward()

    run_ranks(on_rank, 2)


def test_identities_follow_the_model(tiny):
    """Replaced parameters, replaced modules and added modules are found without a scan of the engine."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout("dp2")).train()
        identities = untracked_leaves.all_engines()[0].identities

        def require_equal():
            assert identities.current() == {id(parameter) for parameter in model.parameters()}
            assert {id(leaf) for leaf in identities.differentiable()} == identities.current()

        require_equal()
        layer = model.model.layers[0]
        layer.input_layernorm.weight = nn.Parameter(layer.input_layernorm.weight.detach().clone())
        require_equal()
        layer.mlp.up_proj = nn.Linear(32, 64, bias=False)
        require_equal()
        layer.mlp.up_proj.extra = nn.Linear(3, 3)
        require_equal()
        del layer.mlp.up_proj.extra
        require_equal()

    run_ranks(on_rank, 2)
