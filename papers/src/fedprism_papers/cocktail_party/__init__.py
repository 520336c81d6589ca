"""Cocktail Party Attack (Kariyappa et al., 2023)."""
