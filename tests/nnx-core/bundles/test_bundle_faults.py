"""Every operation on the disk fails once, or is the last before a SIGKILL, while a run is exported."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from made_bundles import everything
from nnx.bundles import export_bundle, validate_bundle

sys.path.insert(0, str(Path(__file__).parents[2]))
from failing_disk import FAULTS, FailingDisk, act, killed


@pytest.fixture
def sweep(trained, monkeypatch):
    """Export again and again, each time with the fault at another operation."""
    folder, run, _ = trained

    def export():
        export_bundle(run.id, "b", root=str(folder / "runs"))

    def sweep(fault, prepare, check):
        prepare()
        counted = FailingDisk()
        act(export, counted, monkeypatch)
        assert len(counted.done) > 12
        for at in range(1, len(counted.done) + 1):
            shutil.rmtree("b", ignore_errors=True)
            prepare()
            disk, error = FailingDisk(at, FAULTS[fault]), None
            try:
                (killed if fault == "killed" else act)(export, disk, monkeypatch)
            except (OSError, KeyboardInterrupt) as caught:
                error = caught
            try:
                check(fault, error, counted.done[at - 1])
            except BaseException as problem:
                problem.args = (f"{counted.done[at - 1]}, operation {at}: {error!r}", *problem.args)
                raise
            export()  # nothing is in the way of the next one
            assert validate_bundle("b").verified
            assert len([n for n in os.listdir("b") if n.startswith("g-")]) <= 2

    return sweep


@pytest.mark.parametrize("fault", FAULTS)
def test_a_first_export_is_there_as_a_whole_or_leaves_nothing(sweep, fault):
    def check(fault, error, operation):
        if fault == "killed":  # what it left is no bundle, or a whole one
            if os.path.exists("b/bundle.json"):
                assert validate_bundle("b").verified
            return
        if error is None or os.path.exists("b/bundle.json"):
            assert validate_bundle("b").verified
        elif operation not in ("rmdir", "unlink"):
            assert not os.path.exists("b")

    sweep(fault, lambda: None, check)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bundle_is_never_without_a_whole_generation(sweep, fault, trained):
    folder, run, _ = trained
    root = str(folder / "runs")
    first = export_bundle(run.id, "first", root=root, checkpoint="first").generation

    def check(fault, error, operation):
        info = validate_bundle("b")  # whatever a killed export left beside it
        if fault == "killed":
            assert info.epoch in (0, 1)
        elif info.generation == first:
            assert everything(Path("b")) == everything(Path("first"))
        else:
            assert info.epoch == 1

    sweep(fault, lambda: shutil.copytree("first", "b"), check)
