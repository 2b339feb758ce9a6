"""What a whole run's configuration costs, beside plain dataclasses of the same fields."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator

from measure import Row, interleaved
from nnx import (
    Losses,
    MetricSpec,
    MonitorSpec,
    Nets,
    NNModelParams,
    NNOptimParams,
    NNParams,
    NNSchedulerParams,
    NNTrainParams,
    Optims,
    RunConfig,
    Schedulers,
)

ROUNDS = 500
NET = {"input_dim": 8, "output_dim": 3, "hidden_dims": [16, 16], "dropout_prob": 0.1}
OPTIM = {"name": Optims.ADAMW, "max_lr": 1e-3, "weight_decay": 0.01, "momentum": (0.9, 0.999)}
SCHEDULE = {
    "min_lr": 1e-7, "factor": 0.5, "patience": 3, "cooldown": 1, "threshold": 1e-3,
    "kind": Schedulers.COSINE_ANNEALING, "T_max": 10,
}  # fmt: skip


def configuration() -> RunConfig:
    return RunConfig(
        net=NNParams(**NET),
        model=NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
        train=NNTrainParams(
            n_epochs=10,
            seed=1,
            optim=NNOptimParams(**OPTIM),
            scheduler=NNSchedulerParams(**SCHEDULE),
            metrics=(MetricSpec("nll"),),
            monitor=MonitorSpec(metric="nll", mode="min"),
        ),
    )


def _plain(cls: type) -> type:
    """A frozen, slotted dataclass with the same fields and none of the checks."""
    fields = [
        (f.name, object, dataclasses.field(default=f.default, default_factory=f.default_factory))
        for f in dataclasses.fields(cls)
    ]
    return dataclasses.make_dataclass(
        f"Plain{cls.__name__}", fields, frozen=True, kw_only=True, slots=True
    )


PLAIN = {
    cls: _plain(cls)
    for cls in (
        NNParams,
        NNModelParams,
        NNOptimParams,
        NNSchedulerParams,
        NNTrainParams,
        MonitorSpec,
    )
}
PLAIN_METRIC = dataclasses.make_dataclass(
    "PlainMetric", ["id", "version", "config", "name"], frozen=True, slots=True
)
PLAIN_RUN = dataclasses.make_dataclass(
    "PlainRun", ["net", "model", "train"], frozen=True, kw_only=True, slots=True
)


def plain() -> object:
    return PLAIN_RUN(
        net=PLAIN[NNParams](**{**NET, "hidden_dims": (16, 16)}),
        model=PLAIN[NNModelParams](net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY),
        train=PLAIN[NNTrainParams](
            n_epochs=10,
            seed=1,
            optim=PLAIN[NNOptimParams](**OPTIM),
            scheduler=PLAIN[NNSchedulerParams](**SCHEDULE),
            metrics=(PLAIN_METRIC("nll", 1, None, None),),
            monitor=PLAIN[MonitorSpec](metric="nll", mode="min"),
        ),
    )


def _plain_state(run: object) -> dict:
    return dataclasses.asdict(run)  # type: ignore[call-overload]


def _plain_id(run: object) -> str:
    return hashlib.md5(str(_plain_state(run)).encode()).hexdigest()


def _plain_rebuilt(run: object) -> object:
    state = _plain_state(run)
    train = state["train"]
    return PLAIN_RUN(
        net=PLAIN[NNParams](**state["net"]),
        model=PLAIN[NNModelParams](**state["model"]),
        train=PLAIN[NNTrainParams](
            **{
                **train,
                "optim": PLAIN[NNOptimParams](**train["optim"]),
                "scheduler": PLAIN[NNSchedulerParams](**train["scheduler"]),
                "monitor": PLAIN[MonitorSpec](**train["monitor"]),
            }
        ),
    )


def bench_configuration() -> Iterator[Row]:
    ours, theirs = configuration(), plain()

    def row(
        what: str, mine: Callable[[], object], other: Callable[[], object], against: str
    ) -> Row:
        def many(call: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                for _ in range(ROUNDS):
                    call()

            return run

        a, b, spread = interleaved(many(mine), many(other))
        return Row(
            f"{what} a run configuration", a / ROUNDS * 1e6, b / ROUNDS * 1e6, unit="us",
            against=against, spread=spread,
        )  # fmt: skip

    yield row("construct", configuration, plain, "plain dataclasses, no checks")
    yield row("state() of", ours.state, lambda: _plain_state(theirs), "dataclasses.asdict")
    yield row("id of", lambda: ours.id, lambda: _plain_id(theirs), "asdict, str, md5")
    yield row("hash()", lambda: hash(ours), lambda: hash(theirs), "plain dataclasses")
    yield row(
        "round-trip", lambda: RunConfig.from_state(ours.state()),
        lambda: _plain_rebuilt(theirs), "asdict and constructors, no checks",
    )  # fmt: skip
