"""A small filter over facts: comparisons of names with values, joined by and, or, not."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nnx.utils import validation as check

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_ALLOWED = "comparisons (== != < <= > >= in, not in) of names and values, joined by and, or, not"


@dataclass(frozen=True, slots=True)
class Where:
    """A parsed filter, such as ``accuracy > 0.9 and optimizer == 'adamw'``.

    Nothing of the text runs. A comparison with a fact that there is none of is not true;
    ``name == None`` asks for that.
    """

    text: str
    _tree: ast.expr

    @classmethod
    def parse(cls, text: str) -> Where:
        """``ValueError`` says what is no part of the language."""
        check.text("where", "text", text)
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"{text!r} is not a filter ({error}); it takes {_ALLOWED}") from None
        found = cls(text, tree)
        found._check(tree)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The facts that it asks about, each once."""
        return tuple(dict.fromkeys(self._names(self._tree)))

    def check_names(self, known: Iterable[str]) -> None:
        """Raise for a name that nothing has, with close matches."""
        known = sorted(set(known))
        for name in self.names:
            if name not in known:
                raise ValueError(
                    f"no run has {name!r}{check.close(name, known)} (known: {', '.join(known)})"
                )

    def matches(self, facts: Mapping[str, Any]) -> bool:
        """Whether it is true of ``facts``; ``ValueError`` where a comparison makes no sense."""
        return self._true(self._tree, facts)

    def _check(self, node: ast.expr) -> None:
        if isinstance(node, ast.BoolOp):
            for part in node.values:
                self._check(part)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self._check(node.operand)
        elif isinstance(node, ast.Compare):
            for operand in (node.left, *node.comparators):
                if _name(operand) is None:
                    self._value(operand)
            if not all(type(op) in _COMPARE for op in node.ops):
                self._refuse(node)
        elif _name(node) is None:
            self._refuse(node)

    def _names(self, node: ast.AST) -> Iterable[str]:
        name = _name(node)
        if name is not None:
            yield name
            return
        for part in ast.iter_child_nodes(node):
            yield from self._names(part)

    def _true(self, node: ast.expr, facts: Mapping[str, Any]) -> bool:
        if isinstance(node, ast.BoolOp):
            every = all if isinstance(node.op, ast.And) else any
            return every(self._true(part, facts) for part in node.values)
        if isinstance(node, ast.UnaryOp):
            return not self._true(node.operand, facts)
        if isinstance(node, ast.Compare):
            operands = [self._read(one, facts) for one in (node.left, *node.comparators)]
            steps = zip(node.ops, operands, operands[1:])
            return all(self._compare(op, left, right) for op, left, right in steps)
        return bool(facts.get(_name(node) or ""))

    def _compare(self, op: ast.cmpop, left: Any, right: Any) -> bool:
        equality = isinstance(op, (ast.Eq, ast.NotEq))
        if not equality and (left is None or right is None):
            return False
        try:
            return bool(_COMPARE[type(op)](left, right))
        except TypeError as error:
            raise ValueError(f"{self.text!r} compares {left!r} with {right!r}: {error}") from None

    def _read(self, node: ast.expr, facts: Mapping[str, Any]) -> Any:
        name = _name(node)
        return self._value(node) if name is None else facts.get(name)

    def _value(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            self._refuse(node)

    def _refuse(self, node: ast.expr) -> Any:
        part = ast.get_source_segment(self.text.strip(), node) or self.text
        raise ValueError(f"{part!r} is no part of a filter, which takes {_ALLOWED}")


def _name(node: ast.AST) -> str | None:
    """``"train.optim.max_lr"`` of dotted names; ``None`` for everything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _name(node.value)
        return None if before is None else f"{before}.{node.attr}"
    return None
