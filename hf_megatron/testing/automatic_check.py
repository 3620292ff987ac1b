"""Subprocess of an automatic check: `python -m hf_megatron.testing.automatic_check REQUEST`.

The request, pickled by `models.automatic_check`, holds a model class, its config and the layouts. The exit code is 0 if
the tiny model of the class matches a single process on all of them.
"""

import pickle
import sys
from pathlib import Path
from typing import Any

import torch

from ..core.layouts import parse_layouts
from ..errors import ConfigError, MegatronError
from ..models.fingerprint import describe_model, is_stock_class
from .cases import resolve_case
from .check import check_layouts, minimum_layers
from .parity import build
from .tiny_config import full_config


def run_request(path: str) -> int:
    """Runs the check that a request describes; returns the exit code."""
    request = pickle.loads(Path(path).read_bytes())
    model_class = request["class"]
    config = request["config_class"].from_dict(request["config"])
    if not hasattr(config.get_text_config(), "vocab_size"):
        print(f"The check draws tokens, and {model_class.__name__} takes {model_class.main_input_name} only.")
        return 1
    config, task, _ = resolve_case(config, "causal", _find_stock_class(model_class).__name__)
    if unlike := _differing_parts(config, task, model_class, request["parts"]):
        print(f"The loaded model has modules that {model_class.__name__} does not create: {unlike}")
        return 1
    layouts = parse_layouts(request["layouts"])
    try:
        results = check_layouts(
            config, task, model_class, layouts, name=model_class.__name__, layers=minimum_layers(layouts)
        )
    except ConfigError as error:
        print(
            f"{error}\nThe check calls {model_class.__name__} with its model type's inputs and labels only. Give other "
            "arguments of its forward a default with which it computes a loss."
        )
        return 1
    except MegatronError as error:
        print(error)
        return 1
    return 0 if all(result["passed"] for result in results) else 1


def _find_stock_class(model_class: type) -> Any:
    """Returns the class of transformers that a class is or inherits from, which determines the task."""
    return next(cls for cls in model_class.__mro__ if is_stock_class(cls))


def _differing_parts(config: Any, task: str, model_class: type, digests: list[str]) -> str:
    """Returns the modules of a model built from a config that the loaded model does not have, as text.

    Modules may have been replaced in the loading process only, and a check of others would prove nothing.
    """
    with torch.device("meta"):
        parts = describe_model(build(full_config(config), task, model_class)).features({}).parts
    unlike = [part for part in parts if part.digest not in digests]
    return "; ".join(sorted(line for part in unlike for line in part.lines))[:500]


if __name__ == "__main__":
    sys.exit(run_request(sys.argv[1]))
