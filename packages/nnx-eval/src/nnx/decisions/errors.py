"""The typed failures of a decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from nnx.errors import NNxError

if TYPE_CHECKING:
    from .jobs import QuestionOutcome


class DecisionError(NNxError):
    """The root of everything that a decision raises."""


class InvalidDecisionRequest(DecisionError, ValueError):
    """A question or inputs that cannot be asked; no provider was called."""


class InvalidDecisionResponse(DecisionError, ValueError):
    """An answer that is no distribution over the question's options."""


class UnsupportedCapability(DecisionError):
    """A question that this provider does not answer; no model was called."""


class ProviderFailure(DecisionError, RuntimeError):
    """A provider that failed to answer."""


class JevError(ProviderFailure):
    """A failure of the hosted service; ``request_id`` is the service's own."""

    def __init__(self, message: str, *, request_id: str | None = None) -> None:
        super().__init__(message)
        self.request_id = request_id


class JevAuthenticationError(JevError):
    """The service does not accept the key."""


class JevRateLimited(JevError):
    """Too many requests; ``retry_after_ms`` when the service said how long to wait."""

    def __init__(
        self, message: str, *, request_id: str | None = None, retry_after_ms: float | None = None
    ) -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_ms = retry_after_ms


class JevTimeout(JevError, TimeoutError):
    """The service did not answer in time."""


class JevMalformedResponse(JevError, InvalidDecisionResponse):
    """The service answered something else than what was asked."""


class JobError(DecisionError):
    """A decision job that did not complete; ``outcomes`` are those known so far."""

    def __init__(
        self, message: str, *, outcomes: Mapping[str, QuestionOutcome] | None = None
    ) -> None:
        super().__init__(message)
        self.outcomes = dict(outcomes or {})


class InvalidJob(JobError, ValueError):
    """A job that cannot be run as it is written."""


class JobLimitExceeded(JobError):
    """A job that needs more than its limits allow."""


class JobTimeout(JobError, TimeoutError):
    """A job that ran longer than its limit."""


class JobFailed(JobError):
    """A question failed, so the job did; there is no partial value.

    ``failed`` and ``skipped`` are question ids.
    """

    def __init__(
        self,
        message: str,
        *,
        outcomes: Mapping[str, QuestionOutcome],
        failed: Sequence[str],
        skipped: Sequence[str],
    ) -> None:
        super().__init__(message, outcomes=outcomes)
        self.failed = tuple(failed)
        self.skipped = tuple(skipped)
