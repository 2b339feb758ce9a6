"""A supervised run: what it returns, what it leaves on disk, and that it is a plain loop."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from nnx import Checkpoints, EarlyStopping, NNCheckpoint, NNModel, NNRun, set_seed
from sklearn.metrics import accuracy_score, f1_score, precision_score, recall_score


def hand_loop(model, loader, val_loader, *, epochs, seed, lr=0.01):
    """The same training in plain PyTorch, with every batch's outputs kept."""
    net, loss_fn = model.net, torch.nn.CrossEntropyLoss()
    set_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.0)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.95, patience=8, cooldown=2, threshold=1e-3, min_lr=1e-7
    )
    batches, validations = [], []
    for _ in range(epochs):
        net.train()
        for x, y in loader:
            optimizer.zero_grad()
            out = net(x)
            loss = loss_fn(out, y)
            loss.backward()
            optimizer.step()
            batches.append((loss.item(), y, out.argmax(1)))
        net.eval()
        with torch.no_grad():
            outs, ys = zip(*[(net(x), y) for x, y in val_loader])
        outs, ys = torch.cat(outs), torch.cat(ys)
        validations.append((loss_fn(outs, ys).item(), ys, outs.argmax(1)))
        plateau.step(1 - (outs.argmax(1) == ys).double().mean().item())
    return batches, validations


def test_a_run_is_a_hand_written_loop_bit_for_bit(kit):
    ours, theirs = kit.model(), kit.model()
    run = ours.train(kit.train_params(n_epochs=4))
    batches, validations = hand_loop(
        theirs, kit.loader(), kit.loader(48, shuffle=False, seed=1), epochs=4, seed=7
    )
    assert kit.same(ours.net.state_dict(), theirs.net.state_dict())
    assert [idp.train_edp.loss for idp in run.idps] == [loss for loss, _, _ in batches]
    for idp, (_, y, guess) in zip(run.idps, batches):
        assert idp.train_edp.accuracy == pytest.approx(accuracy_score(y, guess), abs=1e-12)
        assert idp.train_edp.error == pytest.approx(1 - accuracy_score(y, guess), abs=1e-12)
        for score, name in (
            (f1_score, "f1"),
            (recall_score, "recall"),
            (precision_score, "precision"),
        ):
            expected = score(y, guess, average="macro", zero_division=0)
            assert getattr(idp.train_edp, name) == pytest.approx(expected, abs=1e-12)
    checked = [idp.val_edp for idp in run.idps if idp.val_edp is not None]
    assert [v.loss for v in checked] == pytest.approx(
        [loss for loss, _, _ in validations], rel=1e-6
    )
    assert [v.accuracy for v in checked] == pytest.approx(
        [accuracy_score(y, guess) for _, y, guess in validations]
    )


def test_records_number_steps_epochs_and_batches(kit):
    run = kit.model().train(kit.train_params(n_epochs=2))
    assert [idp.iter_idx for idp in run.idps] == list(range(12))
    assert [idp.epoch_idx for idp in run.idps] == [0] * 6 + [1] * 6
    assert [idp.batch_idx for idp in run.idps] == [0, 1, 2, 3, 4, 5] * 2
    assert [idp.val_edp is not None for idp in run.idps] == [False] * 5 + [True] + [False] * 5 + [
        True
    ]
    assert {idp.lr for idp in run.idps} == {0.01}


def test_a_run_is_on_disk_and_loads_back(kit, capsys):
    run = kit.model().train(kit.train_params(n_epochs=8))
    assert capsys.readouterr().out.strip().endswith(f"Run saved to runs/{run.id}")
    folder = Path("runs") / run.id
    files = {p.name for p in (folder / "checkpoints").glob("*.pt")}
    assert {"first.pt", "q1.pt", "q2.pt", "q3.pt", "last.pt", "best.pt"} <= files
    assert (folder / "run.yaml").is_file()
    assert (folder / "metadata.yaml").is_file()
    loaded = NNRun.load(run.id)
    assert loaded.id == run.id
    assert [idp.state() for idp in loaded.idps] == [idp.state() for idp in run.idps]


def test_phase_checkpoints_hold_the_quartiles(kit):
    run = kit.model().train(kit.train_params(n_epochs=8))
    epochs = {
        tag: NNCheckpoint.load(run=run.id, type=tag).idp.epoch_idx
        for tag in (
            Checkpoints.FIRST,
            Checkpoints.Q1,
            Checkpoints.Q2,
            Checkpoints.Q3,
            Checkpoints.LAST,
        )
    }
    assert list(epochs.values()) == [0, 1, 3, 5, 7]


def test_phase_checkpoints_can_be_left_out(kit):
    run = kit.model().train(kit.train_params(n_epochs=8, save_phase_checkpoints=False))
    names = {
        p.name for p in Path(f"runs/{run.id}/checkpoints").glob("*.pt") if ".opt." not in p.name
    }
    assert names == {"last.pt", "best.pt"}


def test_best_is_the_epoch_of_lowest_validation_error(kit):
    run = kit.model().train(kit.train_params(n_epochs=6))
    errors = [idp.val_edp.error for idp in run.idps if idp.val_edp]
    best = NNCheckpoint.load(run=run.id, type=Checkpoints.BEST)
    assert best.idp.epoch_idx == errors.index(min(errors))


def test_a_checkpoint_rebuilds_the_model(kit):
    model = kit.model()
    run = model.train(kit.train_params())
    before = torch.get_rng_state()
    rebuilt = NNModel.from_checkpoint(NNCheckpoint.load(run=run.id, type=Checkpoints.LAST))
    assert torch.equal(torch.get_rng_state(), before)
    assert kit.same(rebuilt.net.state_dict(), model.net.state_dict())
    x, _ = kit.blobs(20, seed=5)
    logits, classes = model.predict(x)
    assert (rebuilt.predict(x).logits == logits).all()
    assert (classes == logits.argmax(1)).all()


def test_early_stopping_ends_a_run_that_does_not_improve(kit):
    params = kit.train_params(n_epochs=50, optim=kit.adam(max_lr=0.0))
    run = kit.model().train(params, callbacks=[EarlyStopping(patience=2)])
    assert run.idps[-1].epoch_idx == 2


def test_a_loss_that_is_not_finite_stops_training_before_a_step(kit):
    x, y = kit.blobs()
    x[20] = math.nan
    bad = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=16)
    model = kit.model(dropout=0.0)
    with pytest.raises(FloatingPointError, match="epoch 0, batch 1"):
        model.train(kit.train_params(train_loader=bad))
    assert all(torch.isfinite(p).all() for p in model.net.parameters())
    assert not Path("runs").exists() or not [p for p in Path("runs").iterdir() if p.name[0] != "."]


def test_two_trains_in_a_row_go_on_from_the_weights(kit):
    model = kit.model()
    first = model.train(kit.train_params(n_epochs=1, data_id="a"))
    middle = kit.weights(model.net)
    second = model.train(kit.train_params(n_epochs=1, data_id="b"))
    assert first.id != second.id
    assert not kit.same(middle, model.net.state_dict())


def test_without_a_validation_loader_training_decides_best(kit):
    run = kit.model().train(kit.train_params(n_epochs=4, val_loader=None))
    assert all(idp.val_edp is None for idp in run.idps)
    last = [idp.train_edp.error for idp in run.idps if idp.batch_idx == 5]
    best = NNCheckpoint.load(run=run.id, type=Checkpoints.BEST)
    assert best.idp.epoch_idx == last.index(min(last))
