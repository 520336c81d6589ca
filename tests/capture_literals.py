"""Words to put into a JSON document, and places to put them."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

LITERALS = [
    *("null", "true", "false", "0", "-1", "1", "2", "3", "5", "1.5", "-0.5", "1e-320", "1e9", "1e308", "1e999"),
    *("-1e999", "NaN", "-Infinity", "1000000000000", "-1000000000000", "9" * 30, "9" * 5000, "2147483648"),
    *("[]", "{}", "[[]]", "[0]", "[1]", "[2, 2]", "[1, 4, 4]", "[4, 4, 1]", "[16]", "[65536, 65536]", "[-1, 4, 4]"),
    *("[1, 4, 4, 1]", "[1, 2, 3, 4, 5]", "[0.0, 1.0]", "[1, 0]", "[[0.5], [0.5]]", "[[0.5], [0]]", "[[], []]"),
    *("[" * 10_000 + "]" * 10_000, '{"a":' * 200 + "1" + "}" * 200, '{"name": "fc2"}', '[{"name": "prune"}]'),
    *('""', '"x"', '"' + "x" * 100_000 + '"', r'"\u0000"', r'"a\nb"', r'"\ud800"', '"é\u2028ö"', '"..\\/x"', '"."'),
    *('"/etc/passwd"', '"../secret.safetensors"', '"capture.json"', '"update-0.safetensors"', '"os:system"'),
    *('"params-0.safetensors"', '"knowledge.safetensors"', '"gradient"', '"delta"', '"sum"', '"mean"', '"mse"'),
    *('"cross_entropy"', '"weighted_mean"', '"fc2"', '"dense"', '"lenet"', '"resnet18"', '"prune"', '"gaussian-noise"'),
    *('{"name": "fc2", "kwargs": {"input_shape": [1, 4, 4], "hidden": 1000000000000}}', '{"hidden": -1}'),
    *('{"name": "prune", "kwargs": {"ratio": "a"}}', '{"name": "laplace-noise", "kwargs": {"std": 1e300}}'),
]


PLACE = st.integers(0, 59)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value in a JSON document."""
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, child in children for place in places(child, (*path, key)))]
