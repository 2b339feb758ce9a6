"""``runs/best``: who may own the pointer and who does."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
from pathlib import Path

import pytest
from nnx.enums import Checkpoints, Losses
from nnx.records import NNEvaluationDataPoint as E
from nnx.records import NNIterationDataPoint
from nnx.store import NNCheckpoint, NNRun, RunWriter, lease
from nnx.store.cleanup import collect
from nnx.store.election import elect, standings
from nnx.store.paths import RunPaths
from nnx.store.pointer import best_run_id
from nnx.store.standing import grounds, of_record, score
from nnx.utils import files

nan, inf = math.nan, math.inf


def record(train=None, val=None, epoch=0):
    return NNIterationDataPoint(
        lr=0.1, iter_idx=0, epoch_idx=epoch, batch_idx=0, train_edp=train or E(), val_edp=val
    )


@pytest.mark.parametrize(
    ("train", "val", "expected"),
    [
        (E(error=0.1, loss=0.2), E(error=0.3, loss=0.4), 0.3),
        (E(error=0.1), E(error=nan, loss=0.4), 0.4),
        (E(error=0.1), E(error=inf), 0.1),
        (E(error=0.1), E(error=inf, loss=-inf), inf),  # a model that diverged has no score
        (E(error=0.1), E(error=0.2, loss=nan), inf),
        (E(error=0.2, loss=inf), None, inf),
        (E(error=0.2, loss=nan), E(error=0.3, loss=0.4), 0.3),
        (E(error=0.1), E(kind="regression", status="empty"), inf),
        (E(error=None, loss=0.7), E(), 0.7),
        (E(error=0.1, loss=0.2), None, 0.1),
        (E(error=nan, loss=nan), E(error=nan, loss=nan), inf),
        (E(), None, inf),
        (E(error=0.0), E(error=0.0), 0.0),
    ],
)
def test_an_epoch_is_scored_by_its_first_finite_value(train, val, expected):
    assert score(record(train, val)) == expected


@pytest.fixture
def scored(train, parts):
    """Train a run whose last epoch has the given error."""

    def make(salt, error, **options):
        return train(parts.run(1, salt=salt, **options), 1, errors=[error])

    return make


def test_the_lowest_error_owns_the_pointer_as_a_relative_link(scored, root):
    first = scored("a", 0.3)
    assert best_run_id() == first.id
    scored("b", 0.4)
    assert best_run_id() == first.id
    third = scored("c", 0.2)
    assert os.readlink("runs/best") == third.id
    assert NNRun.load("best").id == third.id
    assert NNCheckpoint.load("best", Checkpoints.BEST).idp.val_edp.error == 0.2


def test_a_tie_keeps_the_incumbent_and_without_one_the_smallest_id(scored, root):
    runs = [scored(salt, 0.3) for salt in "abcd"]
    assert best_run_id() == runs[0].id
    os.unlink("runs/best")
    assert elect("runs") == min(run.id for run in runs)


def test_a_run_without_best_is_no_candidate(train, parts, scored, root):
    train(parts.run(1, salt="no best"), 1, best=False, errors=[0.1])
    assert not os.path.lexists("runs/best")
    owner = scored("plain", 0.5)
    assert best_run_id() == owner.id


def variants(parts):
    """A run, and runs whose BEST says something else than the first one's."""
    squared = dataclasses.replace(parts.run().model, loss=Losses.MEAN_SQUARED_ERROR)
    ten = dataclasses.replace(parts.run().net, output_dim=10)
    return {
        "plain": parts.run(1, salt="a"),
        "task": dataclasses.replace(parts.run(1, salt="b"), model=squared),
        "classes": dataclasses.replace(parts.run(1, salt="c"), net=ten),
        "data": parts.run(1, salt="d", data_id="other rows"),
        "monitor": parts.run(1, salt="e", monitor=True),
    }


@pytest.mark.parametrize("other", ["task", "classes", "data", "monitor"])
def test_a_run_of_another_measure_never_takes_the_pointer(parts, train, root, other):
    runs = variants(parts)
    holder = train(runs["plain"], 1, errors=[0.3])
    train(runs[other], 1, errors=[0.001])
    assert best_run_id() == holder.id
    assert elect("runs", incumbent=holder.id) == holder.id
    assert collect("runs") == []
    better = train(dataclasses.replace(runs["plain"], salt="better"), 1, errors=[0.2])
    assert best_run_id() == better.id


class Rows(list):
    """A loader that says which rows it validates on."""

    data_id = "the last 100 rows"


