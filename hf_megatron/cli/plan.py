"""`hf-megatron plan`, `dry-run` and `measure-device`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing, format_layout, recompute_mode


def plan(
    model: Annotated[str, typer.Argument(help="Model type, local folder or hub name; only its config is read.")],
    gpus: Annotated[int, typer.Option(help="Devices to search layouts for; 0: print the plan of one.", min=0)] = 0,
    gpu: Annotated[
        str, typer.Option(help="What they are: a name such as h100, or a YAML of `measure-device`.")
    ] = "h100",
    seq: Annotated[int, typer.Option("--seq", "--seq-length", help="Tokens of a row.", min=1)] = 4096,
    target_seq: Annotated[
        int, typer.Option(help="Tokens of a row of labels of an encoder-decoder; 0: as many as --seq.", min=0)
    ] = 0,
    global_batch: Annotated[
        int, typer.Option("--global-batch", "--global-batch-size", help="Rows of an optimizer step.", min=1)
    ] = 256,
    precision: Annotated[
        str, typer.Option(help="Of products: bf16, fp16, fp32, or fp8 with weights in bf16.")
    ] = "bf16",
    tokens: Annotated[float, typer.Option(help="Tokens to train on, for days; 0: not said.", min=0)] = 0,
    fused: Annotated[
        bool, typer.Option("--fused", help="Times of tuned stacks with fused kernels, not of stock modules.")
    ] = False,
    lora: Annotated[int, typer.Option(help="Rank of LoRA on all linears, the model frozen; 0: train it.", min=0)] = 0,
    frozen: Annotated[
        list[str] | None, typer.Option(help="Regular expression in the names of what is not trained; may be repeated.")
    ] = None,
    quantized: Annotated[str | None, typer.Option(help="Bits of a frozen base's linears: nf4 or int8.")] = None,
    document: Annotated[
        float, typer.Option(help="Tokens of a document on average, in packed rows; 0: a row is one.", min=0)
    ] = 0,
    offload: Annotated[bool, typer.Option("--offload", help="Optimizer state in the hosts' memory.")] = False,
    recompute: Annotated[
        list[str] | None,
        typer.Option(help="What may be tried of none, selective and full; all by default; may be repeated."),
    ] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", "--tensor-model-parallel-size", help="Fix tensor parallel size.")
    ] = None,
    sp: Annotated[bool, typer.Option("--sp", help="With sequence parallelism; searches always have it.")] = False,
    cp: Annotated[
        int | None, typer.Option("--cp", "--context-parallel-size", help="Fix context parallel size.")
    ] = None,
    pp: Annotated[
        int | None, typer.Option("--pp", "--pipeline-model-parallel-size", help="Fix pipeline parallel size.")
    ] = None,
    ep: Annotated[
        int | None, typer.Option("--ep", "--expert-model-parallel-size", help="Fix expert parallel size.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer of a search as JSON.")] = False,
    yaml: Annotated[Path | None, typer.Option(help="Write the best layout here, for `megatron_config=`.")] = None,
    accelerate: Annotated[
        Path | None, typer.Option(help="Write the best layout here, for `accelerate launch --config_file`.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(help="Draw memory of the stages and the step of the best layout into this PNG.")
    ] = None,
) -> None:
    """Search the best layouts of MODEL on --gpus devices; without it, print how one layout splits each parameter."""
    from ..errors import ConfigError
    from ..testing.check import parse_layouts
    from ..testing.resolve_model import print_plan, resolve_config

    with failing():
        if not gpus:
            for name, value in (
                ("--json", as_json),
                ("--yaml", yaml),
                ("--accelerate", accelerate),
                ("--picture", picture),
            ):
                if value:
                    raise ConfigError(f"{name} is only valid for a search: pass --gpus.")
            sizes = 2 if tp is None else tp, sp, 1 if cp is None else cp, 1 if pp is None else pp, ep or 1
            typer.echo(print_plan(model, parse_layouts(format_layout(*sizes))[0]))
            return

        for path in (yaml, accelerate, picture):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"{path}: the folder {path.parent} does not exist.")
        from ..planner.candidates import Bounds
        from ..planner.devices import device
        from ..planner.job import Job
        from ..planner.plan_output import plan_as_dict, plan_as_text, write_plan
        from ..planner.search import search_layouts
        from ..planner.time_model import PUBLISHED, STOCK
        from ..planner.training import Training

        sizes_of = {"tp_size": tp, "cp_size": cp, "pp_size": pp, "ep_size": ep}
        bounds = Bounds(
            offload_optimizer=offload, fixed={name: size for name, size in sizes_of.items() if size is not None}
        )
        if recompute:
            bounds = replace(bounds, recomputes=tuple(map(recompute_mode, recompute)))
        training = Training(lora, tuple(frozen or ()), quantized)
        efficiency = PUBLISHED if fused else STOCK
        job = Job(
            gpus, device(gpu), seq, global_batch, precision, efficiency, training, document or None, target_seq or None
        )
        search_result = search_layouts(resolve_config(model), job, bounds)
        if as_json:
            typer.echo(json.dumps(plan_as_dict(search_result, tokens or None), indent=1))
        else:
            typer.echo(plan_as_text(search_result, model, tokens or None))
        if yaml is not None:
            write_plan(search_result, yaml)
        if accelerate is not None:
            write_plan(search_result, accelerate, for_accelerate=True)
        if picture is not None:
            from ..planner.plan_plot import draw_plan

            draw_plan(search_result, picture)


def dry_run_kinds(
    model: Annotated[str, typer.Argument(help="Model type, local folder or hub name; only its config is read.")],
    ranks: Annotated[int, typer.Option(help="Ranks of the job.", min=2)],
    layout: Annotated[str, typer.Option(help="Such as `tp8+sp+pp16+zero1`; the rest of the ranks is data parallel.")],
    seq: Annotated[int, typer.Option(help="Tokens of a row.", min=1)] = 4096,
    target_seq: Annotated[
        int, typer.Option(help="Tokens of a row of labels of an encoder-decoder; 0: as many as --seq.", min=0)
    ] = 0,
    microbatch: Annotated[int, typer.Option(help="Rows of a microbatch on a data parallel rank.", min=1)] = 1,
    microbatches: Annotated[
        int, typer.Option(help="Microbatches of a step with pipeline stages; 0: two for each of them.", min=0)
    ] = 0,
    schedule: Annotated[str, typer.Option(help="The pipeline schedule.")] = "1f1b",
    recompute: Annotated[str, typer.Option(help="none, selective or full.")] = "none",
    device_memory: Annotated[float, typer.Option(help="GiB of a device, to compare with.", min=0)] = 0.0,
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print every pipeline rank as JSON, in bytes.")] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the memory of the pipeline's ranks into this PNG.")] = None,
) -> None:
    """Simulate a training step of MODEL on every kind of rank of a job, without devices: bytes, collectives, waits."""
    import torch

    from ..core.fork_harness import find_unsupported_reason
    from ..errors import ConfigError, RankError
    from ..planner.rank_predictions import predict_ranks
    from ..planner.report import as_rows, as_text
    from ..testing.check import parse_layouts
    from ..testing.resolve_model import resolve_config

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    with failing():
        if dtype not in dtypes:
            raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(dtypes)}.")
        layouts = parse_layouts(layout)
        if len(layouts) != 1:
            raise ConfigError(f"--layout {layout}: expected one layout.")
        stated = layouts[0].num_microbatches
        if microbatches and stated not in (None, microbatches):
            raise ConfigError(f"--microbatches {microbatches} conflicts with --layout {layout}.")
        if layouts[0].pp_size == 1 and schedule != "1f1b":
            raise ConfigError(f"--schedule {schedule}: --layout {layout} has no pipeline stages.")
        config = replace(
            layouts[0],
            pipeline_schedule=schedule,
            recompute=recompute_mode(recompute),
            num_microbatches=microbatches or layouts[0].num_microbatches,
        )
        try:
            predictions = predict_ranks(
                resolve_config(model),
                config,
                ranks,
                microbatch_size=microbatch,
                sequence_length=seq,
                target_length=target_seq or None,
                dtype=dtypes[dtype],
            )
        except RankError as error:
            if (reason := find_unsupported_reason(str(error))) is None:
                raise
            raise ConfigError(f"--layout {layout}: {reason}") from None
        typer.echo(
            json.dumps(as_rows(predictions), indent=1)
            if as_json
            else as_text(predictions, config, device_memory or None)
        )
        if picture is not None:
            from ..planner.plan_plot import draw_predicted_ranks

            draw_predicted_ranks(predictions, config, picture, device_memory or None)
