"""Data parallelism: gradient reduction, ZeRO sharding, optimizers, gradient norms, and checks of training loops."""
