"""Loss targets, the batch denominator, inline losses and router losses."""
