"""`hf-megatron plan`, `show` and `dry-run`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .exit_codes import failing
from .options import (
    AsJson,
    DecoderSeqLength,
    Layout,
    Model,
    Schedule,
    SeqLength,
    parse_pipeline_layout,
    parse_recompute,
    parse_sizes,
)


def search(
    model: Model,
    num_gpus: Annotated[int, typer.Option(help="Number of GPUs to search layouts for.", min=1)],
    gpu: Annotated[str, typer.Option(help="GPU type, e.g. h100, or a YAML file written by measure-device.")] = "h100",
    layout: Annotated[str, typer.Option(help="Sizes to fix, e.g. tp8+pp4; the others are searched.")] = "",
    seq_length: SeqLength = 4096,
    decoder_seq_length: DecoderSeqLength = 0,
    global_batch_size: Annotated[int, typer.Option(help="Sequences per optimizer step.", min=1)] = 256,
    precision: Annotated[
        str, typer.Option(help="Precision of matrix products: bf16, fp16, fp32, or fp8 with bf16 weights.")
    ] = "bf16",
    tokens: Annotated[float, typer.Option(help="Training tokens, to print days of training; 0: unknown.", min=0)] = 0,
    fused: Annotated[
        bool, typer.Option("--fused", help="Assume the speed of tuned stacks with fused kernels, not of stock modules.")
    ] = False,
    lora: Annotated[int, typer.Option(help="Rank of LoRA on all linears of a frozen model; 0: no LoRA.", min=0)] = 0,
    frozen: Annotated[
        list[str] | None, typer.Option(help="Regular expression for names of frozen parameters; may be repeated.")
    ] = None,
    quantized: Annotated[str | None, typer.Option(help="Quantization of the frozen linears: nf4 or int8.")] = None,
    document_length: Annotated[
        float, typer.Option(help="Mean document length in packed sequences, in tokens; 0: not packed.", min=0)
    ] = 0,
    offload_optimizer: Annotated[
        bool, typer.Option("--offload-optimizer", help="Keep optimizer states in host memory.")
    ] = False,
    recompute: Annotated[
        list[str] | None,
        typer.Option(help="Recompute mode to try: none, selective or full; may be repeated; default: all."),
    ] = None,
    as_json: AsJson = False,
    yaml: Annotated[Path | None, typer.Option(help="Write the best layout as YAML for `megatron_config=`.")] = None,
    accelerate: Annotated[
        Path | None, typer.Option(help="Write the best layout as YAML for `accelerate launch --config_file`.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Plot memory per stage and the step of the best layout as PNG.")
    ] = None,
) -> None:
    """Search for the fastest layouts of MODEL that fit a number of GPUs."""
    from ..errors import ConfigError
    from ..testing.resolve_model import resolve_config

    with failing():
        for path in (yaml, accelerate, plot):
            if path is not None and not path.absolute().parent.is_dir():
                raise ConfigError(f"{path}: the folder {path.parent} does not exist.")
        from ..planner.candidates import Bounds
        from ..planner.devices import device
        from ..planner.job import Job
        from ..planner.plan_output import plan_as_dict, plan_as_text, write_plan
        from ..planner.search import search_layouts
        from ..planner.time_model import PUBLISHED, STOCK
        from ..planner.training import Training

        fixed = parse_sizes(layout, "tp_size", "cp_size", "pp_size", "ep_size", "sequence_parallel") if layout else {}
        # Searches always use sequence parallelism with tensor parallelism.
        fixed.pop("sequence_parallel", None)
        bounds = Bounds(offload_optimizer=offload_optimizer, fixed=fixed)
        if recompute:
            bounds = replace(bounds, recomputes=tuple(map(parse_recompute, recompute)))
        job = Job(
            num_gpus,
            device(gpu),
            seq_length,
            global_batch_size,
            precision,
            PUBLISHED if fused else STOCK,
            Training(lora, tuple(frozen or ()), quantized),
            document_length or None,
            decoder_seq_length or None,
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
        if plot is not None:
            from ..planner.plan_plot import draw_plan

            draw_plan(search_result, plot)


def show(model: Model, layout: Layout = "tp2") -> None:
    """Print how a layout shards each parameter of MODEL."""
    from ..core.layouts import parse_layout
    from ..testing.resolve_model import print_plan

    with failing():
        typer.echo(print_plan(model, parse_layout(layout)))


def dry_run(
    model: Model,
    num_gpus: Annotated[int, typer.Option(help="Number of GPUs of the job.", min=2)],
    layout: Annotated[
        str, typer.Option(help="Parallel layout, e.g. tp8+sp+pp16+mb32+zero1; the other ranks are data-parallel.")
    ],
    seq_length: SeqLength = 4096,
    decoder_seq_length: DecoderSeqLength = 0,
    micro_batch_size: Annotated[int, typer.Option(help="Sequences per microbatch on a data-parallel rank.", min=1)] = 1,
    schedule: Schedule = "1f1b",
    recompute: Annotated[str, typer.Option(help="Recompute mode: none, selective or full.")] = "none",
    device_memory: Annotated[float, typer.Option(help="Memory of a GPU in GiB, to compare with.", min=0)] = 0.0,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights: bfloat16, float16 or float32.")] = "bfloat16",
    as_json: AsJson = False,
    plot: Annotated[Path | None, typer.Option(help="Plot the memory of the pipeline ranks as PNG.")] = None,
) -> None:
    """Simulate one training step of a large job without GPUs: memory, communication and host-device syncs per rank."""
    import torch

    from ..core.fork_harness import find_unsupported_reason
    from ..errors import ConfigError, RankError
    from ..planner.rank_predictions import predict_ranks
    from ..planner.report import as_rows, as_text
    from ..testing.resolve_model import resolve_config

    dtypes = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
    with failing():
        if dtype not in dtypes:
            raise ConfigError(f"--dtype {dtype}: expected one of {', '.join(dtypes)}.")
        config = replace(parse_pipeline_layout(layout, schedule), recompute=parse_recompute(recompute))
        try:
            predictions = predict_ranks(
                resolve_config(model),
                config,
                num_gpus,
                microbatch_size=micro_batch_size,
                sequence_length=seq_length,
                target_length=decoder_seq_length or None,
                dtype=dtypes[dtype],
            )
        except RankError as error:
            if (reason := find_unsupported_reason(str(error))) is None:
                raise
            raise ConfigError(f"--layout {layout}: {reason}") from None
        if as_json:
            typer.echo(json.dumps(as_rows(predictions), indent=1))
        else:
            typer.echo(as_text(predictions, config, device_memory or None))
        if plot is not None:
            from ..planner.plan_plot import draw_predicted_ranks

            draw_predicted_ranks(predictions, config, plot, device_memory or None)
