"""`hf-megatron check` and `new-family`."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import FAILURE, failing
from .options import Model


def _require_device(device: str, record: Path | None) -> None:
    import torch

    from ..errors import ConfigError

    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU.")
    if device == "cuda" and record is not None:
        raise ConfigError("--device cuda with --record is not supported: results are recorded on CPU ranks only.")


def _default_workers(models: list[str], device: str) -> int:
    is_one = len(models) == 1 and models != ["all"]
    return 1 if is_one or device == "cuda" else os.cpu_count() or 1


def check(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Model types, local folders or Hub repositories. `all`: every text and vision-language type, or every "
            "type of --task."
        ),
    ],
    layout: Annotated[
        str, typer.Option(help="Comma-separated parallel layouts, e.g. tp2,tp2+sp,cp2,cp2+a2a,pp2,dp2+ep2.")
    ] = "tp2",
    class_name: Annotated[
        str, typer.Option("--class", help="Transformers class; default: the task's Auto class.")
    ] = "",
    task: Annotated[
        str,
        typer.Option(
            help="Task of the batches: causal, image, video, audio, speech, masked, seq2seq, classification, "
            "token_classification, question_answering or hidden_states."
        ),
    ] = "causal",
    changes: Annotated[
        str, typer.Option("--set", help="Config values to change, as JSON, e.g. '{\"tie_word_embeddings\": true}'.")
    ] = "{}",
    variants: Annotated[
        bool,
        typer.Option("--variants", help="Also check tied and untied embeddings and popular checkpoints' settings."),
    ] = False,
    adapter: Annotated[str, typer.Option(help="Train a PEFT adapter instead of the model's weights, e.g. lora.")] = "",
    record: Annotated[Path | None, typer.Option(help="Write the results into this verified.json.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds per layout.", min=1)] = 120.0,
    workers: Annotated[
        int, typer.Option(help="Models checked concurrently; 0: one per CPU core, or one on GPUs.", min=0)
    ] = 0,
    device: Annotated[
        str, typer.Option(help="Device of the ranks: cpu, or cuda for this machine's GPUs; ranks may share a GPU.")
    ] = "cpu",
) -> None:
    """Check that MODELS train the same in parallel as in a single process.

    Compares loss, every gradient and the updated weights of a tiny random model of each.
    """
    from ..errors import ConfigError
    from ..integrations.accelerate.environment import look_for_gpus_without_using_them

    look_for_gpus_without_using_them()

    from ..core.layouts import parse_layouts
    from ..testing.check import check_models

    with failing():
        _require_device(device, record)
        if record is not None and not record.parent.is_dir():
            raise ConfigError(f"--record {record}: {record.parent} is not a folder.")
        layouts = parse_layouts(layout)
        try:
            parsed_changes = json.loads(changes)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--set {changes}: {error}.") from error
        arguments = {
            "class_name": class_name or None,
            "task": task,
            "changes": parsed_changes,
            "timeout": timeout,
            "variants": variants,
            "adapter": adapter or None,
            "record": record,
            "device": device,
            "workers": workers or _default_workers(models, device),
        }
        results = check_models(models, layouts, **arguments, echo=typer.echo)
    passed = sum(result["passed"] for result in results)
    typer.echo(f"{passed} of {len(results)} cases equal one process")
    if passed < len(results):
        raise typer.Exit(FAILURE)


def new_family(model: Model) -> None:
    """Print a skeleton of models/families/TYPE.py for a model type that is not supported yet."""
    from ..testing.new_family import make_family_skeleton
    from ..testing.resolve_model import resolve_config

    with failing():
        typer.echo(make_family_skeleton(resolve_config(model)), nl=False)
