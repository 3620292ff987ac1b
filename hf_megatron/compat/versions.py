"""The package version, read by the build and by `hf-megatron --version`."""

__version__ = "0.1.0"