def test_runs_that_validate_on_the_same_rows_compare_however_they_trained(parts, root):
    def fit(batches, error):
        run = parts.run(1, data_id=f"rows in batches of {batches}")
        run = dataclasses.replace(run, train=dataclasses.replace(run.train, val_loader=Rows([1])))
        with RunWriter.open(run) as writer:
            writer.append(parts.record(0, 0, batches=1, error=error))
            writer.commit_epoch(parts.checkpoint(0, idp=writer.idps[-1]), parts.state(0), best=True)
            return writer.finish()

    fit(32, 0.3)
    better = fit(64, 0.2)
    assert best_run_id() == better.id
    assert elect("runs") == better.id
    found = standings("runs")
    assert {one.data for one in found.values()} == {"the last 100 rows"}
    other = NNRun.load(better.id)
    assert other.train.data_id == "rows in batches of 64"  # the run's own name does not move


def test_a_monitor_of_the_training_split_is_compared_on_the_training_data(parts):
    run = parts.run(1, data_id="in batches of 32")
    known = grounds(run.state(), val_loader=Rows([1]))
    trained = record(E(loss=1.0, error=0.1))
    assert of_record(trained, known).data == "in batches of 32"
    assert of_record(record(E(loss=1.0), E(loss=1.0, error=0.1)), known).data == Rows.data_id


def test_the_holder_is_followed_by_the_best_that_is_comparable_with_it(parts, train, root):
    runs = variants(parts)
    holder = train(runs["plain"], 1, errors=[0.3])
    next_one = train(dataclasses.replace(runs["plain"], salt="next"), 1, errors=[0.4])
    train(runs["data"], 1, errors=[0.001])
    train(dataclasses.replace(runs["data"], salt="more"), 1, errors=[0.001])
    lease.remove(RunPaths("runs", holder.id))
    assert best_run_id() == next_one.id


def test_a_validated_run_takes_the_place_of_one_that_knows_its_training_alone(parts, root):
    def fit(salt, edp, val):
        with RunWriter.open(parts.run(1, salt=salt)) as writer:
            writer.append(record(edp, val))
            writer.commit_epoch(parts.checkpoint(0, idp=writer.idps[-1]), parts.state(0), best=True)
            return writer.finish()

    trained = fit("a", E(error=0.0, loss=0.0), None)  # 24 rows, all right
    assert best_run_id() == trained.id
    validated = fit("b", E(error=0.1, loss=0.3), E(error=0.2, loss=0.5))
    assert best_run_id() == validated.id
    fit("c", E(error=0.0, loss=0.0), None)
    assert best_run_id() == validated.id
    fit("d", E(), E(loss=0.01))  # a loss is no error rate
    assert best_run_id() == validated.id


def test_saving_a_run_without_its_best_cannot_claim_the_pointer(scored, parts, root):
    owner = scored("a", 0.3)
    parts.run(salt="new").with_idps([parts.record(0, 1, error=0.01)]).save()
    assert best_run_id() == owner.id


@pytest.mark.parametrize(
    "damage",
    [
        lambda run: (run / "run.yaml").write_text("[1, 2"),
        lambda run: (run / "run.yaml").unlink(),
        lambda run: (run / "idps.csv").write_text(",lr,epoch_idx\n0,x,0\n1,y,0\n"),
        lambda run: (run / "checkpoints/best.pt").write_bytes(b"garbage"),
        lambda run: (run / "checkpoints/best.pt").unlink(),
        lambda run: (run / "checkpoints/last.pt").unlink(),
    ],
    ids=["bad yaml", "no yaml", "bad history", "bad best", "no best", "no last"],
)
def test_a_malformed_run_is_never_elected(scored, root, damage):
    sound, broken = scored("a", 0.3), scored("b", 0.2)
    for name in os.listdir(f"runs/{broken.id}/checkpoints"):
        path = Path(f"runs/{broken.id}/checkpoints/{name}")  # unshare, to damage one tag alone
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
    damage(Path(f"runs/{broken.id}"))
    assert elect("runs") == sound.id
    third = scored("c", 0.9)  # its BEST commits: the broken holder gives way
    assert best_run_id() in (sound.id, broken.id)
    NNRun.load(third.id).save()
    os.unlink("runs/best")
    NNRun.load(third.id).save()
    assert best_run_id() == sound.id


def test_a_best_later_than_last_is_no_candidate(scored, parts, root):
    run, other = scored("a", 0.3), scored("b", 0.4)
    late = parts.checkpoint(4, idp=parts.record(4, 1, error=0.01))
    late.save(run.id, Checkpoints.BEST)
    assert elect("runs") == other.id


