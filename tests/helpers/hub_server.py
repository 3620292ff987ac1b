"""Loopback Hub: an HTTP server with the endpoints that `huggingface_hub` uses for uploads and downloads.

Supported: whoami, repositories, branches, pull requests, trees, preupload, git-LFS batch with basic and multipart
uploads and verification, commits, `resolve` with ETag and ranges, the Hub's error codes. Not supported: Xet, which must
be disabled in the client, discussions, gated repositories. Commits are atomic, and an LFS file must be uploaded to the
repository before it is committed. Cards must start with YAML, and the types of a few fields are checked; the real Hub
checks more fields, and their values.

All state is in memory. Requests are logged, and faults can be injected.
"""

import base64
import hashlib
import itertools
import json
import re
import secrets
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".png")
# As on the Hub, files that are larger than this or have one of the suffixes above are LFS files.
LARGEST_REGULAR = 10 << 20
CARD_FIELDS = {"library_name": str, "pipeline_tag": str, "tags": list, "datasets": (list, str), "model_name": str}


@dataclass(frozen=True)
class File:
    """File of a commit; its bytes are in the git store, or in the LFS store under their sha256."""

    oid: str
    size: int
    lfs: str | None


@dataclass
class Repo:
    private: bool
    # Commit -> its files, by name; branch or pull request -> its commit.
    commits: dict = field(default_factory=dict)
    refs: dict = field(default_factory=dict)
    messages: dict = field(default_factory=dict)
    # sha256 -> content of the uploaded LFS files.
    objects: dict = field(default_factory=dict)


class HubServer:
    """Context manager with the state of the Hub and the thread that serves it.

    Attributes:
        log: `(method, path)` of every request.
        puts: sha256 of every stored LFS object, in order, repeated when an object is stored again.
        part_size: LFS objects larger than this are uploaded in parts.
        sent: Bytes of file content sent, by file name.
    """

    def __init__(self, part_size=1 << 30):
        self.lock = threading.RLock()
        self.token, self.user = "hf_loopback", "tester"
        self.repos, self.blobs, self.parts = {}, {}, {}
        self.log, self.puts, self.sent = [], [], {}
        self.part_size = part_size
        self.faults = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

    @contextmanager
    def fault(self, method, pattern, action, *, first=1, count=10**9):
        """Injects a fault into the matching requests `first` to `first + count - 1`, counted from 1.

        Args:
            action: A status code to respond with, `"drop"` to close the connection after half of the content, or
                `"flip"` to send the content with its last byte changed.
        """
        entry = {"method": method, "pattern": re.compile(pattern), "action": action, "seen": 0, "first": first}
        entry["last"] = first + count - 1
        with self.lock:
            self.faults.append(entry)
        try:
            yield entry
        finally:
            with self.lock:
                self.faults.remove(entry)

    def fault_of(self, method, path):
        with self.lock:
            for entry in self.faults:
                if entry["method"] == method and entry["pattern"].search(path):
                    entry["seen"] += 1
                    if entry["first"] <= entry["seen"] <= entry["last"]:
                        return entry["action"]
        return None

    def files(self, repo_id, revision="main"):
        """Returns the file contents by name, at a commit, branch or pull request."""
        with self.lock:
            repo = self.repos[repo_id]
            entries = repo.commits[repo.refs.get(revision, revision)]
            return {name: self.content(repo, entry) for name, entry in entries.items()}

    def content(self, repo, file):
        return repo.objects[file.lfs] if file.lfs else self.blobs[file.oid]

    def commit_count(self, repo_id):
        return len(self.repos[repo_id].commits)

    def new_commit(self, repo, ref, files, message):
        commit = secrets.token_hex(20)
        repo.commits[commit], repo.messages[commit] = files, message
        repo.refs[ref] = commit
        return commit


