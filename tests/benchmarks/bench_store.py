"""What an epoch's commit, a long history and a long list of runs cost."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from measure import Row, interleaved, seconds, spread
from nnx.history import HistoryJournal
from nnx.store import NNCheckpoint, NNRun, RunWriter
from nnx.utils.flushing import Flushes
from nnx.utils.yamlio import write_yaml

_spec = importlib.util.spec_from_file_location(
    "store_parts", Path(__file__).parents[1] / "nnx-core" / "store" / "conftest.py"
)
assert _spec is not None
parts = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(parts)  # type: ignore[union-attr]

torch.set_num_threads(1)


@contextlib.contextmanager
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="nnx-bench-") as path:
        yield path


def trained(widths: list[int]) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    net = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(2, widths[0])).sum().backward()
    optimizer.step()
    return net, optimizer


def checkpoint_of(net: torch.nn.Module, record) -> NNCheckpoint:
    return NNCheckpoint(
        net_params=parts.NET, model_params=parts.MODEL, net_state=net.state_dict(), idp=record
    )


def commit(writer: RunWriter, net, optimizer, epoch: int) -> None:
    writer.extend(parts.make_record(epoch, batch) for batch in range(2))
    state = {"optimizer_state": optimizer.state_dict(), "completed_epoch": epoch}
    writer.commit_epoch(checkpoint_of(net, writer.idps[-1]), state, best=True)


def bench_large_commit() -> Iterator[Row]:
    """19 million parameters with Adam: LAST and BEST beside one save of the same state."""
    net, optimizer = trained([1024, 4096, 3072, 512, 1024])
    count = sum(p.numel() for p in net.parameters())
    assert 18e6 < count < 20e6
    with folder() as root, RunWriter.open(parts.make_run(9), f"{root}/runs") as writer:
        epochs = iter(range(10**6))

        def plain() -> None:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            with open(f"{root}/plain.pt", "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())

        ours, other, varied = interleaved(
            lambda: commit(writer, net, optimizer, next(epochs)), plain
        )
        yield Row(
            f"commit LAST and BEST, {count / 1e6:.0f}M parameters with Adam", ours * 1e3,
            other * 1e3, against="torch.save + fsync", target="<= 1.6x", met=ours <= 1.6 * other,
            spread=varied,
        )  # fmt: skip
    state_bytes = 12 * count
    with folder() as root, RunWriter.open(parts.make_run(5), f"{root}/runs") as writer:
        for epoch in range(5):
            writer.append(parts.make_record(epoch, 1))
            state = {"optimizer_state": optimizer.state_dict(), "completed_epoch": epoch}
            phases = ["first"] if epoch == 0 else []
            last = checkpoint_of(net, writer.idps[-1])
            writer.commit_epoch(last, state, phases=phases, best=epoch < 4)
        used, kept = disk_usage(f"{root}/runs"), 3 * state_bytes  # FIRST, BEST and LAST differ
        yield Row(
            "bytes on disk after 5 epochs", used / 2**20, kept / 2**20, unit="MiB",
            against="FIRST, BEST, LAST", target="<= 1.3x", met=used <= 1.3 * kept,
        )  # fmt: skip


def disk_usage(path: str) -> int:
    seen = {}
    for where, _, names in os.walk(path):
        for name in names:
            info = os.lstat(os.path.join(where, name))
            seen[info.st_ino] = info.st_blocks * 512
    return sum(seen.values())


def bench_small_epochs() -> Iterator[Row]:
    """Two batches, validation, BEST and LAST, around epochs 100 and 5,000."""
    from nnx import NNModel, NNTrainParams

    def loop(epochs: int) -> list[float]:
        torch.manual_seed(0)
        features, labels = torch.randn(64, 20), torch.randint(0, 2, (64,))
        batches = [(features[i : i + 32], labels[i : i + 32]) for i in (0, 32)]
        net = type(parts.NET)(
            input_dim=20, output_dim=2, hidden_dims=[64, 64], dropout_prob=0.0,
            activation=parts.NET.activation,
        )  # fmt: skip
        model, times = NNModel(net_params=net, params=parts.MODEL), []
        real = RunWriter.commit_epoch

        def commit_epoch(writer, *args, **options):
            done = real(writer, *args, **{**options, "best": True})
            times.append(time.perf_counter())
            return done

        RunWriter.commit_epoch = commit_epoch  # type: ignore[method-assign]
        try:
            model.train(
                NNTrainParams(
                    n_epochs=epochs, train_loader=batches, val_loader=batches, seed=0,
                    save_phase_checkpoints=False,
                )
            )  # fmt: skip
        finally:
            RunWriter.commit_epoch = real  # type: ignore[method-assign]
        return [b - a for a, b in itertools.pairwise(times)]

    here = os.getcwd()
    os.environ["TQDM_DISABLE"] = "1"
    with folder() as root:
        try:
            os.chdir(root)
            loop(20)
            early, late = loop(101)[20:], loop(5001)[-300:]
        finally:
            os.chdir(here)
    first, last = statistics.median(early) * 1e3, statistics.median(late) * 1e3
    yield Row(
        "epoch of 2 batches at 100 epochs", first, target="<= 6 ms", met=first <= 6,
        spread=spread(early),
    )  # fmt: skip
    yield Row(
        "epoch of 2 batches at 5,000 epochs", last, first, against="at 100 epochs",
        target="<= 6 ms, equal", met=last <= 6 and last <= 1.15 * first,
        spread=spread(late),
    )  # fmt: skip


def bench_million_records() -> Iterator[Row]:
    """A journal of a million records: bytes linear, memory flat."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:2]; import measure, bench_store as b\n"
        "b.write_journal(sys.argv[2], int(sys.argv[3]))\n"
        "print(measure.peak_mebibytes())"
    )
    here = str(Path(__file__).parent)
    measured = []
    with folder() as root:
        for count in (100_000, 1_000_000):
            path = f"{root}/{count}"
            start = time.perf_counter()
            out = subprocess.run(
                [sys.executable, "-c", code, here, path, str(count)],
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            spent = time.perf_counter() - start
            measured.append((float(out.stdout), disk_usage(path) / 2**20, spent))
            shutil.rmtree(path)
    (memory, size, _), (more_memory, more_size, spent) = measured
    yield Row(
        "bytes of a million records", more_size, size, unit="MiB", against="100,000 records",
        target="10x", met=9.5 <= more_size / size <= 10.5,
    )  # fmt: skip
    yield Row(
        "resident memory at a million records", more_memory, memory, unit="MiB",
        against="100,000 records", target="<= 1.05x", met=more_memory <= 1.05 * memory,
    )  # fmt: skip
    yield Row("time of a million records", spent, unit="s")


def write_journal(path: str, count: int) -> None:
    from nnx.history.writing import JournalWriter

    writer, batches = JournalWriter(path, HistoryJournal()), 1000
    os.makedirs(path)
    for epoch in range(count // batches):
        for batch in range(batches):
            writer.add(parts.make_record(epoch, batch, batches=batches))
        writer.commit(Flushes())


def bench_listing() -> Iterator[Row]:
    """``nnx runs`` over 5,000 runs, as a process."""
    with folder() as root:
        runs = Path(root) / "runs"
        first = parts.make_run(3, salt="0")
        with RunWriter.open(first, str(runs)) as writer:
            for epoch in range(2):
                net, optimizer = trained([4, 8, 2])
                commit(writer, net, optimizer, epoch)
            writer.finish()
        for number in range(1, 5000):
            run = parts.make_run(3, salt=str(number))
            shutil.copytree(runs / first.id, runs / run.id, copy_function=os.link)
            (runs / run.id / "run.yaml").unlink()
            write_yaml(runs / run.id / "run.yaml", run.state())
            (runs / ".leases" / f"{run.id}.lock").touch()

        def listing() -> None:
            subprocess.run(
                [sys.executable, "-m", "nnx", "runs"], cwd=root, check=True,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip

        ours, bare, varied = interleaved(
            listing, lambda: subprocess.run([sys.executable, "-c", "pass"], check=True), repeats=5
        )
        yield Row(
            "nnx runs over 5,000 runs", ours * 1e3, bare * 1e3, against="python -c pass",
            target="<= 2 s", met=ours <= 2, spread=varied,
        )  # fmt: skip
        listed, varied = seconds(lambda: NNRun.all(str(runs)), repeats=3, warmup=0)
        assert len(NNRun.all(str(runs))) == 5000
        yield Row("NNRun.all of 5,000 runs", listed, unit="s", spread=varied)


def bench_kills() -> Iterator[Row]:
    """Three hundred SIGKILLs at random moments of real processes; see the kill test."""
    test = Path(__file__).parents[1] / "nnx-core" / "store" / "test_kills.py"
    kills = int(os.environ.get("NNX_KILLS", "300"))
    environment = {**os.environ, "NNX_KILLS": str(kills), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(test), "--timeout", "3000"],
        env=environment, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    yield Row(
        "SIGKILLs survived exactly", kills if done.returncode == 0 else 0, unit="kills",
        target="all", met=done.returncode == 0,
    )  # fmt: skip
