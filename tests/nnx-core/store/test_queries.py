"""Finding runs: rows, filters, names and tags, short ids, a DataFrame."""

from __future__ import annotations

import dataclasses
import datetime
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nnx import Checkpoints, NNCheckpoint, NNRun, NNTrainParams, runs_frame
from nnx.store import RunBusyError, lease
from nnx.store.paths import RunPaths
from nnx.store.queries import facts
from nnx.store.where import Where
from nnx.utils.yamlio import read_yaml


@pytest.fixture
def three(train, parts, root):
    """Runs of different lengths, the newest last; the second has a name and tags."""
    runs = [train(parts.run(n, salt=f"s{n}"), epochs=n) for n in (1, 2, 3)]
    runs[1] = runs[1].label(name="the second try", tags=["baseline", "small"])
    return runs


def ids(found):
    return [one.id for one in found]


def test_list_gives_rows_the_newest_first_and_find_gives_runs(three):
    rows = NNRun.list()
    assert sorted(ids(rows)) == sorted(ids(three))
    assert [row.written for row in rows] == sorted((row.written for row in rows), reverse=True)
    assert ids(NNRun.list(sort="id")) == sorted(ids(three))
    assert NNRun.find("epochs == 3") == [NNRun.load(three[2].id)]
    assert ids(NNRun.find("epochs > 1 and not epochs == 3")) == [three[1].id]
    assert ids(NNRun.list("1 < epochs <= 3", sort="id")) == sorted(ids(three[1:]))
    assert NNRun.list(root="nowhere") == NNRun.find("loss > 0", root="nowhere") == []
    with pytest.raises(ValueError, match="sort must be one of time, best, id, not 'tme'"):
        NNRun.list(sort="tme")


def test_runs_are_found_by_configuration_scores_name_and_tags(three):
    one = three[0]
    known = facts(next(row for row in NNRun.list() if row.id == one.id))
    last = one.idps[-1]
    assert known["optimizer"] == known["train.optim.name"] == one.state()["train"]["optim"]["name"]
    assert known["lr"] == one.train.optim.max_lr
    assert known["train.loss"] == pytest.approx(last.monitored_train_edp().loss)
    assert known["data_id"] is None
    assert ids(NNRun.find("'baseline' in tags and name == 'the second try'")) == [three[1].id]
    assert ids(NNRun.find("salt in ('s1', 's9')")) == [three[0].id]
    assert ids(NNRun.find(f"id == {three[2].id!r} and loss == {known['loss']!r}")) == []
    assert ids(NNRun.find("name == None and 'baseline' not in tags and epochs < 2")) == [one.id]
    assert len(NNRun.find("train.optim.max_lr > 0 or accuracy > 2")) == 3


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        ("accurcy > 0.9", "no run has 'accurcy'; did you mean 'accuracy'"),
        ("accuracy >", "'accuracy >' is not a filter"),
        ("__import__('os').system('x') == 0", r"is no part of a filter, which takes comparisons"),
        ("epochs + 1 == 2", r"'epochs \+ 1' is no part of a filter"),
        ("[x for x in tags] == 1", "is no part of a filter"),
        ("3", "'3' is no part of a filter"),
        ("epochs is 3", "is no part of a filter"),
        ("epochs > 'two'", "compares 1 with 'two'|compares 2 with 'two'|compares 3 with 'two'"),
        ("", "non-empty"),
        ("f(epochs)", "is no part of a filter"),
        ("(" * 5000, "is not a filter"),
    ],
)
def test_what_is_no_filter_is_said(three, where, problem):
    with pytest.raises(ValueError, match=problem):
        NNRun.find(where)


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(-3, 3) | st.none()),
    st.recursive(
        st.tuples(
            st.sampled_from("abc"), st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
            st.integers(-3, 3),
        ).map(lambda parts: " ".join(map(str, parts))),
        lambda inner: st.one_of(
            inner.map(lambda text: f"not ({text})"),
            st.tuples(inner, st.sampled_from([" and ", " or "]), inner).map(
                lambda parts: f"({parts[0]}){parts[1]}({parts[2]})"
            ),
        ),
        max_leaves=6,
    ),
)  # fmt: skip
def test_a_filter_means_what_python_means(known, text):
    """Where nothing is missing, as ``eval`` has it; an order with a missing fact is not true."""

    class Value:
        def __init__(self, value):
            self.value = value

        def __eq__(self, other):
            return self.value == other

        __hash__ = None

        def __getattr__(self, name):
            raise AttributeError(name)

    for operator in ("__lt__", "__le__", "__gt__", "__ge__"):

        def compare(self, other, operator=operator):
            return self.value is not None and getattr(self.value, operator)(other)

        setattr(Value, operator, compare)
    names = {name: Value(known.get(name)) for name in "abc"}
    assert Where.parse(text).matches(known) == eval(text, {}, names)


