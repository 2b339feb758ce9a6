"""evaluate(), predict() and predict_proba() of a model."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
import torch
from nnx import (
    KeywordInputs,
    MetricSpec,
    Nets,
    NNModel,
    NNModelParams,
    NNParams,
    PositionalInputs,
    PrecisionPolicy,
    PredictionValidationError,
    ProbabilitySpec,
    TaskSpec,
    TaskValidationError,
)
from nnx.prediction.inference import EvaluationTotals, evaluate, predict, predict_proba
from sklearn.metrics import accuracy_score, precision_recall_fscore_support
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

NAN = math.nan


def mixed_modes():
    """A net whose submodules are not all in one mode."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    net.train()
    net[1].eval()
    return net


def flags(net):
    return [module.training for module in net.modules()]


def data(n=50, classes=3, batch_size=16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, 4, generator=generator)
    y = torch.randint(0, classes, (n,), generator=generator)
    return X, y, DataLoader(TensorDataset(X, y), batch_size=batch_size)


def whole(net, X):
    before = flags(net)
    net.eval()
    with torch.no_grad():
        out = net(X)
    for module, flag in zip(net.modules(), before):
        module.training = flag
    return out


def test_an_evaluation_equals_scikit_learn_over_the_full_sample(make_model):
    model = make_model(net=mixed_modes())
    X, y, loader = data()
    record = evaluate(model, loader)
    output = whole(model.net, X)
    precision, recall, f1, _ = precision_recall_fscore_support(
        y, output.argmax(1), average="macro", zero_division=0
    )
    assert record.accuracy == accuracy_score(y, output.argmax(1))
    assert (record.precision, record.recall, record.f1) == pytest.approx((precision, recall, f1))
    assert record.error == 1 - record.accuracy
    assert record.loss == pytest.approx(nn.functional.cross_entropy(output, y).item(), rel=1e-6)
    assert record.kind is record.count is record.status is None


@pytest.mark.parametrize("batch_size", [1, 7, 50])
@pytest.mark.parametrize("loss_fn", [
    nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.1]), ignore_index=1),
    nn.NLLLoss(), nn.CrossEntropyLoss(reduction="sum"), nn.CrossEntropyLoss(label_smoothing=0.1),
], ids=str)  # fmt: skip
def test_the_loss_is_the_full_samples_however_it_is_batched(make_model, loss_fn, batch_size):
    model = make_model(loss_fn, net=nn.Linear(4, 3))
    X, y, loader = data(batch_size=batch_size)
    output = whole(model.net, X)
    output = output.log_softmax(1) if isinstance(loss_fn, nn.NLLLoss) else output
    assert evaluate(model, loader).loss == pytest.approx(loss_fn(output, y).item(), rel=1e-5)


def test_modes_are_given_back_also_when_a_batch_fails(make_model):
    net = mixed_modes()
    model = make_model(net=net)
    before = flags(net)
    X, y, loader = data()
    evaluate(model, loader)
    predict(model, X)
    predict_proba(model, loader, ProbabilitySpec("categorical"))
    assert flags(net) == before

    def failing():
        yield X[:4], y[:4]
        raise RuntimeError("the disk is gone")

    for call in (lambda: evaluate(model, failing()), lambda: predict(model, failing())):
        with pytest.raises(RuntimeError, match="the disk is gone"):
            call()
        assert flags(net) == before
    with pytest.raises(RuntimeError, match="the inputs have 5 features, but the net takes 4"):
        predict(model, torch.zeros(2, 5))
    assert flags(net) == before
    assert torch.is_grad_enabled()


def test_nothing_of_the_model_changes(make_model):
    net = mixed_modes()
    model = make_model(net=net)
    X, _, loader = data()
    state = {k: v.clone() for k, v in net.state_dict().items()}
    rng = torch.get_rng_state()
    evaluate(model, loader, metrics=[MetricSpec("nll")])
    predict_proba(model, X, ProbabilitySpec("categorical"))
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    # A DataLoader draws its base seed from the ambient stream; arrays draw nothing.
    torch.set_rng_state(rng)
    predict(model, X)
    assert torch.equal(rng, torch.get_rng_state())


