"""Attaching fedprism to federated-learning software: `integrations.flower` and `integrations.nvflare`.

Each imports its own framework, which is an extra to install. What they record goes through `recording` and is judged by
`findings` and `leakage`, which need none: a capture can be looked at anywhere.
"""
