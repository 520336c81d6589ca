"""Gradient Disaggregation (Lam et al., 2021)."""