def test_an_empty_loader_is_refused(make_model):
    model = make_model(net=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="no batches: there is nothing to evaluate"):
        evaluate(model, [])
    for call in (predict, lambda m, x: predict_proba(m, x, ProbabilitySpec("categorical"))):
        with pytest.raises(ValueError, match="no batches: there is nothing to predict"):
            call(model, iter(()))


def test_a_one_shot_iterator_is_read_once(make_model):
    model = make_model(net=nn.Linear(4, 3))
    _, _, loader = data()
    batches = iter(list(loader))
    assert evaluate(model, batches) == evaluate(model, loader)
    with pytest.raises(ValueError, match="no batches"):
        evaluate(model, batches)


def test_a_batch_without_a_target_cannot_be_evaluated(make_model):
    model = make_model(net=nn.Linear(4, 3))
    with pytest.raises(ValueError, match="no target to learn from or to score"):
        evaluate(model, [torch.zeros(2, 4)])


def test_metrics_are_checked_before_any_batch_is_read(make_model):
    class Untouched:
        def __iter__(self):
            raise AssertionError("the loader was read")

    with pytest.raises(ValueError, match="reads continuous"):
        evaluate(make_model(net=nn.Linear(4, 3)), Untouched(), metrics=[MetricSpec("mae")])


def test_declared_and_extra_metrics_are_over_the_full_sample(make_model):
    model = make_model(net=nn.Linear(4, 3))
    X, y, loader = data()
    calls = []
    record = evaluate(
        model, loader, {"n": lambda t, p: calls.append((t, p)) or len(t)},
        [MetricSpec("nll"), MetricSpec("accuracy", name="top1")],
    )  # fmt: skip
    output = whole(model.net, X)
    assert record.extra == {"n": 50.0}
    assert len(calls) == 1
    assert np.array_equal(calls[0][0], y.numpy())
    assert np.array_equal(calls[0][1], output.argmax(1).numpy())
    assert record.metrics["top1"] == record.accuracy
    assert record.metrics["nll"] == pytest.approx(
        nn.functional.cross_entropy(output.double(), y).item(), rel=1e-6
    )


def test_a_declared_metric_of_a_tasks_own_name_replaces_its_value(make_model):
    model = make_model(nn.MSELoss(), TaskSpec.regression(3), nn.Linear(4, 3))
    X = torch.randn(10, 4)
    target = torch.randn(10, 3)
    plain = evaluate(model, [(X, target)])
    named = evaluate(model, [(X, target)], metrics=[MetricSpec("mae", name="mse")])
    assert named.metrics["mse"] == pytest.approx(plain.metrics["mae"])


def test_a_fully_masked_task_loader_is_empty_not_an_error(make_model):
    model = make_model(nn.MSELoss(), TaskSpec.regression(3), nn.Linear(4, 3))
    record = evaluate(
        model, [(torch.zeros(2, 4), torch.full((2, 3), NAN))], {"a": lambda t, p: 1 / 0},
        [MetricSpec("mae")],
    )  # fmt: skip
    assert record.status == "empty"
    assert (record.loss, record.count, record.metrics, record.extra) == (None, 0, {}, {})


def test_a_fully_ignored_loader_without_a_task_is_unknown(make_model):
    model = make_model(net=nn.Linear(4, 3))
    record = evaluate(model, [(torch.zeros(2, 4), torch.tensor([-100, -100]))])
    assert (record.loss, record.error, record.accuracy, record.f1) == (None,) * 4


def test_a_masked_batch_does_not_move_the_loss_of_the_others(make_model):
    model = make_model(
        nn.CrossEntropyLoss(), TaskSpec.categorical(3, ignore_index=-100), nn.Linear(4, 3)
    )
    X, y, _ = data(8)
    masked = (X, torch.full_like(y, -100))
    alone, both = evaluate(model, [(X, y)]), evaluate(model, [masked, (X, y), masked])
    assert alone == both
    assert both.count == 8


def test_a_wrong_target_names_the_fault_and_restores(make_model):
    model = make_model(nn.CrossEntropyLoss(), TaskSpec.categorical(3), mixed_modes())
    before = flags(model.net)
    with pytest.raises(TaskValidationError, match="found 7"):
        evaluate(model, [(torch.zeros(2, 4), torch.tensor([0, 7]))])
    assert flags(model.net) == before


