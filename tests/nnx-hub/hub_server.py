"""A Hub on 127.0.0.1: repositories in memory, behind the protocol that huggingface_hub speaks."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit


class Hub:
    """Commits by id, branches by name, LFS objects by digest; ``fail_at`` breaks one request."""

    def __init__(self) -> None:
        self.repos: dict[str, dict] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail_at: int | None = None
        self.after_info = None  # called once after a repository's state was told
        self.after_file = None  # called once after a file was sent
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def create(self, name: str) -> None:
        first = _sha(b"first")
        self.repos.setdefault(
            name, {"commits": {first: {}}, "branches": {"main": first}, "log": []}
        )

    def files(self, name: str, revision: str = "main") -> dict[str, bytes] | None:
        repo = self.repos[name]
        return repo["commits"].get(repo["branches"].get(revision, revision))

    def head(self, name: str, branch: str = "main") -> str:
        return self.repos[name]["branches"][branch]


def _sha(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunked()
        path = unquote(urlsplit(self.path).path)
        if path.startswith(("/break/", "/state", "/forget", "/left")):
            self.control(path)
            return
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.fail_at is not None:
            self.hub.fail_at -= 1
            if self.hub.fail_at < 0:
                self.hub.fail_at = None
                self.reply(400, {"error": "broken on purpose"})
                return
        for method, pattern, act in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method.split("|"):
                act(self, body, *found.groups())
                return
        self.reply(404, {"error": f"no route {self.command} {path}"})

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer

    def _chunked(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline().strip() or b"0", 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def control(self, path: str) -> None:
        """What a test asks of the Hub itself."""
        hub = self.hub
        if path.startswith("/break/"):
            hub.fail_at = int(path.rpartition("/")[2])
        if path == "/forget":
            hub.repos.clear()
            hub.lfs.clear()
            hub.fail_at = None
        if path == "/left":  # how many more requests would have passed; -1: one was broken
            left, hub.fail_at = -1 if hub.fail_at is None else hub.fail_at, None
            self.reply(200, data=str(left).encode())
            return
        self.reply(200, data=str(sum(len(r["log"]) for r in hub.repos.values())).encode())

    def reply(self, status: int, value=None, data: bytes | None = None, **headers: str) -> None:
        content = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        if name in self.hub.repos:
            self.reply(409, {"url": f"{self.hub.url}/{name}", "error": "exists"})
            return
        self.hub.create(name)
        self.reply(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def validate(self, body: bytes) -> None:
        self.reply(200, {"errors": [], "warnings": []})

    def info(self, body: bytes, name: str, revision: str | None = None) -> None:
        files = self.hub.files(name, revision or "main") if name in self.hub.repos else None
        if files is None:
            self.reply(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
            return
        sha = self.hub.repos[name]["branches"].get(revision or "main", revision)
        siblings = [{"rfilename": f} for f in files]
        self.reply(200, {"id": name, "modelId": name, "sha": sha, "siblings": siblings, "tags": []})
        if self.hub.after_info is not None:
            act, self.hub.after_info = self.hub.after_info, None
            act()

    def tree(self, body: bytes, name: str, revision: str, *_: str) -> None:
        found = self.hub.files(name, revision) or {}
        self.reply(
            200,
            [{"type": "file", "path": p, "size": len(d), "oid": _sha(d)} for p, d in found.items()],
        )

    def preupload(self, body: bytes, name: str, revision: str) -> None:
        files = [
            {
                "path": f["path"],
                "uploadMode": "lfs" if f["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for f in json.loads(body)["files"]
        ]
        self.reply(200, {"files": files})

    def batch(self, body: bytes, name: str) -> None:
        objects = [
            {
                **o,
                "authenticated": True,
                "actions": {"upload": {"href": f"{self.hub.url}/lfs/{o['oid']}"}},
            }
            for o in json.loads(body)["objects"]
        ]
        self.reply(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.lfs[oid] = body
        self.reply(200, {})

    def commit(self, body: bytes, name: str, branch: str) -> None:
        repo = self.hub.repos[name]
        lines = [json.loads(line) for line in body.splitlines()]
        header = next(line["value"] for line in lines if line["key"] == "header")
        parent = header.get("parentCommit")
        if parent is not None and parent != repo["branches"][branch]:
            self.reply(412, {"error": "the branch has moved on"})
            return
        files = dict(repo["commits"][repo["branches"][branch]])
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"])
        oid = _sha(body + str(len(repo["commits"])).encode())
        url = f"{self.hub.url}/{name}"
        answer = {"commitUrl": f"{url}/commit/{oid}", "commitOid": oid}
        if "create_pr=1" in urlsplit(self.path).query:
            number = sum(b.startswith("refs/pr/") for b in repo["branches"]) + 1
            branch, answer["pullRequestUrl"] = f"refs/pr/{number}", f"{url}/discussions/{number}"
        repo["commits"][oid] = files
        repo["branches"][branch] = oid
        repo["log"].append(header)
        self.reply(200, answer)

    def branch(self, body: bytes, name: str, branch: str) -> None:
        branches = self.hub.repos[name]["branches"]
        status = 409 if branch in branches else 200
        branches.setdefault(branch, branches["main"])
        self.reply(status, {"error": "exists"} if status == 409 else {})

    def resolve(self, body: bytes, name: str, revision: str, path: str) -> None:
        files = self.hub.files(name, revision) if name in self.hub.repos else None
        if files is None or path not in files:
            code = "EntryNotFound" if files is not None else "RepoNotFound"
            self.reply(404, {"error": "not found"}, X_Error_Code=code)
            return
        sha = self.hub.repos[name]["branches"].get(revision, revision)
        self.reply(200, data=files[path], ETag=f'"{_sha(files[path])}"', X_Repo_Commit=sha)
        if self.command == "GET" and self.hub.after_file is not None:
            act, self.hub.after_file = self.hub.after_file, None
            act()


_NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    ("POST", "/api/repos/create", _Handler.create),
    ("POST", "/api/validate-yaml", _Handler.validate),
    ("GET", rf"/api/models/{_NAME}/revision/(.+)", _Handler.info),
    ("GET", rf"/api/models/{_NAME}", _Handler.info),
    ("GET", rf"/api/models/{_NAME}/tree/([\w.-]+|refs/pr/\d+)(/.*)?", _Handler.tree),
    ("POST", rf"/api/models/{_NAME}/preupload/([\w.-]+)", _Handler.preupload),
    ("POST", rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/lfs/(\w+)", _Handler.put),
    ("POST", rf"/api/models/{_NAME}/commit/([\w.-]+)", _Handler.commit),
    ("POST", rf"/api/models/{_NAME}/branch/([\w.-]+)", _Handler.branch),
    ("GET|HEAD", rf"/{_NAME}/resolve/([\w.-]+|refs/pr/\d+)/(.+)", _Handler.resolve),
)
