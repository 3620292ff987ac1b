"""Frozen bases in four or eight bits: each rank quantises its part, with the codes of the whole."""
