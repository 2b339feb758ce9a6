from __future__ import annotations

import contextlib
import io
import subprocess
import sys
import textwrap
import threading
import time

import pytest
from made_runs import commit, configuration, make_run, record
from nnx.store import RunWriter
from nnx.viz.watch import _Pace, render, snapshot, sparkline, watch
from rich.console import Console


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "runs")


def text_of(state, width=100, **options):
    console = Console(file=io.StringIO(), width=width)
    console.print(render(state, **options))
    return console.file.getvalue()


def test_a_finished_run(root):
    run = make_run(root, n_epochs=3)
    state = snapshot(run.id, root)
    assert (state.status, state.done, state.planned) == ("finished", 3, 3)
    text = text_of(state)
    assert "finished" in text
    assert "epoch 3 of 3" in text
    assert "training loss" in text
    assert "★ best" in text


def test_a_run_that_stopped_before_its_plan(root):
    assert snapshot(make_run(root, n_epochs=5, epochs=2).id, root).status == "stopped"


def test_a_run_being_trained_shows_committed_epochs_only(root):
    run = configuration()
    with RunWriter.open(run, root=root) as writer:
        assert snapshot(run.id, root).status == "waiting"
        commit(writer, 0, [record(0, b, 4) for b in range(4)], True)
        for b in range(2):
            writer.append(record(1, b, 4))
        state = snapshot(run.id, root)
        assert (state.status, state.done) == ("training", 1)
        writer.extend([record(1, b, 4) for b in (2, 3)])
        commit(writer, 1, [record(1, 3, 4)], False)
        assert snapshot(run.id, root).done == 2
        writer.finish()


def test_an_unknown_run(root):
    with pytest.raises(FileNotFoundError):
        snapshot("f" * 32, root)


def test_it_follows_another_process_to_its_end(root, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            sys.path.insert(0, sys.argv[1])
            from made_runs import configuration, commit, record
            from nnx.store import RunWriter
            run = configuration(n_epochs=4)
            with RunWriter.open(run, root=sys.argv[2]) as writer:
                print(run.id, flush=True)
                for epoch in range(4):
                    sys.stdin.readline()  # the epoch before was seen
                    commit(writer, epoch, [record(epoch, b, 4) for b in range(4)], epoch == 0)
                writer.finish()
            """
        )
    )
    here = str(__import__("pathlib").Path(__file__).parent)
    process = subprocess.Popen(
        [sys.executable, str(script), here, root],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    run_id = process.stdout.readline().strip()
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    asked = [0]

    def next_epoch_once_the_last_is_shown(_seconds):
        if asked[0] == 0 or f"epoch {asked[0]} of 4" in console.file.getvalue():
            asked[0] += 1
            with contextlib.suppress(OSError):  # there is no fifth
                process.stdin.write("\n")
                process.stdin.flush()
        time.sleep(0.02)

    final = watch(run_id, root=root, console=console, sleep=next_epoch_once_the_last_is_shown)
    assert process.wait(timeout=60) == 0
    assert (final.status, final.done) == ("finished", 4)
    for epoch in range(1, 5):
        assert f"epoch {epoch} of 4" in console.file.getvalue()


def test_ctrl_c_ends_the_view_not_the_run(root):
    run = configuration()
    with RunWriter.open(run, root=root) as writer:
        commit(writer, 0, [record(0, b, 4) for b in range(4)], True)

        def interrupted(_seconds):
            raise KeyboardInterrupt

        console = Console(file=io.StringIO(), force_terminal=True, width=100)
        assert watch(run.id, root=root, console=console, sleep=interrupted).status == "training"
        writer.finish()


def test_without_a_terminal_it_prints_one_view(root):
    run = make_run(root, n_epochs=2)
    console = Console(file=io.StringIO(), force_terminal=False, width=100)
    done = threading.Event()

    def follow():
        watch(run.id, root=root, console=console)
        done.set()

    threading.Thread(target=follow, daemon=True).start()
    assert done.wait(60)
    assert "epoch 2 of 2" in console.file.getvalue()


def test_the_interval_is_checked(root):
    with pytest.raises(ValueError, match="interval must be"):
        watch("x", root=root, interval=0)


def test_sparklines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0]) == "▁"
    assert sparkline([1.0, float("inf")]) == "▁!"
    assert len(sparkline(list(range(1000)), width=40)) == 40


def test_the_time_left_counts_epochs_seen(root):
    now = [0.0]
    pace = _Pace(2, clock=lambda: now[0])
    run = make_run(root, n_epochs=10, epochs=4)
    import dataclasses

    state = dataclasses.replace(snapshot(run.id, root), status="training")
    now[0] = 20.0
    assert pace.remaining(state) == pytest.approx(60.0)  # 10 s an epoch, 6 to go
    now[0] = 25.0
    assert pace.remaining(state) == pytest.approx(55.0)
    assert "about 0m 55s left" in text_of(state, remaining=55.0)
