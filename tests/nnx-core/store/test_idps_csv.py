from __future__ import annotations

import csv
import io
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.params import MonitorRecord, MonitorSpec
from nnx.records import NNEvaluationDataPoint, NNIterationDataPoint
from nnx.store import idps_csv
from nnx.store.errors import HistoryCorruptionError
from nnx.store.idps_csv import CsvHistory as _CsvHistory
from nnx.utils.flushing import Flushes


class CsvHistory(_CsvHistory):
    """Appends that wait for the disk."""

    def append(self, records):
        flushes = Flushes()
        super().append(records, flushes)
        flushes.wait()


number = st.floats(allow_nan=False)
score = st.one_of(st.none(), number)
name = st.text(
    st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=6
)  # a user's metric may be called anything
edp = st.builds(
    NNEvaluationDataPoint,
    f1=score, recall=score, accuracy=score, precision=score, loss=number, error=score,
    extra=st.dictionaries(name, number, max_size=2),
    kind=st.sampled_from([None, "regression"]),
    count=st.one_of(st.none(), st.integers(0, 2**60)),
    status=st.sampled_from([None, "ok", "empty"]),
    metrics=st.dictionaries(name, number, max_size=2),
)  # fmt: skip
selection = st.builds(
    MonitorRecord,
    monitor=st.builds(MonitorSpec, split=st.sampled_from(["train", "val"])),
    value=score,
    status=st.sampled_from(["ok", "missing", "nonfinite"]),
    improved=st.booleans(),
)


@st.composite
def records(draw):
    found = []
    for epoch in range(draw(st.integers(1, 3))):
        for batch in range(draw(st.integers(1, 3))):
            found.append(
                NNIterationDataPoint(
                    lr=draw(number), iter_idx=len(found), epoch_idx=epoch, batch_idx=batch,
                    train_edp=draw(edp), val_edp=draw(st.one_of(st.none(), edp)),
                    train_summary=draw(st.one_of(st.none(), edp)),
                    selection=draw(st.one_of(st.none(), selection)),
                    update_count=draw(st.one_of(st.none(), st.integers(0, 99))),
                )
            )  # fmt: skip
    return found


def by_epoch(found):
    return [[r for r in found if r.epoch_idx == e] for e in range(found[-1].epoch_idx + 1)]


@settings(deadline=None, max_examples=60)
@given(found=records())
def test_appending_epochs_reads_back_exactly_and_equals_one_whole_write(tmp_path_factory, found):
    folder = tmp_path_factory.mktemp("csv")
    table = CsvHistory(str(folder / "appended.csv"))
    for epoch in by_epoch(found):
        table.append(epoch)
    idps_csv.write(str(folder / "whole.csv"), found)
    assert idps_csv.read(str(folder / "appended.csv")) == found
    assert (folder / "appended.csv").read_bytes() == (folder / "whole.csv").read_bytes()


@settings(deadline=None, max_examples=30)
@given(found=records())
def test_the_layout_is_that_of_pandas(tmp_path_factory, found):
    pandas = pytest.importorskip("pandas")
    path = tmp_path_factory.mktemp("csv") / "idps.csv"
    idps_csv.write(str(path), found)
    oracle = io.StringIO(newline="")
    pandas.json_normalize([r.state() for r in found]).to_csv(oracle, lineterminator="\n")
    ours = list(csv.reader(path.open(encoding="utf-8", newline="")))
    theirs = list(csv.reader(io.StringIO(oracle.getvalue(), newline="")))
    assert ours[0] == theirs[0]
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        for left, right in zip(mine, other, strict=True):
            # pandas turns whole numbers beside gaps into floats
            assert left == right or float(left) == float(right)


def test_values_that_are_not_finite_survive(tmp_path, parts):
    edp = NNEvaluationDataPoint(loss=math.nan, error=math.inf, f1=-math.inf)
    record = parts.record(0)
    record = type(record)(lr=1e-300, iter_idx=0, epoch_idx=0, batch_idx=0, train_edp=edp)
    idps_csv.write(str(tmp_path / "x.csv"), [record])
    (read,) = idps_csv.read(str(tmp_path / "x.csv"))
    assert math.isnan(read.train_edp.loss)
    assert (read.train_edp.error, read.train_edp.f1, read.lr) == (math.inf, -math.inf, 1e-300)


