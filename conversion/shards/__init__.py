"""Folders of `shard-*.safetensors` as written by several transformers ranks; read by `dcp`."""
