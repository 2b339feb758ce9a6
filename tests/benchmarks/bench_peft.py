"""LoRA beside Hugging Face PEFT: training steps, memory, merged inference, wrapping a deep net.

Times are the process's own, so that a busy machine stretches neither side.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from measure import Row, interleaved
from nnx.peft import apply_lora_to, merge_adapters
from torch import nn

WIDTH, HEADS, LAYERS, BATCH, LENGTH = 512, 8, 4, 4, 64
PROJECTIONS = ("q", "k", "v", "o")
ALL = (*PROJECTIONS, "up", "down")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (
            p(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.o(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS))).requires_grad_(False)


def pair(names: tuple[str, ...], dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    """The same encoder with the same LoRA, ours and PEFT's."""
    import peft

    ours, theirs = encoder(), encoder()
    apply_lora_to(ours, *(f"*.{name}" for name in names), r=8, alpha=16.0, dropout=dropout)
    config = peft.LoraConfig(target_modules=list(names), r=8, lora_alpha=16, lora_dropout=dropout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ours, peft.get_peft_model(theirs, config)


class Step:
    def __init__(self, model: nn.Module) -> None:
        self.model = model.train()
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, lr=1e-3)
        torch.manual_seed(1)
        self.x = torch.randn(BATCH, LENGTH, WIDTH)

    def __call__(self) -> None:
        self.model(self.x).pow(2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def saved_mebibytes(model: nn.Module) -> float:
    """What autograd keeps for the backward pass, beyond the parameters, each storage once."""
    x = torch.randn(BATCH, LENGTH, WIDTH)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).pow(2).mean()
    del loss
    return sum(held.values()) / 2**20


def bench_training_step() -> Iterator[Row]:
    for label, names in (("attention", PROJECTIONS), ("every Linear", ALL)):
        ours, theirs = pair(names)
        a, b, spread = interleaved(
            Step(ours), Step(theirs), repeats=15, warmup=2, clock=time.process_time
        )
        yield Row(
            f"LoRA step, {LAYERS}x{WIDTH} encoder, {label}", a * 1e3, b * 1e3,
            against="Hugging Face PEFT", target="<= 1.05x", met=a <= 1.05 * b,
            spread=spread,
        )  # fmt: skip
        a, b = saved_mebibytes(ours), saved_mebibytes(theirs)
        yield Row(
            f"kept for backward, {label}", a, b, unit="MiB",
            against="Hugging Face PEFT", target="<= 1.0x", met=a <= b,
        )  # fmt: skip


def bench_merged_inference() -> Iterator[Row]:
    ours, _ = pair(ALL)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    base, ours = encoder().eval(), ours.eval()
    unloaded = copy.deepcopy(ours)
    merge_adapters(ours)
    merge_adapters(unloaded, unload=True)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    with torch.inference_mode():
        for label, model in (("merged", ours), ("merged and unloaded", unloaded)):
            a, b, spread = interleaved(
                lambda m=model: m(x), lambda: base(x), repeats=41, warmup=3, clock=time.process_time
            )
            yield Row(
                f"forward pass, {label}", a * 1e3, b * 1e3,
                against="the base alone", target="<= 1.05x", met=a <= 1.05 * b,
                spread=spread,
            )  # fmt: skip


def bench_wrap_a_deep_net() -> Iterator[Row]:
    import peft

    def deep() -> nn.Module:
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(1000)))

    def wrapped(wrap: Callable[[nn.Module], object]) -> float:
        net = deep()
        start = time.process_time()
        wrap(net)
        return time.process_time() - start

    def theirs(net: nn.Module) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            peft.get_peft_model(net, peft.LoraConfig(target_modules=r"\d+", r=8))

    a, b, spread = interleaved(
        lambda: wrapped(lambda net: apply_lora_to(net, "*", r=8)), lambda: wrapped(theirs),
        repeats=5, clock=None,
    )  # fmt: skip
    yield Row(
        "wrap 1,000 layers with LoRA", a * 1e3, b * 1e3, against="Hugging Face PEFT",
        target="<= 1.0x", met=a <= b, spread=spread,
    )  # fmt: skip
