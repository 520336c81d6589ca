"""Audit a model of your own: a plan names it, and the results say which columns of whose rows are recovered."""

import tempfile
from pathlib import Path

from torch import nn

from fedprism import audit


def network() -> nn.Module:
    """The plan names this function: in its place, name your own model."""
    return nn.Sequential(nn.Linear(19, 32), nn.ReLU(), nn.Linear(32, 2))


def main() -> None:
    setup = audit.prepare(Path(__file__).with_name("audit_plan.toml"))
    gate = audit.parse_gate("columns=0.5", ["columns"])
    with tempfile.TemporaryDirectory() as folder:
        found = audit.run_audit(setup, folder, checks=audit.Checks(gates=(gate,)))
        for row in found.summary:
            cell, columns = row["configuration"], row["metrics"]["columns"]
            print(
                f"{cell['attack']:>15}, batch of {cell['batch_size']}, {cell['defense']}: {columns['mean']:.0%} of the "
                f"columns were recovered, {columns['baseline']:.0%} without any attack"
            )
        print(*found.conclusion["sentences"], sep="\n")
        print(f"{len(found)} records; {sum(outcome.state == 'failed' for outcome in found)} failed")


if __name__ == "__main__":
    main()
