"""Tokens out of the gradients of layers that are fed them: row spaces, pursuit and prefixes."""
