"""Modules that know nothing of NNx train, checkpoint and resume as they are."""

from __future__ import annotations

import copy
import dataclasses
import os
import re

import pytest
import torch
from nnx import (
    Callback,
    Checkpoints,
    KeywordInputs,
    Losses,
    MissingModelFactoryError,
    ModelSpec,
    NNCheckpoint,
    NNModel,
    NNModelParams,
    NNOptimParams,
    NNRun,
    NNTrainParams,
    PositionalInputs,
    RuntimeModule,
    TaskSpec,
    TaskValidationError,
    register_model_factory,
    set_seed,
    unregister_model_factory,
)
from torch import nn
from torch.utils.data import DataLoader, StackDataset, TensorDataset

os.environ.setdefault("NNX_TQDM_DISABLE", "1")
N, CLASSES = 24, 3


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


# -- modules from elsewhere ------------------------------------------------------------


class BasicBlock(nn.Module):
    """torchvision's residual block."""

    def __init__(self, inplanes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or inplanes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, planes, 1, stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(out + identity)


class ResNet(nn.Module):
    def __init__(self, planes=(4, 8), num_classes=CLASSES):
        super().__init__()
        self.conv1 = nn.Conv2d(3, planes[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(BasicBlock(planes[0], planes[0]))
        self.layer2 = nn.Sequential(BasicBlock(planes[0], planes[1], stride=2))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(planes[1], num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


@dataclasses.dataclass
class SequenceClassifierOutput:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


class KeywordClassifier(nn.Module):
    """The protocol of a Hugging Face classifier: keyword inputs, an output object."""

    def __init__(self, vocab=11, width=8):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, width, padding_idx=0)
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(width, CLASSES)

    def forward(self, input_ids=None, attention_mask=None, labels=None, return_dict=True):
        assert labels is None  # the loss is the model's, not the module's
        mask = attention_mask.unsqueeze(-1).to(self.classifier.weight.dtype)
        hidden = (self.embeddings(input_ids) * mask).sum(1) / mask.sum(1)
        return SequenceClassifierOutput(logits=self.classifier(self.dropout(hidden)))


class Logits(KeywordInputs):
    def output(self, raw):
        return raw.logits


class EncoderClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.head(self.encoder(x).mean(1))


def lazy():
    return nn.Sequential(
        nn.LazyLinear(8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.LazyLinear(CLASSES)
    )


class LastStep(PositionalInputs):
    """The output of ``nn.LSTM`` at the last step."""

    def output(self, raw):
        sequence, _ = raw
        return sequence[:, -1]


def generator():
    return torch.Generator().manual_seed(0)


def targets():
    return torch.randint(0, CLASSES, (N,), generator=generator())


def images():
    return TensorDataset(torch.randn(N, 3, 8, 8, generator=generator()), targets())


def vectors():
    return TensorDataset(torch.randn(N, 5, generator=generator()), targets())


def sequences():
    return TensorDataset(torch.randn(N, 4, 8, generator=generator()), targets())


def texts():
    ids = torch.randint(1, 11, (N, 6), generator=generator())
    mask = (torch.arange(6) < torch.randint(2, 7, (N, 1), generator=generator())).long()
    return StackDataset(
        input_ids=ids * mask, attention_mask=mask, labels=targets(), length=mask.sum(1)
    )


MODULES = {
    "resnet": (ResNet, images, None),
    "keyword": (KeywordClassifier, texts, Logits(("input_ids", "attention_mask"))),
    "transformer-encoder": (EncoderClassifier, sequences, None),
    "batchnorm-and-lazy": (lazy, vectors, None),
    "lstm": (
        lambda: nn.LSTM(8, CLASSES, num_layers=2, dropout=0.3, batch_first=True),
        sequences,
        LastStep(),
    ),
}
each = pytest.mark.parametrize("kind", MODULES)


def fresh(kind, seed=1):
    make, data, adapter = MODULES[kind]
    torch.manual_seed(seed)
    return make(), data(), adapter


def model_of(module, adapter):
    return NNModel(
        module=module, params=NNModelParams(loss=Losses.CROSS_ENTROPY), batch_adapter=adapter
    )


def plan(data, n_epochs=3, **options):
    # No last batch of a single row, which BatchNorm refuses.
    loader = DataLoader(data, batch_size=5, shuffle=True, drop_last=True)
    options = {"optim": NNOptimParams.builder().adam(max_lr=0.01).build(), "seed": 3, **options}
    return NNTrainParams(n_epochs=n_epochs, train_loader=loader, **options)


def by_hand(module, data, adapter, n_epochs=3):
    """The loop that a user would write."""
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01, weight_decay=0.0)
    loader = DataLoader(data, batch_size=5, shuffle=True, drop_last=True)
    set_seed(3)
    module.train()
    losses = []
    for _ in range(n_epochs):
        for batch in loader:
            if isinstance(batch, dict):
                inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
                output, y = module(**inputs).logits, batch["labels"]
            else:
                x, y = batch
                output = module(x)
                output = output[0][:, -1] if isinstance(module, nn.LSTM) else output
            loss = loss_fn(output, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def assert_same_state(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[k], theirs[k]) for k in ours)


class StopAfter(Callback):
    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch_end(self, ctx):
        ctx.should_stop = ctx.epoch == self.epoch


# -- the promises ----------------------------------------------------------------------


@each
def test_it_is_wrapped_as_it_is(kind):
    module, _, adapter = fresh(kind)
    before = copy.deepcopy(module)
    state = torch.get_rng_state()
    model = model_of(module, adapter)
    assert model.net is module
    assert torch.equal(torch.get_rng_state(), state)
    assert model.params.net == RuntimeModule.of(before)
    if kind != "batchnorm-and-lazy":
        assert_same_state(module, before)


@each
def test_it_trains_as_in_a_loop_by_hand(kind):
    module, data, adapter = fresh(kind)
    other = copy.deepcopy(module)
    run = model_of(module, adapter).train(plan(data))
    losses = by_hand(other, data, adapter)
    assert [idp.train_edp.loss for idp in run.idps] == losses
    assert_same_state(module, other)
    assert losses[-1] != losses[0]


@each
def test_a_checkpoint_needs_the_module_again_and_gives_the_same_predictions(kind):
    module, data, adapter = fresh(kind)
    model = model_of(module, adapter)
    run = model.train(plan(data))
    checkpoint = last_of(run)
    assert checkpoint.reconstructible is False
    with pytest.raises(MissingModelFactoryError, match="module="):
        NNModel.from_checkpoint(checkpoint)
    again, _, _ = fresh(kind, seed=99)
    rebuilt = NNModel.from_checkpoint(checkpoint, module=again, batch_adapter=adapter)
    assert rebuilt.net is again
    loader = DataLoader(data, batch_size=7)
    assert (rebuilt.predict(loader).logits == model.predict(loader).logits).all()
    assert rebuilt.evaluate(loader) == model.evaluate(loader)


def last_of(run):
    return NNCheckpoint.load(run.id, Checkpoints.LAST)


@each
def test_a_split_run_equals_the_uninterrupted_one(kind):
    module, data, adapter = fresh(kind)
    if kind == "batchnorm-and-lazy":
        module(data.tensors[0])  # a warm resume compares shapes
    pristine = copy.deepcopy(module)
    straight = copy.deepcopy(module)
    whole = model_of(straight, adapter).train(plan(data, 4), salt="straight")
    first = model_of(module, adapter).train(plan(data, 4), callbacks=[StopAfter(1)])
    rest = model_of(pristine, adapter).train(
        plan(data, 4, resume_from_run_id=first.id, resume_mode="stateful", resume_epochs="planned")
    )
    assert_same_state(pristine, straight)
    halves = [idp.train_edp.loss for run in (first, rest) for idp in run.idps]
    assert halves == [idp.train_edp.loss for idp in whole.idps]


@each
def test_inference_leaves_modes_and_hooks_alone(kind):
    module, data, adapter = fresh(kind)
    model = model_of(module, adapter)
    model.train(plan(data, 1))
    module.train()
    parts = [m for m in module.modules() if m is not module]
    if parts:
        parts[-1].eval()
    modes = [m.training for m in module.modules()]
    model.predict(DataLoader(data, batch_size=7))
    model.evaluate(DataLoader(data, batch_size=7))
    assert [m.training for m in module.modules()] == modes


def test_a_run_of_it_prints_and_loads_its_descriptor():
    module, data, adapter = fresh("keyword")
    model = model_of(module, adapter)
    run = model.train(plan(data, 1))
    loaded = NNRun.load(run.id)
    assert loaded.model.net == RuntimeModule.of(module)
    assert loaded.net is None
    assert "KeywordClassifier" in str(loaded)
    for shown in (str(loaded), loaded._repr_html_()):
        assert re.search(r"net.reconstructible\W.*False", shown)
        assert loaded.model.net.topology not in shown
    state = run.state()
    assert "net" not in state
    assert state["model"]["net"]["kind"] == "runtime"


def test_the_run_id_is_the_architecture_not_the_weights():
    def run_id(p, seed):
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(5, CLASSES), nn.Dropout(p))
        run = model_of(module, None).train(plan(vectors(), 1, overwrite_existing=True))
        return run.id

    assert run_id(0.1, 0) == run_id(0.1, 1) != run_id(0.2, 0)


def test_another_module_is_refused_before_any_weight_is_loaded():
    module, data, adapter = fresh("resnet")
    run = model_of(module, adapter).train(plan(data, 1))
    for other in (ResNet(planes=(4, 6)), nn.Linear(3, 3)):
        before = copy.deepcopy(other.state_dict())
        with pytest.raises(ValueError, match="topology"):
            NNModel.from_checkpoint(last_of(run), module=other)
        assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())


def test_a_mapping_is_predicted_by_its_keyword_inputs():
    module, data, adapter = fresh("keyword")
    model = model_of(module, adapter)
    batch = next(iter(DataLoader(data, batch_size=N)))
    inputs = {k: batch[k] for k in ("input_ids", "attention_mask")}
    expected = module.eval()(**inputs).logits
    assert torch.equal(torch.as_tensor(model.predict(inputs).logits), expected)
    assert torch.equal(torch.as_tensor(model.predict(batch).logits), expected)


# -- registered factories --------------------------------------------------------------


@pytest.fixture
def spec():
    register_model_factory("test.resnet", 1, lambda config: ResNet(**config))
    yield ModelSpec("test.resnet", 1, {"planes": [4, 8]}, seed=5)
    unregister_model_factory("test.resnet", 1)


def test_a_registered_net_is_rebuilt_from_its_checkpoint(spec):
    calls = []
    register_model_factory(
        "test.resnet", 1, lambda config: calls.append(1) or ResNet(**config), replace=True
    )
    params = NNModelParams(net=spec, loss=Losses.CROSS_ENTROPY)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model = NNModel(params=params)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same_state(model.net, NNModel(params=params).net)
    assert len(calls) == 2
    data = images()
    run = model.train(plan(data, 2))
    assert len(calls) == 2  # training builds nothing
    checkpoint = last_of(run)
    assert checkpoint.reconstructible
    rebuilt = NNModel.from_checkpoint(checkpoint)
    loader = DataLoader(data, batch_size=7)
    assert (rebuilt.predict(loader).logits == model.predict(loader).logits).all()
    loaded = NNRun.load(run.id)
    assert loaded.model.net == spec
    assert re.search(r"net.factory\W.*test.resnet@v1", str(loaded))
    assert re.search(r"net.seed\W.*5", str(loaded))


def test_a_registered_net_resumes(spec):
    params = NNModelParams(net=spec, loss=Losses.CROSS_ENTROPY)
    straight, first, rest = (NNModel(params=params) for _ in range(3))
    straight.train(plan(images(), 4), salt="straight")
    run = first.train(plan(images(), 4), callbacks=[StopAfter(1)])
    rest.train(
        plan(
            images(), 4, resume_from_run_id=run.id, resume_mode="stateful", resume_epochs="planned"
        )
    )
    assert_same_state(rest.net, straight.net)


def test_a_factory_that_builds_another_topology_now_is_refused(spec):
    run = NNModel(params=NNModelParams(net=spec)).train(plan(images(), 1))
    checkpoint = last_of(run)
    register_model_factory("test.resnet", 1, lambda config: ResNet(planes=(4, 9)), replace=True)
    with pytest.raises(ValueError, match=r"test.resnet.*another topology"):
        NNModel.from_checkpoint(checkpoint)
    unregister_model_factory("test.resnet", 1)
    with pytest.raises(MissingModelFactoryError, match=r"test.resnet@v1"):
        NNModel.from_checkpoint(checkpoint)
    with pytest.raises(MissingModelFactoryError, match=r"test.resnet@v1"):
        NNModel(params=NNModelParams(net=spec))
    assert NNRun.load(run.id).model.net == spec  # metadata needs no factory
    register_model_factory("test.resnet", 1, lambda config: ResNet(**config))


# -- lazy layers -----------------------------------------------------------------------


def test_lazy_layers_train_uninitialized_and_reload_into_fresh_ones():
    module, data, _ = fresh("batchnorm-and-lazy")
    assert isinstance(module[0], nn.LazyLinear)
    model = model_of(module, None)
    run = model.train(plan(data))
    assert module[0].weight.shape == (8, 5)
    rebuilt = NNModel.from_checkpoint(last_of(run), module=lazy())
    assert_same_state(rebuilt.net, module)


def test_a_warm_resume_of_lazy_layers_needs_their_shapes():
    module, data, _ = fresh("batchnorm-and-lazy")
    run = model_of(module, None).train(plan(data, 4), callbacks=[StopAfter(1)])
    resume = {"resume_from_run_id": run.id, "resume_mode": "stateful", "resume_epochs": "planned"}
    raw = lazy()
    with pytest.raises(ValueError, match=r"0.weight has no shape yet.*materialize its lazy layers"):
        model_of(raw, None).train(plan(data, 4, **resume))
    assert isinstance(raw[0], nn.LazyLinear)
    ready = lazy()
    ready(data.tensors[0])
    model_of(ready, None).train(plan(data, 4, **resume))
    straight, _, _ = fresh("batchnorm-and-lazy")
    model_of(straight, None).train(plan(data, 4), salt="straight")
    assert_same_state(ready, straight)


class DeclaresItsLayout(nn.Module):
    """Reads batches that no built-in adapter knows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, CLASSES)

    def unpack_batch(self, batch):
        return batch["features"], batch["classes"]

    def forward(self, x):
        return self.layer(x)


def test_a_module_with_its_own_layout_keeps_it():
    X, y = vectors().tensors
    module = DeclaresItsLayout()
    model = model_of(module, None)
    run = model.train(plan(StackDataset(features=X, classes=y), 2))
    other = nn.Linear(5, CLASSES)
    other.load_state_dict(module.layer.state_dict())
    assert len(run.idps) == 8
    expected = torch.cat([other(rows).detach() for rows in X.split(7)])
    logits = model.predict(DataLoader(StackDataset(features=X, classes=y), batch_size=7)).logits
    assert torch.equal(torch.as_tensor(logits), expected)


def test_the_adapter_is_no_part_of_the_run():
    def run_of(adapter):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(5, CLASSES))
        return model_of(module, adapter).train(plan(vectors(), 1, overwrite_existing=True))

    class Renamed(PositionalInputs):
        pass

    assert run_of(None).id == run_of(PositionalInputs()).id == run_of(Renamed()).id
    assert "adapter" not in str(run_of(Renamed()).state())


def test_several_positional_inputs():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(5, CLASSES), nn.Linear(2, CLASSES)

        def forward(self, x, z):
            return self.a(x) + self.b(z)

    X, y = vectors().tensors
    Z = torch.randn(N, 2, generator=generator())
    module = Pair()
    model = model_of(module, PositionalInputs(2))
    model.train(plan(TensorDataset(X, Z, y), 2))
    assert torch.equal(torch.as_tensor(model.predict((X, Z)).logits), module(X, Z).detach())
    with pytest.raises(ValueError, match="no target"):
        model.train(plan(TensorDataset(X, y), 1), salt="two")
    with pytest.raises(ValueError, match=r"PositionalInputs\(2\) expects .* got a list of 4"):
        model.train(plan(TensorDataset(X, Z, y, y), 1), salt="four")


def test_a_task_is_checked_on_the_first_batch_of_any_module():
    module = nn.Sequential(nn.Linear(5, CLASSES))
    params = NNModelParams(loss=Losses.CROSS_ENTROPY, task=TaskSpec.categorical(CLASSES + 1))
    before = copy.deepcopy(module)
    with pytest.raises(TaskValidationError):
        NNModel(module=module, params=params).train(plan(vectors(), 1))
    assert_same_state(module, before)


def test_an_output_that_is_no_tensor_names_the_way_out():
    module, data, _ = fresh("lstm")
    with pytest.raises(ValueError, match="returned tuple, not a tensor; pass a batch_adapter"):
        model_of(module, None).train(plan(data, 1))


def test_a_portable_save_of_a_borrowed_module_is_refused_before_a_file_exists(tmp_path):
    module, data, adapter = fresh("resnet")
    run = model_of(module, adapter).train(plan(data, 1))
    with pytest.raises(MissingModelFactoryError):
        last_of(run).to_file(str(tmp_path / "portable.safetensors"), format="safetensors")
    assert not (tmp_path / "portable.safetensors").exists()
