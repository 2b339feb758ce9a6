"""A ranking task in real runs: training, validation, selection, resume, refusals."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest
import torch
from nnx import (
    Devices,
    Losses,
    MonitorSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNParams,
    NNRun,
    NNTrainParams,
)
from nnx import ranking as R


def rows(queries: int = 12, size: int = 5, seed: int = 0):
    """Features whose first column is what makes a candidate relevant."""
    draw = np.random.default_rng(seed)
    features = torch.from_numpy(draw.normal(size=(queries * size, 4)).astype("float32"))
    relevance = torch.zeros(queries * size, dtype=torch.long)
    for q in range(queries):
        relevance[q * size + int(features[q * size : (q + 1) * size, 0].argmax())] = 1
    ids = [f"q{i // size}" for i in range(queries * size)]
    return features, ids, [i % size for i in range(queries * size)], relevance


def batches(parts, size):
    features, queries, candidates, relevance = parts
    cuts = range(0, len(queries), size)
    return [
        (features[i : i + size], queries[i : i + size], candidates[i : i + size], relevance[i : i + size])
        for i in cuts
    ]  # fmt: skip


def model() -> NNModel:
    torch.manual_seed(0)
    params = NNModelParams(net=Nets.FEED_FWD, device=Devices.CPU, loss=Losses.MEAN_SQUARED_ERROR)
    return NNModel(NNParams(input_dim=4, output_dim=1, hidden_dims=[8], dropout_prob=0.0), params)


def train(task, epochs=3, *, objective=None, val=None, **params):
    net = model()
    run = net.train(
        NNTrainParams(
            n_epochs=epochs, seed=1, train_loader=batches(rows(), 15),
            val_loader=val or batches(rows(seed=1), 15), metrics=task.metric_specs(),
            monitor=MonitorSpec("ndcg_at_3"), **params,
        ),
        objective=objective or task.objective(), eval_step_fn=task.eval_step(),
    )  # fmt: skip
    return net, run


def test_a_run_learns_to_rank_and_best_follows_the_named_figure() -> None:
    task = R.RankingTask(k=(1, 3), candidate_sets="exhaustive")
    net, run = train(task, epochs=40)
    record = NNRun.load(run.id).idps[-1].val_edp
    assert record.kind == "ranking"
    assert record.count == 12
    assert record.metrics["ndcg_at_3"] > 0.9
    assert record.metrics["queries"] == 12
    assert record.metrics["candidates_per_query"] == 5
    assert record.metrics["exhaustive_candidates"] == 1.0
    assert (record.accuracy, record.f1, record.error) == (None, None, None)

    features, queries, candidates, relevance = rows(seed=1)
    with torch.no_grad():
        scores = net.net(features)[:, 0]
    values, *_ = task.evaluate_rows(zip(queries, candidates, scores.tolist(), relevance.tolist()))
    assert {name: record.metrics[name] for name in values} == pytest.approx(values)
    loss, count = R.pairwise_logistic_loss(scores, relevance, queries)
    assert record.loss == pytest.approx(float(loss) / count)


@pytest.mark.parametrize("size", [1, 4, 60])
def test_validation_does_not_depend_on_how_the_stream_is_cut(size) -> None:
    task = R.RankingTask(k=(2,))
    whole = task.eval_step()._read(model(), batches(rows(), 60))
    parts = list(rows())
    order = np.random.default_rng(3).permutation(60)
    parts = (parts[0][order], *([p[i] for i in order] for p in parts[1:3]), parts[3][order])
    cut = task.eval_step()._read(model(), batches(parts, size))
    assert cut.values() == pytest.approx(whole.values())
    assert cut.mean_loss() == pytest.approx(whole.mean_loss())


def test_a_grouped_stream_holds_one_query_at_a_time() -> None:
    whole = R.RankingTask(k=(2,)).eval_step()._read(model(), batches(rows(), 60))
    task = R.RankingTask(k=(2,), grouped=True, max_buffered=12)
    found = task.eval_step()._read(model(), batches(rows(), 7))
    assert found.values() == pytest.approx(whole.values())
    assert found.mean_loss() == pytest.approx(whole.mean_loss())
    with pytest.raises(R.RankingError, match="max_buffered=12"):
        R.RankingTask(k=(2,), max_buffered=12).eval_step()._read(model(), batches(rows(), 7))
    parts = batches(rows(), 5)
    with pytest.raises(R.RankingError, match="'q0' do not come together"):
        task.eval_step()._read(model(), [parts[0], parts[1], parts[0], parts[2]])


def test_masked_rows_count_nowhere() -> None:
    features, queries, candidates, relevance = rows(queries=2)
    mask = torch.tensor([True] * 9 + [False])
    task = R.RankingTask(k=(2,))
    masked = task.eval_step()._read(model(), [(features, queries, candidates, relevance, mask)])
    kept = [(features[:9], queries[:9], candidates[:9], relevance[:9])]
    assert masked == task.eval_step()._read(model(), kept)


def test_an_epoch_without_a_scored_query_is_unavailable_and_never_best() -> None:
    features, queries, candidates, relevance = rows()
    nothing = batches((features, queries, candidates, torch.zeros_like(relevance)), 60)
    with pytest.warns(RuntimeWarning, match="ndcg_at_3 has no value"):
        _, run = train(R.RankingTask(k=(3,)), epochs=1, val=nothing)
    record = run.idps[-1].val_edp
    assert (record.status, record.count, record.loss) == ("empty", 0, None)
    assert dict(record.metrics) == {"excluded_queries": 12.0}
    assert run.idps[-1].selection.status == "missing"
    assert not os.path.exists(f"runs/{run.id}/checkpoints/best.pt")


@pytest.mark.parametrize("loss", ["lambdarank", "listwise_softmax"])
def test_other_objectives_learn_to_rank_too(loss) -> None:
    task = R.RankingTask(k=(3,))
    _, run = train(task, epochs=40, objective=task.objective(loss=loss))
    assert run.idps[-1].val_edp.metrics["ndcg_at_3"] > 0.9


def test_the_default_evaluation_refuses_the_figures() -> None:
    task = R.RankingTask()
    net = model()
    loader = [(torch.zeros(4, 4), torch.zeros(4, 1))]
    params = NNTrainParams(
        n_epochs=1, train_loader=loader, val_loader=loader, metrics=task.metric_specs()
    )
    with pytest.raises(ValueError, match=r"eval_step_fn=RankingTask.eval_step\(\)"):
        net.train(params)
    assert not os.path.exists("runs")


def test_a_resume_with_another_task_is_refused() -> None:
    _, run = train(R.RankingTask(k=(3,)), epochs=2)
    other = R.RankingTask(k=(3,), weighting="pair")
    with pytest.raises(ValueError, match="weighting='query', but this task has 'pair'"):
        train(other, resume_from_run_id=run.id, resume_mode="stateful")
    same = R.RankingTask(k=(3,))
    with pytest.raises(ValueError, match="loss='pairwise_logistic'"):
        train(
            same, objective=same.objective(loss="lambdarank"), resume_from_run_id=run.id,
            resume_mode="stateful",
        )  # fmt: skip
    _, again = train(same, resume_from_run_id=run.id, resume_mode="stateful")
    assert again.resume_status.mode == "stateful"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: b[:3], "ranking batch is"),
        (lambda b: (b[0], b[1][:-1], b[2], b[3]), "59 query_ids but 60 candidate_ids"),
        (lambda b: (b[0][:5], *b[1:]), "5 rows of features"),
        (lambda b: (b[0], [1, *b[1][1:]], b[2], b[3]), "integers or all be strings"),
        (lambda b: (b[0], b[1], [0] * 60, b[3]), "'q0' has the candidate 0 twice"),
        (lambda b: (*b[:3], b[3] + 1), "grade 2; grades go from 0 to 1"),
        (lambda b: (*b, torch.ones(3)), r"mask must have shape \(60,\)"),
        (lambda b: (*b, torch.full((60,), 2)), "mask must hold"),
        (lambda b: {"features": b[0]}, "has no query_ids, candidate_ids, relevance"),
    ],
)
def test_a_wrong_batch_is_refused_before_any_update(change, message) -> None:
    net, task = model(), R.RankingTask()
    before = {name: value.clone() for name, value in net.net.state_dict().items()}
    with pytest.raises(R.RankingError, match=message):
        net.train(
            NNTrainParams(n_epochs=1, train_loader=[change(batches(rows(), 60)[0])]),
            objective=task.objective(),
        )
    assert all(torch.equal(value, before[name]) for name, value in net.net.state_dict().items())


def test_a_scorer_of_another_shape_is_refused() -> None:
    params = NNModelParams(net=Nets.FEED_FWD, device=Devices.CPU, loss=Losses.MEAN_SQUARED_ERROR)
    net = NNModel(NNParams(input_dim=4, output_dim=2, hidden_dims=[8], dropout_prob=0.0), params)
    with pytest.raises(R.RankingError, match=r"one score per row, \(60,\), not \(60, 2\)"):
        net.train(
            NNTrainParams(n_epochs=1, train_loader=batches(rows(), 60)),
            objective=R.RankingTask().objective(),
        )


def test_the_task_is_data() -> None:
    task = R.RankingTask(k=(1, 5), max_relevance=4, relevance_threshold=2, group_size=6)
    assert R.RankingTask.from_state(task.state()) == task
    more = R.RankingTask(metrics=("map", "err"), grouped=True)
    assert R.RankingTask.from_state(more.state()) == more
    assert more.metric_names() == ["map_at_10", "err_at_10"]
    assert "grouped" not in task.state()
    with pytest.raises(R.RankingError, match="has no cutoff"):
        R.RankingTask.from_state({**task.state(), "cutoff": 3})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": ()}, "one cutoff"),
        ({"k": (0,)}, "k must be an integer >= 1"),
        ({"k": 10}, "sequence"),
        ({"relevance_threshold": 2}, "relevance_threshold"),
        ({"weighting": "row"}, "weighting"),
        ({"candidate_sets": "all"}, "candidate_sets"),
        ({"group_size": 3}, "group_size"),
        ({"max_buffered": 0}, "max_buffered"),
        ({"metrics": ("auc",)}, "metrics"),
        ({"version": 0}, "version"),
    ],
)
def test_a_wrong_declaration_is_refused(fields, message) -> None:
    with pytest.raises(R.RankingError, match=message):
        R.RankingTask(**fields)


def test_groups_have_the_declared_size() -> None:
    task = R.RankingTask(k=(2,), group_size=3)
    with pytest.raises(R.RankingError, match="'a' has 2 candidates, not group_size=3"):
        task.evaluate_rows([("a", 1, 0.0, 1), ("a", 2, 1.0, 0)])
    with pytest.raises(R.RankingError, match="k=10 is more than the 1 candidates of query 'a'"):
        R.RankingTask().evaluate_rows([("a", 1, 0.0, 1)])
    with pytest.raises(R.RankingError, match="'a' has the candidate 1 twice"):
        R.RankingTask(k=(1,)).evaluate_rows([("a", 1, 0.0, 1), ("a", 1, 1.0, 0)])
    assert math.isclose(R.RankingTask(k=(1,)).evaluate_rows([("a", 1, 0.0, 1)])[0]["mrr_at_1"], 1)
