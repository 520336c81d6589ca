"""Files on disk: tensors, results published in one step, JSON, pictures."""
