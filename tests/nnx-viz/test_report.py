from __future__ import annotations

import json
import os
import re
import warnings
from pathlib import Path

import nnx
import pytest
import torch
from made_runs import make_run
from nnx import (
    Losses,
    Nets,
    NNEvaluationDataPoint,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
)
from nnx.history import HistoryJournal
from nnx.store.predictions import load_predictions, save_predictions
from nnx.viz.report import read_run, write_report
from nnx.viz.report.charts import charts_of
from nnx.viz.report.page import notebook_chart
from nnx.viz.report.scores import split_scores
from sklearn import metrics
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NNX_RUNS", raising=False)
    return str(tmp_path / "runs")


def page_data(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(re.search(r'<script id="report-data"[^>]*>(.*?)</script>', text, re.S)[1])


class TestReading:
    def test_epochs_and_improvements(self, root):
        run = make_run(root, n_epochs=5, batches=4)
        view = read_run(run.id, root)
        assert [r.epoch_idx for r in view.epochs] == [0, 1, 2, 3, 4]
        assert view.total_steps == 20
        errors = [r.val_edp.error for r in view.epochs]
        assert view.improved == {e for e in range(5) if errors[e] == min(errors[: e + 1])}

    def test_a_continued_run_improves_only_on_the_best_that_it_took_over(self, root):
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(32, 4, generator=generator), torch.arange(32) % 2
        loader = DataLoader(TensorDataset(*rows), batch_size=16)
        errors = [0.4, 0.6, 0.5, 0.3]

        def train(n_epochs, **resume):
            net = NNParams(input_dim=4, output_dim=2, hidden_dims=[4], dropout_prob=0.0)
            model = NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))
            params = NNTrainParams(
                n_epochs=n_epochs, train_loader=loader, val_loader=loader, seed=0, **resume
            )
            return model.train(
                params,
                eval_step_fn=lambda ctx: NNEvaluationDataPoint(error=errors[ctx.epoch_idx]),
            )

        first = train(1)
        second = train(3, resume_from_run_id=first.id)
        assert read_run(first.id, root).improved == {0}
        assert read_run(second.id, root).improved == {3}

    def test_long_histories_are_thinned_and_keep_epoch_ends(self, root):
        run = make_run(root, n_epochs=6, batches=900)
        view = read_run(run.id, root)
        assert view.total_steps == 5400
        assert len(view.steps) <= 2000
        assert {r.epoch_idx for r in view.steps if r.batch_idx == 899} == set(range(6))

    def test_checkpoints_are_verified(self, root, tmp_path):
        run = make_run(root)
        first = tmp_path / "runs" / run.id / "checkpoints" / "first.pt"
        data = bytearray(first.read_bytes())
        data[len(data) // 2] ^= 0xFF
        first.write_bytes(bytes(data))
        points = {p.tag: p for p in read_run(run.id, root).points}
        assert points["last"].status == "intact"
        assert points["last"].epoch == 4
        assert points["first"].status == "damaged"
        assert "first.pt" in points["first"].problem

    def test_lineage_holds_ancestors_and_descendants(self, root):
        first = make_run(root)
        second = make_run(root, seed=1, parent=first.id)
        third = make_run(root, seed=2, parent=second.id)
        lineage = read_run(second.id, root).lineage
        assert [r.run_id for r in lineage] == [first.id, second.id, third.id]
        assert [r.parent_id for r in lineage] == [None, first.id, second.id]
        assert lineage[1].epoch == 4

    def test_a_parent_that_is_gone_is_named(self, root):
        run = make_run(root, parent="0" * 32)
        lineage = read_run(run.id, root).lineage
        assert [(r.run_id, r.known) for r in lineage] == [("0" * 32, False), (run.id, True)]


class TestPredictions:
    def test_round_trip(self, root):
        run = make_run(root)
        save_predictions(run.id, "test", targets=["a", "b, c"], predicted=["a", "é\n"], root=root)
        (stored,) = load_predictions(run.id, root)
        assert stored.split == "test"
        assert stored.targets == ("a", "b, c")
        assert stored.predicted == ("a", "é\n")
        assert stored.sample_ids == ("0", "1")

    def test_a_split_is_replaced_and_another_is_kept(self, root):
        run = make_run(root)
        for split, n in (("val", 1), ("test", 2), ("test", 3)):
            save_predictions(run.id, split, targets=[0] * n, predicted=[0] * n, root=root)
        assert [(p.split, len(p.targets)) for p in load_predictions(run.id, root)] == [
            ("test", 3),
            ("val", 1),
        ]

    def test_refusals_leave_nothing(self, root, tmp_path):
        run = make_run(root)
        with pytest.raises(ValueError, match="same length, not 2, 2, 1"):
            save_predictions(run.id, "test", targets=[0, 1], predicted=[0], root=root)
        with pytest.raises(ValueError, match="split"):
            save_predictions(run.id, "../test", targets=[0], predicted=[0], root=root)
        with pytest.raises(FileNotFoundError, match="no run"):
            save_predictions("f" * 32, "test", targets=[0], predicted=[0], root=root)
        assert not (tmp_path / "runs" / run.id / "predictions").exists()
        assert not (tmp_path / "runs" / ("f" * 32)).exists()

    def test_scores_equal_scikit_learn(self, root):
        run = make_run(root)
        targets = [0, 1, 2, 10, 2, 2, 0, 10]
        predicted = [0, 2, 2, 10, 2, 1, 3, 0]
        save_predictions(run.id, "test", targets=targets, predicted=predicted, root=root)
        scores = split_scores("x", load_predictions(run.id, root)[0])
        assert scores.classes == ["0", "1", "2", "3", "10"]
        assert scores.counts == metrics.confusion_matrix(targets, predicted).tolist()
        expected = metrics.precision_recall_fscore_support(targets, predicted, zero_division=0)
        assert [s.precision for s in scores.scores] == pytest.approx(expected[0].tolist())
        assert [s.recall for s in scores.scores] == pytest.approx(expected[1].tolist())
        assert [s.f1 for s in scores.scores] == pytest.approx(expected[2].tolist())
        assert scores.accuracy == metrics.accuracy_score(targets, predicted)

    def test_continuous_predictions_have_no_matrix(self, root):
        run = make_run(root)
        save_predictions(run.id, "test", targets=[0.5, 1.25], predicted=[0.4, 1.0], root=root)
        assert split_scores("x", load_predictions(run.id, root)[0]) is None


class TestPage:
    def test_curves_hold_the_recorded_values(self, root):
        run = make_run(root)
        view = read_run(run.id, root)
        loss = next(c for c in charts_of([view]) if c.id == "loss")
        by_name = {t["name"].split(" ", 1)[1]: t for t in loss.traces}
        val = by_name["validation"]
        assert val["y"] == pytest.approx([r.val_edp.loss for r in view.epochs], rel=1e-6)
        assert val["meta"]["epoch"] == [1, 2, 3, 4, 5]
        assert val["meta"]["step"] == [4, 8, 12, 16, 20]
        assert len(by_name["training, per step"]["y"]) == 20
        assert by_name["wrote BEST"]["meta"]["epoch"] == [e + 1 for e in sorted(view.improved)]

    def test_declared_metrics_get_a_chart(self, root):
        view = read_run(make_run(root).id, root)
        assert "metric-nll" in [c.id for c in charts_of([view])]

    def test_two_runs_are_compared(self, root, tmp_path):
        one, two = make_run(root, lr=0.05), make_run(root, lr=0.01, seed=3)
        path = tmp_path / "report.html"
        assert write_report([one.id, two.id], path, root=root) == str(path)
        text = path.read_text(encoding="utf-8")
        row = re.search(r'<tr class="(\w+)"><th[^>]*>train\.optim\.max_lr</th>(.*?)</tr>', text)
        assert row[1] == "differs"
        assert "0.05" in row[2]
        assert "0.01" in row[2]
        same = re.search(r'<tr class="(\w+)"><th[^>]*>net\.input_dim</th>', text)
        assert same[1] == "same"
        names = {t["name"][:8] for c in page_data(path)["charts"] for t in c["traces"]}
        assert names == {one.id[:8], two.id[:8]}

    def test_texts_of_a_run_cannot_become_markup(self, root, tmp_path):
        run = make_run(root, data_id="</script><script>alert(1)</script><b>")
        save_predictions(
            run.id, "test", targets=["</script><i>", "b"], predicted=["b", "b"], root=root
        )
        path = tmp_path / "report.html"
        write_report([run.id], path, root=root, title="<u>title</u>")
        text = path.read_text(encoding="utf-8")
        own = text[: text.index("<script>")] + text[text.rindex('<script id="report-data"') :]
        for markup in ("<script>alert", "<b>", "<i>", "<u>"):
            assert markup not in own
        assert page_data(path)["matrices"][0]["traces"][0]["x"] == ["</script><i>", "b"]

    def test_a_run_without_an_epoch(self, root, tmp_path):
        from made_runs import configuration
        from nnx.store import NNRun

        run: NNRun = configuration(seed=9).save(root)
        write_report([run.id], tmp_path / "r.html", root=root)
        assert "No epoch is committed yet" in (tmp_path / "r.html").read_text(encoding="utf-8")

    def test_refusals_write_nothing(self, root, tmp_path):
        run = make_run(root)
        path = tmp_path / "report.html"
        with pytest.raises(ValueError, match="at least one"):
            write_report([], path, root=root)
        with pytest.raises(ValueError, match="named twice"):
            write_report([run.id, run.id], path, root=root)
        with pytest.raises(FileNotFoundError):
            write_report(["f" * 32], path, root=root)
        assert not path.exists()

    def test_the_run_is_only_read(self, root, tmp_path):
        run = make_run(root)
        before = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()}
        write_report([run.id], tmp_path / "report.html", root=root)
        after = {p: p.read_bytes() for p in (tmp_path / "runs").rglob("*") if p.is_file()}
        assert {p: b for p, b in after.items() if not p.name.endswith(".lock")} == {
            p: b for p, b in before.items() if not p.name.endswith(".lock")
        }


