"""What loading would say of a layout before anything is loaded, asked on a short model."""

import copy
from dataclasses import replace

from ..config import MegatronConfig
from ..core.axes import Axes
from ..errors import MegatronError
from ..integrations.transformers.verification_gate import why_unverified
from ..models.fingerprint import describe_model
from ..models.registry import spec_for
from ..models.type_facts import batch_coupling_reason
from ..parallelize import plan
from ..pipeline_parallel.support_checks import row_to_cut
from .truncated_model import ShortModel


def why_not_cut(short: ShortModel, layout: MegatronConfig) -> str:
    """Returns why a pipeline, or its schedule, cannot have the model; nothing if it can."""
    model = short.model
    try:
        row_to_cut(model, spec_for(model), layout, Axes.of(layout, 0))
    except MegatronError as error:
        return str(error)
    return batch_coupling_reason(model.config) or ""


def without_pipeline(layout: MegatronConfig) -> MegatronConfig:
    """Returns a layout with one stage, whose other axes split a layer in the same way."""
    return replace(layout, pp_size=1, pipeline_schedule="1f1b", virtual_stages=None, num_microbatches=None)


def what_was_not_compared(short: ShortModel, layout: MegatronConfig) -> list[str]:
    """Returns for what kinds of the layout loading asks for a check first, and why; nothing where all was compared."""
    model = copy.deepcopy(short.model)
    description = describe_model(model)
    flat = without_pipeline(layout)
    return why_unverified(model, layout, plan(model, flat, Axes.of(flat, 0)), description)
