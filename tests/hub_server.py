"""As much of the Hugging Face hub as models and data sets ask for, on the loopback."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Hub(BaseHTTPRequestHandler):
    """A subclass says what there is: repos, {name: {commit: {path: bytes}}}, of which `main` is the first commit."""

    repos: dict[str, dict[str, dict[str, bytes]]] = {}
    kind = "models"
    main = ""  # a commit, where a repository has it
    asked: list[str] = []

    def do_GET(self):
        place, _, query = self.path.partition("?")
        self.asked.append(place)
        parts = [urllib.parse.unquote(part) for part in place.strip("/").split("/")]
        is_api = parts[:2] == ["api", self.kind]
        parts = parts[2:] if is_api else parts[self.kind == "datasets" :]
        parts += ["revision", "main"] if len(parts) == 2 else []
        repo, verb, revision, rest = "/".join(parts[:2]), parts[2], parts[3], "/".join(parts[4:])
        commits = self.repos.get(repo)
        if commits is None:
            return self.answer(401, **{"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        sha = self.main if revision == "main" else revision
        sha = sha if sha in commits else next(iter(commits)) if revision == "main" else None
        if sha is None:
            return self.answer(404, **{"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        files = commits[sha]
        if verb == "revision":
            listed = [{"rfilename": file} for file in files]
            about = {"id": repo, "sha": sha, "siblings": listed, "private": False, "tags": [], "downloads": 0}
            return self.answer(200, json.dumps(about).encode())
        if verb == "tree":
            inside = {file: data for file, data in files.items() if not rest or file.startswith(f"{rest}/")}
            return self.listed(inside, rest, "recursive=true" in query.lower())
        if rest not in files:
            return self.answer(404, **{"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        self.answer(200, files[rest], **{"ETag": f'"{sha[:1]}{rest.encode().hex()}"', "X-Repo-Commit": sha})

    def do_HEAD(self):
        self.do_GET()

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        paths = json.loads(body)["paths"] if body.startswith("{") else urllib.parse.parse_qs(body)["paths"]
        parts = self.path.partition("?")[0].strip("/").split("/")
        files = self.repos["/".join(parts[2:4])][parts[5]]
        folders = {"/".join(file.split("/")[:-1]) for file in files} - {""}
        found = [self.entry(path, files[path]) for path in paths if path in files]
        found += [{"type": "directory", "path": path, "oid": "0"} for path in paths if path in folders]
        self.answer(200, json.dumps(found).encode())

    def entry(self, path, data):
        return {"type": "file", "path": path, "size": len(data), "oid": data.hex()[:40]}

    def listed(self, files, folder, is_recursive):
        found = {}
        for path, data in files.items():
            inside = path.removeprefix(f"{folder}/" if folder else "")
            if "/" in inside:
                first = (f"{folder}/" if folder else "") + inside.split("/")[0]
                found[first] = {"type": "directory", "path": first, "oid": "0"}
            if "/" not in inside or is_recursive:
                found[path] = self.entry(path, data)
        self.answer(200, json.dumps([*found.values()]).encode())

    def answer(self, status, body=b"", **headers):
        whole = len(body)
        if status == 200 and (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))):
            begin, end = int(asked[1]), min(int(asked[2] or whole), whole - 1)
            body, status = body[begin : end + 1], 206
            headers["Content-Range"] = f"bytes {begin}-{end}/{whole}"
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args):
        pass


# The libraries read the environment when they are imported; what they import before takes most of the time.
FORKS = """
import json, os, sys, traceback
import aiohttp, dill, fsspec, multiprocess, pandas, pyarrow.dataset
for line in sys.stdin:
    code, environment, folder = json.loads(line)
    if not (child := os.fork()):
        os.environ.clear()
        os.environ.update(environment)
        for number, name in (1, "out"), (2, "err"):
            os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
        try:
            exec(code, {"__name__": "__main__"})
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@functools.cache
def forks() -> subprocess.Popen:
    """A process that runs each piece of code in a child of its own; it ends with this one."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", FORKS], cwd=ROOT, **pipes)


@contextlib.contextmanager
def serving(handler: type[Hub], home: Path, head: str) -> Iterator:
    """run(code, **environment): what the code prints after `head`, in a process whose hub is this one and whose cache
    is `home`. `run.server` can be stopped."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.asked.clear()
    keep = {key: value for key, value in os.environ.items() if "proxy" not in key.lower() and not key.startswith("HF_")}
    ours = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HOME": str(home)}
    ours |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}

    def run(code: str, **environment: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            call = f"{head}\n{code}", keep | ours | environment, folder
            print(json.dumps(call), file=forks().stdin, flush=True)
            ended = int(forks().stdout.readline())
            out, err = (Path(folder, name).read_text() for name in ("out", "err"))
        assert ended == 0, err
        return out

    run.server = server
    yield run
    server.shutdown()
    server.server_close()
