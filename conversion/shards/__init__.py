"""Folders of `shard-*.safetensors` as several ranks of transformers write them; they are read as `dcp`."""
