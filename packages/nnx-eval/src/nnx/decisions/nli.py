"""Zero-shot answers by textual entailment (Yin, Hay & Roth, 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from nnx.calibration.arrays import softmax
from nnx.utils import validation as check

from .errors import InvalidDecisionRequest, InvalidDecisionResponse, ProviderFailure
from .provider import Capabilities
from .questions import Boolean, Choice, Question
from .results import DecisionResult, validate_response
from .texts import texts_of


@dataclass(slots=True)
class NLIProvider:
    """A sequence classifier for entailment (from transformers) and its tokenizer.

    A ``Choice`` makes one hypothesis of each option's description, and the
    entailment logits become a distribution by softmax. A ``Boolean`` makes one
    of its prompt, and compares entailment with contradiction. ``entailment_id``
    and ``contradiction_id`` are columns, or names in the model's ``label2id``.
    """

    model: Any
    tokenizer: Any
    entailment_id: int | str
    contradiction_id: int | str
    hypothesis_template: str = "This example is {}."
    boolean_template: str = "{}"
    choice_scoring: str = "entailment_softmax"
    boolean_scoring: str = "entailment_vs_contradiction"
    max_length: int = 512
    truncation: str = "only_first"
    pair_batch_size: int = 16
    max_batch: int | None = None
    revision: str | None = None
    name: str = "nnx.nli"
    model_calls: int = field(default=0, init=False)
    _entails: int = field(default=0, init=False, repr=False)
    _contradicts: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        try:
            for name in ("hypothesis_template", "boolean_template"):
                if check.text("NLIProvider", name, getattr(self, name)).count("{}") != 1:
                    check.refuse("NLIProvider", name, getattr(self, name), "a text with one {}")
            check.choice(
                "NLIProvider", "choice_scoring", self.choice_scoring, ["entailment_softmax"]
            )
            check.choice(
                "NLIProvider", "boolean_scoring", self.boolean_scoring,
                ["entailment_vs_contradiction"],
            )  # fmt: skip
            check.choice(
                "NLIProvider", "truncation", self.truncation, ["only_first", "longest_first"]
            )
            for name in ("max_length", "pair_batch_size"):
                check.count("NLIProvider", name, getattr(self, name))
        except ValueError as error:
            raise InvalidDecisionRequest(str(error)) from None
        self._entails = self.entailment_id = self._column("entailment_id", self.entailment_id)
        self._contradicts = self.contradiction_id = self._column(
            "contradiction_id", self.contradiction_id
        )
        if self.entailment_id == self.contradiction_id:
            raise InvalidDecisionRequest("entailment_id and contradiction_id are one column")

    def _column(self, name: str, value: Any) -> int:
        known = dict(getattr(getattr(self.model, "config", None), "label2id", None) or {})
        if isinstance(value, str):
            if value not in known:
                raise InvalidDecisionRequest(
                    f"{name}={value!r} is no label of the model ({', '.join(map(str, known))})"
                )
            return int(known[value])
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidDecisionRequest(f"{name} is a column or a label, not {value!r}")
        if known and value >= len(known):
            raise InvalidDecisionRequest(f"{name}={value} is beyond the {len(known)} labels")
        return value

    def capabilities(self) -> Capabilities:
        return Capabilities(
            primitives=frozenset({"choice", "boolean"}), modalities=frozenset({"text"}),
            dynamic_labels=True, max_batch=self.max_batch,
        )  # fmt: skip

    def hypotheses(self, question: Question) -> list[str]:
        """The texts that are held against each input: model-facing, without ids."""
        if isinstance(question, Boolean):
            return [self.boolean_template.format(question.prompt)]
        if isinstance(question, Choice):
            return [self.hypothesis_template.format(o.description) for o in question.options]
        self.capabilities().check(question, modality="text", batch_size=1)
        raise AssertionError

    def check(self, question: Question, inputs: Any) -> None:
        """Everything that can be refused before the model runs."""
        self.capabilities().check(question, modality="text", batch_size=len(texts_of(inputs)))

    def decide(self, question: Question, inputs: Any) -> list[DecisionResult]:
        """One result for each text of ``inputs`` (a text, or a list of texts)."""
        self.check(question, inputs)
        texts, hypotheses = texts_of(inputs), self.hypotheses(question)
        assert isinstance(question, (Choice, Boolean))
        pairs = [(text, hypothesis) for text in texts for hypothesis in hypotheses]
        logits = self._logits(pairs).reshape(len(texts), len(hypotheses), -1)
        entailed = logits[:, :, self._entails]
        if isinstance(question, Boolean):
            contradicted = logits[:, :, self._contradicts]
            answers: list[Any] = softmax(np.hstack([entailed, contradicted]))[:, 0].tolist()
        else:
            answers = [list(zip(question.option_ids, row)) for row in softmax(entailed).tolist()]
        return [
            validate_response(question, answer, provider=self.name, raw={"logits": raw.tolist()})
            for answer, raw in zip(answers, logits)
        ]

    def _logits(self, pairs: list[tuple[str, str]]) -> np.ndarray:
        from nnx.utils.modes import eval_mode

        try:
            with eval_mode(self.model):
                logits = np.concatenate([self._forward(part) for part in self._parts(pairs)])
        except Exception as error:
            raise ProviderFailure(f"the model failed: {type(error).__name__}: {error}") from error
        columns = (self._entails, self._contradicts)
        if logits.ndim != 2 or logits.shape[1] <= max(columns) or not np.isfinite(logits).all():
            raise InvalidDecisionResponse(
                f"the model's logits {logits.shape} are not finite numbers of its labels"
            )
        return logits

    def _parts(self, pairs: list[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
        for start in range(0, len(pairs), self.pair_batch_size):
            yield pairs[start : start + self.pair_batch_size]

    def _forward(self, pairs: list[tuple[str, str]]) -> np.ndarray:
        import torch

        encoded = self.tokenizer(
            [text for text, _ in pairs], [hypothesis for _, hypothesis in pairs],
            truncation=self.truncation, max_length=self.max_length, padding=True,
            return_tensors="pt",
        )  # fmt: skip
        device = next(self.model.parameters()).device
        self.model_calls += 1
        with torch.inference_mode():
            outputs = self.model(**{name: value.to(device) for name, value in encoded.items()})
        return outputs.logits.double().cpu().numpy()

    def record(self) -> dict[str, Any]:
        """What decides the answers, as plain data."""
        config = getattr(self.model, "config", None)
        return {
            "provider": self.name,
            "model": getattr(config, "_name_or_path", None) or type(self.model).__name__,
            **{
                name: getattr(self, name)
                for name in (
                    "revision", "entailment_id", "contradiction_id", "hypothesis_template",
                    "boolean_template", "choice_scoring", "boolean_scoring", "max_length",
                    "truncation",
                )
            },
        }  # fmt: skip