def test_a_label_is_metadata_and_changes_nothing_else(three, root):
    run = three[1]
    before = read_yaml(f"runs/{run.id}/metadata.yaml")
    assert (run.name, run.tags) == ("the second try", ("baseline", "small"))
    loaded = NNRun.load(run.id)
    assert (loaded.name, loaded.tags, loaded.id) == (run.name, run.tags, run.id)
    renamed = loaded.label(name="", tags=["final", "final"])
    assert (renamed.name, renamed.tags) == (None, ("final",))
    after = read_yaml(f"runs/{run.id}/metadata.yaml")
    assert after.pop("tags") == ["final"]
    assert after == {k: v for k, v in before.items() if k not in ("name", "tags")}
    kept = NNRun.load(run.id).label(name="again")
    assert kept.tags == ("final",)


def test_labels_that_are_none_are_refused(three):
    run = three[0]
    before = Path(f"runs/{run.id}/metadata.yaml").read_bytes()
    with pytest.raises(ValueError, match=r"tags\[1\] must be a word without spaces"):
        run.label(tags=["a", "b c"])
    with pytest.raises(TypeError, match="tags must be a sequence of words, not 'abc'"):
        run.label(tags="abc")
    with pytest.raises(ValueError, match="name"):
        run.label(name=" x ")
    assert Path(f"runs/{run.id}/metadata.yaml").read_bytes() == before
    with pytest.raises(FileNotFoundError, match="to label"):
        dataclasses.replace(run, salt="another").label(name="x")
    with lease.lease(RunPaths.of(run.id)), pytest.raises(RunBusyError):
        run.label(name="x")


def test_names_and_tags_of_a_training_are_no_part_of_its_id():
    plain, called = (NNTrainParams(n_epochs=1, **kw) for kw in ({}, {"name": "x", "tags": ["y"]}))
    assert called.state() == plain.state()
    assert called.tags == ("y",)


@pytest.mark.parametrize("text", ["tags: 3\n", "name: [1]\n", "tags: [a b]\n", "name: {\n"])
def test_labels_that_cannot_be_read_count_as_none(three, text, recwarn):
    Path(f"runs/{three[0].id}/metadata.yaml").write_text(text)
    row = next(row for row in NNRun.list() if row.id == three[0].id)
    loaded = NNRun.load(three[0].id)
    assert (row.name, row.tags) == (loaded.name, loaded.tags) == (None, ())


def test_the_beginning_of_an_id_is_enough_wherever_a_run_is_read(three):
    from nnx.history import iter_history
    from nnx.provenance import load_provenance

    run = three[0]
    assert NNRun.load(run.id[:12]).id == run.id
    assert NNCheckpoint.load(run.id[:12], Checkpoints.LAST).idp == run.idps[-1]
    assert list(iter_history(run.id[:12])) == run.idps
    assert load_provenance(run.id[:12]) is None
    assert NNRun.load(run.id[:12], f"runs/{run.id}/..").id == run.id


def test_a_beginning_of_several_ids_names_them(three):
    one = three[0]
    import shutil

    shutil.copytree(f"runs/{one.id}", f"runs/{one.id}x")
    assert NNRun.load(one.id).id == one.id
    with pytest.raises(ValueError, match=f"beginning of 2 runs: {one.id}, {one.id}x"):
        NNRun.load(one.id[:-1])


def test_a_frame_has_a_row_for_each_run(three):
    pd = pytest.importorskip("pandas")
    frame = runs_frame(sort="id")
    assert list(frame.index) == sorted(ids(three))
    row = frame.loc[three[1].id]
    assert (row["name"], row["tags"], row["epochs"]) == ("the second try", ("baseline", "small"), 2)
    assert row["train.optim.max_lr"] == row["lr"] == three[1].train.optim.max_lr
    assert abs(row["written"] - pd.Timestamp.now("UTC")) < datetime.timedelta(hours=1)
    assert list(runs_frame("epochs == 3").index) == [three[2].id]
    empty = runs_frame(root="nowhere")
    assert (len(empty), empty.index.name) == (0, "id")
    assert {"accuracy", "loss", "optimizer", "status"} <= set(empty.columns)


def test_without_pandas_the_install_line_is_named(monkeypatch):
    from nnx.plugins.siblings import install_line

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError) as refused:
        runs_frame()
    assert install_line("nnx-core", "tabular") in str(refused.value)
