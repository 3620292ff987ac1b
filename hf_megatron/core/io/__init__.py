"""File primitives: safetensors, checksums, atomic folders, safe paths."""
