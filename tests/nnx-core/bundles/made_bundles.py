"""A trained run, its bundle, and a way to tamper with one so that only the tampering shows."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import torch
from nnx import (
    Activations,
    Devices,
    EarlyStopping,
    Losses,
    Nets,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    TaskSpec,
)
from torch.utils.data import DataLoader, TensorDataset

os.environ.setdefault("NNX_TQDM_DISABLE", "1")

_draw = torch.Generator().manual_seed(21)
X = torch.randn(50, 6, generator=_draw)
Y = torch.randint(0, 3, (50,), generator=_draw)


def make_model(**changes):
    torch.manual_seed(0)
    net = NNParams(
        input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2, activation=Activations.RELU
    )
    task = TaskSpec.categorical(3, labels=["a", "b", "c"])
    given = {"net": Nets.FEED_FWD, "device": Devices.CPU, "loss": Losses.CROSS_ENTROPY}
    return NNModel(net, NNModelParams(**{**given, "task": task, **changes}))


def make_params(n_epochs=2, **changes):
    data = TensorDataset(X, Y)
    generator = torch.Generator().manual_seed(5)
    given = {
        "train_loader": DataLoader(data, batch_size=16, shuffle=True, generator=generator),
        "val_loader": DataLoader(data, batch_size=16),
        "seed": 3,
    }
    return NNTrainParams(n_epochs=n_epochs, **{**given, **changes})


def patience():
    return EarlyStopping(patience=50)


def generation(bundle: Path) -> Path:
    return bundle / f"g-{json.loads((bundle / 'bundle.json').read_text())['generation']}"


def stated(bundle: Path, name: str) -> None:
    """Let the manifest state what a payload is now, as someone who tampers would."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    data = (generation(bundle) / name).read_bytes()
    manifest["payloads"][name] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    (bundle / "bundle.json").write_text(json.dumps(manifest))


def change_state(bundle: Path, change) -> None:
    path = generation(bundle) / "state.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    stated(bundle, "state.json")


def change_header(bundle: Path, name: str, change) -> None:
    path = generation(bundle) / name
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    stated(bundle, name)


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


class Calibrator:
    """What a fitted calibrator is to a bundle: its record."""

    def __init__(self, **changes) -> None:
        self.record = {
            "format": "nnx.calibration/1",
            "kind": "temperature",
            "labels": ["a", "b", "c"],
            "model_id": "mine:1",
            "temperature": 1.5,
            "fit": {"config": {}, "result": {}},
            "split": {"calibration": "cal", "disjointness": "unverified"},
            **changes,
        }

    def state(self):
        return self.record