class TestNotebook:
    def test_the_run_finds_the_chart_through_the_registry(self, root):
        run = make_run(root)
        html = run._repr_html_()
        assert "plotly" in html
        assert run.id in html

    def test_a_monitored_run_shows_its_monitor_and_improving_epochs(self, root):
        run = train_digits(root)
        names, figure = traces_of(notebook_chart(run))
        assert "training, whole epoch" in names
        series = figure[names.index("monitor val.nll")]
        ends = [r for r in run.idps if r.selection is not None]
        assert series["y"] == pytest.approx([r.selection.value for r in ends], rel=1e-6)
        stars = figure[names.index("wrote BEST")]
        assert stars["x"] == [r.epoch_idx + 1 for r in ends if r.selection.improved]

    def test_a_journal_is_drawn_from_its_epoch_rows(self, root):
        run = train_digits(root, history=HistoryJournal(retention=20, chunk_size=10))
        chunks = Path(run.history).glob("chunk-*")
        for chunk in chunks:
            chunk.unlink()
        names, figure = traces_of(notebook_chart(run))
        assert len(figure[names.index("validation")]["y"]) == 4

    def test_a_journal_that_was_moved_or_broken_leaves_a_chart_of_what_is_held(
        self, root, tmp_path, monkeypatch
    ):
        run = train_digits(root, history=HistoryJournal(retention=40, chunk_size=10))
        monkeypatch.chdir("/")  # the folder of a held run is known from anywhere
        names, figure = traces_of(notebook_chart(run))
        assert len(figure[names.index("validation")]["y"]) == 4
        manifest = Path(run.history) / "journal.json"
        whole = manifest.read_bytes()
        for damage in (lambda: manifest.write_bytes(whole[:20]), manifest.unlink):
            damage()
            with pytest.warns(RuntimeWarning, match=r"shows its last 40 records: .*journal\.json"):
                names, figure = traces_of(notebook_chart(run))
            ends = [r for r in run.idps if r.val_edp is not None]
            assert figure[names.index("validation")]["x"] == [r.epoch_idx + 1 for r in ends]
            with pytest.warns(RuntimeWarning, match="shows its last 40 records"):
                assert "plotly" in run._repr_html_()

    def test_a_run_without_records(self):
        from made_runs import configuration

        assert "no recorded epoch" in notebook_chart(configuration())