class Response(Exception):
    """Ends a request with this status and body."""

    def __init__(self, status, body=None, headers=None, code=None, message=None):
        self.status, self.body, self.headers = status, {"error": message} if message else body, dict(headers or {})
        if code:
            self.headers["X-Error-Code"] = code
        if message:
            self.headers["X-Error-Message"] = message


def _git_oid(content):
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub):
    routes = [
        ("GET", r"/api/whoami-v2", "whoami"),
        ("POST", r"/api/repos/create", "create"),
        ("POST", r"/api/validate-yaml", "validate_yaml"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/refs", "list_refs"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/branch/(?P<revision>[^/]+)", "branch"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)", "tree"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/preupload/(?P<revision>[^/]+)", "preupload"),
        ("POST", r"/api/models/(?P<repo>[^/]+/[^/]+)/commit/(?P<revision>[^/]+)", "commit"),
        ("GET", r"/api/models/(?P<repo>[^/]+/[^/]+)(/revision/(?P<revision>[^/]+))?", "info"),
        ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", "batch"),
        ("PUT", r"/store/(?P<repo>[^/]+/[^/]+)/(?P<oid>[0-9a-f]{64})", "store"),
        ("PUT", r"/store/(?P<repo>[^/]+/[^/]+)/(?P<oid>[0-9a-f]{64})/(?P<part>\d+)", "store_part"),
        ("POST", r"/complete/(?P<repo>[^/]+/[^/]+)/(?P<oid>[0-9a-f]{64})", "complete"),
        ("POST", r"/verify/(?P<repo>[^/]+/[^/]+)", "verify"),
        ("GET", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)", "resolve"),
        ("HEAD", r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<name>.+)", "resolve"),
    ]
    compiled = [(method, re.compile(pattern), name) for method, pattern, name in routes]

    class Handler(_Requests):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def handle_one(self):
            split = urlsplit(self.path)
            self.query = {name: values[0] for name, values in parse_qs(split.query).items()}
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with hub.lock:
                hub.log.append((self.command, split.path))
            self.fault = hub.fault_of(self.command, split.path)
            try:
                if isinstance(self.fault, int):
                    raise Response(self.fault, message="a fault of the test")
                for method, pattern, name in compiled:
                    if method == self.command and (match := pattern.fullmatch(split.path)):
                        values = {key: value and unquote(value) for key, value in match.groupdict().items()}
                        getattr(self, name)(**values)
                        return
                raise Response(404, message=f"no such page: {self.command} {split.path}")
            except Response as response:
                self.reply(response.status, json.dumps(response.body).encode(), response.headers)

        do_GET = do_POST = do_PUT = do_HEAD = handle_one

    Handler.hub = hub
    return Handler


