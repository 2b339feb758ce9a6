"""What callbacks see and can do; and that a fit survives what they do."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from nnx import (
    Callback,
    Checkpoints,
    EarlyStopping,
    LRMonitor,
    ModelCheckpoint,
    MonitorSpec,
    NNCheckpoint,
    NNCheckpointTransform,
    NNEvaluationDataPoint,
    NNParamGroupSpec,
    NNRun,
    NNSchedulerParams,
    NNTrainerParams,
    Schedulers,
    Trainer,
    default_train_step,
    supervised_objective,
)
from nnx.history import HistoryJournal
from nnx.plugins.manager import registry

HOOKS = ("on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_end")


class Journal(Callback):
    """Notes every hook."""

    def __init__(self):
        self.calls = []

    def on_train_begin(self, ctx):
        self.calls.append("train begin")

    def on_epoch_begin(self, ctx):
        self.calls.append(f"epoch {ctx.epoch} begin")

    def on_epoch_end(self, ctx):
        self.calls.append(f"epoch {ctx.epoch} end")

    def on_train_end(self, ctx):
        self.calls.append("train end")


class Raises(Callback):
    def __init__(self, hook, error, epoch=1):
        self.hook, self.error, self.epoch = hook, error, epoch
        setattr(self, hook, self._raise)

    def _raise(self, ctx, *_):
        if self.hook in ("on_train_begin", "on_train_end") or ctx.epoch == self.epoch:
            raise self.error


def at(hook, act):
    """A callback that does one thing in one hook."""
    return type("At", (Callback,), {hook: lambda self, *args: act(*args)})()


def test_hooks_come_in_order(kit):
    journal = Journal()
    kit.model().train(kit.train_params(n_epochs=2), callbacks=[journal])
    assert journal.calls == [
        "train begin", "epoch 0 begin", "epoch 0 end", "epoch 1 begin", "epoch 1 end", "train end",
    ]  # fmt: skip


def test_the_context_follows_the_fit(kit):
    seen = []

    def look(ctx):
        assert ctx.optimizers is None
        assert ctx.trainer is None
        assert ctx.update_count is None
        assert isinstance(ctx.optimizer, torch.optim.Adam)
        assert isinstance(ctx.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        assert ctx.idp is ctx.idps[-1]
        assert ctx.idp.val_edp is not None
        seen.append((ctx.epoch, len(ctx.idps), ctx.committed_updates, ctx.run.id))

    model = kit.model()
    run = model.train(kit.train_params(n_epochs=2), callbacks=[at("on_epoch_end", look)])
    assert seen == [(0, 6, 6, run.id), (1, 12, 12, run.id)]


def test_a_plain_function_gets_the_records_of_the_run_so_far(kit):
    lengths = []
    kit.model().train(
        kit.train_params(n_epochs=2), callbacks=[lambda idps: lengths.append(len(idps))]
    )
    assert lengths == [6, 12]


def test_should_stop_ends_the_run_after_a_committed_epoch(kit):
    def stop(ctx):
        ctx.should_stop = ctx.epoch == 1

    run = kit.model().train(kit.train_params(n_epochs=9), callbacks=[at("on_epoch_end", stop)])
    assert run.idps[-1].epoch_idx == 1
    assert NNCheckpoint.load(run=run.id, type=Checkpoints.LAST).idp.epoch_idx == 1


def test_reassigned_records_are_seen_by_the_next_callback_only(kit):
    seen = []

    def replace(ctx):
        ctx.idps = ["mine"]

    run = kit.model().train(
        kit.train_params(n_epochs=2),
        callbacks=[
            at("on_epoch_end", lambda ctx: seen.append(len(ctx.idps))),
            at("on_epoch_end", replace),
            at("on_epoch_end", lambda ctx: seen.append(ctx.idps)),
        ],
    )
    assert seen == [6, ["mine"], 12, ["mine"]]
    assert len(run.idps) == 12


# Stopping at an update --------------------------------------------------------------------


class StopAt(Callback):
    """Stops at the n-th committed update, through a listener."""

    def __init__(self, updates, *, with_ctx=True):
        self.updates, self.with_ctx, self.calls = updates, with_ctx, 0

    def on_train_begin(self, ctx):
        def listen(context):
            self.calls += 1
            assert context.committed_updates == self.calls
            context.stop_at_update = context.committed_updates >= self.updates

        ctx.update_listeners.append(listen if self.with_ctx else lambda: listen(ctx))


@pytest.mark.parametrize("with_ctx", [True, False])
def test_a_stop_inside_an_epoch_discards_that_epoch(kit, with_ctx):
    model, reference = kit.model(), kit.model()
    run = model.train(kit.train_params(n_epochs=5), callbacks=[StopAt(9, with_ctx=with_ctx)])
    reference.train(kit.train_params(n_epochs=1))
    assert [idp.epoch_idx for idp in run.idps] == [0] * 6
    assert len(NNRun.load(run.id).idps) == 6
    last = NNCheckpoint.load(run=run.id, type=Checkpoints.LAST)
    assert last.idp.epoch_idx == 0
    assert kit.same(last.net_state, reference.net.state_dict())
    assert not kit.same(model.net.state_dict(), last.net_state)


def test_a_stop_on_the_last_batch_commits_the_epoch(kit):
    run = kit.model().train(kit.train_params(n_epochs=5), callbacks=[StopAt(12)])
    assert len(run.idps) == 12
    assert NNCheckpoint.load(run=run.id, type=Checkpoints.LAST).idp.epoch_idx == 1


def test_a_stop_on_the_last_batch_of_a_source_without_length(kit):
    class NoLength:
        def __iter__(self):
            return iter(kit.loader())

    run = kit.model().train(
        kit.train_params(n_epochs=5, train_loader=NoLength()), callbacks=[StopAt(6)]
    )
    assert len(run.idps) == 6


def test_a_stop_before_the_first_epoch_is_complete_leaves_no_last(kit):
    run = kit.model().train(kit.train_params(n_epochs=5), callbacks=[StopAt(2)])
    assert run.idps == []
    assert NNCheckpoint.load(run=run.id, type=Checkpoints.LAST) is None


def test_a_stop_in_on_epoch_end_stops_at_that_boundary(kit):
    def stop(ctx):
        ctx.stop_at_update = True

    run = kit.model().train(kit.train_params(n_epochs=5), callbacks=[at("on_epoch_end", stop)])
    assert run.idps[-1].epoch_idx == 0


def test_a_stop_inside_an_epoch_with_a_journal(kit):
    run = kit.model().train(
        kit.train_params(n_epochs=5),
        callbacks=[StopAt(9)],
        history=HistoryJournal(retention=4, chunk_size=2),
    )
    assert [idp.iter_idx for idp in run.idps] == [2, 3, 4, 5]
    assert [idp.iter_idx for idp in NNRun.load(run.id).idps] == [2, 3, 4, 5]


def test_a_trainer_refuses_update_listeners(kit):
    params = NNTrainerParams(
        n_epochs=1,
        train_loader=kit.loader(),
        optims={"a": kit.adam(param_groups=[NNParamGroupSpec(name_pattern="*")])},
    )
    with pytest.raises(ValueError, match="on_optimizer_update"):
        Trainer(kit.model()).train(params, objective=supervised_objective(), callbacks=[StopAt(1)])
    assert not [p for p in Path("runs").iterdir() if not p.name.startswith(".")]


# What goes wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("error", [RuntimeError("broken hook"), KeyboardInterrupt()])
def test_an_error_in_a_hook_keeps_the_committed_epochs(kit, hook, error):
    journal = Journal()
    with pytest.raises(type(error)):
        kit.model().train(kit.train_params(n_epochs=3), callbacks=[journal, Raises(hook, error)])
    runs = [
        p.name for p in Path("runs").iterdir() if not p.name.startswith(".") and p.name != "best"
    ]
    if hook == "on_train_begin":
        assert runs == []
    else:
        run = NNRun.load(runs[0])
        committed = {"on_epoch_begin": 1, "on_epoch_end": 1, "on_train_end": 3}[hook]
        assert run.idps[-1].epoch_idx == committed - 1
        NNCheckpoint.verify(run=run.id, type=Checkpoints.LAST)
    assert "train end" in journal.calls, "callbacks that began may close what they opened"


def test_a_failing_clean_up_does_not_hide_the_failure(kit):
    def broken(ctx):
        raise OSError("clean-up failed")

    with (
        pytest.warns(RuntimeWarning, match="clean-up failed"),
        pytest.raises(RuntimeError, match="broken hook"),
    ):
        kit.model().train(
            kit.train_params(n_epochs=2),
            callbacks=[
                at("on_train_end", broken),
                Raises("on_epoch_end", RuntimeError("broken hook"), epoch=0),
            ],
        )


def test_every_hook_runs_in_the_order_of_the_list_the_last_one_too(kit):
    order = []

    def note(name):
        def hook(which):
            return lambda self, ctx: order.append((which, name))

        return type("Note", (Callback,), {which: hook(which) for which in HOOKS})()

    kit.model().train(kit.train_params(n_epochs=1), callbacks=[note("b"), note("a"), note("c")])
    assert order == [(which, name) for which in HOOKS for name in "bac"]


def test_the_first_end_that_fails_is_raised_and_the_others_warn(kit):
    last = Journal()
    with (
        pytest.warns(RuntimeWarning, match="second end"),
        pytest.raises(RuntimeError, match="first end"),
    ):
        kit.model().train(
            kit.train_params(n_epochs=1),
            callbacks=[
                Raises("on_train_end", RuntimeError("first end")),
                Raises("on_train_end", RuntimeError("second end")),
                last,
            ],
        )
    assert last.calls[-1] == "train end"


def test_a_failing_end_lets_the_others_close(kit):
    before, after = Journal(), Journal()
    with pytest.raises(KeyboardInterrupt):
        kit.model().train(
            kit.train_params(n_epochs=1),
            callbacks=[before, Raises("on_train_end", KeyboardInterrupt()), after],
        )
    assert before.calls[-1] == after.calls[-1] == "train end"
    assert before.calls.count("train end") == after.calls.count("train end") == 1


@pytest.mark.parametrize("where", ["forward", "fetch", "validation", "step"])
def test_an_interrupt_anywhere_keeps_the_last_epoch(kit, where):
    model = kit.model()
    count = 0

    class Source:
        def __iter__(self):
            nonlocal count
            for batch in kit.loader():
                count += 1
                if where == "fetch" and count == 9:
                    raise KeyboardInterrupt
                yield batch

        def __len__(self):
            return 6

    def hook(module, inputs):
        interrupts = {
            "forward": module.training and count == 9,
            "validation": not module.training and count == 12,
        }
        if interrupts.get(where):
            raise KeyboardInterrupt

    def step(ctx):
        record = default_train_step(ctx)
        if where == "step" and count == 9:
            raise KeyboardInterrupt
        return record

    model.net.register_forward_pre_hook(hook)
    with pytest.raises(KeyboardInterrupt):
        model.train(kit.train_params(n_epochs=4, train_loader=Source()), train_step_fn=step)
    name = next(
        p.name for p in Path("runs").iterdir() if not p.name.startswith(".") and p.name != "best"
    )
    assert NNRun.load(name).idps[-1].epoch_idx == 0
    again = kit.model().train(
        kit.train_params(n_epochs=4, resume_from_run_id=name, resume_epochs="planned")
    )
    assert again.idps[-1].epoch_idx == 3


def test_a_callback_may_train_another_model(kit):
    inner = []

    def train(ctx):
        if ctx.epoch == 0:
            inner.append(kit.model(seed=3).train(kit.train_params(n_epochs=1, data_id="inner")))

    plain, outer = kit.model(), kit.model()
    plain.train(kit.train_params(n_epochs=2, seed=None))
    run = outer.train(kit.train_params(n_epochs=2), callbacks=[at("on_epoch_end", train)])
    assert len(run.idps) == 12
    assert NNRun.load(inner[0].id).idps[-1].epoch_idx == 0
    assert NNRun.load(run.id).idps[-1].epoch_idx == 1


def test_a_callback_may_even_train_the_model_in_training(kit):
    def train(ctx):
        if ctx.epoch == 0:
            ctx.model.train(kit.train_params(n_epochs=1, data_id="inner"))

    run = kit.model().train(kit.train_params(n_epochs=3), callbacks=[at("on_epoch_end", train)])
    assert run.idps[-1].epoch_idx == 2
    NNCheckpoint.verify(run=run.id, type=Checkpoints.LAST)


def test_a_callback_may_evaluate_and_predict_without_a_trace(kit):
    plain, watched = kit.model(), kit.model()
    plain.train(kit.train_params(n_epochs=2, data_id="plain"))
    batches = list(kit.loader(32, shuffle=False))

    def look(ctx):
        ctx.model.predict(torch.zeros(2, 6))
        ctx.model.evaluate(batches)

    watched.train(kit.train_params(n_epochs=2), callbacks=[at("on_epoch_end", look)])
    assert kit.same(plain.net.state_dict(), watched.net.state_dict())


# Built-in callbacks -------------------------------------------------------------------------


def test_model_checkpoint_files_are_written_after_last_and_hold_weights_only(kit):
    run = kit.model().train(
        kit.train_params(n_epochs=4), callbacks=[ModelCheckpoint(epochs=[1, 3], tag="custom")]
    )
    folder = Path(f"runs/{run.id}/checkpoints")
    for epoch in (1, 3):
        kept = NNCheckpoint.from_file(str(folder / f"custom_e{epoch}.pt"))
        assert kept.idp.epoch_idx == epoch
        assert kept.training_state_present is False
    assert not (folder / "custom_e2.pt").exists()


def schedule(**kwargs):
    return NNSchedulerParams(
        min_lr=0.0, factor=0.5, patience=0, cooldown=0, threshold=0.0,
        kind=Schedulers.STEP, **kwargs,
    )  # fmt: skip


def test_lr_monitor_keeps_a_rate_per_epoch_and_one_per_update_on_the_update_clock(kit):
    monitor = LRMonitor()
    kit.model().train(
        kit.train_params(n_epochs=2, scheduler=schedule(step_size=1)), callbacks=[monitor]
    )
    assert len(monitor.history) == 2
    assert monitor.update_history == []
    kit.model().train(
        kit.train_params(n_epochs=1, scheduler=schedule(step_size=2, clock="optimizer_update")),
        callbacks=[monitor],
    )
    assert monitor.update_history == [
        (1, 0.01), (2, 0.005), (3, 0.005), (4, 0.0025), (5, 0.0025), (6, 0.00125),
    ]  # fmt: skip


# History ------------------------------------------------------------------------------------


class Reads(Callback):
    def __init__(self, access):
        self.history_access, self.seen = access, []

    def on_epoch_end(self, ctx):
        self.seen.append([idp.iter_idx for idp in ctx.idps])

    def on_train_end(self, ctx):
        self.seen.append([idp.iter_idx for idp in ctx.idps])


def test_a_journal_shows_its_window_and_the_whole_history_on_request(kit):
    window, full = Reads("window"), Reads("full")
    kit.model().train(
        kit.train_params(n_epochs=2),
        callbacks=[window, full, window_after := Reads("window")],
        history=HistoryJournal(retention=4, chunk_size=2),
    )
    assert window.seen == [[2, 3, 4, 5], [8, 9, 10, 11], [8, 9, 10, 11]]
    assert full.seen == [list(range(6)), list(range(12)), list(range(12))]
    assert window_after.seen == window.seen


def test_a_final_history_that_cannot_be_read_back_leaves_the_window_and_a_warning(kit):
    def lose(ctx):
        if ctx.epoch == 1:
            next(Path("runs").glob("*/history/chunk-00000000.jsonl")).unlink()

    full = Reads("full")
    with pytest.warns(RuntimeWarning, match=r"Reads gets the last records only.*chunk-00000000"):
        kit.model().train(
            kit.train_params(n_epochs=2),
            callbacks=[full, at("on_epoch_end", lose)],
            history=HistoryJournal(retention=4, chunk_size=2),
        )
    assert full.seen == [list(range(6)), list(range(12)), [8, 9, 10, 11]]


def test_the_window_is_live_and_read_only(kit):
    views = []

    def look(ctx):
        views.append(ctx.idps)
        with pytest.raises(TypeError):
            ctx.idps[0] = None
        assert not hasattr(ctx.idps, "append")
        assert ctx.idps[-2:] == list(ctx.idps)[-2:]

    kit.model().train(
        kit.train_params(n_epochs=2),
        callbacks=[at("on_epoch_end", look)],
        history=HistoryJournal(retention=4, chunk_size=2),
    )
    assert [idp.iter_idx for idp in views[0]] == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("callback", "match"),
    [(lambda idps: None, "full list of records"), (Reads("most"), "history_access")],
)
def test_a_journal_refuses_what_would_need_the_full_list(kit, callback, match):
    with pytest.raises(ValueError, match=match):
        kit.model().train(
            kit.train_params(), callbacks=[callback], history=HistoryJournal(retention=4)
        )
    assert not Path("runs").exists()


def test_a_resumed_journal_continues_its_parent(kit):
    from nnx.history import iter_history

    journal = HistoryJournal(retention=4, chunk_size=2)
    params = kit.train_params(n_epochs=2)
    first = kit.model().train(params, history=journal)
    child = kit.model().train(
        dataclasses.replace(params, resume_from_run_id=first.id), history=journal
    )
    assert [i.epoch_idx for i in iter_history(child.id)] == [2] * 6 + [3] * 6
    lineage = [i.epoch_idx for i in iter_history(child.id, lineage=True)]
    assert lineage == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6


def test_full_readers_of_one_round_share_one_read_only_history(kit, monkeypatch):
    from nnx.history.writing import JournalWriter

    reads, plain = [], JournalWriter.everything
    monkeypatch.setattr(JournalWriter, "everything", lambda self: reads.append(1) or plain(self))

    class Full(Callback):
        history_access = "full"

        def on_epoch_end(self, ctx):
            assert [idp.iter_idx for idp in ctx.idps] == list(range(6 * (ctx.epoch + 1)))
            with pytest.raises(TypeError):
                ctx.idps[0] = None
            assert not hasattr(ctx.idps, "append")

    kit.model().train(
        kit.train_params(n_epochs=2), callbacks=[Full(), at("on_epoch_end", lambda ctx: None), Full()],
        history=HistoryJournal(retention=4, chunk_size=2),
    )  # fmt: skip
    assert len(reads) == 2 + 1  # one for each end of an epoch, and one for the end of training


# Stopping -----------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["should_stop", "stop_at_update"])
@pytest.mark.parametrize("first", [True, False])
def test_no_callback_takes_back_the_stop_of_another(kit, field, first):
    """A callback that says "not yet" every epoch speaks for itself."""
    stops = at("on_epoch_end", lambda ctx: setattr(ctx, field, ctx.epoch == 1))
    goes_on = at("on_epoch_end", lambda ctx: setattr(ctx, field, False))
    callbacks = [stops, goes_on] if first else [goes_on, stops]
    run = kit.model().train(kit.train_params(n_epochs=4), callbacks=callbacks)
    assert run.idps[-1].epoch_idx == 1


def test_a_callback_may_take_back_its_own_stop(kit):
    callback = Callback()
    callback.on_epoch_begin = lambda ctx: setattr(ctx, "should_stop", True)
    callback.on_epoch_end = lambda ctx: setattr(ctx, "should_stop", ctx.epoch == 2)
    run = kit.model().train(kit.train_params(n_epochs=4), callbacks=[callback])
    assert run.idps[-1].epoch_idx == 2


# Records ------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["default", "objective", "step"])
@pytest.mark.parametrize("hook", ["listener", "on_optimizer_update", "on_scheduler_step"])
def test_reading_the_records_inside_an_update_changes_none(kit, owner, hook):
    step = {
        "default": {},
        "objective": {"objective": supervised_objective()},
        "step": {"train_step_fn": lambda ctx: default_train_step(ctx)},
    }[owner]
    lengths = []

    class Looks(Callback):
        def on_train_begin(self, ctx):
            if hook == "listener":
                ctx.update_listeners.append(lambda: lengths.append(len(ctx.idps)))

    looks = Looks()
    if hook != "listener":
        setattr(looks, hook, lambda ctx, _: lengths.append(len(ctx.idps)))
    clock = schedule(step_size=100, clock="optimizer_update")
    make = lambda: kit.train_params(n_epochs=2, scheduler=clock)  # noqa: E731
    quiet = kit.model().train(make(), **step)
    watched = kit.model().train(make(), callbacks=[looks], salt="watched", **step)
    assert [i.state() for i in watched.idps] == [i.state() for i in quiet.idps]
    if hook != "on_optimizer_update" or owner == "objective":
        assert lengths == list(range(12))  # the batch in progress has no record yet


def test_a_tensor_learning_rate_is_recorded_as_it_was(kit):
    def anneal(ctx):
        group = ctx.optimizer.param_groups[0]
        if not torch.is_tensor(group["lr"]):
            group["lr"] = torch.tensor(0.5)
        group["lr"].mul_(0.5)

    class Anneals(Callback):
        def on_train_begin(self, ctx):
            anneal(ctx)
            ctx.update_listeners.append(lambda: anneal(ctx))

    run = kit.model().train(kit.train_params(n_epochs=1), callbacks=[Anneals()])
    assert [idp.lr for idp in run.idps] == [0.25 * 0.5**i for i in range(6)]
    assert all(type(idp.lr) is float for idp in run.idps)


def test_an_epoch_without_any_signal_says_so(kit):
    def silent(ctx):
        default_train_step(ctx)
        return NNEvaluationDataPoint(extra={"own": 1.0})

    with pytest.warns(RuntimeWarning, match="epoch 0: no metric available"):
        run = kit.model().train(kit.train_params(n_epochs=1, val_loader=None), train_step_fn=silent)
    assert NNCheckpoint.load(run.id, Checkpoints.BEST) is None


def test_an_evaluator_without_a_loader_says_that_it_is_not_called(kit):
    params = kit.train_params(n_epochs=1, val_loader=None)
    with pytest.warns(RuntimeWarning, match="eval_step_fn is never called.*val_loader"):
        kit.model().train(params, eval_step_fn=lambda ctx: pytest.fail("called"))


def test_early_stopping_watches_the_training_split_of_a_run_that_declares_nothing(kit):
    """The whole epoch's loss, which the records of such a run do not carry."""
    losses = []

    class Sees(Callback):
        def on_epoch_end(self, ctx):
            losses.append(ctx.idp.train_summary.loss)

    spec = MonitorSpec("loss", split="train")
    stopping = EarlyStopping(spec, patience=2)
    still = {"optim": kit.adam(max_lr=0.0), "train_loader": kit.loader(shuffle=False)}
    run = kit.model(dropout=0.0).train(
        kit.train_params(n_epochs=9, **still), callbacks=[stopping, Sees()]
    )
    assert run.idps[-1].epoch_idx == stopping.stopped_epoch == 2
    x, y = kit.blobs()
    whole = torch.nn.functional.cross_entropy(kit.model(dropout=0.0).net(x), y).item()
    assert losses == pytest.approx([whole] * 3, rel=1e-5)
    assert all(idp.train_summary is None for idp in run.idps)
    declared = kit.model(dropout=0.0).train(
        kit.train_params(n_epochs=9, monitor=spec, **still),
        callbacks=[EarlyStopping(spec, patience=2)],
    )
    assert declared.idps[-1].epoch_idx == 2


