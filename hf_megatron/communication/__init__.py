"""Process groups, the start-up handshake, autograd collectives and random state per axis."""
