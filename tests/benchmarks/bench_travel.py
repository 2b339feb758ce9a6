"""What it costs to take a run or a model elsewhere."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from bench_store import commit, folder, parts, trained
from measure import Row, interleaved
from nnx.store import RunWriter

WIDTHS = [1024, 4096, 3072, 512, 1024]  # 19 million parameters: 227 MB with Adam
_BLOCK = 1 << 22


def stored_run(root: str, widths: list[int]) -> str:
    """A run of one epoch in ``root/runs``; its id."""
    net, optimizer = trained(widths)
    run = parts.make_run(9)
    with RunWriter.open(run, f"{root}/runs") as writer:
        commit(writer, net, optimizer, 0)
    return str(run.id)


def sha256_of(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def bench_bundle() -> Iterator[Row]:
    """Export and validate beside a copy on stable storage and its SHA-256."""
    from nnx.bundles import export_bundle, inspect_bundle, validate_bundle

    with folder() as root:
        run = stored_run(root, WIDTHS)
        files = [f"{root}/runs/{run}/checkpoints/{name}" for name in ("last.pt", "last.pt.opt.pt")]
        size = sum(map(os.path.getsize, files))

        def ours() -> float:
            start = time.perf_counter()
            export_bundle(run, f"{root}/new", root=f"{root}/runs")
            validate_bundle(f"{root}/new")
            spent = time.perf_counter() - start
            shutil.rmtree(f"{root}/new")
            return spent

        def by_hand() -> float:
            start = time.perf_counter()
            for file in files:
                with open(file, "rb") as source, open(f"{root}/copy", "xb") as copy:
                    shutil.copyfileobj(source, copy, _BLOCK)
                    copy.flush()
                    os.fsync(copy.fileno())
                sha256_of(f"{root}/copy")
                os.rename(f"{root}/copy", f"{root}/{os.path.basename(file)}")
            spent = time.perf_counter() - start
            for file in files:
                os.unlink(f"{root}/{os.path.basename(file)}")
            return spent

        spent, other, varied = interleaved(ours, by_hand, clock=None)
        yield Row(
            f"export and validate a bundle of {size / 1e6:.0f} MB", spent * 1e3, other * 1e3,
            against="copy, fsync, SHA-256", target="<= 1.3x", met=spent <= 1.3 * other,
            spread=varied,
        )  # fmt: skip
        held = peak_of_travel(root, run)
        yield Row(
            "memory that export and validate add", held, size / 2**20, unit="MiB",
            against="the state", target="<= 1.2x", met=held <= 1.2 * size / 2**20,
        )  # fmt: skip
        export_bundle(run, f"{root}/large", root=f"{root}/runs")
        small = stored_run(f"{root}/small", [4, 8, 8, 8, 2])
        export_bundle(small, f"{root}/small/b", root=f"{root}/small/runs")
        large, little, varied = interleaved(
            lambda: inspect_bundle(f"{root}/large"), lambda: inspect_bundle(f"{root}/small/b"),
            repeats=51,
        )  # fmt: skip
        yield Row(
            "inspect that bundle", large * 1e3, little * 1e3, against="one of 7 kB",
            target="<= 1.2x", met=large <= 1.2 * little, spread=varied,
        )  # fmt: skip


def peak_of_travel(root: str, run: str) -> float:
    """MiB that a process holds beyond what it held before it exports and validates."""
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import measure, bench_travel\n"
        "import nnx.bundles.export, nnx.store.data, nnx.store.points, torch, nnx\n"
        "torch.zeros(1).numpy(); before = measure.peak_mebibytes()\n"
        "nnx.bundles.export_bundle(sys.argv[3], sys.argv[2] + '/peak', root=sys.argv[2] + '/runs')\n"
        "nnx.bundles.validate_bundle(sys.argv[2] + '/peak')\n"
        "print(measure.peak_mebibytes() - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(Path(__file__).parent), root, run],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout)


def bench_pretrained() -> Iterator[Row]:
    """A saved model of 227 MB beside its tensors alone, loaded into a net that is built."""
    from nnx import Activations, Losses, Nets, NNModel, NNModelParams, NNParams
    from safetensors.torch import load_file

    shape = NNParams(
        input_dim=2048, output_dim=1024, hidden_dims=[5120, 5120, 3072], dropout_prob=0.0,
        activation=Activations.RELU,
    )  # fmt: skip
    model = NNModel(shape, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))
    with folder() as root:
        model.save_pretrained(f"{root}/saved")
        path = f"{root}/saved/model.safetensors"
        row = torch.ones(1, 2048)

        def first(net: torch.nn.Module) -> None:
            """Weights that are mapped are read when they are used."""
            with torch.no_grad():
                net(row)

        spent, other, varied = interleaved(
            lambda: NNModel.from_pretrained(f"{root}/saved"),
            lambda: model.net.load_state_dict(load_file(path)),
        )

        def by_hand() -> None:
            model.net.load_state_dict(load_file(path))
            first(model.net)

        used = interleaved(lambda: first(NNModel.from_pretrained(f"{root}/saved").net), by_hand)
        found = NNModel.from_pretrained(f"{root}/saved").net.state_dict()
        assert all(torch.equal(found[n], v) for n, v in model.net.state_dict().items())
        yield Row(
            f"from_pretrained of {os.path.getsize(path) / 1e6:.0f} MB", spent * 1e3, other * 1e3,
            against="load_file into a built net", target="<= 1.1x", met=spent <= 1.1 * other,
            spread=varied,
        )  # fmt: skip
        yield Row(
            "the same, and a first row predicted", used.ours * 1e3, used.other * 1e3,
            against="load_file into a built net", target="<= 1.1x",
            met=used.ours <= 1.1 * used.other, spread=used.spread,
        )  # fmt: skip