def test_predictions_of_every_kind_of_input_agree(make_model):
    model = make_model(net=mixed_modes())
    X, _, loader = data()
    expected = whole(model.net, X).numpy()
    for inputs in (X, X.numpy(), X.numpy().astype(np.float64), (X,), (X.numpy(),)):
        result = predict(model, inputs)
        logits, classes = result
        assert np.allclose(logits, expected, atol=1e-6)
        assert np.array_equal(classes, logits.argmax(1))
    for batches in (loader, DataLoader(X, batch_size=8), [(X,)], [[X]], iter([X[:9], X[9:]])):
        assert np.allclose(predict(model, batches).logits, expected, atol=1e-6)


class Sum(nn.Module):
    def forward(self, a, b):
        return a + b


def test_several_positional_inputs_and_keyword_inputs(make_model):
    a, b = torch.randn(6, 3), torch.randn(6, 3)
    model = make_model(net=Sum())
    model.batch_adapter = PositionalInputs(2)
    for inputs in ((a, b), (a.numpy(), b.numpy()), [(a, b)], [(a, b, torch.zeros(6).long())]):
        assert np.array_equal(predict(model, inputs).logits, (a + b).numpy())
    model.batch_adapter = KeywordInputs(("a", "b"))
    rows = {"a": a, "b": b, "unused": 3}
    for inputs in (rows, [rows], [{**rows, "labels": torch.zeros(6).long()}]):
        assert np.array_equal(predict(model, inputs).logits, (a + b).numpy())


@pytest.mark.parametrize(
    ("loss_fn", "task", "decide"),
    [
        (nn.CrossEntropyLoss(), None, lambda z: z.argmax(1)),
        (nn.BCEWithLogitsLoss(), None, lambda z: (z >= 0).astype(int)),
        (nn.BCEWithLogitsLoss(), TaskSpec.multilabel(3, threshold=0.7),
         lambda z: (1 / (1 + np.exp(-z.astype(float))) >= 0.7).astype(int)),
        (nn.MSELoss(), TaskSpec.regression(3), lambda z: z),
    ],
)  # fmt: skip
def test_classes_are_the_tasks_or_the_losss_decisions(make_model, loss_fn, task, decide):
    model = make_model(loss_fn, task, nn.Linear(4, 3))
    logits, classes = predict(model, torch.randn(40, 4))
    assert np.array_equal(classes, decide(logits))


def test_predict_proba_takes_its_spec_from_the_task(make_model):
    X = torch.randn(5, 4)
    model = make_model(
        nn.CrossEntropyLoss(), TaskSpec.categorical(3, labels=list("abc")), nn.Linear(4, 3)
    )
    result = predict_proba(model, X)
    assert np.array_equal(result.logits, predict(model, X).logits)
    assert result.labels == ("a", "b", "c")
    regression = make_model(nn.MSELoss(), TaskSpec.regression(3), nn.Linear(4, 3))
    continuous = predict_proba(regression, X)
    assert continuous.probabilities is continuous.spec is None
    assert np.array_equal(continuous.decoded, continuous.logits)
    plain = make_model(net=nn.Linear(4, 3))
    with pytest.raises(PredictionValidationError, match="declares no task, so say what"):
        predict_proba(plain, X)
    with pytest.raises(PredictionValidationError, match="must be a ProbabilitySpec, not str"):
        predict_proba(plain, X, "categorical")


def test_sample_ids_are_rows_or_iteration_positions_and_shuffling_warns(make_model):
    model = make_model(net=nn.Linear(4, 3))
    X, y, loader = data(20)
    spec = ProbabilitySpec("categorical")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for inputs in (X, X.numpy(), loader, [(X[:3], y[:3]), (X[3:], y[3:])]):
            assert np.array_equal(predict_proba(model, inputs, spec).sample_ids, np.arange(20))
    dataset = TensorDataset(X, y)
    for shuffled in (
        DataLoader(dataset, batch_size=8, shuffle=True),
        DataLoader(dataset, sampler=SubsetRandomSampler(range(20))),
        DataLoader(dataset, batch_sampler=torch.utils.data.BatchSampler(
            torch.utils.data.RandomSampler(dataset), 4, False)),
    ):  # fmt: skip
        with pytest.warns(UserWarning, match="this DataLoader shuffles") as caught:
            predict_proba(model, shuffled, spec)
        assert [w.filename for w in caught] == [__file__]


