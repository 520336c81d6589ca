"""Gradient matching: the attack, how its guess is run through the client's step, and presets of papers."""