def test_reservations_links_and_hidden_folders_are_no_candidates(scored, root, tmp_path):
    owner = scored("a", 0.3)
    os.mkdir("runs/reserved")
    shutil.copytree(f"runs/{owner.id}", tmp_path / "outside")
    os.symlink(tmp_path / "outside", "runs/linked")
    shutil.copytree(f"runs/{owner.id}", "runs/.hidden")
    assert elect("runs", without=owner.id) is None


def test_overwriting_the_owner_elects_the_best_survivor_before_anything_is_removed(
    scored, train, parts, root, monkeypatch
):
    second, owner = scored("a", 0.3), scored("b", 0.2)
    scored("c", 0.4)
    seen = []
    real = lease.remove_tree
    monkeypatch.setattr(lease, "remove_tree", lambda path: (seen.append(best_run_id()), real(path)))
    with RunWriter.open(parts.run(1, salt="b"), overwrite=True) as writer:
        assert best_run_id() == second.id
        writer.append(parts.record(0, 1, error=0.25))
        writer.commit_epoch(parts.checkpoint(0, idp=writer.idps[-1]), parts.state(0), best=True)
        assert best_run_id() == owner.id
    assert seen[0] == second.id


def test_overwriting_the_only_run_leaves_no_pointer(scored, parts, root):
    scored("a", 0.3)
    with RunWriter.open(parts.run(1, salt="a"), overwrite=True):
        assert not os.path.lexists("runs/best")


def test_a_checkpoint_whose_loss_is_not_finite_never_holds_the_pointer(parts, root):
    def fit(salt, edp):
        with RunWriter.open(parts.run(1, salt=salt)) as writer:
            writer.append(record(edp, edp))
            writer.commit_epoch(parts.checkpoint(0, idp=writer.idps[-1]), parts.state(0), best=True)
            return writer.finish()

    broken = fit("a", E(error=nan, loss=nan))
    assert best_run_id() is None
    half = fit("c", E(error=0.01, loss=nan))
    assert best_run_id() is None
    before = Path(f"runs/{broken.id}/checkpoints/best.pt").read_bytes()
    finite = fit("b", E(loss=12.0))
    assert best_run_id() == finite.id
    assert elect("runs", without=finite.id) is None
    assert half.id != broken.id
    assert Path(f"runs/{broken.id}/checkpoints/best.pt").read_bytes() == before


def test_a_better_best_file_of_another_writer_is_believed_over_its_manifest(scored, parts, root):
    first, second = scored("a", 0.3), scored("b", 0.4)
    path = Path(f"runs/{second.id}/checkpoints/best.pt")
    os.utime(f"{path}.manifest.json", (1, 1))
    path.unlink()
    parts.checkpoint(0, idp=parts.record(0, 1, error=0.1)).to_file(str(path))
    assert elect("runs") == second.id
    assert first.id


def test_without_symbolic_links_a_file_holds_the_path(scored, root, monkeypatch):
    class NoLinks(files.Disk):
        def symlink(self, target, path):
            raise OSError("privilege not held")

    monkeypatch.setattr(files, "disk", NoLinks())
    first = scored("a", 0.3)
    assert Path("runs/best/POINTER.txt").read_text() == f"runs/{first.id}\n"
    second = scored("b", 0.2)
    assert best_run_id() == second.id
    assert NNRun.load("best").id == second.id
    assert [run.id for run in NNRun.all()] == sorted([first.id, second.id])
    with monkeypatch.context() as patch:
        patch.setattr(files, "disk", files.Disk())
        third = scored("c", 0.1)
    assert os.readlink("runs/best") == third.id


@pytest.mark.parametrize("target", ["../secret", "/etc", "missing", "best", "a/b"])
def test_a_pointer_that_leads_elsewhere_names_no_run(scored, root, target, tmp_path):
    (tmp_path / "secret").mkdir()
    scored("a", 0.3)
    os.unlink("runs/best")
    os.symlink(target, "runs/best")
    assert best_run_id() is None
    with pytest.raises(FileNotFoundError, match="no best run"):
        NNRun.load("best")


def test_epochs_that_better_the_holder_do_not_read_the_other_runs(
    scored, train, parts, root, monkeypatch
):
    scored("a", 0.9)
    from nnx.store import election

    monkeypatch.setattr(election, "elect", lambda *args, **kw: pytest.fail("all runs were read"))
    train(parts.run(3, salt="b"), 3, errors=[0.5, 0.4, 0.3])
    assert best_run_id() == parts.run(3, salt="b").id