class _Requests(BaseHTTPRequestHandler):
    """Implementation of each endpoint."""

    def reply(self, status, content=b"", headers=None):
        headers = dict(headers or {})
        headers.setdefault("Content-Type", "application/json")
        headers.setdefault("Content-Length", str(len(content)))
        dropped = self.fault == "drop" and self.command == "GET"
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if dropped:
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(content)

    def ok(self, value):
        raise Response(200, value)

    def json(self):
        try:
            return json.loads(self.body)
        except ValueError:
            raise Response(400, message="not JSON") from None

    def require_token(self):
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            raise Response(401, message="Invalid credentials in Authorization header")

    def found(self, repo, revision=None):
        entry = self.hub.repos.get(repo)
        allowed = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if entry is None or (entry.private and not allowed):
            raise Response(404 if allowed else 401, code="RepoNotFound", message="Repository not found")
        if revision is None:
            return entry, None
        commit = entry.refs.get(revision, revision)
        if commit not in entry.commits:
            raise Response(404, code="RevisionNotFound", message=f"Invalid rev id: {revision}")
        return entry, commit

    def whoami(self):
        self.require_token()
        self.ok({"type": "user", "name": self.hub.user, "orgs": [], "auth": {"type": "access_token"}})

    def create(self):
        self.require_token()
        request = self.json()
        repo = f"{request.get('organization') or self.hub.user}/{request['name']}"
        with self.hub.lock:
            if repo in self.hub.repos:
                raise Response(409, {"url": f"{self.hub.url}/{repo}", "error": "You already created this model repo"})
            private = request.get("visibility") == "private" or bool(request.get("private"))
            entry = self.hub.repos[repo] = Repo(private)
            self.hub.new_commit(entry, "main", {}, "initial commit")
        self.ok({"url": f"{self.hub.url}/{repo}", "name": repo, "id": repo})

    def validate_yaml(self):
        content = str(self.json().get("content"))
        match = re.match(r"---\s*\n(.*?)\n?---\s*(\n|$)", content, re.DOTALL)
        warnings, errors = [], []
        if match is None:
            warnings.append({"message": "empty or missing yaml metadata in repo card"})
        else:
            try:
                fields = yaml.safe_load(match[1]) or {}
            except yaml.YAMLError as error:
                fields, errors = {}, [{"message": f"YAML: {error}"}]
            for name, kind in CARD_FIELDS.items():
                if name in fields and not isinstance(fields[name], kind):
                    errors.append({"message": f'"{name}" must be a {kind}'})
        raise Response(400 if errors else 200, {"errors": errors, "warnings": warnings})

    def list_refs(self, repo):
        entry, _ = self.found(repo)
        branches = [(name, commit) for name, commit in entry.refs.items() if not name.startswith("refs/pr/")]
        rows = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": commit} for name, commit in branches]
        self.ok({"branches": rows, "converts": [], "tags": []})

    def branch(self, repo, revision):
        self.require_token()
        start = self.json().get("startingPoint", "main")
        entry, commit = self.found(repo, start)
        with self.hub.lock:
            if revision in entry.refs:
                raise Response(409, message=f"Reference already exists: {revision}")
            entry.refs[revision] = commit
        self.ok({})

    def info(self, repo, revision=None):
        entry, commit = self.found(repo, revision or "main")
        names = [{"rfilename": name} for name in sorted(entry.commits[commit])]
        self.ok({"id": repo, "modelId": repo, "sha": commit, "private": entry.private, "tags": [], "siblings": names})

    def tree(self, repo, revision):
        entry, commit = self.found(repo, revision)
        rows = []
        for name, file in sorted(entry.commits[commit].items()):
            row = {"type": "file", "path": name, "size": file.size, "oid": file.oid}
            if file.lfs:
                row["lfs"] = {"oid": file.lfs, "size": file.size, "pointerSize": 134}
            rows.append(row)
        self.ok(rows)

    def preupload(self, repo, revision):
        self.require_token()
        entry, commit = self.found(repo, revision)
        rows = []
        for file in self.json()["files"]:
            large = file["size"] > LARGEST_REGULAR or file["path"].endswith(LFS_SUFFIXES)
            row = {"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            present = entry.commits[commit].get(file["path"])
            rows.append(row | {"oid": None if present is None else present.lfs or present.oid})
        self.ok({"files": rows})

    def batch(self, repo):
        self.require_token()
        entry, _ = self.found(repo)
        request, url = self.json(), self.hub.url
        rows = []
        for item in request["objects"]:
            oid, size = item["oid"], item["size"]
            row = {"oid": oid, "size": size, "authenticated": True}
            if oid not in entry.objects:
                upload = {"href": f"{url}/store/{repo}/{oid}"}
                if size > self.hub.part_size and "multipart" in request["transfers"]:
                    count = -(-size // self.hub.part_size)
                    parts = {str(number): f"{url}/store/{repo}/{oid}/{number}" for number in range(1, count + 1)}
                    upload = {
                        "href": f"{url}/complete/{repo}/{oid}",
                        "header": {"chunk_size": str(self.hub.part_size)} | parts,
                    }
                row["actions"] = {"upload": upload, "verify": {"href": f"{url}/verify/{repo}"}}
            rows.append(row)
        self.ok({"transfer": "basic", "objects": rows})

    def store_object(self, repo, oid, content):
        if hashlib.sha256(content).hexdigest() != oid:
            raise Response(400, message=f"the content's sha256 is not {oid}")
        with self.hub.lock:
            self.hub.repos[repo].objects[oid] = content
            self.hub.puts.append(oid)

    def store(self, repo, oid):
        self.store_object(repo, oid, self.body)
        self.ok({})

    def store_part(self, repo, oid, part):
        with self.hub.lock:
            self.hub.parts[repo, oid, int(part)] = self.body
        self.reply(200, b"", {"ETag": f'"{hashlib.md5(self.body).hexdigest()}"'})

    def complete(self, repo, oid):
        content = b""
        for row in self.json()["parts"]:
            part = self.hub.parts.get((repo, oid, row["partNumber"]))
            if part is None or row["etag"].strip('"') != hashlib.md5(part).hexdigest():
                raise Response(400, message=f"part {row['partNumber']} is missing or another one")
            content += part
        self.store_object(repo, oid, content)
        self.ok({})

    def verify(self, repo):
        item = self.json()
        if len(self.hub.repos[repo].objects.get(item["oid"], b"")) != item["size"]:
            raise Response(404, message=f"{item['oid']} is not there")
        self.ok({})

    def commit(self, repo, revision):
        self.require_token()
        entry, base = self.found(repo, revision)
        lines = [json.loads(line) for line in self.body.splitlines()]
        header = lines[0]["value"]
        with self.hub.lock:
            files, blobs = dict(entry.commits[base]), {}
            for line in lines[1:]:
                key, value = line["key"], line["value"]
                if key == "file":
                    content = base64.b64decode(value["content"])
                    blobs[_git_oid(content)] = content
                    files[value["path"]] = File(_git_oid(content), len(content), None)
                elif key == "lfsFile":
                    oid = value["oid"]
                    if oid not in entry.objects:
                        raise Response(400, message=f"LFS pointer of {value['path']} to {oid}, which was not uploaded")
                    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {value['size']}\n"
                    files[value["path"]] = File(_git_oid(pointer.encode()), value["size"], oid)
                elif key == "deletedFile":
                    if files.pop(value["path"], None) is None:
                        raise Response(404, code="EntryNotFound", message="A file with this name doesn't exist")
                else:
                    raise Response(400, message=f"operation {key!r} is not spoken here")
            self.hub.blobs.update(blobs)
            number = next(n for n in itertools.count(1) if f"refs/pr/{n}" not in entry.refs)
            ref = f"refs/pr/{number}" if self.query.get("create_pr") == "1" else revision
            commit = self.hub.new_commit(entry, ref, files, header["summary"])
        response = {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{repo}/commit/{commit}"}
        if ref != revision:
            response["pullRequestUrl"] = f"{self.hub.url}/{repo}/discussions/{number}"
        self.ok(response)

    def resolve(self, repo, revision, name):
        entry, commit = self.found(repo, revision)
        file = entry.commits[commit].get(name)
        if file is None:
            raise Response(404, headers={"X-Repo-Commit": commit}, code="EntryNotFound", message="Entry not found")
        content = self.hub.content(entry, file)
        if self.fault == "flip":
            content = content[:-1] + bytes([content[-1] ^ 1])
        headers = {"ETag": f'"{file.lfs or file.oid}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        headers |= {"Content-Type": "application/octet-stream"}
        status = 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start, stop = int(match[1]), int(match[2] or len(content) - 1) + 1
            if start >= len(content):
                raise Response(416, message="range outside of the file")
            headers["Content-Range"] = f"bytes {start}-{min(stop, len(content)) - 1}/{len(content)}"
            status, content = 206, content[start:stop]
        if self.command == "GET":
            with self.hub.lock:
                self.hub.sent[name] = self.hub.sent.get(name, 0) + len(content)
        headers["Content-Length"] = str(len(content))
        self.reply(status, content, headers)
