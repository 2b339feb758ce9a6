"""The ``nnx calibrate`` and ``nnx decide`` commands, for tables trained by ``nnx train``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from nnx.cli.options import RunId, RunsFolder, again, use_runs
from nnx.cli.output import check_output

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from nnx.decisions.chain import TrustChain

FILE = "trust.json"


def calibrate(
    run: RunId,
    method: Annotated[
        str, typer.Option(help="auto, temperature, vector, matrix or isotonic.")
    ] = "auto",
    checkpoint: Annotated[str, typer.Option(help="Which checkpoint.")] = "best",
    data: Annotated[
        str | None, typer.Option(metavar="DATA.csv", help="Where the run's table is now.")
    ] = None,
    runs: RunsFolder = None,
) -> None:
    """Calibrate a run's probabilities on its own validation rows.

    Half of the validation rows fit the calibrator, the other half is kept to tune
    thresholds on, and the test rows report. Rows equal to one that was trained on
    are left out. Example: nnx calibrate best
    """
    from nnx.calibration import RowSet, choose_calibrator, fit_calibrator
    from nnx.cli.stored_run import open_job
    from nnx.decisions.chain import TrustChain
    from nnx.store.pointer import resolve_run_id

    use_runs(runs)
    run_id = resolve_run_id(run)
    job = open_job(run_id, data=data)
    labels = _labels(run_id, job.preparation)
    rows = {"train": RowSet.of(_inputs(job.preparation, job.table)[list(job.split.train)])}
    outputs = _Outputs(run_id, checkpoint, job.preparation, job.table)
    cal, tune, test = _held_out(job, outputs, rows["train"])
    bound: dict[str, Any] = {
        "model_id": outputs.model_id, "labels": labels, "split_id": "validation/calibration",
        "train_split_id": "train", "test_split_id": "test",
    }  # fmt: skip
    logits, targets = outputs.logits[cal], outputs.targets[cal]
    if method == "auto":
        choice = choose_calibrator(logits, targets, **bound)
        for name, value in sorted(choice.scores.items(), key=lambda item: item[1]):
            print(f"  {name:<12} cross-validated NLL {value:.4f}")
        if choice.calibrator is None:
            print("the raw probabilities are best: nothing was written")
            return
        calibrator = choice.calibrator
    else:
        calibrator = fit_calibrator(logits, targets, method=method, **bound)
    for name, places in (("calibrator", cal), ("abstention", tune), ("test", test)):
        if len(places):
            rows[name] = RowSet.of(outputs.inputs[places])
    chain = TrustChain(outputs.model_id, calibrator, rows=rows)
    chain.save(_file(run_id))
    if len(test):
        report = calibrator.report(
            outputs.logits[test], outputs.targets[test], model_id=outputs.model_id, labels=labels,
            split_id="test",
        )  # fmt: skip
        print(report.summary())
    print(f"written to {_file(run_id)}")
    print(f"decide: {again(f'nnx decide {run_id[:8]} DATA.csv --max-risk 0.05')}")


def decide(
    run: RunId,
    data: Annotated[str, typer.Argument(metavar="DATA.csv", help="The rows to decide about.")],
    max_risk: Annotated[
        float, typer.Option(min=0, max=1, help="The share of wrong decisions to accept.")
    ] = 0.05,
    output: Annotated[
        str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to write the CSV.")
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Which checkpoint.")] = "best",
    runs: RunsFolder = None,
) -> None:
    """Decide about each row, or abstain where the run is not sure enough.

    The threshold is the one of highest coverage whose risk on the run's tuning
    rows is at most --max-risk: an observation there, no guarantee elsewhere. Rows
    that the run was trained on are refused. Example: nnx decide best new.csv --max-risk 0.02
    """
    from nnx.abstention import select_threshold
    from nnx.cli.kept import write_predictions
    from nnx.cli.stored_run import open_job, stored_preparation
    from nnx.cli.table import read_table
    from nnx.decisions.chain import TrustChain
    from nnx.store.pointer import resolve_run_id

    use_runs(runs)
    if output is not None:
        check_output(output, inputs=[data])
    run_id = resolve_run_id(run)
    chain = _chain_of(run_id)
    fitted = stored_preparation(run_id)
    new = _inputs(fitted, read_table(data))
    _refuse_trained(chain, new, data, run_id)
    job = open_job(run_id)
    outputs = _Outputs(run_id, checkpoint, fitted, job.table)
    _, tune, _ = _held_out(job, outputs, (chain.rows or {})["train"])
    labels = chain.calibrator.labels
    prediction = chain.calibrator.transform(
        outputs.logits[tune], model_id=outputs.model_id, labels=labels
    )
    chosen = select_threshold(
        prediction, outputs.targets[tune], kind="max_probability", risk_ceiling=max_risk,
        split_id="validation/tuning", test_split_id="test",
        input_field="calibrated_probabilities",
    )  # fmt: skip
    served = TrustChain(
        chain.model_id, chain.calibrator, abstention=chosen.require(), rows=chain.rows
    )
    found = served.decide(outputs.predict(new), model_id=outputs.model_id)
    header = ["decision", "probability", f"predicted {fitted.target.name}"]
    chances = found.prediction.calibrated_probabilities.max(1)
    cells = [
        [action if kept else "abstained", f"{chance:.9g}", action]
        for action, kept, chance in zip(found.actions, found.accepted.tolist(), chances.tolist())
    ]
    write_predictions(output, header, cells)
    if output is not None:
        held = chosen.require().apply(prediction).report(outputs.targets[tune])
        print(f"{int(found.accepted.sum())} of {len(cells)} rows decided, in {output}")
        print(f"on {len(tune)} tuning rows: {held.summary()}")


def _chain_of(run_id: str) -> TrustChain:
    """The run's calibrators, as ``nnx calibrate`` left them."""
    from nnx.decisions.chain import TrustChain

    if not _file(run_id).exists():
        raise FileNotFoundError(
            f"run {run_id} is not calibrated; `{again(f'nnx calibrate {run_id[:8]}')}` does it"
        )
    return TrustChain.load(_file(run_id))


