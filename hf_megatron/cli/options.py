"""Options that several commands share, and the parsing of their values."""

from dataclasses import replace
from typing import Annotated, Any

import typer

from ..config import CHOICES, MegatronConfig
from ..errors import ConfigError

# Panels of `hf-megatron --help`.
PLANNING, CHECKING, CHECKPOINTS, HUB, DATA, DEBUGGING = (
    "Plan a job",
    "Check a model",
    "Checkpoints",
    "Hugging Face Hub",
    "Data",
    "Debugging",
)

Model = Annotated[str, typer.Argument(help="Model type, local folder or Hub repository; only its config is read.")]
Source = Annotated[str, typer.Argument(help="Checkpoint folder in any format, or a Hub repository.")]
Target = Annotated[str, typer.Argument(help="Output folder; must not exist.")]
Layout = Annotated[str, typer.Option(help="Parallel layout, e.g. tp2+sp+pp2.")]
SeqLength = Annotated[int, typer.Option(help="Sequence length, in tokens.", min=1)]
DecoderSeqLength = Annotated[
    int, typer.Option(help="Label length of an encoder-decoder, in tokens; 0: same as --seq-length.", min=0)
]
Schedule = Annotated[
    str,
    typer.Option(
        help="Pipeline schedule: 1f1b, gpipe, interleaved_1f1b, interleaved_zero_bubble, zbv, dualpipev, "
        "looped_bfs, or a registered one."
    ),
]
VirtualStages = Annotated[int | None, typer.Option(help="Pipeline stages per rank.", min=1)]
MaxShardSize = Annotated[str, typer.Option(help="Maximum size of a weight file, e.g. 5GB.")]
NoChecksums = Annotated[bool, typer.Option("--no-checksums", help="Do not verify the source's checksums first.")]
WithoutMtp = Annotated[
    bool, typer.Option("--without-mtp", help="Leave out multi-token prediction layers, and print how many.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def parse_recompute(mode: str) -> str | None:
    """Parses a value of `MegatronConfig.recompute`, with `none` for `None`; raises `ConfigError` for other words."""
    modes = {"none" if choice is None else str(choice): choice for choice in CHOICES["recompute"]}
    if mode not in modes:
        raise ConfigError(f"--recompute {mode}: expected one of {', '.join(modes)}.")
    return modes[mode]


def parse_sizes(layout: str, *supported: str) -> dict[str, Any]:
    """Parses a layout of which a command reads some fields only.

    Raises:
        ConfigError: the layout sets a field that is not one of `supported`.
    """
    from ..core.layouts import parse_fields

    fields = {name: value for name, value in parse_fields(layout).items() if name != "cp_comm_type"}
    if unsupported := sorted(fields.keys() - set(supported)):
        raise ConfigError(
            f"--layout {layout}: {', '.join(unsupported)} is not used here. Set {', '.join(supported)} only."
        )
    MegatronConfig(**fields)
    return fields


def parse_pipeline_layout(layout: str, schedule: str, virtual_stages: int | None = None) -> MegatronConfig:
    """Parses a layout and adds a pipeline schedule; raises `ConfigError` for a schedule without pipeline stages."""
    from ..core.layouts import parse_layout

    config = parse_layout(layout)
    if config.pp_size == 1 and schedule != "1f1b":
        raise ConfigError(f"--schedule {schedule}: --layout {layout} has no pipeline stages.")
    return replace(config, pipeline_schedule=schedule, virtual_stages=virtual_stages)
