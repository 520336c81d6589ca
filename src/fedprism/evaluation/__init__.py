"""Comparing a reconstruction with the truth, and saying in words how much came back."""