def _refuse_trained(chain: TrustChain, rows: Any, data: str, run_id: str) -> None:
    """Refuse to decide about rows that the run was trained on."""
    from nnx.cli.table import TableError

    trained = (chain.rows or {})["train"].contains(rows)
    if trained.any():
        raise TableError(
            f"{int(trained.sum())} rows of {data} are rows that run {run_id} was trained on "
            f"(the first is data row {int(trained.argmax()) + 1}), so its decisions about them "
            "say nothing; take them out"
        )


class _Outputs:
    """What a checkpoint makes of a table: inputs, logits and targets, row by row."""

    def __init__(self, run_id: str, checkpoint: str, fitted: Any, table: Any) -> None:
        from nnx.calibration import model_fingerprint
        from nnx.cli.table_run import load_model

        self._model = load_model(run_id, checkpoint)
        self.model_id = model_fingerprint(self._model)
        self.inputs = _inputs(fitted, table)
        self.targets: np.ndarray = fitted.target.encode(table).numpy()
        self.logits = self.predict(self.inputs)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        import torch

        with torch.random.fork_rng(devices=[]):
            found: np.ndarray = self._model.predict(
                torch.from_numpy(inputs).to(self._model.device)
            ).logits
        return found


def _held_out(job: Any, outputs: _Outputs, trained: Any) -> tuple[np.ndarray, ...]:
    """Row places for calibrating, tuning and testing; no row is equal to one of another part."""
    import numpy as np
    from nnx.calibration.rows import row_hashes

    hashes = row_hashes(outputs.inputs)
    seen = set(trained.values().tolist())
    order = sorted(job.split.validation, key=lambda row: (int(outputs.targets[row]), row))
    parts: list[list[int]] = [[], [], []]
    owner: dict[int, int] = {}
    for place, row in [*enumerate(order), *((-1, row) for row in job.split.test)]:
        key = int(hashes[row])
        part = 2 if place < 0 else place % 2
        if key not in seen and owner.setdefault(key, part) == part:
            parts[part].append(row)
    if min(len(parts[0]), len(parts[1])) < 5:
        raise ValueError(
            f"run {job.source.path} has too few validation rows to calibrate on "
            f"({len(parts[0])} and {len(parts[1])}); train with a larger --validation share"
        )
    return tuple(np.array(part, dtype=np.int64) for part in parts)


def _inputs(fitted: Any, table: Any) -> np.ndarray:
    found: np.ndarray = fitted.inputs(table).cpu().numpy()
    return found


def _labels(run_id: str, fitted: Any) -> tuple[str, ...]:
    labels: tuple[str, ...] | None = fitted.target.labels
    if labels is None:
        raise ValueError(
            f"run {run_id} predicts numbers; nnx calibrate is for classes "
            "(nnx.conformal.fit_intervals gives numbers their intervals)"
        )
    return labels


def _file(run_id: str) -> Path:
    from pathlib import Path

    from nnx.store.paths import RunPaths

    return Path(RunPaths.of(run_id).dir) / FILE
