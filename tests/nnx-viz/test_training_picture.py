"""The picture of a training in a model card."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from made_runs import configuration, record
from nnx.history import HistoryJournal
from nnx.store import NNRun, RunWriter
from nnx.viz.report.image import training_svg

SVG = "{http://www.w3.org/2000/svg}"


def circles(svg):
    found = ET.fromstring(svg).iter(f"{SVG}circle")
    return [(float(c.get("cx")), float(c.get("cy")), c.get("fill")) for c in found]


def run_of(epochs, **changes):
    records = [record(epoch, batch, 2, **changes) for epoch in range(epochs) for batch in range(2)]
    return configuration().with_idps(records)


def test_each_epoch_is_a_point_whose_height_is_its_loss():
    run = run_of(4)
    found = circles(training_svg(run))
    last = [r for r in run.idps if r.batch_idx == 1]
    losses = [r.train_edp.loss for r in last] + [r.val_edp.loss for r in last]
    assert len(found) == len(losses) == 8
    # The axes are linear: equal steps of the value are equal steps of the picture.
    (x0, y0, _), (x1, y1, _) = found[0], found[3]
    for (x, y, _), epoch, loss in zip(found, [0, 1, 2, 3] * 2, losses):
        assert x == pytest.approx(x0 + (x1 - x0) * epoch / 3, abs=0.2)
        assert y == pytest.approx(
            y0 + (y1 - y0) * (loss - losses[0]) / (losses[3] - losses[0]), abs=0.3
        )
    assert len({colour for _, _, colour in found}) == 2


def test_it_is_a_picture_alone(tmp_path):
    svg = training_svg(run_of(3))
    assert not re.search(r"script|href|url[(]|onload|foreignObject", svg)
    assert {"training", "validation", "epochs completed"} <= {
        t.text for t in ET.fromstring(svg).iter(f"{SVG}text")
    }


def test_one_epoch_equal_losses_and_none():
    assert len(circles(training_svg(run_of(1, val=False)))) == 1
    assert training_svg(configuration().with_idps([])) == ""


def test_a_journal_is_drawn_from_its_epochs(tmp_path):
    run = configuration()
    with RunWriter.open(run, str(tmp_path), history=HistoryJournal(retention=2)) as writer:
        from made_runs import NNCheckpoint

        for epoch in range(3):
            writer.extend(record(epoch, batch, 2) for batch in range(2))
            checkpoint = NNCheckpoint(
                net_params=run.net, model_params=run.model, net_state={}, idp=writer.idps[-1]
            )
            writer.commit_epoch(checkpoint, None)
        writer.finish()
    assert len(circles(training_svg(NNRun.load(run.id, str(tmp_path))))) == 6
