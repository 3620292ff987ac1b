"""Pipeline parallelism: partition into stages, schedules, and communication of microbatches between stages."""
