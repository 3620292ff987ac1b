"""`model(**batch)` over pipeline stages.

| call | what happens |
|---|---|
| training, with labels | the whole schedule, backwards included; `loss.backward()` says how much they count |
| gradients, without labels or in evaluation | forwards that keep their graphs; the reverse pipeline runs in backward |
| no gradients | forwards only |

Every rank of a pipeline gets the same batch, calls the model alike and gets the same numbers.
"""

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..compat.torch_autograd import left_inference_mode
from ..compat.transformers_models import ties_embeddings
from ..data_parallel.engine import DataParallel
from ..errors import UnsupportedError
from ..losses.targets import target_names
from ..parallel_state import ParallelState
from .deferred_backward import run_forwards, values_of
from .encoder_forward import pipelined_encoder
from .split_model import ModelPartition
from .stage_runner import StageRunner
from .train_step import run_schedule


class Pipeline(StageRunner):
    """Attached to a model whose layers lie on several ranks."""

    def __init__(self, model: Any, state: ParallelState, cut: ModelPartition, engine: DataParallel):
        super().__init__(model, state, cut, engine)

        @functools.wraps(type(model).forward)
        def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
            if model is not self.model:
                raise UnsupportedError("A deep copy of a pipelined model cannot be called: load it a second time.")
            if type(model).forward is not self.forward.func:
                raise UnsupportedError(
                    f"{type(model).__name__}.forward is not what the model was loaded with: its stages would run the "
                    "former one. Load it with the new class, or call the model inside a function of your own."
                )
            return self(*args, **kwargs)

        state.patches.replace(model, "forward", types.MethodType(forward, model))
        if cut.layers.decoder:
            encoder = model.get_encoder()
            state.patches.replace(encoder, "forward", pipelined_encoder(self, encoder.forward))
        tied = ties_embeddings(model)

        @functools.wraps(type(model).tie_weights)
        def require_tied_before(model: Any, *args: Any, **kwargs: Any) -> None:
            if ties_embeddings(model) != tied:
                raise UnsupportedError(
                    f"tie_weights() after config.tie_word_embeddings was changed from {tied}: both weights lie on "
                    "different pipeline stages. Pass tie_word_embeddings to from_pretrained()."
                )
            type(model).tie_weights(model, *args, **kwargs)

        state.patches.replace(model, "tie_weights", types.MethodType(require_tied_before, model))

    def describe(self) -> dict[str, Any]:
        """Returns the schedule and its sizes; `microbatches` are those of a batch with enough rows."""
        return {
            "schedule": self.schedule.name,
            "ranks": self.config.pp_size,
            "stages_per_rank": self.stages_per_rank,
            "microbatches": self.microbatches_at_most(),
        }

    # A schedule sends and receives: compiled models run it as it is.
    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with left_inference_mode():
            return self._call(self._arguments(args, kwargs))

    def _call(self, arguments: dict[str, Any]) -> Any:
        return_dict = arguments.pop("return_dict", None)
        self.checks.require_tokens(arguments)
        if self.read is not None:
            return values_of(self, arguments, self.read)
        self.checks.require_known_loss(arguments)
        trains = torch.is_grad_enabled() and bool(target_names(arguments)) and self.model.training
        output = run_schedule(self, arguments) if trains else run_forwards(self, arguments)
        wants_dict = self.model.config.return_dict if return_dict is None else return_dict
        return output if wants_dict else output.to_tuple()

    def _arguments(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        bound = self.signature.bind_partial(*args, **kwargs).arguments
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        return dict(bound)

    @contextmanager
    def reading(self, read: Callable[[Any, slice], tuple[Tensor, ...]]) -> Iterator[None]:
        """Makes calls inside return on every rank what `read` makes of the last stage's outputs.

        Args:
            read (`Callable`): (what the model returned for a microbatch, its rows in the batch) -> tensors
                `[rows, ...]`, and scalars, which are added up. Their backward runs the pipeline in reverse.
        """
        before, self.read = self.read, read
        try:
            yield
        finally:
            self.read = before
