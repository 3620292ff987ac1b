"""`hf-megatron dry-run`."""

import json
from typing import Annotated

import typer

from .failure import failing


def dry_run_kinds(
    model: Annotated[str, typer.Argument(help="Model type, local folder or hub name; only its config is read.")],
    ranks: Annotated[int, typer.Option(help="Ranks of the job.", min=2)],
    layout: Annotated[str, typer.Option(help="Such as `tp8+sp+pp16+zero1`; the rest of the ranks is data parallel.")],
    seq: Annotated[int, typer.Option(help="Tokens of a row.", min=1)] = 4096,
    microbatch: Annotated[int, typer.Option(help="Rows of a microbatch on a data parallel rank.", min=1)] = 1,
    microbatches: Annotated[
        int, typer.Option(help="Microbatches of a step with pipeline stages; 0: two for each of them.", min=0)
    ] = 0,
    schedule: Annotated[str, typer.Option(help="The pipeline schedule.")] = "1f1b",
    recompute: Annotated[str, typer.Option(help="none, selective or full.")] = "none",
    device_memory: Annotated[float, typer.Option(help="GiB of a device, to compare with.", min=0)] = 0.0,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print every pipeline rank as JSON, in bytes.")] = False,
) -> None:
    """Run a training step of MODEL on every kind of rank of a job that is nowhere: bytes, collectives, waits."""
    from dataclasses import replace

    import torch

    from ..errors import ConfigError
    from ..planner.predicted_ranks import predict_ranks
    from ..planner.report import as_rows, as_text
    from ..verify.check import parse_layouts
    from ..verify.named_models import resolve_config

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    with failing():
        if dtype not in dtypes:
            raise ConfigError(f"--dtype {dtype}: valid are {', '.join(dtypes)}.")
        layouts = parse_layouts(layout)
        if len(layouts) != 1:
            raise ConfigError(f"--layout {layout}: expected one layout.")
        config = replace(
            layouts[0],
            pipeline_schedule=schedule,
            recompute=None if recompute == "none" else recompute,
            num_microbatches=microbatches or layouts[0].num_microbatches,
        )
        found = predict_ranks(
            resolve_config(model),
            config,
            ranks,
            microbatch_size=microbatch,
            sequence_length=seq,
            dtype=dtypes[dtype],
        )
        typer.echo(json.dumps(as_rows(found), indent=1) if as_json else as_text(found, config, device_memory or None))
