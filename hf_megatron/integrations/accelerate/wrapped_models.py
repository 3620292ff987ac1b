"""Modules that wrap a parallelized model: prepared with it if they have no weights of their own, otherwise rejected."""

from typing import Any

from torch import Tensor, nn

from ...checkpoint.gather_full import full_state_dict
from ...compat.ecosystem import is_sentence_transformer
from ...core.off_stage import local_named_parameters
from ...core.runtime import RUNTIME
from ...errors import UnsupportedError
from ...parallel_state import ParallelState, parallel_state, share_state_around

_PREPARE = "Accelerator.prepare"
_INSTEAD = (
    "Prepare the parallelized model itself and call it through {name}, unprepared. Additional weights to train must "
    "be part of the model when from_pretrained loads it: use a PreTrainedModel class (of transformers or your own) "
    "that has them."
)


def parallelized_submodule(module: nn.Module) -> list[nn.Module]:
    """Returns the parallelized models inside a module, excluding itself; each with its adapters, if it has any."""
    models: list[nn.Module] = []
    for inner in module.modules():
        # `modules()` yields a module before its submodules.
        if (
            inner is not module
            and parallel_state(inner) is not None
            and all(inner not in one.modules() for one in models)
        ):
            models.append(inner)
    return models


def state_around(module: Any, what: str) -> ParallelState | None:
    """Returns the state of the model inside a sentence-transformers model, and shares it with the wrapper.

    Args:
        what (`str`): caller, for error messages.

    Raises:
        UnsupportedError: another kind of module that contains a parallelized model, or weights of one.
    """
    if not isinstance(module, nn.Module):
        return None
    if is_sentence_transformer(module) and (model := model_to_prepare(module, what)) is not None:
        state = parallel_state(model)
        assert state is not None
        share_state_around(module, model, state)
        return state
    for inner in parallelized_submodule(module):
        raise UnsupportedError(
            f"{_named(what, module)} contains a parallelized {type(inner).__name__}. {_instead(module)}"
        )
    _reject_parts(module, what)
    return None


def model_to_prepare(module: nn.Module, what: str = _PREPARE) -> nn.Module | None:
    """Returns the parallelized model that a module without weights of its own wraps, `None` if there is none.

    Args:
        what (`str`): caller, for error messages.

    Raises:
        UnsupportedError: the module has parameters or buffers of its own, several parallelized models, or only some
            weights of one.
    """
    inside = parallelized_submodule(module)
    if not inside:
        _reject_parts(module, what)
        return None
    model = inside[0]
    if len(inside) > 1:
        names = ", ".join(type(inner).__name__ for inner in inside)
        raise UnsupportedError(
            f"{_named(what, module)} contains {len(inside)} parallelized models ({names}). Prepare each of them with "
            f"its own optimizer, and call them through {type(module).__name__}, unprepared."
        )
    known = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    tensors = (*module.named_parameters(), *module.named_buffers())
    extra_tensors = [f"{name} {tuple(tensor.shape)}" for name, tensor in tensors if id(tensor) not in known]
    if extra_tensors:
        listing = ", ".join(extra_tensors[:3]) + (
            f" and {len(extra_tensors) - 3} more" if len(extra_tensors) > 3 else ""
        )
        raise UnsupportedError(
            f"{_named(what, module)} contains a parallelized {type(model).__name__} and weights that are not part of "
            f"it ({listing}). {_instead(module)}"
        )
    return model


def full_state_dict_around(module: nn.Module) -> dict[str, Tensor] | None:
    """Returns the full state dict of a parallelized model, or of a module that contains one, on rank 0.

    Other ranks get an empty dict, but have to call it too, because it is collective; `None` if there is no such model.
    """
    if parallel_state(module) is not None:
        return full_state_dict(module)
    if not parallelized_submodule(module):
        return None
    state_dict: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for prefix, inner in module.named_modules():
        if parallel_state(inner) is None:
            continue
        inner_state = full_state_dict(inner)
        state_dict |= {f"{prefix}.{name}": tensor for name, tensor in inner_state.items()}
        # The wrapper may register the same parameters under other names.
        params = inner.named_parameters(remove_duplicate=False)
        known |= {id(tensor): inner_state[name] for name, tensor in params if name in inner_state}
    if not state_dict:
        return {}
    tensors, parameters = module.state_dict(), dict(module.named_parameters(remove_duplicate=False))
    further = {
        name: known.get(id(parameters.get(name)), tensor) for name, tensor in tensors.items() if name not in state_dict
    }
    return {name: (state_dict | further)[name] for name in tensors}


def _reject_parts(module: nn.Module, what: str) -> None:
    models = RUNTIME.models
    if not models:
        return
    name_of = {id(weight): (name, model) for model in models for name, weight in local_named_parameters(model)}
    for weight in module.parameters():
        if id(weight) in name_of:
            name, model = name_of[id(weight)]
            raise UnsupportedError(
                f"{_named(what, module)} contains {name} of a parallelized {type(model).__name__} but not the model "
                f"itself. Weights of a parallelized model can only be trained by calling the model. {_instead(module)}"
            )


def _named(what: str, module: nn.Module) -> str:
    return f"{what} of a {type(module).__name__}: it"


def _instead(module: nn.Module) -> str:
    return _INSTEAD.format(name=type(module).__name__)
