"""``python -m nnx`` is the ``nnx`` command."""

from __future__ import annotations

from nnx.cli import main

if __name__ == "__main__":
    main()
