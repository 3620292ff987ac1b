"""The ground floor of every format: safetensors in and out, digests, folders complete or absent, safe paths."""
