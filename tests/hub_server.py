"""A local Hugging Face hub server: repositories with commits, large files and tags."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_a_test"
_RESOLVE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
_API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit|tag)/([^/?]+))?")


@dataclass
class Repository:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def find(self, revision: str) -> str | None:
        commit = self.refs.get(revision, revision)
        return commit if commit in self.commits else None


class Hub(ThreadingHTTPServer):
    """Repositories by (kind, name). `cut_after`: interrupt the next download after this number of bytes."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.large: dict[str, bytes] = {}
        self.sent: list[tuple[str, int]] = []
        self.cut_after: int | None = None
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


def _wrong_base(card: str) -> list[dict[str, str]]:
    """Return the hub's response to an invalid `base_model` (huggingface/transformers#32212)."""
    named = re.search(r"^base_model: (.*)$", card.split("---")[1], re.MULTILINE)
    if named is None or re.fullmatch(r"[\w.-]+/[\w.-]+", named[1]):
        return []
    return [
        {"message": f'"base_model" with value "{named[1]}" is not valid. Use a model id from https://hf.co/models.'}
    ]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := _RESOLVE.fullmatch(path):
            return self._file("dataset" if found[1] else "model", *found.group(2, 3, 4))
        found = _API.fullmatch(path)
        if found is None:
            return self._json(404, {"error": "no such page"})
        repository = self.server.repositories.get((found[1], found[2]))
        if repository is None:
            return self._json(404, {"error": "none"}, {"X-Error-Code": "RepoNotFound"})
        commit = repository.find(found[4] or "main")
        if commit is None:
            return self._json(404, {"error": "none"}, {"X-Error-Code": "RevisionNotFound"})
        files = repository.commits[commit]
        if found[3] == "tree":
            return self._json(200, [self._entry(name, content) for name, content in sorted(files.items())])
        self._json(200, {"id": found[2], "sha": commit, "siblings": [{"rfilename": name} for name in sorted(files)]})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if path == "/api/validate-yaml":
            wrong = _wrong_base(json.loads(body)["content"])
            return self._json(400 if wrong else 200, {"errors": wrong, "warnings": []})
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json(401, {"error": "who are you?"})
        if path == "/api/repos/create":
            told = json.loads(body)
            name = f"{told['organization']}/{told['name']}" if told.get("organization") else told["name"]
            key = (told.get("type", "model"), name)
            code = 409 if key in self.server.repositories else 200
            self.server.repositories.setdefault(key, Repository({"0" * 40: {}}, {"main": "0" * 40}))
            return self._json(code, {"url": f"{self.server.url}/{name}", "name": name})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._json(200, {"objects": [self._ticket(one) for one in json.loads(body)["objects"]]})
        found = _API.fullmatch(path)
        assert found, path
        repository = self.server.repositories[found[1], found[2]]
        if found[3] == "preupload":
            large = {True: "lfs", False: "regular"}
            files = json.loads(body)["files"]
            modes = [{"path": f["path"], "uploadMode": large[f["size"] > 4096], "shouldIgnore": False} for f in files]
            return self._json(200, {"files": modes})
        if found[3] == "tag":
            told = json.loads(body)
            if told["tag"] in repository.refs:
                return self._json(409, {"error": "there is such a tag"})
            repository.refs[told["tag"]] = repository.find(found[4]) or ""
            return self._json(200, {})
        assert found[3] == "commit"
        oid = self._commit(repository, found[4], body)
        self._json(200, {"commitUrl": f"{self.server.url}/{found[2]}/commit/{oid}", "commitOid": oid})

    def do_PUT(self) -> None:
        content = self._body()
        assert hashlib.sha256(content).hexdigest() == self.path.rpartition("/")[2]
        self.server.large[self.path.rpartition("/")[2]] = content
        self._json(200, {})

    def do_DELETE(self) -> None:
        found = _API.fullmatch(unquote(self.path))
        assert found
        assert found[3] == "tag"
        gone = self.server.repositories[found[1], found[2]].refs.pop(found[4], None)
        self._json(200 if gone else 404, {})

    def _commit(self, repository: Repository, branch: str, body: bytes) -> str:
        files = dict(repository.commits[repository.refs[branch]])
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        oid = hashlib.sha1(body + repository.refs[branch].encode()).hexdigest()
        repository.commits[oid], repository.refs[branch] = files, oid
        return oid

    def _ticket(self, one: dict[str, Any]) -> dict[str, Any]:
        known = one["oid"] in self.server.large
        place = {"upload": {"href": f"{self.server.url}/lfs/{one['oid']}"}}
        return {"oid": one["oid"], "size": one["size"], **({} if known else {"actions": place})}

    def _entry(self, name: str, content: bytes) -> dict[str, Any]:
        entry = {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
        oid = hashlib.sha256(content).hexdigest()
        return entry | ({"lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if len(content) > 4096 else {})

    def _file(self, kind: str, name: str, revision: str, path: str) -> None:
        repository = self.server.repositories[kind, name]
        commit = repository.find(revision)
        assert commit is not None
        content = repository.commits[commit][path]
        digest = hashlib.sha256 if len(content) > 4096 else hashlib.sha1
        start = int(re.sub(r"\D", "", (self.headers.get("Range") or "0").partition("-")[0]) or 0)
        headers = {"ETag": f'"{digest(content).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        rest = content[start:]
        self.send_response(206 if start else 200)
        for key, value in {**headers, "Content-Length": str(len(rest))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.server.cut_after is not None and len(rest) > self.server.cut_after:
            rest, self.server.cut_after, self.close_connection = rest[: self.server.cut_after], None, True
        self.server.sent.append((path, len(rest)))
        self.wfile.write(rest)

    def _body(self) -> bytes:
        if "chunked" not in (self.headers.get("Transfer-Encoding") or ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _json(self, code: int, content: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self.send_response(code)
        for key, value in {"Content-Type": "application/json", "Content-Length": len(body), **(headers or {})}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