def factorize(ctx):
    """Put two factors in place of the first layer."""
    first = ctx.model.net.layers[0]
    u, s, vh = torch.linalg.svd(first.weight.detach(), full_matrices=False)
    pair = torch.nn.Sequential(
        torch.nn.Linear(first.in_features, 2, bias=False), torch.nn.Linear(2, first.out_features)
    )
    with torch.no_grad():
        pair[0].weight.copy_(s[:2, None] * vh[:2])
        pair[1].weight.copy_(u[:, :2])
        pair[1].bias.copy_(first.bias)
    ctx.model.net.layers[0] = pair


@pytest.mark.parametrize(("hook", "epoch"), [("on_train_end", 1), ("on_epoch_end", 0)])
def test_a_topology_change_that_nothing_declares_never_replaces_last(kit, hook, epoch):
    class Changes(Callback):
        pass

    def change(ctx):
        if hook == "on_train_end" or ctx.epoch == 1:
            factorize(ctx)

    changes = Changes()
    setattr(Changes, hook, lambda self, ctx: change(ctx))
    model = kit.model()
    with pytest.raises(ValueError) as caught:
        model.train(kit.train_params(n_epochs=2), callbacks=[changes])
    message = str(caught.value)
    assert "layers.0.weight" in message
    assert "checkpoint_transforms" in message
    [run] = (path.parent for path in Path("runs").glob("*/run.yaml") if path.parent.name != "best")
    last = NNCheckpoint.load(run.name, Checkpoints.LAST)
    assert last.idp.epoch_idx == epoch
    assert "layers.0.weight" in type(model).from_checkpoint(last).net.state_dict()
    resumed = kit.model().train(kit.train_params(n_epochs=1, resume_from_run_id=run.name))
    assert resumed.idps[-1].epoch_idx == epoch + 1


