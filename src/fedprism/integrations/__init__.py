"""Attaching fedprism to federated-learning software: `integrations.flower` and `integrations.nvflare`."""
