"""One small file per model family that transformers has no plan for, or whose plan needs a word more."""
