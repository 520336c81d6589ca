"""Texts out of the gradients of the layers that are fed their tokens."""
