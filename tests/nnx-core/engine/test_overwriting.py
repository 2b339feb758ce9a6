"""A run that is trained again stays until the first commit of the new training."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from nnx import Callback, Checkpoints, NNCheckpoint, NNRun
from nnx.history import HistoryJournal, iter_history
from nnx.store import RunBusyError
from nnx.store.cleanup import collect
from nnx.store.listing import list_runs
from nnx.store.pointer import best_run_id

JOURNAL = HistoryJournal(retention=2, chunk_size=1)


class Broken:
    """Gives ``good`` batches, then fails."""

    def __init__(self, loader, good, fail):
        self.loader, self.good, self.fail = loader, good, fail

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        for number, batch in enumerate(self.loader):
            if number == self.good:
                self.fail()
            yield batch


def no_more():
    raise OSError("the share is gone")


def everything(folder="runs"):
    """Every file of every run by its content; locks and leases say nothing."""
    return {
        str(path): path.read_bytes()
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and not path.name.endswith(".lock")
    }


@pytest.mark.parametrize("good", [0, 3])
@pytest.mark.parametrize("history", [None, JOURNAL], ids=["table", "journal"])
def test_a_loader_that_fails_in_the_first_epoch_costs_nothing(kit, good, history):
    params = kit.train_params(n_epochs=2)
    run = kit.model().train(params, history=history)
    before, holder = everything(), best_run_id()
    broken = kit.train_params(
        n_epochs=2, train_loader=Broken(kit.loader(), good, no_more), overwrite_existing=True
    )
    with pytest.raises(OSError, match="share is gone"):
        kit.model(seed=3).train(broken, history=history)
    assert everything() == before
    assert best_run_id() == holder == run.id
    assert collect("runs") == []


@pytest.mark.parametrize("history", [None, JOURNAL], ids=["table", "journal"])
def test_the_old_run_is_read_until_the_new_one_commits(kit, history):
    run = kit.model().train(kit.train_params(n_epochs=3), history=history)
    other = kit.model(seed=5).train(kit.train_params(n_epochs=1, data_id="other"))
    seen = []

    class Look(Callback):
        def on_epoch_begin(self, ctx):
            seen.append(len(list(iter_history(run.id))))
            assert NNCheckpoint.load(run.id, Checkpoints.LAST).idp.epoch_idx == (
                2 if ctx.epoch == 0 else ctx.epoch - 1
            )
            rows = {row.id: row.epochs for row in list_runs("runs")}
            assert rows[run.id] == (3 if ctx.epoch == 0 else ctx.epoch)
            assert [found.id for found in NNRun.all()] == sorted([run.id, other.id])

    params = kit.train_params(n_epochs=3, overwrite_existing=True)
    kit.model(seed=3).train(params, callbacks=[Look()], history=history)
    assert seen == [18, 6, 12]
    assert not [name for name in os.listdir("runs") if name.startswith(".replaced")]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_training_killed_in_its_first_epoch_leaves_the_old_run(kit):
    run = kit.model().train(kit.train_params(n_epochs=2))
    records = [record.state() for record in run.idps]

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        broken = Broken(kit.loader(), 2, die)
        kit.model(seed=3).train(
            kit.train_params(n_epochs=2, train_loader=broken, overwrite_existing=True)
        )
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL
    assert [record.state() for record in NNRun.load(run.id).idps] == records
    with pytest.raises(FileExistsError, match="already exists"):
        kit.model().train(kit.train_params(n_epochs=2))
    (found,) = [
        leftover for leftover in collect("runs", dry_run=True) if leftover.verb == "restore"
    ]
    assert "never committed anything" in found.reason
    collect("runs")
    assert collect("runs") == []
    assert best_run_id() == run.id
    assert [record.state() for record in NNRun.load(run.id).idps] == records


@pytest.mark.parametrize("history", [None, JOURNAL], ids=["table", "journal"])
def test_a_first_epoch_that_fails_leaves_no_reservation(kit, history):
    broken = kit.train_params(n_epochs=2, train_loader=Broken(kit.loader(), 3, no_more))
    with pytest.raises(OSError, match="share is gone"):
        kit.model().train(broken, history=history)
    assert [name for name in os.listdir("runs") if not name.startswith(".")] == []
    assert kit.model().train(kit.train_params(n_epochs=2), history=history).idps


def test_nobody_changes_a_run_from_a_callback_of_its_fit(kit):
    from nnx.history import migrate_history
    from nnx.store.lease import remove
    from nnx.store.paths import RunPaths

    refused = []

    class Meddle(Callback):
        def on_epoch_end(self, ctx):
            if ctx.epoch == 0:  # there is no run yet
                return
            for change in (migrate_history, lambda id: remove(RunPaths.of(id))):
                with pytest.raises(RunBusyError, match="in use by this very process"):
                    change(ctx.run.id)
                refused.append(ctx.epoch)
            ctx.run.with_idps(list(ctx.idps)[:2]).save()  # the history is the fit's own

    run = kit.model().train(kit.train_params(n_epochs=3), callbacks=[Meddle()])
    assert refused == [1, 1, 2, 2]
    assert [record.state() for record in NNRun.load(run.id).idps] == [
        record.state() for record in run.idps
    ]
    migrate_history(run.id)
    assert len(list(iter_history(run.id))) == len(run.idps)
