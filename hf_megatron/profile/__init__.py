"""What the ranks of a pipeline did when: recorded, gathered and drawn."""
