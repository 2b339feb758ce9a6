"""Real models behind questions: a trained head, an entailment model, a hosted service."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import torch
from nnx import Losses, Nets, NNModel, NNModelParams, NNParams, TaskSpec
from nnx.decisions import (
    Boolean,
    Choice,
    DecisionProvider,
    FixedHeadProvider,
    InvalidDecisionRequest,
    InvalidDecisionResponse,
    JevAuthenticationError,
    JevError,
    JevMalformedResponse,
    JevProvider,
    JevRateLimited,
    JevTimeout,
    NLIProvider,
    Option,
    ProviderFailure,
    Score,
    UnsupportedCapability,
)
from nnx.plugins.siblings import install_line

LABELS = ("cat", "dog", "owl")
ANIMAL = Choice("Which animal?", tuple(Option(name, f"a {name}") for name in LABELS))
RAIN = Boolean("Is it raining?")


def model(task: TaskSpec, outputs: int, loss: Losses = Losses.CROSS_ENTROPY) -> NNModel:
    torch.manual_seed(0)
    return NNModel(
        net_params=NNParams(input_dim=4, output_dim=outputs, hidden_dims=[6], dropout_prob=0.5),
        params=NNModelParams(net=Nets.FEED_FWD, loss=loss, task=task),
    )


def classifier() -> NNModel:
    return model(TaskSpec.categorical(labels=LABELS), 3)


X = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


# -- a trained head ---------------------------------------------------------------------------------


def test_a_categorical_head_answers_over_its_labels_and_stays_as_it_was() -> None:
    net = classifier()
    net.net.train()
    modes = [module.training for module in net.net.modules()]
    provider = FixedHeadProvider(net)
    assert isinstance(provider, DecisionProvider)
    results = provider.decide(ANIMAL, X)
    logits = net.predict(X).logits.astype(np.float64)
    wanted = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    found = [[p for _, p in result.distribution] for result in results]
    np.testing.assert_allclose(found, wanted, atol=1e-12)
    assert [module.training for module in net.net.modules()] == modes
    assert provider.model_calls == 1
    assert results[0].provider == "nnx.fixed_head"
    np.testing.assert_allclose(results[0].raw["logits"], logits[0])


def test_another_order_or_a_bijection_is_answered_by_name() -> None:
    provider = FixedHeadProvider(classifier())
    turned = Choice(ANIMAL.prompt, ANIMAL.options[::-1])
    a, b = provider.decide(ANIMAL, X)[0], provider.decide(turned, X)[0]
    assert a.probabilities() == b.probabilities()
    assert [i for i, _ in b.distribution] == ["owl", "dog", "cat"]
    german = Choice("Welches Tier?", tuple(Option(i, i) for i in ("Hund", "Eule", "Katze")))
    mapped = FixedHeadProvider(
        classifier(), option_map={"Katze": "cat", "Hund": "dog", "Eule": "owl"}
    ).decide(german, X)[0]
    assert mapped.probabilities()["Eule"] == a.probabilities()["owl"]


def test_only_an_ordinal_head_answers_a_score() -> None:
    scale = Score("How big?", ANIMAL.options)
    with pytest.raises(UnsupportedCapability, match="no score questions"):
        FixedHeadProvider(classifier()).decide(scale, X)
    provider = FixedHeadProvider(classifier(), ordinal=True)
    assert 0 < provider.decide(scale, X)[0].expected_index < 2
    with pytest.raises(UnsupportedCapability, match="in the order"):
        provider.decide(Score("How big?", ANIMAL.options[::-1]), X)


def test_a_one_logit_head_answers_the_question_it_was_trained_for() -> None:
    net = model(TaskSpec.multilabel(1), 1, Losses.BINARY_CROSS_ENTROPY)
    provider = FixedHeadProvider(net, question=RAIN)
    wanted = 1 / (1 + np.exp(-net.predict(X).logits[:, 0].astype(np.float64)))
    np.testing.assert_allclose([r.p_true for r in provider.decide(RAIN, X)], wanted, atol=1e-12)
    with pytest.raises(UnsupportedCapability, match="trained for 'Is it raining"):
        provider.decide(Boolean("Is it snowing?"), X)
    with pytest.raises(UnsupportedCapability, match="no boolean questions"):
        FixedHeadProvider(classifier()).decide(RAIN, X)
    assert provider.model_calls == 1


def test_what_a_head_does_not_justify_is_refused_before_the_model_runs() -> None:
    provider = FixedHeadProvider(classifier(), max_batch=4)
    two = Choice("Which?", ANIMAL.options[:2])
    with pytest.raises(UnsupportedCapability, match="exactly"):
        provider.decide(two, X[:1])
    with pytest.raises(UnsupportedCapability, match="4 rows at a time"):
        provider.decide(ANIMAL, X)
    with pytest.raises(InvalidDecisionRequest, match="no rows"):
        provider.decide(ANIMAL, X[:0])
    assert provider.model_calls == 0
    with pytest.raises(UnsupportedCapability, match="regression"):
        FixedHeadProvider(model(TaskSpec.regression(1), 1, Losses.MEAN_SQUARED_ERROR))
    with pytest.raises(InvalidDecisionRequest, match="names no labels"):
        FixedHeadProvider(model(TaskSpec.categorical(3), 3))
    with pytest.raises(InvalidDecisionRequest, match="not those of the model's task"):
        FixedHeadProvider(classifier(), labels=["dog", "cat", "owl"])
    with pytest.raises(InvalidDecisionRequest, match="one option onto each"):
        FixedHeadProvider(classifier(), option_map={"a": "cat", "b": "cat", "c": "dog"})


def test_a_failing_model_is_a_provider_failure_and_nan_is_no_answer() -> None:
    net = classifier()
    with pytest.raises(ProviderFailure, match="the model failed"):
        FixedHeadProvider(net).decide(ANIMAL, torch.zeros(2, 9))
    with torch.no_grad():
        next(net.net.parameters()).fill_(float("nan"))
    with pytest.raises(InvalidDecisionResponse, match="finite"):
        FixedHeadProvider(net).decide(ANIMAL, X)


# -- entailment -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nli():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "a",
        "cat",
        "dog",
        "owl",
        "this",
        "example",
        "is",
        ".",
        "it",
        "raining",
        "sleeps",
        "?",
    ]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]",
    )  # fmt: skip
    torch.manual_seed(0)
    net = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(words), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=16, num_labels=3, label2id={"no": 0, "maybe": 1, "yes": 2},
            id2label={0: "no", 1: "maybe", 2: "yes"},
        )
    )  # fmt: skip
    return net.train(), tokenizer


def by_hand(net, tokenizer, text: str, hypothesis: str) -> np.ndarray:
    net.eval()
    with torch.no_grad():
        logits = net(**tokenizer(text, hypothesis, return_tensors="pt")).logits[0]
    net.train()
    return logits.double().numpy()


def test_entailment_logits_become_a_distribution_over_the_options(nli) -> None:
    net, tokenizer = nli
    provider = NLIProvider(net, tokenizer, "yes", "no", pair_batch_size=2)
    texts = ["a cat sleeps", "it is a dog"]
    results = provider.decide(ANIMAL, texts)
    assert provider.hypotheses(ANIMAL)[0] == "This example is a cat."
    for text, result in zip(texts, results):
        yes = [by_hand(net, tokenizer, text, h)[2] for h in provider.hypotheses(ANIMAL)]
        wanted = np.exp(yes) / np.exp(yes).sum()
        np.testing.assert_allclose([p for _, p in result.distribution], wanted, atol=1e-5)
    assert provider.model_calls == 3
    assert net.training


def test_a_boolean_compares_entailment_with_contradiction(nli) -> None:
    net, tokenizer = nli
    provider = NLIProvider(net, tokenizer, 2, 0)
    (result,) = provider.decide(RAIN, "it sleeps")
    logits = by_hand(net, tokenizer, "it sleeps", "Is it raining?")
    assert result.p_true == pytest.approx(1 / (1 + np.exp(logits[0] - logits[2])), abs=1e-5)


def test_an_entailment_provider_says_what_it_does_not_do(nli) -> None:
    net, tokenizer = nli
    with pytest.raises(UnsupportedCapability, match="score"):
        NLIProvider(net, tokenizer, 2, 0).decide(Score("How?", ANIMAL.options), "x")
    with pytest.raises(InvalidDecisionRequest, match="no label of the model"):
        NLIProvider(net, tokenizer, "entailment", "no")
    with pytest.raises(InvalidDecisionRequest, match="one column"):
        NLIProvider(net, tokenizer, 2, "yes")
    with pytest.raises(InvalidDecisionRequest, match="one {}"):
        NLIProvider(net, tokenizer, 2, 0, hypothesis_template="This.")
    with pytest.raises(InvalidDecisionRequest, match="no text"):
        NLIProvider(net, tokenizer, 2, 0).decide(ANIMAL, ["x", ""])
    assert NLIProvider(net, tokenizer, 2, 0, revision="abc").record()["revision"] == "abc"


# -- a hosted service -------------------------------------------------------------------------------


class Service:
    """A local server of the service's protocol, with the answers that a test wants."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.responses: list[tuple[int, dict, dict]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                service.requests.append(body)
                status, headers, answer = (
                    service.responses.pop(0)
                    if service.responses
                    else (200, {}, service.answer(body))
                )
                data = json.dumps(answer).encode()
                self.send_response(status)
                for name, value in {"x-typesafe-request-id": "req-1", **headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    @staticmethod
    def answer(body: dict) -> dict:
        answers = {}
        for name, question in body["questions"].items():
            if question["type"] == "noul":
                answers[name] = {"type": "noul", "noul": 0.9}
            elif question["type"] == "choice":
                ids = list(question["criteria"])
                p = dict.fromkeys(ids[1:], 0.25 / (len(ids) - 1)) | {ids[0]: 0.75}
                answers[name] = {
                    "type": "choice", "choice": ids[0], "confidence": 0.6, "probabilities": p,
                }  # fmt: skip
            else:
                n = len(question["criteria"])
                answers[name] = {
                    "type": "score", "score": 1.5, "confidence": 0.5,
                    "legend": {str(i): c for i, c in enumerate(question["criteria"])},
                    "probabilities": {str(i): float(i == n - 1) for i in range(n)},
                }  # fmt: skip
        usage = {"input_tokens": 1, "output_tokens": 1}
        return {"model": "jev-1", "answers": answers, "usage": usage}


@pytest.fixture(scope="module")
def running():
    service = Service()
    yield service
    service.server.shutdown()


@pytest.fixture
def service(running):
    running.requests.clear()
    running.responses.clear()
    return running


def jev(service: Service, **changes) -> JevProvider:
    from typesafe_sdk import RetryPolicy

    settings = {"api_key": "key", "base_url": service.url, "retry": RetryPolicy(max_retries=0)}
    return JevProvider(**{**settings, **changes})


QUALITY = Score("How good?", (Option("bad", "Bad"), Option("fair", "Fair"), Option("good", "Good")))


def test_one_request_for_each_text_holds_every_question(service) -> None:
    provider = jev(service, model="jev-latest")
    answers = provider.decide_many([ANIMAL, RAIN, QUALITY], ["one", "two"])
    assert [len(rows) for rows in answers] == [2, 2, 2]
    assert [request["state"] for request in service.requests] == ["one", "two"]
    assert all(len(r["questions"]) == 3 and r["model"] == "jev-latest" for r in service.requests)
    animal, rain, quality = (rows[0] for rows in answers)
    assert animal.probabilities() == {"cat": 0.75, "dog": 0.125, "owl": 0.125}
    assert animal.raw["provider_confidence"] == 0.6
    assert animal.raw["request_id"] == "req-1"
    assert rain.p_true == 0.9
    assert (quality.vendor_score, quality.expected_index) == (1.5, 2.0)
    assert provider.record()["model"] == "jev-latest"
    assert "key" not in json.dumps(provider.record())
    provider.close()


def test_the_awaited_path_is_the_same(service) -> None:
    async def ask():
        provider = jev(service)
        try:
            return await provider.adecide_many([ANIMAL, RAIN], "one"), await provider.adecide(
                RAIN, "two"
            )
        finally:
            await provider.aclose()

    many, one = asyncio.run(ask())
    assert many[0] == jev(service).decide_many([ANIMAL, RAIN], "one")[0]
    assert one[0].p_true == 0.9


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        ((401, {}, {"error": "bad key"}), JevAuthenticationError),
        ((429, {"retry-after": "2"}, {"error": "slow down"}), JevRateLimited),
        ((500, {}, {"error": "oops"}), JevError),
        ((200, {}, {"nothing": 1}), JevMalformedResponse),
        ((200, {}, {"model": "m", "usage": {}, "answers": {}}), JevMalformedResponse),
        (
            (200, {}, {"model": "m", "usage": {}, "answers": {"q0": {
                "type": "choice", "choice": "cat", "confidence": 1.0,
                "probabilities": {"cat": 0.5, "dog": 0.2, "owl": 0.2},
            }}}),
            JevMalformedResponse,
        ),
        (
            (200, {}, {"model": "m", "usage": {}, "answers": {"q0": {"type": "noul", "noul": 1.0}}}),
            JevMalformedResponse,
        ),
    ],
)  # fmt: skip
def test_failures_are_typed_and_carry_the_services_request_id(service, response, kind) -> None:
    service.responses.append(response)
    with pytest.raises(kind) as caught:
        jev(service).decide(ANIMAL, "x")
    assert caught.value.request_id == "req-1"
    assert isinstance(caught.value, ProviderFailure)
    if kind is JevRateLimited:
        assert caught.value.retry_after_ms == 2000


