"""Collective push and pull of checkpoint folders on the Hub."""
