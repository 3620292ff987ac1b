"""Which stage holds which layers, and in what order every rank runs and passes on microbatches."""