def train_digits(root, **options):
    """A short real training with a declared metric and monitor."""
    import nnx

    images, targets = load_digits(return_X_y=True)
    data = TensorDataset(
        torch.tensor(images[:600] / 16, dtype=torch.float32), torch.tensor(targets[:600])
    )
    model = nnx.NNModel(
        net_params=nnx.NNParams(input_dim=64, output_dim=10, hidden_dims=[16], dropout_prob=0.0),
        params=nnx.NNModelParams(net=nnx.Nets.FEED_FWD),
    )
    return model.train(
        nnx.NNTrainParams(
            n_epochs=4,
            seed=0,
            train_loader=DataLoader(data, batch_size=32, shuffle=True),
            val_loader=DataLoader(data, batch_size=600),
            metrics=[nnx.MetricSpec("nll")],
            monitor=nnx.MonitorSpec("nll", min_delta=0.2),
        ),
        **options,
    )


def traces_of(html):
    """Names and traces of the one figure in a Plotly fragment."""
    start = html.index("[", html.index("Plotly.newPlot("))
    traces, _ = json.JSONDecoder().raw_decode(html[start:])
    return [t["name"] for t in traces], traces


def test_the_command(root, tmp_path, monkeypatch):
    from nnx.cli.app import build
    from typer.testing import CliRunner

    run = make_run(root)
    monkeypatch.setenv("NNX_RUNS", "")  # the command sets it; it is put back
    out = tmp_path / "page.html"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        runner, app = CliRunner(), build()
        result = runner.invoke(app, ["report", run.id[:10], "-o", str(out), "--runs", root])
        assert result.exit_code == 0, result.output
        assert out.exists()
        table = tmp_path / "data.csv"
        table.write_text("a,b\n1,2\n")
        for name in (str(table), str(tmp_path), str(tmp_path / "absent" / "page.html")):
            refused = runner.invoke(app, ["report", run.id, "-o", name, "--runs", root])
            assert refused.exit_code == 1
            told = {
                "data.csv": f"{table} is there and is no HTML page; choose another file with --out",
                "page.html": f"there is no folder {tmp_path / 'absent'}, where {name} would lie",
            }.get(os.path.basename(name), f"{name} is a folder; name a file in it")
            assert told in " ".join(refused.output.split())
        assert table.read_text() == "a,b\n1,2\n"
        again = runner.invoke(app, ["report", run.id, "-o", str(out), "--runs", root])
        assert again.exit_code == 0  # a page is replaced by a newer one
        missing = runner.invoke(app, ["report", "zzz", "-o", str(out), "--runs", root])
        assert missing.exit_code == 1


def test_a_fit_writes_the_report_of_its_run(tmp_path, monkeypatch):
    monkeypatch.setenv("NNX_RUNS", str(tmp_path / "runs"))
    x, y = torch.randn(16, 2), torch.arange(16) % 2
    fitted = nnx.fit(torch.nn.Linear(2, 2), (x, y), epochs=1, device="cpu")
    path = tmp_path / "page.html"
    assert fitted.report(path) == str(path)
    assert fitted.run.id in path.read_text(encoding="utf-8")
