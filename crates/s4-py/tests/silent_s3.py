"""An S3 server that never answers chosen requests."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class SilentS3:
    """Objects in memory. A request for which ``silent(method, key)`` is true is not answered until
    the server ends; ``fell_silent`` is set at the first one.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.silent: Callable[[str, str], bool] = lambda method, key: False
        self.fell_silent = threading.Event()
        self.ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> SilentS3:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()

    @property
    def options(self) -> dict[str, str]:
        """Storage options for this server."""
        return {
            "key": "test",
            "secret": "test",
            "region": "us-east-1",
            "endpoint_url": f"http://127.0.0.1:{self._server.server_address[1]}",
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), value)
                if "Content_Length" not in headers:
                    self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def handle_request(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = self.rfile.read(length)
                url = urlsplit(self.path)
                key = unquote(url.path).removeprefix("/bucket").removeprefix("/")
                if server.silent(self.command, key):
                    server.fell_silent.set()
                    server.ended.wait()
                    self.close_connection = True
                    return
                with server.lock:
                    self.respond(key, parse_qs(url.query, keep_blank_values=True), body)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_request

            def respond(self, key: str, query: dict[str, list[str]], body: bytes) -> None:
                there = server.objects.get(key)
                if self.command == "GET" and "list-type" in query:
                    self.list(query)
                elif self.command == "PUT":
                    if there is not None and self.headers.get("If-None-Match") == "*":
                        self.answer(412)
                        return
                    server.objects[key] = body
                    self.answer(200, ETag=etag(body))
                elif self.command == "DELETE":
                    server.objects.pop(key, None)
                    self.answer(204)
                elif there is None:
                    self.answer(404)
                else:
                    self.send_object(there)

            def send_object(self, data: bytes) -> None:
                common = {"ETag": etag(data), "Last_Modified": "Mon, 05 Jan 2026 10:00:00 GMT"}
                asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                if self.command == "HEAD":
                    self.answer(200, Content_Length=str(len(data)), **common)
                elif asked:
                    first, last = int(asked[1]), min(int(asked[2]), len(data) - 1)
                    span = f"bytes {first}-{last}/{len(data)}"
                    self.answer(206, data[first : last + 1], Content_Range=span, **common)
                else:
                    self.answer(200, data, **common)

            def list(self, query: dict[str, list[str]]) -> None:
                prefix, after = query.get("prefix", [""])[0], query.get("start-after", [""])[0]
                items = [
                    f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
                    f"<LastModified>2026-01-05T10:00:00Z</LastModified>"
                    f"<ETag>{escape(etag(data))}</ETag></Contents>"
                    for key, data in sorted(server.objects.items())
                    if key.startswith(prefix) and key > after
                ]
                text = "".join(items)
                self.answer(200, f"<ListBucketResult>{text}</ListBucketResult>".encode())

        return Handler


def etag(data: bytes) -> str:
    """The ETag of an object with this content."""
    return f'"{hashlib.md5(data).hexdigest()}"'
