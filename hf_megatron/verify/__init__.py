"""The proof that ships: ranks forked from one process, tiny twins, and the comparison with one process."""
