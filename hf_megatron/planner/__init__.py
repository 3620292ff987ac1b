"""What a parallel run will need, told before it has a cluster."""
