"""Training loops as users write them, compared with one process: a table of habits, and random combinations."""
