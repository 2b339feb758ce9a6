"""Workers over one study: joined, killed, taken up, and configurations known by their run id."""

from __future__ import annotations

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
from made_plans import net, plan, training
from nnx import Callback, MonitorSpec, NNRun
from nnx.cli.app import build
from nnx.search import CategoricalParam, IntParam, SearchBudget, SearchSpace, Sweep, sweep
from typer.testing import CliRunner

HELPERS = str(Path(__file__).parents[1])
SPACE = SearchSpace((IntParam("hidden", 2, 64),))


def apply(base, params):
    return base.with_net(net(hidden_dims=[params["hidden"]]))


def swept(trials=3, **changes) -> Sweep:
    values = {
        "plan": plan(), "space": SPACE, "apply": apply, "monitor": MonitorSpec("nll"),
        "budget": SearchBudget(trials), "sampler": lambda: optuna.samplers.RandomSampler(seed=0),
    }  # fmt: skip
    return Sweep(**{**values, **changes})


FILE = f"""
import sys, time
sys.path.insert(0, {HELPERS!r})
from made_plans import net, plan, training
import optuna
from nnx import Callback, MonitorSpec
from nnx.search import IntParam, SearchBudget, SearchSpace, Sweep

class Slow(Callback):
    def on_epoch_begin(self, ctx):
        time.sleep(EPOCH)

def apply(base, params):
    return base.with_net(net(hidden_dims=[params["hidden"]]))

sweep = Sweep(
    plan=plan(callback_factories=(Slow,), train=training(n_epochs=EPOCHS)),
    space=SearchSpace((IntParam("hidden", 2, 64),)), apply=apply, monitor=MonitorSpec("nll"),
    budget=SearchBudget(4), sampler=lambda: optuna.samplers.RandomSampler(seed=0),
)
"""


def write(epochs=3, seconds=0.0) -> Path:
    path = Path("plan_file.py")
    path.write_text(FILE.replace("EPOCHS", str(epochs)).replace("EPOCH", str(seconds)))
    return path


def test_one_worker_tries_what_its_sampler_says_and_the_study_is_shared() -> None:
    found = swept(2).work()
    more = swept(3).work(first=False)  # joins later
    assert more.outcomes[:2] == found.outcomes
    assert [o.state for o in more.outcomes] == ["completed"] * 3
    draw = optuna.samplers.RandomSampler(seed=0)
    study = optuna.create_study(sampler=draw)
    wanted = [study.ask().suggest_int("hidden", 2, 64) for _ in range(2)]
    assert [o.params["hidden"] for o in found.outcomes] == wanted
    assert more.best.monitor_value == min(o.monitor_value for o in more.outcomes)
    assert swept(3).result().outcomes == more.outcomes


def test_workers_with_equal_sampler_seeds_do_not_repeat_each_other() -> None:
    found = swept(2).work()
    more = swept(4).work(first=False)
    drawn = [o.params["hidden"] for o in more.outcomes]
    assert drawn[2:] != drawn[:2]
    assert found.asked == 2


def test_a_configuration_is_known_by_its_run_and_reused_or_skipped(monkeypatch) -> None:
    one = SearchSpace((CategoricalParam("hidden", (5,)),))
    first = swept(1, space=one).work().outcomes[0]
    monkeypatch.setattr("nnx.plans.continuing.fit", lambda *a, **k: pytest.fail("it was trained"))
    for name in ("sweep", "another"):
        again = swept(2, space=one, study_name=name).work().outcomes[-1]
        assert (again.state, again.reason) == ("completed", "reused")
        assert (again.run_id, again.monitor_value) == (first.run_id, first.monitor_value)
    skipped = swept(1, space=one, study_name="third", known="skip").work().outcomes[0]
    assert (skipped.state, skipped.reason) == ("failed", "reused")
    assert first.run_id in skipped.error


def test_a_configuration_that_another_worker_trains_is_waited_for() -> None:
    one = SearchSpace((CategoricalParam("hidden", (5,)),))
    planned = plan().with_net(net(hidden_dims=[5])).run_id("sweep")
    code = (
        f"import sys, time; sys.path.insert(0, {HELPERS!r})\n"
        "from nnx.store.paths import RunPaths\n"
        "from nnx.store.lease import lease\n"
        f"with lease(RunPaths.of({planned!r})):\n"
        "    print('held', flush=True); time.sleep(2)\n"
    )
    os.makedirs("runs", exist_ok=True)
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    began = time.monotonic()
    assert swept(1, space=one).work().outcomes[0].state == "completed"
    assert time.monotonic() - began > 1.0
    holder.wait()


