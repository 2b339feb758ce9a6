"""What changes logits before a token is drawn, and how it is stored."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nnx.generation import (
    CustomStage,
    LogitsChain,
    LogitsStage,
    LogitsStageCodec,
    MinPFilter,
    OrderedLogitsPipeline,
    RepetitionPenalty,
    TemperatureScaling,
    TopKFilter,
    TopPFilter,
    register_logits_stage_codec,
    registered_logits_stage_codecs,
    sample_next_token,
    unregister_logits_stage_codec,
)

LOGITS = torch.tensor([[2.0, 1.0, 0.5, -1.0, -3.0]])


def kept(logits):
    return torch.isfinite(logits).nonzero(as_tuple=True)[-1].tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("top_p", [0, 0.0, 1e-300, 1e-45, 1e-8, 1e-3])
def test_top_p_of_nothing_keeps_the_most_probable_token(dtype, top_p):
    for logits in (LOGITS, LOGITS * 0, LOGITS * 1e4):
        left = TopPFilter(top_p)(logits.to(dtype), [])
        assert kept(left) == [0]
        assert sample_next_token(left) == 0


def test_top_p_keeps_the_fewest_that_reach_it():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for p, wanted in ((0.4, 1), (0.5, 1), (0.6, 2), (0.81, 3), (0.96, 4), (1.0, 4)):
        assert len(kept(TopPFilter(p)(logits, []))) == wanted, p
    ties = torch.zeros(2, 8)  # 1/8 each: three of them reach 0.375, in the order of ids
    assert kept(TopPFilter(0.375)(ties, [])) == [0, 1, 2] * 2


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=12),
    st.floats(0, 1),
    st.integers(1, 12),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
)
def test_filters_never_rule_out_the_greatest_logit(values, p, k, dtype):
    logits = torch.tensor(values, dtype=dtype)
    for filter in (TopPFilter(p), MinPFilter(p), TopKFilter(k)):
        left = filter(logits, [])
        assert left.max() == logits.max()
        assert torch.equal(left[torch.isfinite(left)], logits[torch.isfinite(left)])


def test_min_p_and_top_k():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    assert kept(MinPFilter(0.31)(logits, [])) == [0, 1]
    assert kept(MinPFilter(0)(logits, [])) == [0, 1, 2, 3]
    assert kept(TopKFilter(2)(LOGITS, [])) == [0, 1]
    assert kept(TopKFilter(99)(LOGITS, [])) == [0, 1, 2, 3, 4]
    assert kept(TopKFilter(2)(torch.tensor([1.0, 3.0, 1.0, 0.0]), [])) == [0, 1, 2]


def test_a_repetition_penalty_lowers_what_was_seen():
    out = RepetitionPenalty(2.0)(LOGITS, [0, 3, 3])
    assert out.tolist() == [[1.0, 1.0, 0.5, -2.0, -3.0]]
    assert LOGITS[0, 0] == 2.0
    assert torch.equal(RepetitionPenalty(1.0)(LOGITS, [0]), LOGITS)


def test_temperature_zero_is_greedy_even_before_filters():
    for dtype in (torch.float16, torch.float32):
        out = TemperatureScaling(0)(LOGITS.to(dtype), [])
        for filter in (TopPFilter(0.5), MinPFilter(0.5), TopKFilter(2)):
            assert sample_next_token(filter(out, [])) == 0
    assert TemperatureScaling(2.0)(LOGITS, [])[0, 0] == 1.0


def test_draws_are_those_of_the_softmax():
    generator, draws = torch.Generator().manual_seed(0), 4000
    counts = torch.zeros(5)
    for _ in range(draws):
        counts[sample_next_token(LOGITS, generator=generator)] += 1
    wanted = LOGITS.softmax(dim=-1)[0]
    assert torch.allclose(counts / draws, wanted, atol=0.03)


def test_nothing_to_draw_is_said():
    with pytest.raises(ValueError, match="no logit above -inf"):
        sample_next_token(torch.full((1, 3), -math.inf))
    with pytest.raises(ValueError, match="NaN"):
        sample_next_token(torch.tensor([[math.nan, 1.0]]))


@pytest.mark.parametrize(
    "make",
    [
        lambda: TemperatureScaling(-0.1),
        lambda: TemperatureScaling(math.nan),
        lambda: TopKFilter(0),
        lambda: TopKFilter(2.5),
        lambda: TopPFilter(1.1),
        lambda: TopPFilter(-0.1),
        lambda: MinPFilter(2),
        lambda: RepetitionPenalty(0),
        lambda: LogitsStage("top_k", 0),
        lambda: LogitsStage("topk", 1),
    ],
)
def test_values_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match=r"must be"):
        make()


def test_a_builder_orders_the_standard_processors():
    def bias(logits, history):
        return logits

    builder = LogitsChain.builder().custom(bias).temperature(0.5).top_p(0.9).min_p(0.1)
    chain = builder.top_k(3).repetition_penalty(1.2).top_k(2).build()
    kinds = [type(p).__name__ for p in chain.processors[:-1]]
    assert kinds == [
        "RepetitionPenalty", "TopKFilter", "TopPFilter", "MinPFilter", "TemperatureScaling",
    ]  # fmt: skip
    assert chain.processors[-1] is bias
    assert chain.processors[1].top_k == 2
    assert kept(chain.apply(LOGITS, [])) == [0, 1]
    with pytest.raises(TypeError, match="callable"):
        builder.custom(3)


# Pipelines ---------------------------------------------------------------------------------


class Bias:
    def __init__(self, token, by):
        self.token, self.by = token, by

    def __call__(self, logits, history):
        out = logits.clone()
        out[..., self.token] += self.by
        return out


@pytest.fixture
def codec():
    codec = LogitsStageCodec(
        "test.bias",
        encode=lambda bias: {"token": bias.token, "by": bias.by},
        decode=lambda config: Bias(config["token"], config["by"]),
    )
    register_logits_stage_codec(codec)
    yield codec
    unregister_logits_stage_codec(codec.tag)


def test_a_pipeline_keeps_the_callers_order():
    hot_first = OrderedLogitsPipeline.of(LogitsStage.temperature(4.0), LogitsStage.top_p(0.6))
    cut_first = OrderedLogitsPipeline.of(LogitsStage.top_p(0.6), LogitsStage.temperature(4.0))
    assert len(kept(hot_first(LOGITS, []))) > len(kept(cut_first(LOGITS, [])))
    longer = cut_first.append(LogitsStage.top_k(1)).prepend(LogitsStage.min_p(0.0))
    assert [stage.kind for stage in longer.stages] == ["min_p", "top_p", "temperature", "top_k"]
    assert len(cut_first.stages) == 2
    assert kept(longer(LOGITS, [])) == [0]


def test_a_pipeline_is_stored_with_its_custom_stages(codec):
    pipeline = OrderedLogitsPipeline.of(
        LogitsStage.repetition_penalty(1.5), CustomStage(Bias(2, 9.0), codec.tag)
    )
    state = pipeline.state()
    assert state["stages"][1] == {
        "kind": "custom", "tag": "test.bias", "config": {"token": 2, "by": 9.0},
    }  # fmt: skip
    again = OrderedLogitsPipeline.from_state(state)
    assert torch.equal(again(LOGITS, [0]), pipeline(LOGITS, [0]))
    assert again.state() == state
    assert registered_logits_stage_codecs() == ("test.bias",)


@given(
    st.lists(
        st.one_of(
            st.builds(LogitsStage.top_k, st.integers(1, 50)),
            st.builds(LogitsStage.top_p, st.floats(0, 1)),
            st.builds(LogitsStage.min_p, st.floats(0, 1)),
            st.builds(LogitsStage.temperature, st.floats(0.01, 5)),
            st.builds(LogitsStage.repetition_penalty, st.floats(0.01, 5)),
        ),
        max_size=5,
    )
)
def test_every_pipeline_of_standard_stages_comes_back_equal(stages):
    pipeline = OrderedLogitsPipeline.of(*stages)
    assert OrderedLogitsPipeline.from_state(pipeline.state()) == pipeline


def test_what_a_pipeline_cannot_be(codec):
    with pytest.raises(ValueError, match="must be the last stage"):
        OrderedLogitsPipeline.of(LogitsStage.temperature(0), LogitsStage.top_k(3))
    with pytest.raises(TypeError, match="a stage is"):
        OrderedLogitsPipeline.of(3)
    with pytest.raises(ValueError, match="give CustomStage a tag"):
        OrderedLogitsPipeline.of(lambda logits, history: logits).state()
    with pytest.raises(ValueError, match=r"registered for 'test.other' \(registered: test.bias\)"):
        OrderedLogitsPipeline.of(CustomStage(Bias(1, 1), "test.other")).state()
    with pytest.raises(ValueError, match="registered already"):
        register_logits_stage_codec(codec)
    with pytest.raises(KeyError, match="no logits stage codec"):
        unregister_logits_stage_codec("test.other")
    with pytest.raises(ValueError, match="version 2"):
        OrderedLogitsPipeline.from_state({"version": 2, "stages": []})
