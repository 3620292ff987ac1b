"""Integrations with transformers, Trainer, Accelerate, TRL, PEFT, torch and the Hub."""
