"""TRL's trainers."""
