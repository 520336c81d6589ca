"""The map of a network: which operations use a parameter, what feeds them, where the input enters."""
