"""One registry class keeps every kind of contribution under (id, version)."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
from nnx.plugins import Registry, RegistryConflictError, UnknownIdError, siblings


@pytest.fixture
def registry() -> Registry[object]:
    return Registry("metric")


def test_a_registered_value_is_found_by_id_and_version(registry: Registry[object]) -> None:
    first, second = object(), object()
    registry.register("acme.kappa", 1, first, owner="acme")
    registry.register("acme.kappa", 2, second, owner="acme")
    assert registry.resolve("acme.kappa") is first
    assert registry.resolve("acme.kappa", 2) is second
    assert registry.keys() == (("acme.kappa", 1), ("acme.kappa", 2))
    assert list(registry) == list(registry.keys())
    assert len(registry) == 2
    assert ("acme.kappa", 2) in registry
    assert registry.owner("acme.kappa", 2) == "acme"


def test_a_reference_is_imported_when_it_is_first_resolved(
    registry: Registry[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazily_there.py").write_text("class Kappa:\n    value = {'deep': 3}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.register("acme.kappa", 1, "lazily_there:Kappa.value", owner="acme")
    assert "lazily_there" not in sys.modules
    value = registry.resolve("acme.kappa")
    assert value == {"deep": 3}
    assert registry.resolve("acme.kappa") is value


@pytest.mark.parametrize(
    ("reference", "says"),
    [("no_such_module_here:x", "No module named"), ("json:no_such_name", "no_such_name")],
)
def test_a_reference_that_cannot_be_imported_names_owner_and_place(
    registry: Registry[object], reference: str, says: str
) -> None:
    registry.register("acme.kappa", 1, reference, owner="plugin 'acme' (acme-nnx)")
    with pytest.raises(ImportError, match=says) as raised:
        registry.resolve("acme.kappa")
    message = str(raised.value)
    assert "metric acme.kappa@v1 of plugin 'acme' (acme-nnx)" in message
    assert repr(reference) in message


def test_a_second_registration_is_refused_and_names_both_owners(
    registry: Registry[object],
) -> None:
    held = object()
    registry.register("acme.kappa", 1, held, owner="plugin 'acme'")
    with pytest.raises(RegistryConflictError) as raised:
        registry.register("acme.kappa", 1, object(), owner="plugin 'rival'")
    assert str(raised.value) == (
        "metric acme.kappa@v1 is already registered by plugin 'acme'; "
        "plugin 'rival' cannot register it again. Choose another id or version."
    )
    assert registry.resolve("acme.kappa") is held
    replaced = object()
    registry.register("acme.kappa", 1, replaced, owner="plugin 'rival'", replace=True)
    assert registry.resolve("acme.kappa") is replaced


def test_an_unknown_version_names_the_registered_ones(registry: Registry[object]) -> None:
    for version in (1, 3):
        registry.register("acme.kappa", version, object(), owner="acme")
    with pytest.raises(
        UnknownIdError,
        match=r"no metric is registered as acme\.kappa@v2; registered versions of "
        r"'acme\.kappa': 1, 3",
    ):
        registry.resolve("acme.kappa", 2)


def test_an_unknown_id_names_close_matches(registry: Registry[object]) -> None:
    registry.register("acme.kappa", 1, object(), owner="acme")
    registry.register("other.thing", 1, object(), owner="acme")
    with pytest.raises(UnknownIdError, match=r"did you mean 'acme\.kappa'\?"):
        registry.resolve("acme.kapa")


@pytest.mark.parametrize(
    ("id", "distribution"),
    [("graph_conv", "nnx-graph"), ("torchao_qat", "nnx-peft"), ("transformer", "nnx-lm")],
)
def test_an_id_of_a_sibling_says_how_to_get_it(
    registry: Registry[object], id: str, distribution: str
) -> None:
    with pytest.raises(UnknownIdError) as raised:
        registry.resolve(id)
    assert str(raised.value).endswith(siblings.how_to_get(repr(id), distribution))


def test_the_error_class_of_an_unknown_id_can_be_chosen() -> None:
    class MissingFactory(LookupError):
        pass

    with pytest.raises(MissingFactory, match="no model factory is registered as x@v1"):
        Registry("model factory", error=MissingFactory).resolve("x")


def test_a_value_of_the_wrong_kind_is_refused_when_it_is_resolved() -> None:
    def check(key: tuple[str, int], value: object) -> None:
        if not callable(value):
            raise TypeError(f"{key[0]} must be callable, not {type(value).__name__}")

    registry: Registry[object] = Registry("command", check=check)
    registry.register("report", 1, "math:pi", owner="acme")
    with pytest.raises(TypeError, match="report must be callable, not float"):
        registry.resolve("report")


@pytest.mark.parametrize("id", ["", None, 3])
def test_an_id_is_a_non_empty_string(registry: Registry[object], id: object) -> None:
    with pytest.raises(ValueError, match="a metric id must be a non-empty string"):
        registry.register(id, 1, object(), owner="acme")  # type: ignore[arg-type]


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1"])
def test_a_version_is_a_positive_integer(registry: Registry[object], version: object) -> None:
    with pytest.raises(ValueError, match="a metric version must be an integer >= 1"):
        registry.register("acme.kappa", version, object(), owner="acme")  # type: ignore[arg-type]


def test_unregistering_says_whether_there_was_something(registry: Registry[object]) -> None:
    registry.register("acme.kappa", 1, object(), owner="acme")
    assert registry.unregister("acme.kappa", 1) is True
    assert registry.unregister("acme.kappa", 1) is False
    assert len(registry) == 0


def test_one_of_many_threads_wins_a_key() -> None:
    registry: Registry[object] = Registry("metric")
    refused = []

    def register(n: int) -> None:
        try:
            registry.register("acme.kappa", 1, n, owner=f"thread {n}")
        except RegistryConflictError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=register, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 15
    assert all(registry.owner("acme.kappa") in message for message in refused)
