"""A stand-in for a model hub: the routes that `huggingface_hub` uses for an upload."""

import base64
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class FakeHub:
    """Keeps what is pushed in `files`; large files come as LFS. `refuse` answers every create."""

    def __init__(self, *, refuse: int | None = None, token: str = "hf_right") -> None:
        self.files: dict[str, bytes] = {}
        self.stored: dict[str, bytes] = {}
        self.created: list[Any] = []
        self.uploads = 0
        self.fail_commit = False
        self._refuse, self._token = refuse, token

    def __enter__(self) -> Self:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hub._answer(self)

            do_PUT = do_POST

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: Any) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        status, answer = self._route(request.path, request.headers, body)
        data = json.dumps(answer).encode()
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    def _route(self, path: str, headers: Any, body: bytes) -> tuple[int, Any]:
        if path.startswith("/store/"):
            self.stored[path.removeprefix("/store/")] = body
            self.uploads += 1
            return 200, {}
        if headers.get("Authorization") != f"Bearer {self._token}":
            return 401, {"error": "Invalid credentials"}
        if path == "/api/repos/create":
            if self._refuse:
                return self._refuse, {"error": "You may not create this"}
            self.created.append(json.loads(body))
            one = self.created[-1]
            return 200, {"url": f"{self.address}/{one.get('organization', 'me')}/{one['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return 200, {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if _is_large(file["path"]) else "regular",
                        "shouldIgnore": False,
                    }
                    for file in files
                ]
            }
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": self._lfs(json.loads(body))}
        if "/commit/" in path:
            if self.fail_commit:
                return 500, {"error": "Out of order"}
            self._commit(body)
            return 200, {"commitUrl": f"{self.address}/me/x/commit/abc", "commitOid": "abc"}
        return 404, {"error": f"no route {path}"}

    def _lfs(self, request: Any) -> list[Any]:
        """What to send: a file that is stored already has no action."""
        objects = []
        for one in request["objects"]:
            upload = {"upload": {"href": f"{self.address}/store/{one['oid']}"}}
            objects.append(one if one["oid"] in self.stored else {**one, "actions": upload})
        return objects

    def _commit(self, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.stored[value["oid"]]


def _is_large(path: str) -> bool:
    return re.search(r"\.(gguf|safetensors|png)$", path) is not None
