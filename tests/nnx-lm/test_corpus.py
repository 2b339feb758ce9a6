"""Corpora on disk, packed batches, exact resuming, shares of processes."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nnx import Callback, NNOptimParams, NNRun, NNTrainParams
from nnx.lm import PackedLoader, PackedTokens, TokenFile, write_tokens
from nnx.lm.corpus import text_files
from nnx.lm_tasks import CausalLMTask

EOS = 1


@pytest.fixture
def corpus(kit, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(kit.texts[:4] * 3):
        (folder / f"{i:02}.txt").write_text(f"{text}\n" * (1 + i % 3), encoding="utf-8")
    (folder / "skipped.bin").write_bytes(b"\xff\xfe")
    return folder


def written(kit, corpus, **options):
    return write_tokens([corpus], kit.tokenizer(), "corpus.tokens", **{"eos_id": EOS, **options})


def test_a_token_file_holds_every_document_with_its_end(kit, corpus):
    tokens, tokenizer = written(kit, corpus), kit.tokenizer()
    texts = [p.read_text(encoding="utf-8") for p in sorted(corpus.glob("*.txt"))]
    wanted = [[*tokenizer.encode(text), EOS] for text in texts]
    assert [tokens.document(i).tolist() for i in range(len(texts))] == wanted
    assert tokens.tokens.dtype == np.uint16
    assert len(tokens) == sum(map(len, wanted))
    assert tokens.n_bytes == sum(len(text.encode()) for text in texts)
    tokens.verify()
    about = json.loads((corpus.parent / "corpus.tokens.json").read_text(encoding="utf-8"))
    assert about["tokens"] == len(tokens)
    assert about["tokenizer"].startswith("sha256:")


def test_lines_may_be_documents(kit, tmp_path):
    (tmp_path / "lines.txt").write_text("the cat\r\n\n  \na dog ran\n", encoding="utf-8")
    tokenizer = kit.tokenizer()
    tokens = write_tokens(tmp_path / "lines.txt", tokenizer, "l.tokens", documents="line")
    assert [tokens.document(i).tolist() for i in range(len(tokens.starts))] == [
        tokenizer.encode("the cat"), tokenizer.encode("a dog ran"),
    ]  # fmt: skip


def test_a_large_vocabulary_takes_wider_ids(kit, tmp_path, monkeypatch):
    tokenizer = kit.tokenizer()
    monkeypatch.setattr(type(tokenizer), "vocab_size", 70_000)
    (tmp_path / "a.txt").write_text("the cat", encoding="utf-8")
    tokens = write_tokens([tmp_path / "a.txt"], tokenizer, "wide.tokens", eos_id=69_999)
    assert tokens.tokens.dtype == np.uint32
    assert tokens.tokens[-1] == 69_999


def test_a_corpus_is_written_once_and_another_is_refused(kit, corpus, tmp_path):
    first = written(kit, corpus)
    content = (tmp_path / "corpus.tokens").stat().st_mtime_ns
    assert written(kit, corpus).digest == first.digest
    assert (tmp_path / "corpus.tokens").stat().st_mtime_ns == content
    with pytest.raises(ValueError, match="holds another corpus"):
        written(kit, corpus, eos_id=None)
    (corpus / "more.txt").write_text("more", encoding="utf-8")
    with pytest.raises(ValueError, match="holds another corpus"):
        written(kit, corpus)
    other = kit.tokenizer("other.json", byte_level=True)
    with pytest.raises(ValueError, match="was written by another tokenizer"):
        TokenFile.open("corpus.tokens", other)


def test_a_damaged_file_is_refused(kit, corpus, tmp_path):
    tokens, path = written(kit, corpus), tmp_path / "corpus.tokens"
    data = bytearray(path.read_bytes())
    data[3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="its digest differs"):
        TokenFile.open(path).verify()
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="damaged or of another corpus"):
        TokenFile.open(path)
    (tmp_path / "corpus.tokens.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="does not describe a token file"):
        TokenFile.open(path)
    assert len(tokens)


@pytest.mark.parametrize(
    ("sources", "options", "error", "message"),
    [
        (["absent.txt"], {}, FileNotFoundError, "no file or folder 'absent.txt'"),
        (["empty"], {}, ValueError, "no text files"),
        ([], {}, ValueError, "no text files to read"),
        (["blank.txt"], {}, ValueError, "hold no text"),
        (["latin.txt"], {}, ValueError, "latin.txt is not UTF-8"),
        (["good.txt"], {"eos_id": 999}, ValueError, "below the 76 tokens"),
        (["good.txt"], {"documents": "page"}, ValueError, "file, line"),
    ],
)
def test_what_cannot_be_written_leaves_no_file(kit, tmp_path, sources, options, error, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "blank.txt").write_text("", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"na\xefve text")
    (tmp_path / "good.txt").write_text("the", encoding="utf-8")
    with pytest.raises(error, match=message):
        write_tokens(sources, kit.tokenizer(), "c.tokens", **options)
    assert not list(tmp_path.glob("c.tokens*"))


def test_memory_does_not_grow_with_the_corpus(kit, tmp_path):
    tokenizer, peaks = kit.tokenizer(), []
    for size in (200, 1600):
        path = tmp_path / f"{size}.txt"
        path.write_text((kit.texts[0] + "\n") * size * 100, encoding="utf-8")
        tracemalloc.start()
        write_tokens([path], tokenizer, f"{size}.tokens")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 2 * peaks[0] + (40 << 20)


def test_folders_are_read_in_the_order_of_names(corpus):
    names = [path.name for path in text_files([corpus])]
    assert names == sorted(names)
    assert "skipped.bin" not in names


# Packing --------------------------------------------------------------------------------------


class Made:
    """A token file in memory: documents of these lengths, ids that say where they stand."""

    def __new__(cls, lengths):
        starts = np.cumsum([0, *lengths[:-1]]).astype("<u8")
        tokens = np.arange(sum(lengths), dtype="<u2") % 30
        return TokenFile(
            path="made", tokens=tokens, starts=starts, n_bytes=1, eos_id=None, vocab_size=30,
            tokenizer="t", sources="s", digest=f"d{lengths}",
        )  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 8))
def test_every_token_is_an_input_once_and_every_follower_in_its_document_a_target_once(
    lengths, length
):
    made = Made(lengths)
    document = np.repeat(np.arange(len(lengths)), lengths)
    for separate in (True, False):
        packed = PackedTokens(made, length, separate=separate)
        batch = packed.batch(range(len(packed)))
        flat = batch["input_ids"].flatten()[: len(made)].tolist()
        assert flat == made.tokens.tolist()
        wanted = [
            int(made.tokens[i + 1])
            if i + 1 < len(made) and (not separate or document[i] == document[i + 1])
            else -100
            for i in range(len(made))
        ]
        assert batch["targets"].flatten()[: len(made)].tolist() == wanted
        assert (batch["targets"].flatten()[len(made) :] == -100).all()
        if separate:
            numbers = batch["documents"]
            for row in range(len(packed)):
                held = document[row * length : (row + 1) * length]
                assert numbers[row, : len(held)].tolist() == (held - held[0]).tolist()
        else:
            assert "documents" not in batch


def test_the_loss_of_packed_rows_is_that_of_the_documents_alone(kit, corpus):
    model, tokens = kit.model(context=512), written(kit, corpus)
    packed = PackedTokens(tokens, len(tokens))
    lm = CausalLMTask(vocab_size=76, alignment="pre_shifted")
    alone = CausalLMTask(vocab_size=76)
    rows = [tokens.document(i) for i in range(len(tokens.starts))]

    class Context:
        pass

    def nll(task, batches):
        Context.model, Context.val_loader = model, batches
        return task.eval_step()(Context)

    one = nll(lm, [packed.batch([0])])
    each = nll(alone, [torch.tensor(row.astype(np.int64))[None] for row in rows])
    assert one.count == each.count == len(tokens) - len(rows)
    assert one.loss == pytest.approx(each.loss, rel=1e-6)


def test_a_part_is_kept_to_validate(kit):
    packed = PackedTokens(Made([50, 50]), 8)
    train, val = packed.split(0.25)
    assert (len(train), len(val), len(packed)) == (10, 3, 13)
    assert torch.equal(val[0]["input_ids"], packed[10]["input_ids"])
    with pytest.raises(ValueError, match="cannot be split"):
        PackedTokens(Made([5]), 8).split(0.1)
    with pytest.raises(ValueError, match="not among the 13"):
        PackedTokens(Made([50, 50]), 8, last=14)


def collected(loader):
    return [batch["input_ids"] for batch in loader]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_processes_share_the_windows_without_overlap_or_loss(monkeypatch, world):
    packed = PackedTokens(Made([101]), 4)
    seen, sizes = [], set()
    for rank in range(world):
        monkeypatch.setattr("nnx.lm.packing.rank_and_world", lambda rank=rank: (rank, world))
        loader = PackedLoader(packed, 2, seed=3)
        loader.set_epoch(1)
        batches = list(loader)
        sizes.add((len(batches), sum(len(b["targets"]) for b in batches)))
        for batch in batches:
            for ids, targets in zip(batch["input_ids"], batch["targets"]):
                if (targets != -100).any() or ids.any():
                    seen.append(tuple(ids.tolist()))
    windows = [tuple(packed[i]["input_ids"].tolist()) for i in range(len(packed))]
    assert sorted(seen) == sorted(windows)
    assert len(sizes) == 1


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_change_no_batch_and_a_position_is_gone_on_from(workers):
    packed = PackedTokens(Made([200]), 4)
    whole = collected(PackedLoader(packed, 3, seed=1))
    loader = PackedLoader(packed, 3, seed=1, workers=workers)
    assert all(torch.equal(a, b) for a, b in zip(whole, collected(loader)))
    reading = iter(loader)
    for _ in range(5):
        next(reading)
    state = loader.state_dict()
    other = PackedLoader(packed, 3, seed=1, workers=3 - workers)
    other.load_state_dict(state)
    rest = collected(other)
    assert len(rest) == len(whole) - 5
    assert all(torch.equal(a, b) for a, b in zip(whole[5:], rest))
    assert len(collected(other)) == len(whole)  # the next epoch is whole again
    for different in (PackedLoader(packed, 4, seed=1), PackedLoader(packed, 3, seed=2)):
        with pytest.raises(ValueError, match="position is of other batches"):
            different.load_state_dict(state)


def test_epochs_are_orders_of_their_own_and_draw_nothing(kit):
    loader = PackedLoader(PackedTokens(Made([200]), 4), 50)
    before = torch.get_rng_state()
    first = collected(loader)[0]
    loader.set_epoch(1)
    second = collected(loader)[0]
    assert not torch.equal(first, second)
    assert torch.equal(first.sort(dim=0).values, second.sort(dim=0).values)
    assert torch.equal(torch.get_rng_state(), before)


class Killed(BaseException):
    pass


class KillAt(Callback):
    def __init__(self, update):
        self.update = update

    def on_optimizer_update(self, ctx, event):
        if event.update_idx + 1 == self.update:
            raise Killed


def test_a_run_killed_inside_an_epoch_continues_bit_for_bit_with_other_workers(kit, corpus):
    tokens = written(kit, corpus)

    def fit(model, *, workers, n_epochs=2, callbacks=(), **resume):
        lm = CausalLMTask(vocab_size=76, alignment="pre_shifted")
        loader = PackedLoader(PackedTokens(tokens, 16), 2, seed=4, workers=workers)
        params = NNTrainParams(
            n_epochs=n_epochs, seed=3, train_loader=loader, checkpoint_every=1,
            optim=NNOptimParams.builder().adamw(max_lr=1e-3).accumulate_grad(2).build(), **resume,
        )  # fmt: skip
        return model.train(params, objective=lm.objective(), callbacks=list(callbacks))

    whole = kit.model(drop=0.1)
    fit(whole, workers=0)
    killed = kit.model(drop=0.1)
    with pytest.raises(Killed):
        fit(killed, workers=3, callbacks=[KillAt(7)], data_id="killed")
    run = next(run for run in NNRun.all() if run.train.data_id == "killed")
    again = kit.model(seed=99, drop=0.1)
    fit(again, workers=1, resume_from_run_id=run.id, resume_epochs="planned")
    for name, weight in whole.net.state_dict().items():
        assert torch.equal(weight, again.net.state_dict()[name]), name
