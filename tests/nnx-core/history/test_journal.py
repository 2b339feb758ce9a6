"""The bounded journal: what is on disk, what is in memory, what is refused."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nnx.history import HistoryCorruptionError, HistoryJournal, iter_history
from nnx.history.reading import Journal
from nnx.history.writing import JournalWriter
from nnx.store import NNRun, RunWriter
from nnx.utils.flushing import Flushes


@pytest.fixture
def journaled(train, parts, root):
    def make(epochs=4, retention=3, chunk_size=2, **options):
        spec = HistoryJournal(retention=retention, chunk_size=chunk_size)
        return train(parts.run(epochs, salt="journal"), epochs, history=spec, **options)

    return make


def all_records(parts, epochs):
    return [parts.record(e, b) for e in range(epochs) for b in range(2)]


def test_the_chunk_size_is_resolved_and_checked():
    assert HistoryJournal().chunk == 250
    assert HistoryJournal(retention=10).chunk == 10
    assert HistoryJournal(retention=10, chunk_size=4).chunk == 4
    with pytest.raises(ValueError, match=r"chunk_size must be at most retention \(10\), not 11"):
        HistoryJournal(retention=10, chunk_size=11)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=r"HistoryJournal\.retention"):
            HistoryJournal(retention=bad)


def test_the_run_keeps_a_window_and_the_disk_everything(journaled, parts):
    run = journaled()
    assert run.idps == all_records(parts, 4)[-3:]
    loaded = NNRun.load(run.id)
    assert loaded.id == run.id == parts.run(4, salt="journal").id
    assert loaded.idps == run.idps
    assert os.path.samefile(loaded.history, f"runs/{run.id}/history")
    assert list(iter_history(run.id)) == all_records(parts, 4)
    assert not os.path.exists(f"runs/{run.id}/idps.csv")
    assert NNRun.all()[0].idps == run.idps


def test_the_files_are_chunks_an_index_epochs_and_a_manifest(journaled):
    run = journaled(epochs=2)
    folder = Path(f"runs/{run.id}/history")
    assert sorted(os.listdir(folder)) == [
        "chunk-00000000.jsonl", "chunk-00000001.jsonl", "epochs.jsonl", "index.jsonl",
        "journal.json",
    ]  # fmt: skip
    manifest = json.loads((folder / "journal.json").read_text())
    assert (manifest["records"], manifest["chunks"], manifest["epochs"]) == (4, 2, 2)
    entries = [json.loads(line) for line in (folder / "index.jsonl").read_text().splitlines()]
    for number, entry in enumerate(entries):
        data = (folder / f"chunk-{number:08d}.jsonl").read_bytes()
        assert entry["sha256"] == hashlib.sha256(data).hexdigest()
        assert entry["records"] == len(data.splitlines()) == 2
    rows = Journal.open(str(folder)).epochs()
    assert [row["epoch_idx"] for row in rows] == [0, 1]


def test_every_record_is_written_once(journaled, monkeypatch):
    written = []
    real = JournalWriter._write_chunk

    def write_chunk(self):
        written.extend(self._waiting)
        real(self)

    monkeypatch.setattr(JournalWriter, "_write_chunk", write_chunk)
    journaled(epochs=4)
    assert [r.iter_idx for r in written] == list(range(8))


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5), st.integers(1, 6), st.integers(1, 6))
def test_any_epochs_come_back_in_order_through_any_chunks(
    tmp_path_factory, parts_of, epochs, retention, chunk
):
    folder = str(tmp_path_factory.mktemp("journal") / "history")
    spec = HistoryJournal(retention=retention, chunk_size=min(chunk, retention))
    writer, expected = JournalWriter(folder, spec), []
    for epoch, batches in enumerate(epochs):
        for batch in range(batches):
            record = parts_of(epoch, batch, batches=batches)
            writer.add(record)
            expected.append(record)
            assert list(writer.view) == expected[-retention:]
            assert list(writer.everything()) == expected
        done = parts_of(epoch, batches - 1, batches=batches, error=0.123)
        writer.replace_last(done)
        expected[-1] = done
        writer.commit(Flushes())
    journal = Journal.open(folder)
    assert list(journal.iterate()) == expected
    assert max(c.records for c in journal.chunks) <= spec.chunk
    for last in range(len(epochs)):
        known = [r for r in expected if r.epoch_idx <= last]
        assert list(journal.iterate(last)) == known
        assert journal.tail(4, last) == known[-4:]


@pytest.fixture(scope="module")
def parts_of():
    import importlib.util

    path = Path(__file__).parents[1] / "store" / "conftest.py"
    spec = importlib.util.spec_from_file_location("store_parts_again", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.make_record


def test_the_window_is_a_live_read_only_sequence(parts, root):
    with RunWriter.open(parts.run(), history=HistoryJournal(retention=3)) as writer:
        window = writer.idps
        for batch in range(5):
            writer.append(parts.record(0, batch, batches=9))
        assert [r.batch_idx for r in window] == [2, 3, 4]
        assert window[-1].batch_idx == 4
        assert [r.batch_idx for r in reversed(window)] == [4, 3, 2]
        assert window[1:] == list(window)[1:]
        assert isinstance(window[:], list)
        with pytest.raises(TypeError):
            window[0] = None
        for name in ("append", "extend", "pop", "clear", "insert", "remove", "sort"):
            assert not hasattr(window, name)
        with writer.full_history() as full:
            assert [r.batch_idx for r in full] == list(range(5))


def test_discarding_forgets_the_epoch_that_runs(parts, root):
    spec = HistoryJournal(retention=3, chunk_size=1)
    with RunWriter.open(parts.run(salt="d"), history=spec) as writer:
        writer.append(parts.record(0, 1))
        writer.commit_epoch(parts.checkpoint(0), parts.state(0))
        for batch in range(4):
            writer.append(parts.record(1, batch, batches=9))
        writer.discard_epoch()
        writer.append(parts.record(1, 1))
        writer.commit_epoch(parts.checkpoint(1), parts.state(1))
        run = writer.finish()
    assert list(iter_history(run.id)) == [parts.record(0, 1), parts.record(1, 1)]


def test_records_past_last_are_filtered(journaled, parts):
    run = journaled(epochs=3)
    parts.checkpoint(0).save(run.id, "last", completed_epoch=0)
    assert NNRun.load(run.id).idps == all_records(parts, 1)
    assert list(iter_history(run.id)) == all_records(parts, 1)


def test_a_failed_last_republishes_the_previous_manifest(parts, root):
    run = parts.run(3, salt="failed")

    def fit():
        with RunWriter.open(run, history=HistoryJournal(retention=5)) as writer:
            writer.append(parts.record(0, 1))
            writer.commit_epoch(parts.checkpoint(0), parts.state(0))
            writer.append(parts.record(1, 1))
            writer.commit_epoch(parts.checkpoint(1), {"components": {"x": object()}})

    with pytest.raises(TypeError):
        fit()
    journal = Journal.open(f"runs/{run.id}/history")
    assert (journal.records, journal.manifest["last_epoch"]) == (1, 0)
    assert NNRun.load(run.id).idps == [parts.record(0, 1)]


def flip(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda h: flip(h / "chunk-00000001.jsonl"), r"chunk-00000001.jsonl does not match"),
        (lambda h: (h / "chunk-00000000.jsonl").unlink(), r"chunk-00000000.jsonl is missing"),
        (lambda h: flip(h / "index.jsonl"), r"index.jsonl (was altered|cannot be read)"),
        (lambda h: (h / "index.jsonl").write_bytes(b""), r"index.jsonl is shorter"),
        (lambda h: flip(h / "journal.json"), r"journal.json cannot be read"),
    ],
    ids=["altered chunk", "missing chunk", "altered index", "cut index", "altered manifest"],
)
def test_damage_is_a_corruption_error(journaled, damage, message):
    run = journaled(epochs=2, retention=50)
    damage(Path(f"runs/{run.id}/history"))
    with pytest.raises(HistoryCorruptionError, match=message):
        list(iter_history(run.id))
    with pytest.raises(ValueError, match=message):
        NNRun.load(run.id)


def test_loading_reads_only_the_chunks_of_the_tail(journaled, monkeypatch):
    run = journaled(epochs=6, retention=3, chunk_size=2)
    read = []
    real = Journal.read_chunk
    monkeypatch.setattr(
        Journal, "read_chunk", lambda self, chunk: (read.append(chunk.number), real(self, chunk))[1]
    )
    assert len(NNRun.load(run.id).idps) == 3
    assert sorted(read) == [4, 5]
    first = next(iter_history(run.id))
    assert (first.epoch_idx, read[-1]) == (0, 0)


def test_saving_never_rewrites_a_journal_and_refuses_another_root(journaled, tmp_path):
    run = journaled()
    before = {p: p.read_bytes() for p in Path(f"runs/{run.id}/history").iterdir()}
    NNRun.load(run.id).save()
    assert {p: p.read_bytes() for p in Path(f"runs/{run.id}/history").iterdir()} == before
    assert not os.path.exists(f"runs/{run.id}/idps.csv")
    with pytest.raises(ValueError, match="the copy would have none. Export it with"):
        run.save(str(tmp_path / "other"))
    assert not (tmp_path / "other").exists()


def test_bytes_written_grow_linearly_and_memory_stays_flat(tmp_path, parts):
    import tracemalloc

    def write(epochs):
        folder = str(tmp_path / str(epochs))
        writer = JournalWriter(folder, HistoryJournal(retention=50))
        tracemalloc.start()
        for epoch in range(epochs):
            for batch in range(40):
                writer.add(parts.record(epoch, batch, batches=40))
            writer.commit(Flushes())
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return held, sum(p.stat().st_size for p in Path(folder).iterdir())

    few, many = write(20), write(80)
    assert many[0] < 1.5 * few[0] + 100_000
    assert many[1] == pytest.approx(4 * few[1], rel=0.1)


# -- the original's journals ---------------------------------------------------------

ORIGINAL = Path(__file__).parents[2] / "data" / "original-runs" / "journal"
ORIGINAL_ID = "c5204b997249ee4007518040c0aa5dc7"


@pytest.fixture
def original(tmp_path, monkeypatch):
    import shutil

    monkeypatch.chdir(tmp_path)
    shutil.copytree(ORIGINAL, "runs")
    return Path("runs") / ORIGINAL_ID / "history"


def test_a_journal_of_the_original_system_is_read_whole(original):
    rows = [json.loads(line) for c in sorted(original.glob("chunk-*")) for line in c.open()]
    records = list(iter_history(ORIGINAL_ID))
    assert len(records) == len(rows) == 12
    for record, row in zip(records, rows, strict=True):
        assert (record.iter_idx, record.epoch_idx, record.lr) == (
            row["iter_idx"], row["epoch_idx"], row["lr"],
        )  # fmt: skip
        assert record.train_edp.loss == row["train_edp"]["loss"]
        assert (record.val_edp is None) == (row["val_edp"] is None)
    run = NNRun.load(ORIGINAL_ID)
    assert run.idps == records[-6:]
    assert run.precision.effective == "fp32"
    summaries = Journal.open(run.history).epochs(2)
    assert [s["epoch_idx"] for s in summaries] == [0, 1, 2]
    assert [s["last"]["iter_idx"] for s in summaries] == [2, 5, 8]


@pytest.mark.parametrize("name", ["index.jsonl", "chunk-00000003.jsonl"])
def test_an_altered_journal_of_the_original_system_is_noticed(original, name):
    path = original / name
    path.write_text(path.read_text().replace("3", "4", 1))
    with pytest.raises(HistoryCorruptionError):
        list(iter_history(ORIGINAL_ID))
