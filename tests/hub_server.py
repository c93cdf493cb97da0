"""A small server that speaks the part of the Hugging Face Hub's HTTP API that huggingface_hub uses for models.

Repositories live in memory. Large files go the LFS way, with a redirect to a "CDN" on another origin; there is no Xet.
Whatever a hub can do wrong is a `Fault`. Standard library only.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LARGE = 1_000_000
PIECE = 4096


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(name: str, content: bytes) -> bool:
    """As the .gitattributes of a new repository say."""
    return name.endswith(".safetensors") or len(content) > LARGE


@dataclass
class Repository:
    """`commits` are (id, files); the last one is main."""

    private: bool = False
    gated: bool = False
    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], message: str = "") -> str:
        before = self.commits[-1][1] if self.commits else {}
        oid = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits.append((oid, {**before, **files}))
        self.messages.append(message)
        return oid

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[-1][1]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        if revision == "main":
            return self.commits[-1]
        return next((commit for commit in self.commits if commit[0] == revision), None)


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose "METHOD /path" matches `where`.

    Args:
        status: answer with this instead.
        cut: end the connection after so many bytes of the content.
        slow: seconds for each piece of 4 KB.
        corrupt: the content's first byte is another one.
        no_range: the request's range is ignored.
        least: requests for a range of fewer bytes are left alone.
    """

    where: str
    times: int = 1
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None
    slow: float = 0.0
    corrupt: bool = False
    no_range: bool = False
    least: int = 0


@dataclass
class Request:
    method: str
    path: str
    range: str
    token: str
    host: str
    sent: int = 0
    received: int = 0


