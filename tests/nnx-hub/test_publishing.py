"""Pushes and pulls with the real client, against a Hub on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from hub_server import Hub

MODEL = """
import os, torch
from nnx import *
from torch.utils.data import DataLoader, TensorDataset

def model():
    torch.manual_seed(0)
    net = NNParams(input_dim=6, output_dim=3, hidden_dims=[8], dropout_prob=0.2)
    return NNModel(net, NNModelParams(net=Nets.FEED_FWD, loss=Losses.CROSS_ENTROPY))

draw = torch.Generator().manual_seed(1)
data = TensorDataset(torch.randn(40, 6, generator=draw), torch.randint(0, 3, (40,), generator=draw))

def params(epochs):
    return NNTrainParams(n_epochs=epochs, seed=3, train_loader=DataLoader(data, batch_size=8, shuffle=True))
"""


@pytest.fixture
def hub():
    hub = Hub()
    yield hub
    hub.close()


@pytest.fixture
def client(hub, tmp_path):
    """Run a script whose huggingface_hub talks to the Hub; what it printed."""

    def client(script, folder="work", command=()):
        (tmp_path / folder).mkdir(exist_ok=True)
        call = ["-m", "nnx", *command] if command else ["-c", MODEL + textwrap.dedent(script)]
        done = subprocess.run(
            [sys.executable, *call],
            cwd=tmp_path / folder, capture_output=True, text=True, timeout=200,
            env={
                **os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"),
                "HF_TOKEN": "hf_test", "HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1",
                "NNX_TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
                "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1",
            },
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    return client


def test_a_model_is_one_commit_and_is_loaded_by_its_revision(hub, client):
    out = client(
        """
        import nnx.hub
        m = model()
        first = m.push_to_hub("me/mine")
        torch.nn.init.zeros_(m.net.layers[0].weight)
        m.push_to_hub("me/mine", commit_message="again")
        old = NNModel.from_pretrained("me/mine", revision=first.oid)
        new = NNModel.from_pretrained("me/mine")
        print(float(new.net.layers[0].weight.abs().sum()), float(old.net.layers[0].weight.abs().sum()) > 0)
        print(torch.equal(old.net.layers[1].weight, model().net.layers[1].weight))
        print(nnx.hub.inspect_pretrained("me/mine").parameters)
        """
    )
    assert out.split() == ["0.0", "True", "True", "83"]
    assert sorted(hub.files("me/mine")) == ["README.md", "config.json", "model.safetensors"]
    log = hub.repos["me/mine"]["log"]
    assert [entry["summary"] for entry in log] == ["Push model using huggingface_hub.", "again"]
    assert all(entry["parentCommit"] for entry in log)


def test_a_push_in_between_is_not_overwritten(hub, client):
    hub.create("me/mine")

    def move_on():
        repo = hub.repos["me/mine"]
        repo["commits"]["c" * 40] = {"theirs": b""}
        repo["branches"]["main"] = "c" * 40

    hub.after_info = move_on
    out = client(
        """
        from huggingface_hub.errors import HfHubHTTPError
        try:
            model().push_to_hub("me/mine")
        except HfHubHTTPError as error:
            print(error.response.status_code)
        """
    )
    assert out.strip() == "412"
    assert hub.files("me/mine") == {"theirs": b""}


def test_a_push_that_fails_at_any_request_can_be_repeated(hub, client):
    """The number of requests is that of a whole push; each of them fails once."""
    client('model().push_to_hub("me/mine")')
    whole = len(hub.requests)
    assert whole >= 5
    hub.repos.clear()
    hub.lfs.clear()
    script = """
        from huggingface_hub.errors import HfHubHTTPError
        import urllib.request
        for n in range(WHOLE):
            urllib.request.urlopen(os.environ["HF_ENDPOINT"] + f"/break/{n}").read()
            failed = False
            try:
                model().push_to_hub("me/mine")
            except (HfHubHTTPError, OSError, ValueError, RuntimeError):
                failed = True
            kept = urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/state").read().decode()
            if failed:
                model().push_to_hub("me/mine")
            urllib.request.urlopen(os.environ["HF_ENDPOINT"] + "/forget").read()
            print(n, failed, kept)
        """.replace("WHOLE", str(whole))
    out = client(script)
    rows = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert len(rows) == whole
    assert sum(row[1] == "True" for row in rows) >= 4
    # Half a push is never seen: after a failure there is no commit at all.
    assert all(row[2] == "0" for row in rows if row[1] == "True")


def test_a_training_continues_elsewhere_from_a_revision(hub, client):
    out = client(
        """
        from nnx.hub import push_run
        run = model().train(params(2))
        print("pushed", push_run(run.id, "me/run").oid)
        print("whole", model().train(params(4)).idps[-1].train_edp.loss.hex())
        """
    )
    pushed, whole = (line.split()[1] for line in out.splitlines() if line.startswith(("p", "w")))
    out = client(
        f"""
        from nnx.bundles import reconstruct_bundle
        from nnx.hub import pull_run
        info = pull_run("me/run", "here", revision="{pushed}")
        assert info.verified and not os.path.exists("runs")
        run = reconstruct_bundle("here").resume(params(2))
        print("resumed", run.idps[-1].train_edp.loss.hex())
        """,
        folder="elsewhere",
    )
    assert f"resumed {whole}" in out


def test_a_pushed_run_has_a_card_that_a_pull_does_not_need(hub, client):
    out = client(
        """
        from nnx.hub import pull_run, push_run
        run = model().train(params(1))
        push_run(run.id, "me/run", checkpoint="first")
        push_run(run.id, "me/run")
        pull_run("me/run", "here")
        print(run.id, sorted(os.listdir("here"))[0], len(os.listdir("here")))
        """
    )
    run, first, count = out.split()[-3:]
    assert (first, count) == ("bundle.json", "2")
    files = hub.files("me/run")
    card = files["README.md"].decode()
    assert f"| run | {run} |" in card
    assert "| checkpoint | last, epoch 0 |" in card
    assert "| parameters | 83 |" in card
    assert 'pull_run("me/run", "here")' in card
    assert len({name.split("/")[0] for name in files if name.startswith("g-")}) == 1


def test_a_pulled_run_that_was_tampered_with_is_not_left(hub, client):
    client(
        """
        from nnx.hub import push_run
        push_run(model().train(params(1)).id, "me/run")
        """
    )
    files = hub.files("me/run")
    name = next(n for n in files if n.endswith("model.safetensors"))
    files[name] = files[name][:-1] + b"\x01"
    out = client(
        """
        from nnx.bundles import BundleIntegrityError
        from nnx.hub import pull_run
        try:
            pull_run("me/run", "here")
        except BundleIntegrityError as error:
            print("SHA-256" in str(error), os.listdir("."))
        """,
        folder="elsewhere",
    )
    assert out.split() == ["True", "[]"]


# -- what a push is made of ----------------------------------------------------------------


def test_a_pull_request_leaves_the_branch_as_it_is(hub, client):
    out = client(
        """
        m = model()
        m.push_to_hub("me/mine")
        torch.nn.init.zeros_(m.net.layers[0].weight)
        done = m.push_to_hub("me/mine", create_pr=True)
        print("pr", done.pr_url, done.pr_revision)
        proposed = NNModel.from_pretrained("me/mine", revision=done.oid).net.layers[0].weight
        current = NNModel.from_pretrained("me/mine").net.layers[0].weight
        print("sums", float(proposed.abs().sum()), float(current.abs().sum()) > 0)
        m.push_to_hub("me/mine", branch="next")
        print("next", float(NNModel.from_pretrained("me/mine", revision="next").net.layers[0].weight.abs().sum()))
        """
    )
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()}
    assert rows["pr"] == [f"{hub.url}/me/mine/discussions/1", "refs/pr/1"]
    assert rows["sums"] == ["0.0", "True"]
    assert rows["next"] == ["0.0"]
    assert sorted(hub.repos["me/mine"]["branches"]) == ["main", "next", "refs/pr/1"]


def test_a_push_between_two_files_mixes_no_versions(hub, client):
    """The configuration is of one commit; the branch then moves on; the weights are of the same."""
    client('model().push_to_hub("me/mine")')
    repo = hub.repos["me/mine"]

    def move_on():
        files = dict(hub.files("me/mine"))
        files["model.safetensors"] = b"of another net"
        repo["commits"]["d" * 40] = files
        repo["branches"]["main"] = "d" * 40

    hub.after_file = move_on
    out = client(
        'print(torch.equal(NNModel.from_pretrained("me/mine").net.layers[0].weight, model().net.layers[0].weight))'
    )
    assert out.strip() == "True"
    assert hub.head("me/mine") == "d" * 40


def test_only_config_and_weights_are_downloaded(hub, client):
    client('model().push_to_hub("me/mine")')
    repo = hub.repos["me/mine"]
    repo["commits"][hub.head("me/mine")]["pytorch_model.bin"] = b"\x80\x04."
    hub.requests.clear()
    client('NNModel.from_pretrained("me/mine")')
    asked = {request.rpartition("/")[2] for request in hub.requests if "/resolve/" in request}
    assert asked == {"config.json", "model.safetensors"}
    del repo["commits"][hub.head("me/mine")]["model.safetensors"]
    out = client(
        """
        from huggingface_hub.errors import EntryNotFoundError
        try:
            NNModel.from_pretrained("me/mine", force_download=True)
        except EntryNotFoundError:
            print("no weights, and no pickle instead of them")
        """
    )
    assert out.strip() == "no weights, and no pickle instead of them"


def test_runs_pushed_and_pulled_with_any_failing_request(hub, client):
    """A push is repeated until it is whole; a pull leaves no folder until it is."""
    script = """
        import urllib.request
        from huggingface_hub.errors import HfHubHTTPError
        from nnx.hub import pull_run, push_run
        control = lambda path: urllib.request.urlopen(os.environ["HF_ENDPOINT"] + path).read().decode()
        run = model().train(params(1))

        def tried(action, n):
            control(f"/break/{n}")
            try:
                action()
            except (HfHubHTTPError, OSError, ValueError, RuntimeError):
                return False
            return True

        n, failures = 0, 0
        while True:
            control("/forget")
            whole = tried(lambda: push_run(run.id, "me/run"), n)
            left = int(control("/left"))
            if whole and left >= 0:
                break
            if not whole:
                assert control("/state") == "0", n
                failures += 1
                push_run(run.id, "me/run")
            n += 1
        print("push", n, failures)
        n = failures = 0
        while True:
            os.environ["HF_HUB_CACHE"] = cache = f"cache-{n}"
            whole = tried(lambda: pull_run("me/run", f"pulled-{n}", cache_dir=cache), n)
            if whole and int(control("/left")) >= 0:
                break
            if not whole:
                assert not [f for f in os.listdir(".") if f.startswith((f"pulled-{n}", ".pulled"))]
                failures += 1
                assert pull_run("me/run", f"pulled-{n}", cache_dir=cache).verified
            n += 1
        print("pull", n, failures)
        """
    rows = {
        line.split()[0]: line.split()[1:]
        for line in client(script).splitlines()
        if line.startswith("pu")
    }
    assert int(rows["push"][1]) >= 5
    assert int(rows["pull"][1]) >= 5


def test_a_pull_onto_a_failing_disk_leaves_nothing_or_the_whole(hub, client):
    script = """
        import sys
        sys.path.insert(0, TESTS)
        from failing_disk import FAULTS, FailingDisk
        from nnx.bundles import validate_bundle
        from nnx.hub import pull_run, push_run
        from nnx.utils import files
        push_run(model().train(params(1)).id, "me/run")
        real = files.disk

        def pulled(disk):
            files.disk = disk
            try:
                pull_run("me/run", "here")
            except (OSError, KeyboardInterrupt) as error:
                return error
            finally:
                files.disk = real

        counted = FailingDisk()
        assert pulled(counted) is None
        for fault in ("full", "broken", "interrupted"):
            for at in range(1, len(counted.done) + 1):
                shutil.rmtree("here", ignore_errors=True)
                before = set(os.listdir("."))
                error = pulled(FailingDisk(at, FAULTS[fault]))
                if os.path.exists("here"):
                    assert validate_bundle("here").verified
                elif counted.done[at - 1] not in ("unlink", "rmdir"):
                    assert error is not None and set(os.listdir(".")) == before, counted.done[at - 1]
        print("done", len(counted.done))
        """.replace("TESTS", repr(os.path.dirname(os.path.dirname(__file__))))
    out = client("import shutil\n" + textwrap.dedent(script))
    assert int(out.split()[-1]) > 20


# -- the commands --------------------------------------------------------------------------


def test_a_run_is_pushed_pulled_and_continued_by_commands(hub, client, tmp_path):
    (tmp_path / "work").mkdir()
    out = client(
        """
        run = model().train(params(2))
        print("run", run.id)
        print("whole", model().train(params(3)).idps[-1].train_edp.loss.hex())
        """
    )
    rows = {
        line.split()[0]: line.split()[1]
        for line in out.splitlines()
        if line.startswith(("run ", "whole "))
    }
    pushed = client("", command=("hub", "push", rows["run"][:10], "me/run")).strip()
    assert pushed == f"me/run: {hub.head('me/run')}"
    proposed = client("", command=("hub", "push", rows["run"], "me/run", "--pull-request")).strip()
    assert proposed == f"me/run: {hub.url}/me/run/discussions/1"
    out = client("", "there", ("hub", "pull", "me/run", "bundle", "--revision", pushed.split()[1]))
    assert out.startswith(f"bundle: run {rows['run'][:12]}, epoch 1, ")
    (tmp_path / "there" / "mine.py").write_text(MODEL + "def more(info):\n    return params(1)\n")
    client("", "there", ("bundle", "resume", "bundle", "mine.py:more", "--quiet"))
    out = client(
        "print('loss', next(NNRun.load(r).idps[-1].train_edp.loss.hex() for r in os.listdir('runs') if len(r) == 32))",
        "there",
    )
    assert f"loss {rows['whole']}" in out


def test_a_refused_pull_is_one_line(hub, client, tmp_path):
    hub.create("me/run")
    (tmp_path / "work" / "there").mkdir(parents=True)
    with pytest.raises(
        AssertionError, match="nnx: .*there is there already; pull into a new folder"
    ):
        client("", command=("hub", "pull", "me/run", "there"))
    with pytest.raises(AssertionError, match=r"bundle.json"):
        client("", command=("hub", "pull", "me/run", "new"))
    assert os.listdir(tmp_path / "work") == ["there"]