def test_an_epoch_appends_its_own_rows_only(tmp_path, parts):
    table = CsvHistory(str(tmp_path / "idps.csv"))
    table.append([parts.record(0, 0), parts.record(0, 1)])
    before = (tmp_path / "idps.csv").stat()
    table.append([parts.record(1, 0), parts.record(1, 1)])
    after = (tmp_path / "idps.csv").stat()
    assert after.st_ino == before.st_ino
    assert after.st_size < 2 * before.st_size


def test_a_new_column_is_added_at_the_end_and_old_rows_gain_an_empty_cell(tmp_path, parts):
    path = tmp_path / "idps.csv"
    table = CsvHistory(str(path))
    table.append([parts.record(0, 0)])
    late = parts.record(1, 0)
    late = type(late).from_state({**late.state(), "update_count": 5})
    table.append([late])
    rows = list(csv.reader(path.open(newline="")))
    assert rows[0][-1] == "update_count"
    assert [row[-1] for row in rows[1:]] == ["", "5"]
    assert idps_csv.read(str(path)) == [parts.record(0, 0), late]


def test_rolling_back_restores_the_bytes_before_the_append(tmp_path, parts):
    path = tmp_path / "idps.csv"
    table = CsvHistory(str(path))
    table.append([parts.record(0, 0), parts.record(0, 1)])
    before = path.read_bytes()
    table.append([parts.record(1, 0)])
    table.rollback()
    assert path.read_bytes() == before
    table.append([parts.record(1, 1)])
    assert idps_csv.read(str(path)) == [
        parts.record(0, 0), parts.record(0, 1), parts.record(1, 1)
    ]  # fmt: skip


def test_rows_past_the_last_epoch_and_a_torn_last_row_are_left_out(tmp_path, parts):
    path = tmp_path / "idps.csv"
    idps_csv.write(str(path), [parts.record(0, 0), parts.record(1, 0)])
    whole = path.read_bytes()
    for cut in range(whole.rindex(b"\n1,") + 1, len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert idps_csv.read(str(path), 0) == [parts.record(0, 0)]


def test_a_torn_row_of_a_committed_epoch_is_said_not_skipped(tmp_path, parts):
    path = tmp_path / "idps.csv"
    records = [parts.record(0, 0), parts.record(1, 0), parts.record(1, 1)]
    for count in (2, 3):  # the epoch's only row, or one of two
        idps_csv.write(str(path), records[:count])
        whole = path.read_bytes()
        after_epoch = whole[whole.rindex(b"\n", 0, -1) + 1 :].split(b",", 4)[4]
        for cut in range(len(whole) - len(after_epoch), len(whole)):
            path.write_bytes(whole[:cut])
            with pytest.raises(HistoryCorruptionError, match=f"row {count + 1} "):
                idps_csv.read(str(path), 1)


def test_a_damaged_committed_row_is_said_not_skipped(tmp_path, parts):
    path = tmp_path / "idps.csv"
    idps_csv.write(str(path), [parts.record(0, 0), parts.record(0, 1)])
    path.write_text(path.read_text().replace("0.75", "0.x5", 1))
    with pytest.raises(HistoryCorruptionError, match=r"row 2 cannot be read .*0\.x5"):
        idps_csv.read(str(path), 0)


def test_metric_names_with_dots_commas_and_quotes_come_back(tmp_path):
    extra = {"a.b": 1.0, 'q"uote, comma': 2.0, "новый": 3.0}
    edp = NNEvaluationDataPoint(loss=1.0, extra=extra, metrics=extra)
    record = NNIterationDataPoint(lr=0.1, iter_idx=0, epoch_idx=0, batch_idx=0, train_edp=edp)
    idps_csv.write(str(tmp_path / "x.csv"), [record])
    assert idps_csv.read(str(tmp_path / "x.csv")) == [record]
