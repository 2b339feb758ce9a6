"""Summaries and comparisons as tables, text and one file that is checked when it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nnx.comparison.grouping import GroupSummary, Summary, summarize
from nnx.comparison.observations import FORMAT, ComparisonError, Observation
from nnx.comparison.paired import Bootstrap, PairedComparison, compare
from nnx.utils.files import atomic_write


@dataclass(frozen=True, slots=True)
class ComparisonReport:
    """A summary and the paired comparisons made beside it."""

    summary: Summary
    comparisons: tuple[PairedComparison, ...] = ()

    @staticmethod
    def build(
        observations: Iterable[Observation],
        comparisons: Sequence[tuple[Iterable[Observation], Iterable[Observation], str]] = (),
        *,
        bootstrap: Bootstrap | None = None,
    ) -> ComparisonReport:
        """Summarize ``observations`` and compare each ``(a, b, pairing)``."""
        found = tuple(
            compare(a, b, pairing=text, bootstrap=bootstrap) for a, b, text in comparisons
        )
        return ComparisonReport(summarize(observations), found)

    # Views -------------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """Plain rows of kind "group", "observation", "comparison", "pair" and "unmatched"."""
        rows: list[dict[str, Any]] = []
        for group in self.summary.groups:
            rows.append({"kind": "group", "group": group.label(), **_without_rows(group)})
            rows += [
                {"kind": "observation", "group": group.label(), **row.state()}
                for row in group.observations
            ]
        for comparison in self._ordered():
            name = _title(comparison)
            state = comparison.state()
            fields = ("pairing", "n", "n_nonfinite", "mean", "std", "interval", "bootstrap")
            rows.append(
                {
                    "kind": "comparison",
                    "comparison": name,
                    "metric": comparison.metric.state(),
                    **{field: state[field] for field in fields},
                }
            )
            rows += [
                {"kind": "pair", "comparison": name, **pair.state()} for pair in comparison.pairs
            ]
            for side, items in (("a", comparison.unmatched_a), ("b", comparison.unmatched_b)):
                rows += [
                    {
                        "kind": "unmatched",
                        "comparison": name,
                        "side": side,
                        "replicate": key,
                        "id": id,
                    }
                    for key, id in items
                ]
        return rows

    def text(self) -> str:
        """What :meth:`table` says, to be read: every attempt, and every signed difference."""
        lines: list[str] = []
        for group in self.summary.groups:
            lines.append(group.label())
            lines.append(
                f"  n={group.n} of {group.n_attempts} attempts, not_completed: {group.n_failed}, "
                f"nonfinite: {group.n_nonfinite}, mean={_number(group.mean)}, "
                f"std={_number(group.std)}"
            )
            for row in group.observations:
                lines.append(
                    f"  {row.id} [{row.status}] {row.replicate or 'no replicate key'}: "
                    f"{_number(row.value)} ({row.selection})"
                )
        if self.summary.differing:
            lines.append(f"not pooled: they differ in {', '.join(self.summary.differing)}")
        for comparison in self._ordered():
            lines.append(f"{_title(comparison)} ({comparison.pairing})")
            interval = comparison.interval
            shown = "" if interval is None else f", interval=[{interval[0]:.6g}, {interval[1]:.6g}]"
            lines.append(
                f"  n={comparison.n}, nonfinite: {comparison.n_nonfinite}, "
                f"mean={_signed(comparison.mean)}, std={_number(comparison.std)}{shown}"
            )
            if comparison.bootstrap is not None and interval is not None:
                draw = comparison.bootstrap
                lines.append(
                    f"  a {draw.level:.0%} percentile interval over {draw.resamples} resamples of the "
                    f"pairs (seed {draw.seed}): how the mean varies with the seed, not a test"
                )
            for pair in comparison.pairs:
                lines.append(f"  {pair.replicate}: {_signed(pair.delta)} ({pair.b} - {pair.a})")
            for side, items in (("A", comparison.unmatched_a), ("B", comparison.unmatched_b)):
                lines += [f"  {key}: on side {side} alone ({id})" for key, id in items]
        return "\n".join(lines) + "\n"

    # On disk -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Observations, what was asked, and the results, as strict JSON values."""
        return {
            "format": FORMAT,
            "observations": [row.state() for row in self.summary.observations],
            "summary": self.summary.state(),
            "comparisons": [
                {
                    "observations": {
                        side: [row.state() for row in getattr(comparison, side).observations]
                        for side in ("a", "b")
                    },
                    "result": comparison.state(),
                }
                for comparison in self._ordered()
            ],
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> ComparisonReport:
        """Rebuild from :meth:`state`: results are derived again, and must be those stored."""
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = state.get("format") if isinstance(state, Mapping) else state
            raise ComparisonError(f"this is no comparison report: its format is {found!r}")
        try:
            rows = [Observation.from_state(row) for row in state["observations"]]
            comparisons = []
            for entry in state["comparisons"]:
                sides = (
                    [Observation.from_state(row) for row in entry["observations"][side]]
                    for side in ("a", "b")
                )
                result = entry["result"]
                comparisons.append(
                    compare(*sides, pairing=result["pairing"], bootstrap=_bootstrap(result))
                )
            report = ComparisonReport(summarize(rows), tuple(comparisons))
        except (KeyError, TypeError, AttributeError) as error:
            raise ComparisonError(f"the comparison report is damaged: {error!r}") from None
        if json.loads(report.to_json()) != json.loads(_json(state)):
            raise ComparisonError(
                "the results of the comparison report are not those of its observations: it was "
                "changed after it was written"
            )
        return report

    def to_json(self) -> str:
        """:meth:`state` as JSON, keys sorted."""
        return _json(self.state())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report, the old file or the new one whatever happens."""
        with atomic_write(os.fspath(path)) as stream:
            stream.write(self.to_json() + "\n")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> ComparisonReport:
        """Read what :meth:`save` wrote; a file whose results disagree is refused."""
        with open(path, encoding="utf-8") as stream:
            try:
                state = json.load(stream, parse_constant=_refuse_constant)
            except ValueError as error:
                raise ComparisonError(
                    f"{os.fspath(path)} is no comparison report: {error}"
                ) from None
        return ComparisonReport.from_state(state)

    def _ordered(self) -> list[PairedComparison]:
        return sorted(self.comparisons, key=lambda comparison: _json(comparison.state()))


def _json(state: Any) -> str:
    try:
        return json.dumps(state, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False)
    except (ValueError, TypeError) as error:
        raise ComparisonError(f"the comparison report is damaged: {error}") from None


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _bootstrap(result: Mapping[str, Any]) -> Bootstrap | None:
    state = result["bootstrap"]
    if state is None:
        return None
    return Bootstrap(state["seed"], state["resamples"], state["level"])


def _without_rows(group: GroupSummary) -> dict[str, Any]:
    state = group.state()
    del state["observations"]
    return state


def _title(comparison: PairedComparison) -> str:
    a, b = (
        "unknown" if side.config is None else side.config[:12]
        for side in (comparison.a, comparison.b)
    )
    return f"{comparison.metric.name}: B ({b}) - A ({a})"


def _number(value: float | None) -> str:
    return "unavailable" if value is None else f"{value:.6g}"


def _signed(value: float | None) -> str:
    return "unavailable" if value is None else f"{value:+.6g}"
