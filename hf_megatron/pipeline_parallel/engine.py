"""`model(**batch)` over pipeline stages.

| call | what happens |
|---|---|
| training, with labels | the full schedule, backwards included; `loss.backward()` scales the gradients |
| gradients, without labels or in evaluation | forwards that keep their graphs; the reverse pipeline runs in backward |
| no gradients | forwards only |

Every rank of a pipeline gets the same batch, makes the same calls and returns the same values.
"""

import functools
import inspect
import types
from typing import Any

import torch

from ..compat.torch_autograd import left_inference_mode
from ..compat.transformers_models import ties_embeddings
from ..data_parallel.engine import DataParallel
from ..errors import UnsupportedError
from ..losses.targets import target_names
from ..parallel_state import ParallelState
from .deferred_backward import run_forwards, values_of
from .encoder_forward import pipelined_encoder
from .pipeline import Pipeline
from .split_model import ModelPartition
from .train_step import TrainStep


def install_pipeline(model: Any, state: ParallelState, cut: ModelPartition, engine: DataParallel) -> Pipeline:
    """Replaces a model's forward by its pipeline.

    Args:
        cut (`ModelPartition`): how its layers were split.
        engine (`DataParallel`): holds its gradients.
    """
    pipeline = Pipeline(model, state, cut, engine)
    original = type(model).forward

    @functools.wraps(original)
    def forward(called: Any, *args: Any, **kwargs: Any) -> Any:
        if called is not model:
            raise UnsupportedError("A deep copy of a pipelined model cannot be called: load it a second time.")
        if type(called).forward is not original:
            raise UnsupportedError(
                f"{type(called).__name__}.forward was replaced after loading, but the pipeline stages run the forward "
                "that the model was loaded with. Load it with the new class, or call the model inside your function."
            )
        return _call(pipeline, args, kwargs)

    # Replaced on the instance: `type(model).forward` stays the model's own forward, which the stages run.
    state.patches.replace(model, "forward", types.MethodType(forward, model))
    if cut.layers.decoder:
        encoder = model.get_encoder()
        state.patches.replace(encoder, "forward", pipelined_encoder(pipeline, encoder.forward))
    tied = ties_embeddings(model)

    @functools.wraps(type(model).tie_weights)
    def require_tied_before(model: Any, *args: Any, **kwargs: Any) -> None:
        if ties_embeddings(model) != tied:
            raise UnsupportedError(
                f"tie_weights() after config.tie_word_embeddings was changed from {tied}: the two weights belong to "
                "different pipeline stages. Pass tie_word_embeddings to from_pretrained()."
            )
        type(model).tie_weights(model, *args, **kwargs)

    state.patches.replace(model, "tie_weights", types.MethodType(require_tied_before, model))
    return pipeline


# Schedules communicate, so compiled models run them eagerly.
@torch.compiler.disable
def _call(pipeline: Pipeline, args: tuple, kwargs: dict[str, Any]) -> Any:
    arguments = _bind(pipeline.signature, args, kwargs)
    # Tensors that are created here and kept must not be inference tensors: later training calls use them.
    with left_inference_mode():
        return_dict = arguments.pop("return_dict", None)
        pipeline.checks.require_tokens(arguments)
        if pipeline.read is not None:
            return values_of(pipeline, arguments, pipeline.read)
        pipeline.checks.require_known_loss(arguments)
        trains = torch.is_grad_enabled() and bool(target_names(arguments)) and pipeline.model.training
        awaits_problem_type = pipeline.problem_type.awaits(arguments)
        output = TrainStep(pipeline).forward(arguments) if trains else run_forwards(pipeline, arguments)
        if awaits_problem_type:
            pipeline.problem_type.share()
        wants_dict = pipeline.model.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()


def _bind(signature: inspect.Signature, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    # By name, with the entries of `**kwargs` at the top level, so that every argument can be split.
    bound = signature.bind_partial(*args, **kwargs).arguments
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            bound |= bound.pop(name, {})
    return dict(bound)
