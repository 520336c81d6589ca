"""Taking apart a sum of samples: independent components, exact batches, decoding of mixtures."""
