"""Test of modules whose buffers count their calls, on a pipeline."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks


@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_spectral_norm_of_a_hook_is_rejected_with_microbatches(stories, num_microbatches):
    """Each call makes a power iteration: the second microbatch would see another weight."""
    config = MegatronConfig(pp_size=2, num_microbatches=num_microbatches)

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=config).train()
        for layer in model.model.layers:
            # Placeholders of another stage's layers have no linear.
            if isinstance(getattr(layer.mlp, "up_proj", None), torch.nn.Linear):
                torch.nn.utils.spectral_norm(layer.mlp.up_proj)
        ids = torch.arange(24).view(4, 6)
        return model(input_ids=ids, labels=ids).loss.item()

    if num_microbatches == 1:
        assert len(set(run_ranks(on_rank, 2))) == 1
    else:
        with pytest.raises(Exception, match="weight_u is changed in each forward") as error:
            run_ranks(on_rank, 2)
        assert UnsupportedError.__name__ in str(error.value)
