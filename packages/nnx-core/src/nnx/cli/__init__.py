"""The ``nnx`` command. A command module imports what it works with when it runs."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line of this process."""
    from nnx.cli import streams
    from nnx.cli.app import build, explain, report

    streams.prepare()
    try:
        build()()
    except OSError as error:
        if error.filename != streams.OUTPUT:
            raise
        report(explain(error))
        raise SystemExit(1) from None
    finally:
        streams.finish()
