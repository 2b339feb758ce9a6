"""The ``nnx`` command. A command module imports what it works with when it runs."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process."""
    from nnx.cli.app import build

    build()()
