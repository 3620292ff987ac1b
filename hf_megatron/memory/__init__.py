"""What backward keeps of forward, and what it computes again instead."""
