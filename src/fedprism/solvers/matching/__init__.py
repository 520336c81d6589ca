"""Searching for inputs whose gradient, or whose features, match an observed one."""
