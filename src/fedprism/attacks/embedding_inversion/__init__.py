"""Tokens and categories out of the gradients of the tables that they are looked up in."""
