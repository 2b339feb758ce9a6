"""Hosted Jev models through the TypeSafe SDK (the extra ``jev``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nnx.plugins.siblings import install_line

from .errors import (
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    JevAuthenticationError,
    JevError,
    JevMalformedResponse,
    JevRateLimited,
    JevTimeout,
)
from .provider import Capabilities
from .questions import Boolean, Choice, Question, Score
from .results import DecisionResult, validate_response
from .texts import texts_of


def _sdk() -> Any:
    try:
        import typesafe_sdk
    except ImportError:
        raise ImportError(
            "JevProvider needs the TypeSafe SDK; install it with: "
            + install_line("nnx-eval", "jev")
        ) from None
    return typesafe_sdk


class JevProvider:
    """One ``system_one`` request for each text, holding every question.

    A ``client`` (or ``async_client``) of the SDK may be handed in and is never
    closed here; otherwise one is made from ``api_key``, ``base_url``, ``model``,
    ``timeout`` (seconds) and ``retry``, the SDK's ``RetryPolicy``, which owns all
    retries. Jev's confidence is kept in ``raw`` as the provider's, and is no
    probability of being right.
    """

    def __init__(
        self,
        client: Any = None,
        *,
        async_client: Any = None,
        model: str | None = None,
        api_key: str | None = None,
        base_url: str | None = None,
        timeout: float | None = None,
        retry: Any = None,
        max_batch: int | None = None,
        name: str = "jev",
    ) -> None:
        settings = {"api_key": api_key, "base_url": base_url, "timeout": timeout, "retry": retry}
        given = [key for key, value in settings.items() if value is not None]
        if given and (client is not None or async_client is not None):
            raise InvalidDecisionRequest(
                f"{given[0]} belongs to a client that JevProvider makes; the one handed in has "
                "its own"
            )
        self._sdk = _sdk()
        self._client, self._async_client = client, async_client
        self._owned: list[Any] = []
        self._owned_async: list[Any] = []
        self._settings = {key: value for key, value in settings.items() if value is not None}
        self.model, self.max_batch, self.name = model, max_batch, name
        self._borrows = client is not None or async_client is not None

    def capabilities(self) -> Capabilities:
        return Capabilities(
            primitives=frozenset({"choice", "boolean", "score"}), modalities=frozenset({"text"}),
            dynamic_labels=True, max_batch=self.max_batch,
        )  # fmt: skip

    def check(self, question: Question, inputs: Any) -> None:
        """Everything that can be refused before a request is sent."""
        self.capabilities().check(question, modality="text", batch_size=len(texts_of(inputs)))

    def record(self) -> dict[str, Any]:
        """What decides the answers, as plain data, without the key."""
        return {
            "provider": self.name,
            "model": self.model,
            "base_url": self._settings.get("base_url"),
            "sdk": self._sdk.__version__,
        }

    # -- asking ----------------------------------------------------------------------

    def decide(self, question: Question, inputs: Any) -> list[DecisionResult]:
        """One result for each text of ``inputs`` (a text, or a list of texts)."""
        return self.decide_many([question], inputs)[0]

    def decide_many(self, questions: Sequence[Question], inputs: Any) -> list[list[DecisionResult]]:
        """Of each question one result for each text; one request for each text."""
        asked, texts = self._asked(questions, inputs)
        client = self._sync()
        return _by_question([self._answer(client, asked, text) for text in texts], len(asked))

    async def adecide(self, question: Question, inputs: Any) -> list[DecisionResult]:
        """:meth:`decide`, awaited."""
        return (await self.adecide_many([question], inputs))[0]

    async def adecide_many(
        self, questions: Sequence[Question], inputs: Any
    ) -> list[list[DecisionResult]]:
        """:meth:`decide_many`, awaited."""
        asked, texts = self._asked(questions, inputs)
        client = self._async()
        rows = []
        for text in texts:
            try:
                response = await client.system_one(text, self._wire(asked), **self._model())
            except self._sdk.TypeSafeError as error:
                raise self._typed(error) from error
            rows.append(self._results(asked, response))
        return _by_question(rows, len(asked))

    def _asked(self, questions: Any, inputs: Any) -> tuple[list[Question], list[str]]:
        asked = list(questions)
        if not asked:
            raise InvalidDecisionRequest("there is no question to ask")
        for question in asked:
            self.check(question, inputs)
        return asked, texts_of(inputs)

    def _answer(self, client: Any, asked: list[Question], text: str) -> list[DecisionResult]:
        try:
            response = client.system_one(text, self._wire(asked), **self._model())
        except self._sdk.TypeSafeError as error:
            raise self._typed(error) from error
        return self._results(asked, response)

    def _model(self) -> dict[str, Any]:
        return {} if self.model is None else {"model": self.model}

    def _wire(self, asked: Sequence[Question]) -> dict[str, Any]:
        """The questions as the service reads them, under names of this request alone."""
        return {f"q{i}": self._one(question) for i, question in enumerate(asked)}

    def _one(self, question: Question) -> Any:
        if isinstance(question, Boolean):
            return self._sdk.Noul(instructions=question.prompt)
        if isinstance(question, Choice):
            criteria = {option.id: option.description for option in question.options}
            return self._sdk.Choice(instructions=question.prompt, criteria=criteria)
        assert isinstance(question, Score)
        levels = [level.description for level in question.levels]
        return self._sdk.Score(instructions=question.prompt, criteria=levels)

    # -- what comes back -------------------------------------------------------------

    def _results(self, asked: Sequence[Question], response: Any) -> list[DecisionResult]:
        names = [f"q{i}" for i in range(len(asked))]
        if set(response.answers) != set(names):
            raise JevMalformedResponse(
                f"the service answered {sorted(response.answers)}, not {names}",
                request_id=_request_id(response),
            )
        try:
            return [
                self._result(question, response.answers[name], response)
                for question, name in zip(asked, names)
            ]
        except InvalidDecisionResponse as error:
            raise JevMalformedResponse(str(error), request_id=_request_id(response)) from error

    def _result(self, question: Question, answer: Any, response: Any) -> DecisionResult:
        wanted = {"choice": "choice", "boolean": "noul", "score": "score"}[question.kind]
        if answer.type != wanted:
            raise InvalidDecisionResponse(f"a {question.kind} question got a {answer.type} answer")
        raw = {
            "model": response.model,
            "request_id": _request_id(response),
            "provider_confidence": getattr(answer, "confidence", None),
            "answer": answer.model_dump(),
        }
        if isinstance(question, Boolean):
            return validate_response(question, answer.noul, provider=self.name, raw=raw)
        if isinstance(question, Choice):
            found = dict(answer.probabilities)
            return validate_response(question, found, provider=self.name, raw=raw)
        assert isinstance(question, Score)
        ids = question.option_ids
        levels = [
            (ids[level] if 0 <= level < len(ids) else str(level), p)
            for level, p in answer.probabilities.items()
        ]
        return validate_response(
            question, levels, provider=self.name, raw=raw, vendor_score=answer.score
        )

    def _typed(self, error: Exception) -> JevError:
        sdk, request_id = self._sdk, getattr(error, "request_id", None)
        if isinstance(error, sdk.TypeSafeRateLimitError):
            return JevRateLimited(
                str(error), request_id=request_id, retry_after_ms=error.retry_after_ms
            )
        kinds = (
            ((sdk.TypeSafeAuthenticationError, sdk.TypeSafePermissionDeniedError),
             JevAuthenticationError),
            ((sdk.TypeSafeAPITimeoutError,), JevTimeout),
            ((sdk.TypeSafeAPIResponseValidationError,), JevMalformedResponse),
        )  # fmt: skip
        for theirs, ours in kinds:
            if isinstance(error, theirs):
                return ours(str(error), request_id=request_id)
        return JevError(str(error) or type(error).__name__, request_id=request_id)

    # -- clients ---------------------------------------------------------------------

    def _sync(self) -> Any:
        if self._client is None:
            if self._borrows:
                raise InvalidDecisionRequest("only an async client was handed in; use adecide")
            self._client = self._make(self._sdk.TypeSafeClient)
            self._owned.append(self._client)
        return self._client

    def _async(self) -> Any:
        if self._async_client is None:
            if self._borrows:
                raise InvalidDecisionRequest("only a sync client was handed in; use decide")
            self._async_client = self._make(self._sdk.AsyncTypeSafeClient)
            self._owned_async.append(self._async_client)
        return self._async_client

    def _make(self, kind: Any) -> Any:
        try:
            return kind(**self._settings)
        except self._sdk.TypeSafeError as error:
            missing = "key" in str(error).lower()
            raise (JevAuthenticationError if missing else JevError)(str(error)) from error

    def close(self) -> None:
        """Close the client that was made here; one that was handed in stays open."""
        while self._owned:
            self._owned.pop().close()
            self._client = None

    async def aclose(self) -> None:
        """:meth:`close` for both clients."""
        self.close()
        while self._owned_async:
            await self._owned_async.pop().aclose()
            self._async_client = None


def _request_id(response: Any) -> str | None:
    try:
        return str(response.request_id)
    except Exception:  # the SDK raises when the service sent none
        return None


def _by_question(rows: list[list[DecisionResult]], count: int) -> list[list[DecisionResult]]:
    return [[row[i] for row in rows] for i in range(count)]
