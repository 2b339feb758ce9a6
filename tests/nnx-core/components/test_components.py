from __future__ import annotations

import io
import warnings

import pytest
import torch
from nnx.components import (
    ComponentRegistry,
    ComponentRestoreError,
    ComponentSpec,
    ResumeStatus,
    StatefulComponent,
)


class RunningMean:
    def __init__(self, name="my.mean", *, version=1, required=True, numbered=False, mean=0.0):
        self.spec = ComponentSpec(name, version, required, numbered)
        self.mean = mean
        self.loaded_version = None

    def component_spec(self):
        return self.spec

    def component_state(self):
        return {"mean": self.mean}

    def load_component_state(self, state, *, version):
        self.mean = state["mean"]
        self.loaded_version = version


class FailingToLoad(RunningMean):
    def load_component_state(self, state, *, version):
        self.mean = "half loaded"
        if state["mean"] == 2.0:
            raise RuntimeError("disk on fire")
        self.mean = state["mean"]


def saved(**entries):
    return {
        name.replace("__", "."): {"version": 1, "required": True, "state": {"mean": value}}
        for name, value in entries.items()
    }


def test_state_goes_through_a_checkpoint_file_and_back():
    source = ComponentRegistry([RunningMean(mean=torch.tensor([1.0, 2.0]))])
    buffer = io.BytesIO()
    torch.save(source.collect(), buffer)
    buffer.seek(0)

    target = RunningMean()
    registry = ComponentRegistry([target])
    plan = registry.plan(torch.load(buffer, weights_only=True))

    assert registry.restore(plan) == ("my.mean",)
    assert torch.equal(target.mean, torch.tensor([1.0, 2.0]))
    assert target.loaded_version == 1
    assert plan.fresh == ()


def test_discover_finds_components_among_callbacks_and_the_step_function():
    callback, step, extra = RunningMean("a"), RunningMean("b"), RunningMean("c")
    registry = ComponentRegistry.discover(
        [callback, print, object()], step, None, explicit=[extra, callback]
    )
    assert registry.names == ("a", "b", "c")
    assert isinstance(callback, StatefulComponent)


def test_an_explicit_entry_without_the_protocol_is_a_type_error():
    with pytest.raises(TypeError, match="lacks component_spec, component_state"):
        ComponentRegistry.discover(explicit=[object()])


def test_a_class_is_not_a_component():
    assert ComponentRegistry.discover(RunningMean).names == ()
    with pytest.raises(TypeError, match="not a component"):
        ComponentRegistry([RunningMean])


def test_one_object_passed_twice_registers_once():
    one = RunningMean()
    assert ComponentRegistry([one, one]).names == ("my.mean",)


def test_names_must_be_unique_unless_numbered():
    with pytest.raises(ValueError, match=r"two components are named 'my\.mean'"):
        ComponentRegistry([RunningMean(), RunningMean()])
    numbered = [RunningMean("early", numbered=True) for _ in range(3)]
    assert ComponentRegistry(numbered).names == ("early", "early.2", "early.3")


def test_a_component_spec_of_the_wrong_type_is_refused():
    component = RunningMean()
    component.component_spec = lambda: ("my.mean", 1)
    with pytest.raises(TypeError, match="must return a ComponentSpec"):
        ComponentRegistry([component])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": " "}, "non-empty string"),
        ({"name": "a", "version": 0}, "integer >= 1"),
        ({"name": "a", "version": True}, "integer >= 1"),
        ({"name": "a", "required": 1}, "ComponentSpec.required"),
    ],
)
def test_component_spec_validates_its_fields(arguments, message):
    with pytest.raises(ValueError, match=message):
        ComponentSpec(**arguments)


def test_every_problem_is_reported_in_one_error_and_nothing_is_touched():
    class Picky(RunningMean):
        def check_component_state(self, state, *, version):
            return [f"monitor was {state['mean']}", "mode differs"]

    missing, newer, picky = RunningMean("missing"), RunningMean("newer"), Picky("picky")
    registry = ComponentRegistry([missing, newer, picky])
    state = saved(unknown=1.0, newer=1.0, picky=3.0)
    state["newer"]["version"] = 2

    with pytest.raises(ComponentRestoreError) as error:
        registry.plan(state)

    text = str(error.value)
    assert len(error.value.problems) == 5
    assert "unknown: the checkpoint requires it" in text
    assert "missing: required, but the checkpoint has no state for it" in text
    assert "newer: saved with schema version 2, newer than this component's version 1" in text
    assert "picky: monitor was 3.0" in text
    assert "picky: mode differs" in text
    assert (missing.mean, newer.mean, picky.mean) == (0.0, 0.0, 0.0)


