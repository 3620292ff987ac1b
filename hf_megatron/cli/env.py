"""`hf-megatron env`."""

import json

import typer


def env() -> None:
    """Print the versions that matter in a report."""
    import platform
    from importlib import metadata

    versions = {"python": platform.python_version()}
    for name in ("hf_megatron", "torch", "transformers", "accelerate", "safetensors", "peft", "trl", "megatron-core"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    typer.echo(json.dumps(versions, indent=2))