def test_a_submodule_attached_in_training_is_no_change_of_the_net(kit):
    def attach(ctx):
        ctx.model.net.probe = torch.nn.Linear(2, 2)

    run = kit.model().train(kit.train_params(n_epochs=2), callbacks=[at("on_epoch_end", attach)])
    assert "probe.weight" in NNCheckpoint.load(run.id, Checkpoints.LAST).net_state


def test_a_declared_transform_that_changes_no_shapes_keeps_last_resumable(kit):
    class Doubles(Callback):
        def on_train_end(self, ctx):
            replay(ctx.model.net, {})

        def checkpoint_transforms(self):
            return (NNCheckpointTransform(name="acme.double", version=1, options={}),)

    def replay(net, options):
        with torch.no_grad():
            net.layers[0].weight.mul_(2)
        return net

    registry("transform").register("acme.double", 1, replay, owner="test")
    try:
        whole = kit.model()
        whole.train(kit.train_params(n_epochs=3), salt="whole")
        model = kit.model()
        run = model.train(kit.train_params(n_epochs=1), callbacks=[Doubles()])
        last = NNCheckpoint.load(run.id, Checkpoints.LAST)
        assert [t.name for t in last.transforms] == ["acme.double"]
        assert kit.same(last.net_state, kit.weights(model.net))
        assert kit.same(type(model).from_checkpoint(last).net.state_dict(), last.net_state)
        rest = kit.model()
        rest.train(kit.train_params(n_epochs=2, resume_from_run_id=run.id))
        assert kit.same(kit.weights(rest.net), kit.weights(whole.net))
    finally:
        registry("transform").unregister("acme.double", 1)
