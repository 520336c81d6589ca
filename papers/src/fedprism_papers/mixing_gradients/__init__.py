"""Mixing Gradients Strategies (Eloul et al.)."""
