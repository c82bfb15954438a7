"""The dashboard: a read-only page about runs, served on this machine only.

Every address starts with a random token, so other users of the machine and other pages in the browser cannot read the
runs. The page loads nothing from the network; names from run directories are only ever shown as text.
"""

from __future__ import annotations

import http.server
import json
import re
import secrets
import threading
import urllib.parse
from collections.abc import Sequence
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Any

from rl_training.errors import UserError
from rl_training.reports import analysis, page
from rl_training.reports.live import LiveRuns

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src 'self';"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = (  # its script is inside the page; the sandbox keeps it away from the addresses of the dashboard
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
)
_TYPES = {
    ".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".mp4": "video/mp4", ".webm": "video/webm",
    ".gif": "image/gif", ".png": "image/png", ".svg": "image/svg+xml",
}  # fmt: skip
_MAX_RUNS = 200  # in one request
_CHUNK = 1 << 18


class Dashboard(http.server.ThreadingHTTPServer):
    """Serves the runs below `root` at `url` until `shutdown`."""

    daemon_threads = True

    def __init__(self, root: Path, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(16)
        self.runs = LiveRuns(root)
        self.lock = threading.Lock()  # LiveRuns is used by one request at a time
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise UserError(f"port {port} cannot be used ({error.strerror}); choose another --port") from error

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def runs_answer(self) -> Any:
        with self.lock:
            self.runs.refresh()
            return {"root": str(self.runs.root), "runs": self.runs.overview()}

    def curves_answer(self, keys: Sequence[str], metrics: Sequence[str]) -> Any:
        with self.lock:
            return [self.runs.curves(key, metrics) for key in keys]

    def detail_answer(self, key: str) -> Any:
        with self.lock:
            return self.runs[key].detail()

    def report_answer(self, keys: Sequence[str]) -> str:
        with self.lock:
            paths = [self.runs[key].path for key in keys]
        try:
            return page.page(analysis.report(paths, partial=True, mixed=True), "Report")
        except UserError as error:
            return f"<!doctype html><meta charset='utf-8'><title>No report</title><p>{escape(str(error))}</p>"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Dashboard
    protocol_version = "HTTP/1.1"
    server_version = sys_version = "rl-training"

    def do_GET(self) -> None:
        address = urllib.parse.urlsplit(self.path)
        query = urllib.parse.parse_qs(address.query)
        token, _, rest = address.path.removeprefix("/").partition("/")
        host = (self.headers.get("Host") or "").rsplit(":", 1)[0]
        # The host is checked because a foreign page can point a name of its own at this address.
        if host not in ("127.0.0.1", "localhost") or not secrets.compare_digest(
            token.encode(), self.server.token.encode()
        ):
            return self._refuse(HTTPStatus.FORBIDDEN, "open the address that `rl-training dashboard` printed")
        try:
            self._answer(rest, query.get("run", [])[:_MAX_RUNS], query.get("metric", []))
        except StopIteration:
            self._refuse(HTTPStatus.NOT_FOUND, "this run does not exist any more")
        except ConnectionError:  # the browser closed the connection
            self.close_connection = True
        except FileNotFoundError:  # between looking for it and opening it
            self._refuse(HTTPStatus.NOT_FOUND, "this file does not exist any more")
        return None

    do_HEAD = do_GET

    def _answer(self, rest: str, keys: list[str], metrics: list[str]) -> None:
        if rest in ("", "dashboard.css", "dashboard.js"):
            name = rest or "dashboard.html"
            text = page.asset(name)
            self._send((page.style() + text if name.endswith(".css") else text).encode(), _TYPES[Path(name).suffix])
        elif rest == "api/runs":
            self._send_json(self.server.runs_answer())
        elif rest == "api/curves":
            self._send_json(self.server.curves_answer(keys, metrics))
        elif rest == "api/run" and keys:
            self._send_json(self.server.detail_answer(keys[0]))
        elif rest == "report" and keys:
            self._send(self.server.report_answer(keys).encode(), "text/html", policy=_REPORT_POLICY)
        elif rest.startswith("file/"):
            key, _, name = rest.removeprefix("file/").partition("/")
            with self.server.lock:
                path = self.server.runs[key].file(urllib.parse.unquote(name, errors="surrogateescape"))
            self._send_file(path)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    def _send_json(self, value: Any) -> None:
        text = json.dumps(value, default=str, separators=(",", ":"))
        if "NaN" in text or "Infinity" in text:  # from a file of somebody else: JSON has no such numbers
            text = json.dumps(json.loads(text, parse_constant=lambda word: None))
        self._send(text.encode(), "application/json")

    def _send(self, body: bytes, kind: str, status: HTTPStatus = HTTPStatus.OK, policy: str = _POLICY) -> None:
        self._head(status, kind, len(body), policy)
        if self.command == "GET":
            self.wfile.write(body)

    def _head(self, status: HTTPStatus, kind: str, length: int, policy: str = _POLICY, span: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind if not kind.startswith("text/") else f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(length))
        self.send_header("Content-Security-Policy", policy)
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Cache-Control", "no-store")
        self.send_header("Accept-Ranges", "bytes")
        if span is not None:
            self.send_header("Content-Range", span)
        self.end_headers()

    def _send_file(self, path: Path | None) -> None:
        """A file of a run, or the part of it that a video player asks for. Unknown kinds are shown as plain text."""
        if path is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "this file does not exist")
        kind = _TYPES.get(path.suffix, "text/plain") if path.suffix != ".html" else "text/plain"
        with open(path, "rb") as file:
            size = file.seek(0, 2)
            first, last, status, span = 0, size - 1, HTTPStatus.OK, None
            asked = re.fullmatch(r"bytes=(\d{1,15})-(\d{0,15})", self.headers.get("Range") or "")
            if asked and int(asked[1]) < size:
                first, last = int(asked[1]), min(int(asked[2] or last), last)
                status, span = HTTPStatus.PARTIAL_CONTENT, f"bytes {first}-{last}/{size}"
            self._head(status, kind, last - first + 1, span=span)
            file.seek(first)
            left = last - first + 1 if self.command == "GET" else 0
            while left > 0 and (block := file.read(min(_CHUNK, left))):
                self.wfile.write(block)
                left -= len(block)
            if left:  # a log that was cut while it was sent: the browser must not wait for the rest
                self.close_connection = True
        return None

    def _refuse(self, status: HTTPStatus, reason: str) -> None:
        self._send(f"{reason}\n".encode(), "text/plain", status)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
