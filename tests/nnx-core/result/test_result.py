"""Results are values: they never hide an exception, and they have no truth."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from nnx.result import BoundaryError, Err, Ok, Result, UnwrapError


def half(n: int) -> Result[int, str]:
    return Ok(n // 2) if n % 2 == 0 else Err(f"{n} is odd")


def test_map_changes_only_a_success_and_map_error_only_a_failure() -> None:
    ok: Ok[int] = Ok(2)
    err: Err[str] = Err("no")
    assert ok.map(lambda n: n + 1) == Ok(3)
    assert ok.map_error(str.upper) is ok
    assert err.map_error(str.upper) == Err("NO")
    assert err.map(len) is err


def test_bind_and_recover_flatten_one_result() -> None:
    assert Ok(8).bind(half).bind(half) == Ok(2)
    assert Ok(6).bind(half).bind(half) == Err("3 is odd")
    err: Err[str] = Err("3 is odd")
    assert err.bind(half) is err
    assert err.recover(lambda message: Ok(len(message))) == Ok(8)
    assert err.recover(lambda message: Err(message[0])) == Err("3")
    ok: Ok[int] = Ok(1)
    assert ok.recover(lambda _: Ok(0)) is ok


def test_unwrap_returns_the_value_or_raises_with_the_typed_error() -> None:
    assert Ok([1]).unwrap() == [1]
    failure = BoundaryError("bundle_invalid", "inspect_bundle", {"path": "x"}, OSError("bad"))
    with pytest.raises(UnwrapError, match="bundle_invalid") as raised:
        Err(failure).unwrap()
    assert raised.value.error is failure
    assert raised.value.__cause__ is failure.cause
    with pytest.raises(RuntimeError):
        Err("plain").unwrap()


@pytest.mark.parametrize("falsy", [0, None, False, "", []])
def test_a_falsy_success_is_a_success_and_no_result_has_a_truth_value(falsy: object) -> None:
    result = Ok(falsy)
    assert result.is_ok
    assert not result.is_err
    with pytest.raises(TypeError, match="has no truth value"):
        bool(result)
    with pytest.raises(TypeError, match="has no truth value"):
        bool(Err(falsy))


@pytest.mark.parametrize("raised", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_exception_of_a_callback_propagates(raised: BaseException) -> None:
    def fail(_: object) -> Result[int, str]:
        raise raised

    for call in (Ok(1).map, Ok(1).bind, Err(1).map_error, Err(1).recover):
        with pytest.raises(type(raised)):
            call(fail)


def test_a_bound_callback_must_return_a_result() -> None:
    with pytest.raises(TypeError, match=r"callback of bind\(\) must return Ok.* not int"):
        Ok(1).bind(lambda n: n)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"callback of recover\(\) must return Ok.* not NoneType"):
        Err(1).recover(lambda n: None)  # type: ignore[arg-type, return-value]


def test_results_are_frozen_comparable_and_pickle() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Ok(1).value = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Err(1).error = 2  # type: ignore[misc]
    assert Ok(1) != Err(1)
    assert pickle.loads(pickle.dumps(Ok({"a": 1}))) == Ok({"a": 1})


def test_match_narrows_a_result() -> None:
    def describe(result: Result[int, str]) -> str:
        if isinstance(result, Ok):
            return f"value {result.value}"
        return f"error {result.error}"

    assert describe(half(4)) == "value 2"
    assert describe(half(5)) == "error 5 is odd"


def test_the_context_of_a_boundary_error_is_a_read_only_copy() -> None:
    context = {"path": "a"}
    error = BoundaryError("artifact_missing", "inspect_bundle", context)
    context["path"] = "b"
    assert error.context == {"path": "a"}
    with pytest.raises(TypeError):
        error.context["path"] = "c"  # type: ignore[index]
    assert BoundaryError("a", "b").context == {}
