"""Shows: LoRA adapts a trained net with few weights, stored apart, the base left alone."""

from __future__ import annotations

import os

import torch
from nnx import (
    Nets,
    NNModel,
    NNModelParams,
    NNParams,
    NNTrainParams,
    apply_lora_to,
    load_lora_weights,
    save_lora_weights,
)
from torch.utils.data import DataLoader, TensorDataset


def loader(shift: float) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(240, 8, generator=generator)
    return DataLoader(TensorDataset(X, (X.sum(1) > shift).long()), batch_size=24, shuffle=True)


def net() -> NNModel:
    return NNModel(
        NNParams(input_dim=8, output_dim=2, hidden_dims=[64, 64], dropout_prob=0.0),
        NNModelParams(net=Nets.FEED_FWD),
    )


torch.manual_seed(0)
model = net()
model.train(NNTrainParams(n_epochs=8, seed=0, train_loader=loader(0.0)))
base = {name: weight.clone() for name, weight in model.net.state_dict().items()}
before = model.evaluate(loader(3.0)).accuracy

apply_lora_to(model.net, "layers.*", r=4, alpha=8.0, freeze_base=True)
model.train(NNTrainParams(n_epochs=8, seed=0, train_loader=loader(3.0)), salt="adapted")
after = model.evaluate(loader(3.0)).accuracy
save_lora_weights(model.net, "adapter.pt")

again = net()
again.net.load_state_dict(base)
apply_lora_to(again.net, "layers.*", r=4, alpha=8.0, freeze_base=True)
load_lora_weights(again.net, "adapter.pt")
trained = sum(p.numel() for p in model.net.parameters() if p.requires_grad)
total = sum(p.numel() for p in model.net.parameters())
print(f"accuracy on the shifted task: {before:.3f} before, {after:.3f} after")
print(f"{trained} of {total} weights trained, {os.path.getsize('adapter.pt')} bytes stored")
assert after > before
assert again.evaluate(loader(3.0)).accuracy == after
wrapped = {n.replace(".base.", "."): w for n, w in model.net.state_dict().items() if ".base." in n}
assert wrapped.keys() == base.keys()
assert all(torch.equal(wrapped[name], weight) for name, weight in base.items())
