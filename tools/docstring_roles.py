"""A griffe extension: ``:class:`X``` in a docstring is shown as code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|attr|data|exc|mod):`~?([^`]+)`")


class DocstringRoles(griffe.Extension):
    """Replaces Sphinx roles, which editors understand, by what Markdown understands."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = ROLE.sub(r"`\1`", obj.docstring.value)
