"""Text embeddings: training, FAISS, safetensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from nnx import Losses, NNModel, NNModelParams, NNOptimParams, NNTrainParams
from nnx import text_contrastive_train_step_factory as step_factory
from nnx.embeddings import (
    ContrastiveTextDataset,
    TokenEncoder,
    embed_texts,
    export_to_faiss,
    export_to_safetensors,
    pair_collate,
    search_faiss,
    train_contrastive,
)
from nnx.objectives.contrastive import nt_xent
from torch import nn
from torch.utils.data import DataLoader

PAIRS = [(f"{c * 5} an", f"{c.upper() * 5} po") for c in "abcdefghijk"]


class Letters(nn.Module):
    """Embeds a text by its letters."""

    def __init__(self, dim=16):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(128, dim)
        self.drop = nn.Dropout(0.1)

    def forward(self, texts):
        rows = [self.table(torch.tensor([ord(c) for c in text])).mean(0) for text in texts]
        return self.drop(torch.stack(rows))


def test_the_loss_is_the_cross_entropy_over_the_other_rows():
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    rows = F.normalize(torch.cat((a, b)).double(), dim=1)
    total = 0.0
    for i in range(8):
        scores = [float(rows[i] @ rows[j]) / 0.2 for j in range(8) if j != i]
        partner = float(rows[i] @ rows[(i + 4) % 8]) / 0.2
        total += np.log(np.exp(scores).sum()) - partner
    assert float(nt_xent(a, b, 0.2)) == pytest.approx(total / 8, rel=1e-5)


@pytest.mark.parametrize(
    ("a", "b", "temperature", "message"),
    [
        (torch.ones(1, 3), torch.ones(1, 3), 0.5, "at least 2 samples"),
        (torch.ones(2, 3), torch.ones(3, 3), 0.5, "two views"),
        (torch.ones(2, 3), torch.ones(2, 3), 0, "temperature"),
    ],
)
def test_the_loss_refuses_what_it_cannot_compare(a, b, temperature, message):
    with pytest.raises(ValueError, match=message):
        nt_xent(a, b, temperature)


def test_training_pulls_pairs_together_and_restores_modes():
    backbone = Letters().eval()
    backbone.drop.train()

    def likeness():
        a, b = (embed_texts(backbone, list(side)) for side in zip(*PAIRS))
        return float((a @ b.t()).softmax(1).diagonal().mean())

    before = likeness()
    torch.manual_seed(1)
    same = train_contrastive(backbone, PAIRS, n_epochs=30, batch_size=5, lr=0.05)
    assert same is backbone
    assert likeness() > before + 0.05
    assert [m.training for m in backbone.modules()] == [False, False, True]


def test_a_last_batch_of_one_pair_is_left_out():
    backbone = Letters()
    seen = []
    backbone.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    train_contrastive(backbone, PAIRS, n_epochs=1, batch_size=5)
    assert seen == [5, 5, 5, 5]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dataset": PAIRS[:1]}, ValueError, "at least 2 pairs"),
        ({"dataset": []}, ValueError, "at least one"),
        ({"dataset": ["ab"]}, ValueError, "entry 0"),
        ({"batch_size": 1}, ValueError, "batch_size"),
        ({"n_epochs": 0}, ValueError, "n_epochs"),
        ({"temperature": 0}, ValueError, "temperature"),
        ({"grad_clip_norm": 0}, ValueError, "grad_clip_norm"),
        ({"lr": float("inf")}, ValueError, "lr"),
    ],
)
def test_training_refuses_before_anything_changes(change, error, message):
    backbone = Letters()
    before = backbone.table.weight.clone()
    with pytest.raises(error, match=message):
        train_contrastive(backbone, **{"dataset": PAIRS, **change})
    assert torch.equal(backbone.table.weight, before)


def test_a_loss_that_is_not_finite_is_never_stepped():
    backbone = Letters()
    with torch.no_grad():
        backbone.table.weight[ord("a")] = float("nan")
    kept = backbone.table.weight.clone()
    with pytest.raises(FloatingPointError, match="nothing was stepped"):
        train_contrastive(backbone, PAIRS, lr=1.0)
    assert torch.equal(backbone.table.weight.nan_to_num(), kept.nan_to_num())


def test_the_step_trains_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = NNModel(module=Letters(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    loader = DataLoader(ContrastiveTextDataset(PAIRS), batch_size=4, collate_fn=pair_collate)
    optim = NNOptimParams.builder().adam(max_lr=0.05).build()
    params = NNTrainParams(n_epochs=10, seed=0, train_loader=loader, optim=optim)
    run = model.train(params, train_step_fn=step_factory(temperature=0.2))
    assert run.idps[-1].train_edp.loss < 0.5 * run.idps[0].train_edp.loss
    bad = NNModel(module=Letters(), params=NNModelParams(loss=Losses.CROSS_ENTROPY))
    params = NNTrainParams(n_epochs=1, train_loader=[torch.ones(2, 2, 2)], optim=optim)
    with pytest.raises(ValueError, match="pair_collate"):
        bad.train(params, train_step_fn=step_factory())
    with pytest.raises(ValueError, match="temperature"):
        step_factory(temperature=0)


def test_embedding_is_deterministic_and_leaves_no_trace():
    backbone = Letters().train()
    rows = embed_texts(backbone, ["a", "bc", "d"], batch_size=2)
    assert torch.equal(rows, embed_texts(backbone, ["a", "bc", "d"]))
    assert torch.allclose(rows.norm(dim=1), torch.ones(3))
    assert not rows.requires_grad
    assert backbone.training
    assert backbone.drop.training
    assert embed_texts(backbone, []).shape == (0, 0)
    with pytest.raises(TypeError, match="list of strings"):
        embed_texts(backbone, "abc")
    with pytest.raises(ValueError, match=r"one embedding per text, \(2, D\)"):
        embed_texts(nn.Identity(), ["a", "b"])


def test_a_language_model_embeds_by_the_mean_of_its_states(kit):
    model = kit.model()
    encoder = TokenEncoder(model.net, model.tokenizer)
    texts = ["the cat", "to be or not to be that is the question"]
    rows = encoder(texts)
    for text, row in zip(texts, rows):
        ids = torch.tensor([model.tokenizer.encode(text)])
        assert torch.allclose(row, model.net.hidden(ids).mean(1)[0], atol=1e-6)
    with pytest.raises(ValueError, match="no tokens"):
        encoder([""])


# Files ---------------------------------------------------------------------------------------


def test_cosine_search_finds_the_nearest_of_any_length(tmp_path):
    pytest.importorskip("faiss")

    vectors = {"long": [30.0, 3.0], "near": [0.2, 0.1], "far": [-1.0, 0.4], "q": [0.5, 0.24]}

    class Fixed(nn.Module):
        def forward(self, texts):
            return torch.tensor([vectors[t] for t in texts])

    path = export_to_faiss(Fixed(), ["long", "near", "far"], tmp_path / "i.faiss")
    scores, ids = search_faiss(Fixed(), path, ["q"], k=3)
    assert ids.tolist() == [[1, 0, 2]]  # by raw inner product, "long" would win
    q, near = np.array([0.5, 0.24]), np.array([0.2, 0.1])
    cosine = q @ near / np.linalg.norm(q) / np.linalg.norm(near)
    assert scores[0, 0] == pytest.approx(cosine, abs=1e-6)
    path = export_to_faiss(
        Fixed(), ["long", "near", "far"], tmp_path / "named.faiss", ids=[700, 41, 3]
    )
    assert search_faiss(Fixed(), path, ["q"], k=4)[1].tolist() == [[41, 700, 3, -1]]


@pytest.mark.parametrize("index_type", ["IndexFlatL2", "IndexHNSWFlat"])
def test_other_indexes_hold_raw_embeddings(tmp_path, index_type):
    faiss = pytest.importorskip("faiss")
    backbone, texts = Letters(), [f"text {i}" for i in range(20)]
    path = export_to_faiss(backbone, texts, tmp_path / "i.faiss", index_type=index_type)
    index = faiss.read_index(path)
    raw = embed_texts(backbone, texts, normalize=False).numpy()
    assert index.ntotal == 20
    assert np.allclose(index.reconstruct(7), raw[7])
    scores, ids = search_faiss(backbone, path, texts[3:5], k=1)
    assert ids[:, 0].tolist() == [3, 4]
    assert np.allclose(scores, 0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"corpus": []}, ValueError, "corpus is empty"),
        ({"index_type": "IndexIVF"}, ValueError, "IndexFlatIP"),
        ({"ids": [1]}, ValueError, "2 distinct integers"),
        ({"ids": [1, 1]}, ValueError, "2 distinct integers"),
        ({"out_path": "nowhere/i.faiss"}, FileNotFoundError, "does not exist"),
    ],
)
def test_an_index_that_cannot_be_is_refused_without_a_file(
    tmp_path, monkeypatch, options, error, message
):
    pytest.importorskip("faiss")
    monkeypatch.chdir(tmp_path)
    given = {"corpus": ["a", "b"], "out_path": "i.faiss", **options}
    with pytest.raises(error, match=message):
        export_to_faiss(Letters(), **given)
    assert not list(tmp_path.iterdir())


def test_another_backbone_does_not_fit_an_index(tmp_path):
    pytest.importorskip("faiss")
    path = export_to_faiss(Letters(16), ["a"], tmp_path / "i.faiss")
    with pytest.raises(ValueError, match="width 16 and the backbone gives 4"):
        search_faiss(Letters(4), path, ["a"])


def test_weights_go_to_safetensors_and_back(tmp_path):
    from safetensors.torch import load_file

    backbone = Letters()
    path = export_to_safetensors(backbone, tmp_path / "w.safetensors")
    other = Letters()
    other.load_state_dict(load_file(path))
    assert torch.equal(other.table.weight, backbone.table.weight)
    with pytest.raises(TypeError, match="x is a int"):
        export_to_safetensors({"x": 1}, tmp_path / "v.safetensors")
    assert not (tmp_path / "v.safetensors").exists()
