"""Neighbours, linear probes and collapse as a run's validation; experts' loads over all of it."""

from __future__ import annotations

import pytest
import torch
from nnx import Callback, EarlyStopping, MonitorSpec, NNCheckpoint
from nnx.paradigms import EmbeddingProbe, RoutingProbe, moe_objective, simclr_objective
from nnx.paradigms.probes import knn_classes, linear_classes
from small_models import X, Y, feed_forward, loader, mixture, numbers, training

BANK = loader(X, Y, batch=20, shuffle=False)
VAL = loader(X[:30], Y[:30], batch=13, shuffle=False)


def test_neighbours_vote_by_similarity():
    neighbors = pytest.importorskip("sklearn.neighbors")
    known, labels, rows = numbers(1, 80, 5), Y.repeat(2)[:80], numbers(2, 40, 5)
    oracle = neighbors.KNeighborsClassifier(
        7, metric="cosine", weights=lambda distance: torch.from_numpy(-distance / 0.2).exp().numpy()
    ).fit(known.numpy(), labels.numpy())
    found = knn_classes(known, labels, rows, neighbours=7, temperature=0.2)
    assert found.tolist() == oracle.predict(rows.numpy()).tolist()
    few = knn_classes(known[:3], labels[:3], rows, neighbours=20)  # all that there are
    assert set(few.tolist()) <= set(labels[:3].tolist())


def test_the_linear_probe_is_a_logistic_regression():
    linear = pytest.importorskip("sklearn.linear_model")
    known, labels, rows = numbers(1, 90, 5), Y.repeat(2)[:90], numbers(2, 200, 5)
    known = torch.cat((known * 3 + 1, torch.ones(90, 1)), 1)  # a scale, a shift, a constant
    rows = torch.cat((rows * 3 + 1, torch.ones(200, 1)), 1)
    mean, spread = known.mean(0), known.std(0, correction=0).clamp(min=1e-9)
    oracle = linear.LogisticRegression(C=1 / (0.01 * 90), tol=1e-8, max_iter=1000)
    oracle.fit(((known - mean) / spread).double().numpy(), labels.numpy())
    wanted = oracle.predict(((rows - mean) / spread).double().numpy())
    found = linear_classes(known, labels, rows, penalty=0.01)
    assert (found.numpy() == wanted).mean() >= 0.995


def test_a_run_is_validated_selected_and_stopped_by_a_probe():
    probe = EmbeddingProbe(BANK, neighbours=5)
    seen = []

    class Look(Callback):
        def on_epoch_end(self, ctx):
            seen.append(torch.get_rng_state())

    plain, probed = feed_forward(out=8), feed_forward(out=8)
    views = (X, X + 0.1 * numbers(3, 50, 6))
    plain.train(training(*views, data_id="plain"), objective=simclr_objective(), callbacks=[Look()])
    run = probed.train(
        training(
            *views, val_loader=VAL, metrics=probe.metric_specs(),
            monitor=MonitorSpec("effective_rank"),
        ),
        objective=simclr_objective(), eval_step_fn=probe, callbacks=[Look()],
    )  # fmt: skip
    # Probing draws nothing: the training is the one without it.
    for one, other in zip(plain.net.parameters(), probed.net.parameters()):
        assert torch.equal(one, other)
    records = [p.val_edp for p in run.idps if p.val_edp is not None]
    assert [r.accuracy for r in records] == [r.metrics["linear_accuracy"] for r in records]
    ranks = [r.metrics["effective_rank"] for r in records]
    best = NNCheckpoint.load(run.id, "best").idp
    assert best.selection.value == max(ranks)
    with torch.no_grad():
        embedded = probed.net.eval()(X)
    found = knn_classes(embedded, Y, embedded[:30], neighbours=5)
    assert records[-1].metrics["knn_accuracy"] == pytest.approx(
        float((found == Y[:30]).double().mean())
    )
    stop = EarlyStopping(monitor=MonitorSpec("effective_rank", min_delta=100.0), patience=1)
    stopped = feed_forward(out=8).train(
        training(*views, epochs=9, val_loader=VAL, metrics=probe.metric_specs(), data_id="stop"),
        objective=simclr_objective(), eval_step_fn=probe, callbacks=[stop],
    )  # fmt: skip
    assert stopped.idps[-1].epoch_idx == 1


def test_an_embedding_of_one_s_own_is_probed():
    probe = EmbeddingProbe(BANK, neighbours=None, embed=lambda net, x: net.layers[0](x).relu())
    assert [spec.label for spec in probe.metric_specs()] == [
        "linear_accuracy", "effective_rank", "deviation_mean", "deviation_min",
    ]  # fmt: skip
    model = feed_forward(dropout=0.0)
    run = model.train(training(val_loader=VAL), eval_step_fn=probe)
    hidden = model.net.layers[0](X).relu().detach()
    right = linear_classes(hidden, Y, hidden[:30]) == Y[:30]
    found = [p.val_edp for p in run.idps if p.val_edp is not None][-1]
    assert found.accuracy == pytest.approx(float(right.double().mean()))


def test_what_cannot_be_probed_is_refused():
    with pytest.raises(ValueError, match="needs neighbours, linear=True or both"):
        EmbeddingProbe(BANK, neighbours=None, linear=False)
    for wrong in ({"neighbours": 0}, {"temperature": 0}, {"penalty": 0}):
        with pytest.raises(ValueError):
            EmbeddingProbe(BANK, **wrong)
    params = training(val_loader=loader(X, X[:, 0]))
    with pytest.raises(ValueError, match="the validation loader must give batches of"):
        feed_forward().train(params, eval_step_fn=EmbeddingProbe(BANK), objective=simclr_less)
    probe = EmbeddingProbe(BANK)
    with pytest.raises(ValueError, match=r"pass eval_step_fn=EmbeddingProbe"):
        feed_forward().train(training(val_loader=VAL, metrics=probe.metric_specs()))


def simclr_less(ctx):
    from nnx import supervised_objective

    return supervised_objective()(ctx)


def test_the_experts_loads_are_those_of_the_whole_validation_set():
    probe, model = RoutingProbe(), mixture(top_k=1)
    params = training(
        val_loader=VAL, metrics=probe.metric_specs(), monitor=MonitorSpec("moe_max_load")
    )
    run = model.train(params, objective=moe_objective(), eval_step_fn=probe)
    plain = model.evaluate(VAL)
    record = [p.val_edp for p in run.idps if p.val_edp is not None][-1]
    assert (record.loss, record.accuracy) == (plain.loss, plain.accuracy)
    scores = model.net.layers[0].router(X[:30]).detach()
    counts = scores.argmax(1).bincount(minlength=4)
    shares = scores.softmax(1)
    assert record.metrics["moe_dead_experts"] == int((counts == 0).sum())
    assert record.metrics["moe_max_load"] == pytest.approx(int(counts.max()) * 4 / 30)
    assert record.metrics["moe_entropy"] == pytest.approx(
        float(-(shares * shares.log()).sum(1).mean()), rel=1e-5
    )
    assert record.metrics["moe_dropped"] == 0.0
    assert not model.net.layers[0]._forward_hooks
    with pytest.raises(ValueError, match="no MoELinear"):
        feed_forward().train(training(val_loader=VAL), eval_step_fn=probe)
