"""Memory and time model of a parallel run, layout search and dry run."""
