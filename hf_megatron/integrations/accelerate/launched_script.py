"""`python -m hf_megatron`: runs an unmodified script on the layout that the launcher describes.

    accelerate launch --config_file megatron.yaml -m hf_megatron train.py --its --own flags
    HF_MEGATRON_TP_SIZE=2 torchrun --nproc_per_node 2 -m hf_megatron train.py --its --own flags

Models that the script loads with `from_pretrained`, or creates with `from_config`, are parallelized, including frozen
reference models. A model whose layout is not supported stays replicated, which is fine for inference; training it
raises with the reason.
"""

import argparse
import gc
import os
import runpy
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from ...compat.patch_registry import PATCH_REGISTRY
from ...config import MegatronConfig, validate_world_size
from ...core.runtime import RUNTIME
from ...data_parallel.engine import get_engine
from ...errors import MegatronError, PlanError, UnsupportedError, UnverifiedLayoutError
from ...parallel_state import parallel_state
from .environment import config_from_environment, export_layout, job_world_size

_BY_HAND = (
    "it was created from its class or combined from other models. Create it with `from_pretrained`, or with an Auto "
    "class's `from_config`"
)


class Launch:
    """Parallelizes the models of a script and reports which ones.

    Args:
        layout (`MegatronConfig`): layout of every model.
    """

    def __init__(self, layout: MegatronConfig):
        self.layout = layout
        self._reasons: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()
        self._checked_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()

    def make(
        self,
        cls: type,
        load_parallelized: Callable[..., Any],
        load_unsharded: Callable[..., Any],
        arguments: Mapping[str, Any],
    ) -> Any:
        """Creates a model from the arguments of a script that is unaware of the layout.

        Args:
            cls: class of the model.
            load_parallelized: creates the model from `megatron_config` and the arguments.
            load_unsharded: creates the model as upstream does, from the arguments.
            arguments: keyword arguments of the script.
        """
        if _is_inside_model_init():
            return load_unsharded(**arguments)
        # A script's `device_map` refers to the devices of one process.
        kwargs = {name: value for name, value in arguments.items() if name != "device_map"}
        try:
            result = load_parallelized(megatron_config=self.layout, **kwargs)
        except (UnsupportedError, UnverifiedLayoutError, PlanError) as error:
            result = load_unsharded(**arguments)
            self._reasons[_model(result)] = str(error)
            self._say(f"{cls.__name__} was not parallelized (replicated on every rank): {error}")
        else:
            state = parallel_state(_model(result))
            assert state is not None
            self._say(f"{cls.__name__} is parallelized: {state.config.layout()}.")
        return result

    def require_parallelized(self, model: Any) -> None:
        """Raises `UnsupportedError` for a replicated transformers model that is about to be trained."""
        from transformers import PreTrainedModel

        if isinstance(model, PreTrainedModel) and any(parameter.requires_grad for parameter in model.parameters()):
            reason = self._reasons.get(model, _BY_HAND)
            raise UnsupportedError(f"{type(model).__name__} was not parallelized and cannot be trained: {reason}")

    def check_step(self, optimizer: Any) -> None:
        """Checks before an optimizer's first step that it trains a parallelized model.

        Raises:
            UnsupportedError: it trains a replicated transformers model, or the script has parallelized no model.
        """
        if optimizer in self._checked_optimizers:
            return
        weights = {id(weight): weight for group in optimizer.param_groups for weight in group["params"]}
        if not any(get_engine(weight) is not None for weight in weights.values()):
            owners = [model for model in _list_models() if any(id(weight) in weights for weight in model.parameters())]
            for model in owners if all(parallel_state(model) is None for model in owners) else ():
                self.require_parallelized(model)
            if not RUNTIME.models:
                raise UnsupportedError(
                    f"{type(optimizer).__name__} trains weights of no parallelized model, and the script has created "
                    f"none: the layout {self.layout.layout()} would be ignored. Start the script without -m "
                    "hf_megatron."
                )
        self._checked_optimizers.add(optimizer)

    def _say(self, text: str) -> None:
        import torch.distributed as dist

        if text not in self._said and not (dist.is_initialized() and dist.get_rank()):
            self._said.add(text)
            print(f"hf_megatron: {text}", file=sys.stderr, flush=True)


def _model(loaded: Any) -> Any:
    # With `output_loading_info` the result is a tuple of the model and the loading info.
    return loaded[0] if isinstance(loaded, tuple) else loaded


def _list_models() -> list[Any]:
    """Returns the transformers models of this process; searched for once per optimizer."""
    from transformers import PreTrainedModel

    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), PreTrainedModel)]


def _is_inside_model_init() -> bool:
    """Returns whether a model's `__init__` is on the call stack: its submodels are parallelized as part of it."""
    from transformers import PreTrainedModel

    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), PreTrainedModel):
            return True
        frame = frame.f_back
    return False


def _set_launch(layout: MegatronConfig) -> None:
    """Parallelizes the models that this process creates from now on, if the job has several ranks."""
    if job_world_size() > 1:
        PATCH_REGISTRY.activate()
        RUNTIME.launch = Launch(layout)
    else:
        RUNTIME.launch = None


def run_script(script: str, arguments: Sequence[str], layout: MegatronConfig, *, as_module: bool = False) -> None:
    """Runs a script as the interpreter would, with its models parallelized.

    Args:
        script: path of a file, or name of a module.
        arguments: command-line arguments of the script.
        layout: layout of its models; not used in a job with one rank.
        as_module: whether `script` is a module name.
    """
    validate_world_size(layout, job_world_size())
    _set_launch(layout)
    sys.argv = [script, *arguments]
    try:
        if as_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(script))
            runpy.run_path(script, run_name="__main__")
    finally:
        RUNTIME.launch = None


def follow_launcher() -> None:
    """Parallelizes the models that this process creates from now on, as the launcher describes.

    In a job with one rank, models stay as upstream creates them.
    """
    layout = config_from_environment()
    validate_world_size(layout, job_world_size())
    _set_launch(layout)


def launch() -> None:
    """Parses the command line of `python -m hf_megatron` and runs the script."""
    parser = argparse.ArgumentParser(prog="python -m hf_megatron", description=__doc__.partition("\n")[0])
    parser.add_argument("--config", metavar="FILE", help="YAML of MegatronConfig, instead of what the launcher says")
    parser.add_argument("-m", "--module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a training script, as it is")
    parser.add_argument("arguments", metavar="ARGUMENTS", nargs=argparse.REMAINDER, help="its own")
    args = parser.parse_args()
    if not args.module and not os.path.isfile(args.script):
        parser.error(f"SCRIPT = {args.script!r}: there is no such file.")
    try:
        layout = config_from_environment() if args.config is None else MegatronConfig.from_yaml(args.config)
        validate_world_size(layout, job_world_size())
    except MegatronError as error:
        parser.error(str(error))
    export_layout(layout)
    run_script(args.script, args.arguments, layout, as_module=args.module)
