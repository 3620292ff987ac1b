"""Tests of pipelined model outputs that are available on a single stage only."""

import pytest

from hf_megatron.errors import UnsupportedError
from hf_megatron.pipeline_parallel.outputs import STATES, PipelineOutput


@pytest.mark.parametrize("name", [*STATES, "encoder_last_hidden_state"])
def test_single_stage_outputs_are_rejected_by_name(name):
    with pytest.raises(UnsupportedError, match=f"outputs.{name} of a pipelined model.*pp_size=1"):
        getattr(PipelineOutput(), name)
    assert not hasattr(PipelineOutput(), name)


def test_other_names_are_attribute_errors():
    """Such as the value of a value head; the error lists what a pipeline returns."""
    with pytest.raises(AttributeError, match="has no attribute 'value': .* returns logits, .*pp_size=1"):
        _ = PipelineOutput().value
    assert getattr(PipelineOutput(), "value", None) is None
