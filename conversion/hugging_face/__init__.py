"""Hugging Face folders: `config.json` and safetensors or `.bin` files under the names of the model's files."""
