"""`hf-megatron check`."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import MISMATCH, failing, format_layout


def _require_device(device: str, record: Path | None) -> None:
    import torch

    from ..errors import ConfigError

    if device not in ("cpu", "cuda"):
        raise ConfigError(f"--device {device}: expected cpu or cuda.")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no GPU.")
    if device == "cuda" and record is not None:
        raise ConfigError("--device cuda with --record is not supported: results are recorded on CPU ranks only.")


def _workers(models: list[str], device: str) -> int:
    is_one = len(models) == 1 and models != ["all"]
    return 1 if is_one or device == "cuda" else os.cpu_count() or 1


def check(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Model types, local folders or hub names; `all` for every type of text, and of images and text; with "
            "--task, of that one."
        ),
    ],
    tp: Annotated[int, typer.Option(help="Tensor parallel size.", min=1)] = 2,
    sp: Annotated[bool, typer.Option("--sp", help="With sequence parallelism.")] = False,
    cp: Annotated[int, typer.Option(help="Context parallel size.", min=1)] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline parallel size.", min=1)] = 1,
    ep: Annotated[
        int, typer.Option(help="Expert parallel size, over tp first; data parallel ranks are added for it.", min=1)
    ] = 1,
    layouts: Annotated[
        str,
        typer.Option(
            help="Several layouts at once, such as `tp2,tp2+sp,cp2,cp2+a2a,pp2,dp2+ep2`; replaces the sizes above."
        ),
    ] = "",
    class_name: Annotated[str, typer.Option("--class", help="A transformers class instead of the causal one.")] = "",
    task: Annotated[
        str,
        typer.Option(
            help="Of the batches: causal, image, video, audio, speech, masked, seq2seq, classification, "
            "token_classification, question_answering or hidden_states."
        ),
    ] = "causal",
    changes: Annotated[
        str, typer.Option("--set", help="Changes of the config, as JSON: '{\"tie_word_embeddings\": true}'.")
    ] = "{}",
    variants: Annotated[
        bool, typer.Option("--variants", help="Also tied or untied, and as in popular checkpoints.")
    ] = False,
    adapter: Annotated[
        str, typer.Option(help="Train a PEFT adapter instead of the model's weights, such as `lora`.")
    ] = "",
    record: Annotated[Path | None, typer.Option(help="Write the results into this verified.json.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds per layout.", min=1)] = 120.0,
    workers: Annotated[
        int, typer.Option(help="Models that are checked at a time; as many as cores for 0, one on GPUs.", min=0)
    ] = 0,
    device: Annotated[
        str, typer.Option(help="Of the ranks: cpu, or cuda for this machine's GPUs over NCCL; ranks may share one.")
    ] = "cpu",
) -> None:
    """Compare a tiny model of each of MODELS on several ranks with one process: loss, all gradients, updated weights.

    Exit codes: 0 all equal, 1 a mismatch, 2 wrong usage.
    """
    from ..errors import ConfigError
    from ..integrations.accelerate.environment import look_for_gpus_without_using_them

    look_for_gpus_without_using_them()

    from ..testing.check import check_models, parse_layouts

    with failing():
        _require_device(device, record)
        if record is not None and not record.parent.is_dir():
            raise ConfigError(f"--record {record}: {record.parent} is not a folder.")
        layout_configs = parse_layouts(layouts or format_layout(tp, sp, cp, pp, ep))
        try:
            changed = json.loads(changes)
        except json.JSONDecodeError as error:
            raise ConfigError(f"--set {changes}: {error}.") from error
        arguments = {
            "class_name": class_name or None,
            "task": task,
            "changes": changed,
            "timeout": timeout,
            "variants": variants,
            "adapter": adapter or None,
            "record": record,
            "device": device,
            "workers": workers or _workers(models, device),
        }
        rows = check_models(models, layout_configs, **arguments, echo=typer.echo)
    passed = sum(row["passed"] for row in rows)
    typer.echo(f"{passed} of {len(rows)} cases equal one process")
    if passed < len(rows):
        raise typer.Exit(MISMATCH)