def test_the_sdks_policy_owns_retries(service) -> None:
    from typesafe_sdk import RetryPolicy

    service.responses += [(500, {}, {"error": "once"})]
    provider = jev(service, retry=RetryPolicy(max_retries=1, backoff_initial=0.01))
    assert provider.decide(RAIN, "x")[0].p_true == 0.9
    assert len(service.requests) == 2


def test_a_service_that_does_not_answer_is_a_timeout() -> None:
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        from typesafe_sdk import RetryPolicy

        provider = JevProvider(
            api_key="k", base_url=f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.2,
            retry=RetryPolicy(max_retries=0),
        )  # fmt: skip
        with pytest.raises(JevTimeout) as caught:
            provider.decide(RAIN, "x")
    assert isinstance(caught.value, TimeoutError)


def test_a_client_that_was_handed_in_is_never_closed(service) -> None:
    from typesafe_sdk import TypeSafeClient

    with TypeSafeClient(api_key="k", base_url=service.url) as client:
        provider = JevProvider(client)
        provider.decide(RAIN, "x")
        provider.close()
        assert provider.decide(RAIN, "x")[0].p_true == 0.9
        with pytest.raises(InvalidDecisionRequest, match="has its own"):
            JevProvider(client, api_key="other")
        with pytest.raises(InvalidDecisionRequest, match="use decide"):
            asyncio.run(provider.adecide(RAIN, "x"))


def test_a_missing_key_and_a_wrong_request_never_reach_the_service(service, monkeypatch) -> None:
    monkeypatch.delenv("TYPESAFE_API_KEY", raising=False)
    with pytest.raises(JevAuthenticationError):
        JevProvider(base_url=service.url).decide(RAIN, "x")
    with pytest.raises(InvalidDecisionRequest):
        jev(service).decide(RAIN, [])
    with pytest.raises(UnsupportedCapability):
        jev(service, max_batch=1).decide(RAIN, ["a", "b"])
    assert service.requests == []


def test_without_the_sdk_the_error_names_the_line_that_installs_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "typesafe_sdk", None)
    with pytest.raises(ImportError) as raised:
        JevProvider()
    assert install_line("nnx-eval", "jev") in str(raised.value)
