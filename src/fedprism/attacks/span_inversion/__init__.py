"""Images out of what the gradients of convolutions and dense layers span."""
