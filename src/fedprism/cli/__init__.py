"""The command line: `fedprism COMMAND`; `entry` collects the commands, one file each."""

from fedprism.cli.entry import main

__all__ = ["main"]