class Graphish(nn.Module):
    """The two conventions of graph nets: seed rows first, and named rows."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x):
        return self.linear(x)

    def unpack_batch(self, batch):
        return (batch.x,), batch.y


class Seeds(Graphish):
    def seed_count(self, batch):
        return batch.batch_size


class Named(Graphish):
    def sample_ids(self, batch):
        return batch.graph_id


class Batch:
    def __init__(self, **tensors):
        self.__dict__.update(tensors)


def test_seed_rows_alone_are_scored_and_carry_their_global_index(make_model):
    model = make_model(net=Seeds())
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1])
    batch = Batch(x=x, y=y, batch_size=2, n_id=torch.tensor([40, 7, 1, 2, 3]))
    result = predict_proba(model, [batch], ProbabilitySpec("categorical"))
    assert result.sample_ids.tolist() == [40, 7]
    assert np.allclose(result.logits, model.net(x)[:2].detach().numpy())
    record = evaluate(model, [batch])
    expected = nn.functional.cross_entropy(model.net(x)[:2], y[:2]).item()
    assert record.loss == pytest.approx(expected, rel=1e-6)


def test_a_net_may_name_its_own_rows(make_model):
    model = make_model(net=Named())
    batches = [Batch(x=torch.randn(2, 4), y=None, graph_id=torch.tensor([9, 4])),
               Batch(x=torch.randn(1, 4), y=None, graph_id=torch.tensor([11]))]  # fmt: skip
    result = predict_proba(model, batches, ProbabilitySpec("categorical"))
    assert result.sample_ids.tolist() == [9, 4, 11]
    wrong = [Batch(x=torch.randn(2, 4), y=None, graph_id=torch.tensor([9]))]
    with pytest.raises(ValueError, match="sample ids for 2 output rows"):
        predict_proba(model, wrong, ProbabilitySpec("categorical"))


def test_inference_runs_in_the_models_explicit_precision_alone(make_model):
    seen = []

    class Spy(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            seen.append(out.dtype)
            return out

    model = make_model(net=Spy(4, 3))
    predict(model, torch.randn(2, 4))
    model.params = NNModelParams(mixed_precision=True)
    predict(model, torch.randn(2, 4))
    model.params = NNModelParams(precision=PrecisionPolicy("bf16"))
    logits = predict(model, torch.randn(2, 4)).logits
    record = evaluate(model, [(torch.randn(2, 4), torch.tensor([0, 1]))])
    assert seen == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
    assert logits.dtype == np.float32
    assert math.isfinite(record.loss)


def test_an_output_without_a_class_axis_is_refused(make_model):
    class Flat(nn.Module):
        def forward(self, x):
            return x.sum(1)

    with pytest.raises(ValueError, match="have no class axis; declare the model's task"):
        predict(make_model(net=Flat()), torch.randn(2, 4))
    with pytest.raises(ValueError, match="would broadcast targets"):
        evaluate(
            make_model(nn.MSELoss(), net=nn.Linear(4, 3)),
            [(torch.zeros(2, 4), torch.tensor([[1], [0]]))],
        )


def test_nan_outputs_are_reported_not_hidden(make_model):
    net = nn.Linear(4, 3)
    nn.init.constant_(net.weight, NAN)
    record = evaluate(
        make_model(net=net),
        [(torch.ones(3, 4), torch.tensor([0, 1, 2]))],
        metrics=[MetricSpec("nll")],
    )
    assert math.isnan(record.loss)
    assert math.isnan(record.metrics["nll"])


@pytest.mark.parametrize("loss_fn", [nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()])
def test_soft_targets_are_scored_by_what_they_decide(make_model, loss_fn):
    net = nn.Linear(4, 3)
    X, soft = torch.randn(40, 4), torch.rand(40, 3, generator=torch.Generator().manual_seed(3))
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        soft = soft / soft.sum(1, keepdim=True)
        truth, guess = soft.argmax(1), net(X).argmax(1)
    else:
        truth, guess = soft >= 0.5, net(X) >= 0
    loader = DataLoader(TensorDataset(X, soft), batch_size=16)
    model = make_model(loss_fn, net=net)
    record = evaluate(model, loader, {"seen": lambda t, p: len(t)})
    expected = precision_recall_fscore_support(truth, guess, average="macro", zero_division=0)
    assert record.loss == pytest.approx(loss_fn(net(X), soft).item())
    assert record.accuracy == pytest.approx(accuracy_score(truth, guess))
    assert record.error == pytest.approx(1 - record.accuracy)
    assert (record.precision, record.recall, record.f1) == pytest.approx(expected[:3])
    assert record.extra == {"seen": 40}


def test_declared_metrics_read_class_probabilities_as_targets(make_model):
    net = nn.Linear(4, 3)
    X, soft = torch.randn(30, 4), torch.rand(30, 3).softmax(1)
    metrics = [MetricSpec(id) for id in ("nll", "brier", "accuracy", "f1")]
    loader = DataLoader(TensorDataset(X, soft), batch_size=7)
    found = evaluate(make_model(net=net), loader, metrics=metrics).metrics
    chances = net(X).double().softmax(1)
    assert found["nll"] == pytest.approx(-(soft * chances.log()).sum(1).mean().item())
    assert found["brier"] == pytest.approx(((chances - soft) ** 2).sum(1).mean().item())
    assert found["accuracy"] == pytest.approx(accuracy_score(soft.argmax(1), chances.argmax(1)))


def test_targets_that_are_no_probabilities_have_a_loss_but_no_scores(make_model):
    model = make_model(nn.BCEWithLogitsLoss(), net=nn.Linear(4, 3))
    X, beyond = torch.randn(4, 4), torch.full((4, 3), 1.5)
    record = evaluate(model, [(X, beyond)], {"a": lambda t, p: 1 / 0})
    expected = nn.functional.binary_cross_entropy_with_logits(model.net(X), beyond).item()
    assert record.loss == pytest.approx(expected)
    assert (record.accuracy, record.f1, record.error, record.extra) == (None, None, None, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": ["nll"]}, r"metrics\[0\] must be a MetricSpec, not 'nll'"),
        ({"metrics": MetricSpec("nll")}, "must be a sequence of MetricSpec"),
        ({"extra_metrics": [max]}, "must map names to functions"),
        (
            {"extra_metrics": {"a": lambda t, p: None}},
            r"\['a'\] must return a number, not NoneType",
        ),
    ],
)
def test_wrong_metrics_are_named(make_model, arguments, message):
    with pytest.raises(TypeError, match=message):
        evaluate(make_model(net=nn.Linear(4, 3)), data()[2], **arguments)


@pytest.mark.parametrize("sizes", [[3] * 150, [5000, 3, 5000, 1], [1] * 64])
@pytest.mark.parametrize("ignored", [0.0, 0.5])
def test_small_batches_counted_together_are_the_same_counts(make_model, sizes, ignored):
    """Also when the loader fills one buffer again and again."""
    generator = torch.Generator().manual_seed(0)
    n = sum(sizes)
    X, y = torch.randn(n, 4, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    y[torch.rand(n, generator=generator) < ignored] = -100
    buffers = torch.zeros(5000, 4), torch.zeros(5000, dtype=torch.long)

    def refilled():
        start = 0
        for size in sizes:
            for buffer, values in zip(buffers, (X, y)):
                buffer[:size] = values[start : start + size]
            start += size
            yield buffers[0][:size], buffers[1][:size]

    for task in (None, TaskSpec.categorical(3, ignore_index=-100)):
        model = make_model(task=task, net=nn.Linear(4, 3))
        assert evaluate(model, refilled()).f1 == evaluate(model, [(X, y)]).f1


def test_batches_scored_in_different_ways_are_refused(make_model):
    class Either(nn.Module):
        def forward(self, output, target):
            return output.sum() * 0

    X, y, _ = data(4)
    with pytest.raises(ValueError, match="mixes batches scored by classes with batches"):
        evaluate(make_model(Either(), net=nn.Linear(4, 3)), [(X, y), (X, torch.zeros(4, 3))])


@pytest.mark.parametrize(
    ("loss_fn", "task", "masked"),
    [
        (nn.CrossEntropyLoss(), None, -100),
        (nn.CrossEntropyLoss(), TaskSpec.categorical(3, ignore_index=-100), -100),
        (nn.BCEWithLogitsLoss(), None, None),
        (nn.BCEWithLogitsLoss(), TaskSpec.multilabel(3), NAN),
        (nn.MSELoss(), TaskSpec.regression(3), NAN),
    ],
)
def test_totals_of_several_processes_add_up_to_the_whole(make_model, loss_fn, task, masked):
    model = make_model(loss_fn, task, nn.Linear(4, 3))
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(40, 4, generator=generator)
    if isinstance(loss_fn, nn.CrossEntropyLoss):
        target = torch.randint(0, 3, (40,), generator=generator)
    else:
        target = (torch.randn(40, 3, generator=generator) > 0).float()
    if masked is not None:
        target[torch.rand(target.shape, generator=generator) < 0.3] = masked
    shards = []
    for part in (slice(0, 10), slice(10, 33), slice(33, 40), slice(40, 40)):
        totals = EvaluationTotals(model, keep_arrays=True)
        with torch.no_grad():
            if len(X[part]):
                totals.add(model.net(X[part]), target[part])
        shards.append(totals)
    merged = shards[0].emptied()
    for shard in reversed(shards):
        merged.add_parts(shard.parts())
    extra = {"n": lambda truth, guess: truth.size}
    mine, whole = merged.record(extra), evaluate(model, [(X, target)], extra)
    assert (mine.count, mine.extra, mine.kind) == (whole.count, whole.extra, whole.kind)
    for field in ("loss", "error", "accuracy", "f1", "recall", "precision"):
        assert getattr(mine, field) == pytest.approx(getattr(whole, field)), field
    assert mine.metrics == pytest.approx(whole.metrics)


class Unread:
    def __iter__(self):
        raise AssertionError("the loader was read")


@pytest.mark.parametrize(
    ("task", "spec", "message"),
    [
        (None, ProbabilitySpec("categorical", 0), "class_axis=0 is not a class axis"),
        (None, ProbabilitySpec("bernoulli", 0), "class_axis=0 is not a class axis"),
        (TaskSpec.categorical(3), ProbabilitySpec("categorical", 1, ["a", "b"]),
         "names 2 labels but the model has 3 outputs"),
        (None, None, "declares no task"),
        (None, "categorical", "must be a ProbabilitySpec"),
    ],
)  # fmt: skip
def test_a_spec_that_cannot_fit_is_refused_before_the_loader_runs(make_model, task, spec, message):
    with pytest.raises(PredictionValidationError, match=message):
        predict_proba(make_model(task=task), Unread(), spec)


def test_labels_are_compared_with_the_nets_outputs_before_the_loader_runs():
    model = NNModel(
        NNParams(input_dim=4, output_dim=3, hidden_dims=[], dropout_prob=0.0),
        NNModelParams(net=Nets.FEED_FWD),
    )
    for call in (model.predict_proba, model.iter_predict):
        with pytest.raises(PredictionValidationError, match="names 2 labels but the model has 3"):
            call(Unread(), ProbabilitySpec("categorical", labels=["a", "b"]))


def test_outputs_that_do_not_fit_a_spec_end_the_prediction_at_the_first_batch(make_model):
    read = []

    def batches():
        for index in range(5):
            read.append(index)
            yield (torch.ones(2, 4),)

    model = make_model(net=nn.Linear(4, 3))
    with pytest.raises(PredictionValidationError, match="names 2 labels"):
        predict_proba(model, batches(), ProbabilitySpec("categorical", labels=["a", "b"]))
    assert read == [0]


def test_probabilities_of_logits_that_are_not_finite_are_refused(make_model):
    net = nn.Linear(4, 3)
    nn.init.constant_(net.bias, math.inf)
    for task, spec in ((TaskSpec.categorical(3), None), (None, ProbabilitySpec("bernoulli"))):
        with pytest.raises(PredictionValidationError, match=r"logits\[0, 0\] is inf"):
            predict_proba(make_model(task=task, net=net), torch.zeros(2, 4), spec)
    assert np.isinf(predict(make_model(net=net), torch.zeros(2, 4)).logits).all()