class HubServer:
    """`repos` by id; `requests` are all that came, in order."""

    def __init__(self, token: str = "hf_right") -> None:
        self.token = token
        self.repos: dict[str, Repository] = {}
        self.lfs: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        hub = self

        class Handler(_Handler):
            server_state = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.cdn = f"http://localhost:{self.port}"

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def add(self, repo: str, folder: Path, **options: Any) -> str:
        """A repository with what a folder holds; returns its commit."""
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        self.repos[repo] = Repository(**options)
        return self.repos[repo].commit(files)

    def fault(self, where: str, **options: Any) -> Fault:
        self.faults.append(Fault(where, **options))
        return self.faults[-1]

    def take_fault(self, request: str, range_: str) -> Fault | None:
        start, end = map(int, re.findall(r"\d+", range_)) if re.fullmatch(r"bytes=\d+-\d+", range_) else (0, -1)
        with self.lock:
            for fault in self.faults:
                if fault.times > 0 and re.search(fault.where, request) and end - start + 1 >= fault.least:
                    fault.times -= 1
                    return fault
        return None

    def of(self, where: str) -> list[Request]:
        return [request for request in self.requests if re.search(where, f"{request.method} {request.path}")]

    def sent(self, where: str) -> int:
        return sum(request.sent for request in self.of(where))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: HubServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve()

    do_HEAD = do_POST = do_PUT = do_GET

    def _serve(self) -> None:
        hub = self.server_state
        url = urlsplit(self.path)  # a proxy is asked for whole addresses
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.request_ = Request(
            self.command, unquote(url.path), self.headers.get("Range", ""), token, url.netloc or self.headers["Host"]
        )
        self.body = self._read()
        self.request_.received = len(self.body)
        with hub.lock:
            hub.requests.append(self.request_)
        self.fault = hub.take_fault(f"{self.command} {self.request_.path}", self.request_.range)
        if self.fault and self.fault.status:
            self._json({"error": "a fault"}, self.fault.status, self.fault.headers)
            return
        for pattern, answer in ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {self.request_.path}"):
                answer(self, **match.groupdict())
                return
        self._error(404, "", f"no route for {self.command} {self.request_.path}")

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    # Answers

    def _json(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._content(json.dumps(value).encode(), status, {"Content-Type": "application/json", **(headers or {})})

    def _error(self, status: int, code: str, message: str) -> None:
        self._json({"error": message}, status, {"X-Error-Code": code, "X-Error-Message": message})

    def _content(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        fault = self.fault or Fault("")
        if fault.corrupt and content:
            content = bytes([content[0] ^ 1]) + content[1:]
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(content) if fault.cut is None else min(fault.cut, len(content))
        try:
            for start in range(0, end, PIECE):
                piece = content[start : min(start + PIECE, end)]
                time.sleep(fault.slow)
                self.request_.sent += len(piece)  # before it is: a test may look as soon as it has arrived
                self.wfile.write(piece)
        except OSError:  # the client is gone
            self.close_connection = True
        if fault.cut is not None:
            self.close_connection = True

    def _ranged(self, content: bytes, headers: dict[str, str]) -> None:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.request_.range)
        if not match or (self.fault and self.fault.no_range):
            self._content(content, 200, headers)
            return
        start, end = int(match[1]), min(int(match[2] or len(content) - 1) + 1, len(content))
        if start >= len(content):
            self._content(b"", 416, {"Content-Range": f"bytes */{len(content)}"})
            return
        self._content(content[start:end], 206, {**headers, "Content-Range": f"bytes {start}-{end - 1}/{len(content)}"})

    # What a token may

    def _repo(self, repo: str, write: bool = False) -> Repository | None:
        hub, token = self.server_state, self.request_.token
        found = hub.repos.get(repo)
        if token and token != hub.token:
            self._error(401, "", "Invalid credentials in Authorization header")
        elif found is None or (found.private and not token):
            self._error(404 if token else 401, "RepoNotFound", "Repository not found")
        elif write and not token:
            self._error(403, "", "You don't have the rights to write here")
        else:
            return found
        return None

    def _commit_at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        found = self._repo(repo)
        if not found:
            return None
        commit = found.at(revision)
        if not commit:
            self._error(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    # Reading

    def info(self, repo: str, revision: str | None = None) -> None:
        commit = self._commit_at(repo, revision or "main")
        if not commit:
            return
        siblings = []
        for name, content in commit[1].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_id(content)}
            if is_lfs(name, content):
                entry["lfs"] = {"sha256": sha256(content), "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        self._json({"id": repo, "sha": commit[0], "siblings": siblings, "private": False, "tags": [], "downloads": 0})

    def tree(self, repo: str, revision: str) -> None:
        """Pages of one file each, so that following them is proven."""
        commit = self._commit_at(repo, revision)
        if not commit:
            return
        match = re.search(r"cursor=(\d+)", self.path)
        at, names = int(match[1]) if match else 0, list(commit[1])
        content = commit[1][names[at]]
        entry: dict[str, Any] = {"type": "file", "path": names[at], "size": len(content), "oid": git_id(content)}
        if is_lfs(names[at], content):
            entry["lfs"] = {"oid": sha256(content), "size": len(content), "pointerSize": 134}
        following = f"{self.server_state.url}/api/models/{repo}/tree/{revision}?recursive=true&cursor={at + 1}"
        self._json([entry], headers={"Link": f'<{following}>; rel="next"'} if at + 1 < len(names) else {})

    def resolve(self, repo: str, revision: str, name: str) -> None:
        commit = self._commit_at(repo, revision)
        if not commit:
            return
        if self.server_state.repos[repo].gated:
            self._error(403, "GatedRepo", f"Access to model {repo} is restricted")
            return
        content = commit[1].get(name)
        if content is None:
            self._error(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit[0], "Accept-Ranges": "bytes"}
        if not is_lfs(name, content):
            self._ranged(content, {**headers, "ETag": f'"{git_id(content)}"'})
            return
        oid = sha256(content)
        self.server_state.lfs[oid] = content
        headers |= {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content))}
        self._content(b"", 302, {**headers, "Location": f"{self.server_state.cdn}/cdn/{oid}/{name}"})

    def cdn(self, oid: str, name: str) -> None:
        self._ranged(self.server_state.lfs[oid], {"ETag": f'"{oid}"', "Accept-Ranges": "bytes"})

    # Writing

    def create(self) -> None:
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        hub = self.server_state
        if self.request_.token != hub.token:
            self._error(401, "", "Invalid username or password.")
        elif repo in hub.repos:
            self._json({"error": "You already created this model repo", "url": f"{hub.url}/{repo}"}, 409)
        else:
            private = asked.get("private") or asked.get("visibility") == "private"
            hub.repos[repo] = Repository(private=bool(private))
            hub.repos[repo].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
            self._json({"url": f"{hub.url}/{repo}", "name": repo})

    def preupload(self, repo: str, revision: str) -> None:
        found = self._repo(repo, write=True)
        if not found:
            return
        ignored = found.files.get(".gitignore", b"").decode().split()
        files = []
        for file in json.loads(self.body)["files"]:
            name, old = file["path"], found.files.get(file["path"])
            large = name.endswith(".safetensors") or file["size"] > LARGE
            oid = None if old is None else sha256(old) if large else git_id(old)
            mode = "lfs" if large else "regular"
            files.append({"path": name, "uploadMode": mode, "shouldIgnore": name in ignored, "oid": oid})
        self._json({"files": files})

    def batch(self, repo: str) -> None:
        if not self._repo(repo, write=True):
            return
        hub = self.server_state
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            if wanted["oid"] not in hub.lfs:
                wanted["actions"] = {
                    "upload": {"href": f"{hub.cdn}/lfs/{wanted['oid']}"},
                    "verify": {"href": f"{hub.url}/lfs-verify/{repo}"},
                }
            objects.append(wanted)
        self._json({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        content = self.body
        if self.fault and self.fault.corrupt:
            content = b"?" + content[1:]
        self.server_state.lfs[oid] = content
        self._content(b"")

    def verify(self, repo: str) -> None:
        asked = json.loads(self.body)
        known = self.server_state.lfs.get(asked["oid"])
        self._json({}, 200 if known is not None and len(known) == asked["size"] else 404)

    def commit(self, repo: str, revision: str) -> None:
        found = self._repo(repo, write=True)
        if not found:
            return
        files, message = {}, ""
        for item in map(json.loads, self.body.splitlines()):
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.server_state.lfs[value["oid"]]
        with self.server_state.lock:
            oid = found.commit(files, message)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.server_state.url}/{repo}/commit/{oid}"})

    def yaml(self) -> None:
        content = json.loads(self.body)["content"]
        bad = content.startswith("---\nbad")
        errors = [{"message": "license must be a string"}] if bad else []
        self._json({"errors": errors, "warnings": []}, 400 if bad else 200)


_ID = r"(?P<repo>[\w.-]+/[\w.-]+?)"
ROUTES = [
    (rf"GET /api/models/{_ID}", _Handler.info),
    (rf"GET /api/models/{_ID}/revision/(?P<revision>.+)", _Handler.info),
    (rf"GET /api/models/{_ID}/tree/(?P<revision>[^/]+)", _Handler.tree),
    (rf"(?:GET|HEAD) /{_ID}/resolve/(?P<revision>[^/]+)/(?P<name>.+)", _Handler.resolve),
    (r"(?:GET|HEAD) /cdn/(?P<oid>\w+)/(?P<name>.+)", _Handler.cdn),
    (r"POST /api/repos/create", _Handler.create),
    (rf"POST /api/models/{_ID}/preupload/(?P<revision>.+)", _Handler.preupload),
    (rf"POST /{_ID}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/(?P<oid>\w+)", _Handler.put),
    (rf"POST /lfs-verify/{_ID}", _Handler.verify),
    (rf"POST /api/models/{_ID}/commit/(?P<revision>.+)", _Handler.commit),
    (r"POST /api/validate-yaml", _Handler.yaml),
]
