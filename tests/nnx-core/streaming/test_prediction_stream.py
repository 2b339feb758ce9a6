"""Predictions as a stream: one batch in memory, nothing left behind."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import numpy as np
import pytest
import torch
from nnx import PredictionBatch, PredictionResult, PredictionStream, ProbabilitySpec, TaskSpec
from nnx.prediction.inference import predict, predict_proba
from nnx.streaming import StreamClosedError, concatenate_predictions, iter_predict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def net():
    made = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 3))
    made.train()
    made[1].eval()
    return made


def flags(module):
    return [m.training for m in module.modules()]


X = torch.randn(21, 4, generator=torch.Generator().manual_seed(0))
LOADER = DataLoader(TensorDataset(X, torch.zeros(21).long()), batch_size=8)
SPEC = ProbabilitySpec("categorical", labels=["a", "b", "c"])


@pytest.fixture
def model(make_model):
    return make_model(net=net())


def same(one, other):
    assert type(one) is type(other)
    for name in type(one).__dataclass_fields__:
        a, b = getattr(one, name), getattr(other, name)
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, name


@pytest.mark.parametrize(
    ("loss_fn", "task"),
    [
        (nn.CrossEntropyLoss(), None),
        (nn.BCEWithLogitsLoss(), None),
        (nn.CrossEntropyLoss(), TaskSpec.categorical(3)),
        (nn.BCEWithLogitsLoss(), TaskSpec.multilabel(3, threshold=0.3)),
        (nn.MSELoss(), TaskSpec.regression(3)),
    ],
)
def test_concatenated_batches_are_exactly_the_eager_result(make_model, loss_fn, task):
    model = make_model(loss_fn, task, net())
    joined = concatenate_predictions(iter_predict(model, LOADER))
    eager = predict(model, LOADER)
    assert isinstance(joined, PredictionBatch)
    assert np.array_equal(joined.logits, eager.logits)
    assert np.array_equal(joined.classes, eager.classes)
    assert np.array_equal(joined.sample_ids, np.arange(21))
    same(
        concatenate_predictions(iter_predict(model, LOADER, SPEC)),
        predict_proba(model, LOADER, SPEC),
    )
    if task is not None:
        rich = concatenate_predictions(iter_predict(model, LOADER, rich=True))
        same(rich, predict_proba(model, LOADER))


def test_batches_arrive_in_loader_order(model):
    sizes = [(len(b.classes), b.sample_ids[0]) for b in iter_predict(model, LOADER)]
    assert sizes == [(8, 0), (8, 8), (5, 16)]


def test_the_model_is_in_its_own_mode_between_batches_and_may_be_trained(model):
    before = flags(model.net)
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    with model_stream(model) as stream:
        for batch in stream:
            assert flags(model.net) == before
            assert torch.is_grad_enabled()
            model.net(X).sum().backward()
            optimizer.step()
            assert isinstance(batch, PredictionBatch)
    assert flags(model.net) == before


def model_stream(model, **options):
    return iter_predict(model, LOADER, **options)


def test_a_failed_forward_restores_the_modes_and_closes_the_stream(model):
    before = flags(model.net)
    stream = iter_predict(model, [(X[:4], None), torch.zeros(2, 5)])
    next(stream)
    with pytest.raises(RuntimeError, match="the inputs have 5 features"):
        next(stream)
    assert flags(model.net) == before
    assert stream.closed
    with pytest.raises(StopIteration):
        next(stream)


def test_an_error_in_the_block_closes_the_stream(model):
    stream = model_stream(model)

    def consume():
        with stream:
            next(stream)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        consume()
    assert stream.closed
    assert flags(model.net) == flags(net())


def test_close_inside_a_loop_ends_it_and_leaves_the_loader_usable(model):
    seen = 0
    with model_stream(model) as stream:
        for _ in stream:
            seen += 1
            stream.close()
    assert seen == 1
    assert len(list(model_stream(model))) == 3
    stream.close()


@pytest.mark.parametrize("use", ["closed", "consumed", "partly"])
def test_iterating_again_is_refused(model, use):
    stream = model_stream(model)
    if use == "closed":
        stream.close()
    elif use == "consumed":
        list(stream)
    else:
        for _ in stream:
            break
    with pytest.raises(StreamClosedError, match=r"ask iter_predict\(\) for a new one"):
        iter(stream)
    if use != "partly":
        with pytest.raises(StreamClosedError, match="is closed"), stream:
            pass


def test_a_closed_stream_holds_neither_model_nor_loader_iterator(make_model):
    class Batches:
        def __iter__(self):
            self.alive = iterator = Once()
            return iterator

    class Once:
        def __iter__(self):
            return self

        def __next__(self):
            return X[:2]

    loader, module = Batches(), net()
    stream = iter_predict(make_model(net=module), loader)
    next(stream)
    iterator, network = weakref.ref(loader.alive), weakref.ref(module)
    del loader.alive, module
    assert iterator() is not None
    stream.close()
    gc.collect()
    assert iterator() is None
    assert network() is None


def test_only_the_batch_in_flight_is_held(model):
    held = []

    def source():
        for _ in range(4):
            batch = torch.randn(2, 4)
            held.append(weakref.ref(batch))
            yield batch

    stream = iter_predict(model, source())
    for index, batch in enumerate(stream):
        assert [reference() is not None for reference in held] == [False] * index + [True]
        del batch


def test_an_empty_loader_yields_nothing(model):
    assert list(iter_predict(model, [])) == []
    with pytest.raises(ValueError, match="no batches to concatenate"):
        concatenate_predictions(iter_predict(model, []))


@pytest.mark.parametrize("inputs", [X, X.numpy(), (X,), {"x": X}])
def test_in_memory_inputs_stay_with_predict(model, inputs):
    with pytest.raises(TypeError, match=r"pass in-memory inputs to predict\(\)"):
        iter_predict(model, inputs)


def test_a_missing_spec_is_refused_before_the_loader_is_read(model):
    class Untouched:
        def __iter__(self):
            raise AssertionError("the loader was read")

    with pytest.raises(ValueError, match="declares no task"):
        iter_predict(model, Untouched(), rich=True)


def test_a_shuffling_loader_warns_at_its_first_batch_only(model):
    loader = DataLoader(TensorDataset(X), batch_size=8, shuffle=True)
    stream = iter_predict(model, loader)
    with pytest.warns(UserWarning, match="this DataLoader shuffles") as caught:
        assert len(list(stream)) == 3
    assert len(caught) == 1


def test_predictions_of_different_kinds_are_not_joined(model):
    plain, rich = list(model_stream(model)), list(model_stream(model, spec=SPEC))
    assert isinstance(rich[0], PredictionResult)
    with pytest.raises(TypeError, match="cannot concatenate PredictionBatch with"):
        concatenate_predictions([plain[0], rich[0]])
    other = list(model_stream(model, spec=ProbabilitySpec("bernoulli")))
    with pytest.raises(ValueError, match="different specs"):
        concatenate_predictions([rich[0], other[0]])


def test_any_iterator_can_be_a_stream():
    stream = PredictionStream(iter([1, 2]))
    assert list(stream) == [1, 2]
    assert stream.closed


def test_probabilities_are_kept_or_the_join_is_refused(model):
    rich = list(model_stream(model, spec=SPEC))
    whole = concatenate_predictions(rich)
    assert np.array_equal(whole.probabilities, np.concatenate([r.probabilities for r in rich]))
    without = dataclasses.replace(rich[1], probabilities=None)
    for parts in ([rich[0], without], [without, rich[0]]):
        with pytest.raises(ValueError, match="with probabilities and predictions without"):
            concatenate_predictions(parts)
    assert concatenate_predictions([without, without]).probabilities is None


def test_a_batch_is_as_long_as_it_has_rows(model):
    assert [len(batch) for batch in model_stream(model)] == [
        len(b) for b in model_stream(model, spec=SPEC)
    ]
    assert sum(map(len, model_stream(model))) == len(X)
