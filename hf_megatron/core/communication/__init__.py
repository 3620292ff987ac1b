"""Collectives with autograd, full-tensor gathers, error propagation, RNG states and the rank watchdog."""
