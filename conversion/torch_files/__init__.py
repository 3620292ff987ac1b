"""Files of `torch.save`, read without executing a pickle and written in one pass."""
