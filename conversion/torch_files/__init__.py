"""Files of `torch.save`, read without running a pickle and written in one pass."""
