"""torch: autograd, DTensor operators, stock optimizers and DistributedDataParallel."""
