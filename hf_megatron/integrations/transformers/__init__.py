"""transformers: loading, saving, generation and model cards."""
