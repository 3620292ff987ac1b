"""Autograd collectives, process-group handshake, RNG states and the rank watchdog."""