def test_a_killed_workers_trial_goes_on_from_its_last_committed_epoch() -> None:
    file = write(epochs=4, seconds=0.4)
    command = [sys.executable, "-m", "nnx", "sweep", str(file), "--trials", "1", "-q"]
    worker = subprocess.Popen(command, start_new_session=True)
    give_up = time.monotonic() + 60
    while not list(Path("runs").glob("*/checkpoints/last.pt.manifest.json")):
        assert time.monotonic() < give_up
        assert worker.poll() is None
        time.sleep(0.02)
    time.sleep(0.1)
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    first = next(p for p in Path("runs").glob("?" * 32) if (p / "run.yaml").exists()).name
    done = 1 + max(idp.epoch_idx for idp in NNRun.load(first).idps)
    assert 1 <= done < 4

    sweep(file, trials=1)
    from nnx.search.sweep import load_sweep

    (outcome,) = load_sweep(file, trials=1).result().outcomes
    assert (outcome.number, outcome.state, outcome.epochs) == (0, "completed", 4)
    assert outcome.run_id != first
    run = NNRun.load(outcome.run_id)
    assert run.idps[0].epoch_idx == done  # not from zero
    assert run.resume_status.source_run_id == first
    whole = load_sweep(file).plan.with_net(net(hidden_dims=[outcome.params["hidden"]]))
    wanted = whole.fit().run.idps
    assert run.idps[-1].state() == wanted[-1].state()
    best = [i.selection.value for i in wanted if i.selection and i.selection.improved][-1]
    assert outcome.monitor_value == best


def test_workers_share_the_trials_of_one_command() -> None:
    file = write()
    found = sweep(file, trials=4, workers=2)
    assert [o.state for o in found.outcomes] == ["completed"] * 4
    assert len({o.run_id for o in found.outcomes}) == len(
        {o.params["hidden"] for o in found.outcomes}
    )
    assert found.asked == 4
    done = CliRunner().invoke(build(), ["sweep", str(file), "--trials", "4", "-q"])
    assert done.exit_code == 0, done.output  # all is there already
    assert "4 configurations were tried (4 completed); stopped: budget" in done.output
    assert found.best.run_id[:8] in done.output


class Raise(Callback):
    def __init__(self, error):
        self.error = error

    def on_epoch_end(self, ctx):
        raise self.error


def raising(error):
    return plan(callback_factories=(lambda: Raise(error),))


def test_a_trial_that_fails_is_told_and_a_full_disk_ends_the_work() -> None:
    found = swept(2, plan=raising(ValueError("odd"))).work()
    assert [(o.state, o.error) for o in found.outcomes] == [("failed", "ValueError: odd")] * 2
    full = raising(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left"):
        swept(5, plan=full, study_name="full").work()
    (outcome,) = swept(1, plan=full, study_name="full").result().outcomes
    assert outcome.state == "failed"
    assert "No space left" in outcome.error
    diverging = plan(train=training(optim=dataclasses.replace(training().optim, max_lr=1e30)))
    (outcome,) = swept(1, plan=diverging, study_name="nan").work().outcomes
    assert (outcome.state, outcome.reason) == ("failed", "nonfinite")


def test_a_trial_whose_workers_keep_dying_is_given_up() -> None:
    planned = swept(1)
    study = planned._open(MonitorSpec("nll", mode="min"))
    trial = study.ask()
    trial.suggest_int("hidden", 2, 64)
    trial.set_user_attr("nnx.takes", 3)
    (outcome,) = planned.work().outcomes
    assert (outcome.state, outcome.error) == ("failed", "its worker died 4 times")
    assert not list(Path("runs").glob("[0-9a-f]*"))


def test_a_trial_that_someone_holds_is_left_alone() -> None:
    planned = swept(1)
    study = planned._open(MonitorSpec("nll", mode="min"))
    study.ask()
    os.makedirs("runs/.sweeps", exist_ok=True)
    code = (
        "import sys, time\nfrom nnx.utils.locks import locked\n"
        "with locked(sys.argv[1], timeout=0, what='it'):\n"
        "    print('held', flush=True); time.sleep(30)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, planned.lock("trial-0")], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline() == "held\n"
    assert [o.state for o in planned.work().outcomes] == ["orphaned"]
    holder.kill()
    holder.wait()
    assert [o.state for o in planned.work().outcomes] == ["completed"]


def test_a_grid_that_is_used_up_ends_the_work() -> None:
    grid = SearchSpace((CategoricalParam("hidden", (2, 3)),))
    options = {"space": grid, "sampler": lambda: optuna.samplers.GridSampler({"hidden": [2, 3]})}
    found = swept(9, **options).work()
    assert (found.asked, found.stop_reason) == (2, "exhausted")


def test_pruned_trials_stay_pruned_when_their_configuration_comes_again() -> None:
    class Never(optuna.pruners.BasePruner):
        def prune(self, study, trial):
            return True

    one = SearchSpace((CategoricalParam("hidden", (5,)),))
    found = swept(2, space=one, pruner=Never).work()
    assert [o.state for o in found.outcomes] == ["pruned", "pruned"]
    assert [o.reason for o in found.outcomes] == ["pruned", "reused"]


def test_a_file_that_defines_no_sweep_is_refused(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.py"):
        sweep("nowhere.py")
    Path("empty.py").write_text("x = 1")
    with pytest.raises(ValueError, match=r"must define sweep = Sweep"):
        sweep("empty.py")
    with pytest.raises(ValueError, match="known"):
        swept(known="twice")