def test_a_malformed_entry_is_a_problem():
    registry = ComponentRegistry([RunningMean()])
    with pytest.raises(ComponentRestoreError, match="malformed"):
        registry.plan({"my.mean": {"state": {}}})
    with pytest.raises(ComponentRestoreError, match="not a mapping"):
        registry.plan({"my.mean": {"version": 1, "state": [1]}})
    with pytest.raises(ComponentRestoreError, match="must be a mapping of names"):
        registry.plan([1])


def test_an_older_schema_is_handed_to_the_component():
    component = RunningMean(version=3)
    registry = ComponentRegistry([component])
    registry.restore(registry.plan(saved(my__mean=5.0)))
    assert (component.mean, component.loaded_version) == (5.0, 1)


def test_optional_components_may_be_missing_on_either_side():
    registry = ComponentRegistry([RunningMean("here", required=False)])
    state = saved(gone=1.0)
    state["gone"]["required"] = False
    plan = registry.plan(state)
    assert (plan.restored, plan.fresh) == ((), ("here",))


def test_a_checkpoint_from_before_component_state_starts_everything_fresh_with_a_warning():
    registry = ComponentRegistry([RunningMean()])
    with pytest.warns(RuntimeWarning, match="start fresh: my.mean"):
        plan = registry.plan(None)
    assert plan.fresh == ("my.mean",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.fresh_plan().fresh == ("my.mean",)
        assert ComponentRegistry().plan(None).fresh == ()


def test_a_failed_load_gives_every_component_its_state_back():
    first, second = RunningMean("first", mean=10.0), FailingToLoad("second", mean=20.0)
    registry = ComponentRegistry([first, second])
    plan = registry.plan(saved(first=1.0, second=2.0))
    with pytest.raises(RuntimeError, match="disk on fire"):
        registry.restore(plan)
    assert (first.mean, second.mean) == (10.0, 20.0)


def test_rollback_restores_a_copy_even_when_the_state_is_a_live_tensor():
    class Live(RunningMean):
        def load_component_state(self, state, *, version):
            self.mean.copy_(state["mean"])

    live = Live("live", mean=torch.tensor(7.0))
    registry = ComponentRegistry([live, FailingToLoad("second")])
    plan = registry.plan(saved(live=torch.tensor(1.0), second=2.0))
    with pytest.raises(RuntimeError, match="disk on fire"):
        registry.restore(plan)
    assert live.mean.item() == 7.0


def test_a_failed_rollback_is_a_warning_and_the_first_error_propagates():
    class Stuck(RunningMean):
        def load_component_state(self, state, *, version):
            raise KeyError(f"cannot load {state['mean']}")

    registry = ComponentRegistry([Stuck("stuck", mean=3.0)])
    plan = registry.plan(saved(stuck=1.0))
    with (
        pytest.warns(RuntimeWarning, match=r"'stuck' could not be rolled back.*cannot load 3\.0"),
        pytest.raises(KeyError, match=r"cannot load 1\.0"),
    ):
        registry.restore(plan)


def test_state_that_a_checkpoint_cannot_hold_is_named_by_its_path():
    component = RunningMean()
    component.component_state = lambda: {"buffers": [torch.zeros(1), {"fn": print}]}
    with pytest.raises(TypeError, match=r"'my.mean': state\['buffers'\]\[1\]\['fn'\]"):
        ComponentRegistry([component]).collect()
    component.component_state = lambda: [1]
    with pytest.raises(TypeError, match="must return a dict, not list"):
        ComponentRegistry([component]).collect()


def test_resume_status_is_exported_beside_the_components():
    status = ResumeStatus(mode="stateful", restored_components=("a",))
    assert ResumeStatus.from_state(status.state()) == status
