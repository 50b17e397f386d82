"""A hub for tests: as much of its HTTP interface as an upload without Xet takes, on a port of this machine."""

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit


@dataclass
class FakeHub:
    """What was uploaded.

    Attributes:
        endpoint: its address.
        private: of every repository, whether it was made private.
        files: of every repository, the content of every file by name.
        messages: of the commits.
        refused: paths that are answered with 403.
    """

    endpoint: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    stored: dict[str, bytes] = field(default_factory=dict)  # large files, by their SHA-256

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON."""
        parts = path.strip("/").split("/")
        if path in self.refused:
            return 403, {"error": "You may not."}
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            known = repo in self.files
            self.files.setdefault(repo, {})
            self.private.setdefault(repo, asked.get("private") or asked.get("visibility") == "private")
            return (409 if known else 200), {"url": f"{self.endpoint}/{repo}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if parts[0] == "stored":
            assert hashlib.sha256(body).hexdigest() == parts[1]
            self.stored[parts[1]] = body
            return 200, {}
        if path.endswith(".git/info/lfs/objects/batch"):
            objects = json.loads(body)["objects"]
            actions = {each["oid"]: {"upload": {"href": f"{self.endpoint}/stored/{each['oid']}"}} for each in objects}
            return 200, {
                "transfer": "basic",
                "objects": [{**each, "actions": actions[each["oid"]]} for each in objects],
            }
        if parts[:2] == ["api", "models"]:
            return self._of_repo("/".join(parts[2:4]), parts[4], body)
        return 404, {"error": f"{method} {path}: a hub has more to it."}

    def _of_repo(self, repo: str, what: str, body: bytes) -> tuple[int, Any]:
        files = self.files[repo]
        if what == "tree":
            return 200, [
                {"type": "file", "path": name, "size": len(content), "oid": "0"} for name, content in files.items()
            ]
        if what == "preupload":
            asked = json.loads(body)["files"]
            modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in asked}
            return 200, {
                "files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            }
        assert what == "commit"
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                files[value["path"]] = self.stored[value["oid"]]
        return 200, {"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.endpoint}/{repo}/commit/{'0' * 40}"}


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """One that answers until the end of the `with` block."""
    hub = FakeHub()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, told = hub.answer(self.command, urlsplit(self.path).path, body)
            content = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
