"""Serves the stored bytes of checkpoints over HTTP on a socket, to processes that cannot reach the store.

``GET /v1/checkpoints?after=ID&wait=SECONDS``
    The listed checkpoints as JSON, as soon as the newest is not ``ID`` or the wait has timed out.
``GET /v1/checkpoints/ID``
    The index of a checkpoint and its objects, one after the other; their sizes are in the header
    ``S4-Sizes``. The index names each object by its BLAKE3.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import http.client
import http.server
import json
import logging
import math
import os
import socket
import socketserver
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from . import _core, _live
from ._entries import CheckpointEntry
from ._errors import CorruptDataError, NotFoundError, S4Error, StorageError
from ._runner import UnixConnection

logger = logging.getLogger("s4weights")

#: Seconds for which a request may wait for a new checkpoint.
LONGEST_WAIT = 60.0
#: The most bytes of a list of checkpoints, and the most objects of a checkpoint.
_LIST_BYTES = 16 << 20
_MOST_OBJECTS = 1 << 16
#: Seconds of silence after which a connection is given up.
_SILENCE = 60.0
#: The most bytes of a checkpoint that is kept in memory for the next request.
_KEPT_BYTES = 256 << 20
_PAUSE = 0.2

_servers: weakref.WeakSet[Server] = weakref.WeakSet()


def _in_child() -> None:
    for server in _servers:
        server._in_child()
    _servers.clear()


_live.at_fork(_in_child)


def split_address(address: str) -> tuple[str, int] | str:
    """Host and port of ``tcp://host:port``, or the path of ``unix:///path``.

    Raises:
        ValueError: it is neither.
    """
    parts = urlsplit(address)
    plain = not (parts.query or parts.fragment or parts.username)
    with contextlib.suppress(ValueError):
        if parts.scheme == "tcp" and parts.hostname and parts.port is not None and not parts.path:
            return parts.hostname, parts.port
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/") and plain:
        return unquote(parts.path)
    raise ValueError(f"{address!r}: expected tcp://host:port or unix:///path/to/socket")


def is_address(text: str) -> bool:
    """Whether a text names a socket, not a store."""
    return text.startswith(("tcp:", "unix:"))


class Server:
    """Serves the checkpoints of a store on its own threads, to anyone who can reach the socket.

    Args:
        address: ``tcp://host:port`` (port 0: any free one) or ``unix:///path``.
        entries: returns what the store lists.
        stored: returns the index and the objects of a checkpoint, given its id.
    """

    def __init__(
        self,
        address: str,
        entries: Callable[[], list[CheckpointEntry]],
        stored: Callable[[str], tuple[bytes, Sequence[bytes]]],
    ) -> None:
        place = split_address(address)
        self._list, self._stored = entries, stored
        self._news = threading.Condition()
        self._entries: list[CheckpointEntry] = []
        self._closed = False
        self._reading = threading.Lock()
        self._kept: tuple[str, bytes, Sequence[bytes]] | None = None
        self._server: _UnixServer | _TcpServer
        try:
            if isinstance(place, str):
                _remove_stale(place)
                self._server = _UnixServer(place, _Handler)
            else:
                self._server = _TcpServer(place, _Handler)
        except OSError as error:
            what = f"cannot listen: {error.strerror or error}"
            raise StorageError(error.errno, what, address) from error
        self._server.owner = self
        #: The address that it listens at, with the actual port.
        self.address = address
        if not isinstance(place, str):
            host = f"[{place[0]}]" if ":" in place[0] else place[0]
            self.address = f"tcp://{host}:{self._server.socket.getsockname()[1]}"
        self._path = place if isinstance(place, str) else None
        #: Whether this is the copy in a child: the parent's thread serves.
        self._is_parents = False
        _servers.add(self)
        try:
            self.refresh()
            serve = self._server.serve_forever
            threading.Thread(target=serve, name="s4weights-sync", daemon=True).start()
        except BaseException:
            # Nobody would serve who connects, and the address would stay in use.
            self._end()
            raise

    def _in_child(self) -> None:
        """In the child after a fork. Its copy of the socket would keep the address in use."""
        self._is_parents = True
        self._server.socket.close()

    def refresh(self) -> None:
        """Read what the store lists, and wake requests that wait for it."""
        entries = self._list()
        with self._news:
            self._entries = entries
            self._news.notify_all()

    def close(self) -> None:
        """Stop serving; answers that are being sent are cut off."""
        if self._is_parents:
            return
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._server.shutdown()
        self._end()

    def _end(self) -> None:
        self._server.server_close()
        if self._path is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)

    def entries(self, after: str | None, wait: float) -> list[CheckpointEntry]:
        """The listed checkpoints, once the newest is not ``after``, or the time is over."""

        def is_news() -> bool:
            return self._closed or bool(self._entries and self._entries[-1].id != after)

        with self._news:
            self._news.wait_for(is_news, wait)
            return self._entries

    def payload(self, id: str) -> tuple[bytes, Sequence[bytes]]:
        """The index and the objects of a checkpoint. A small one is read once for all requests."""
        if all(entry.id != id for entry in self._entries):
            raise NotFoundError(errno.ENOENT, "no such checkpoint", id)
        with self._reading:
            kept = self._kept
            if kept is not None and kept[0] == id:
                return kept[1], kept[2]
            index, objects = self._stored(id)
            if sum(map(len, objects)) <= _KEPT_BYTES:
                self._kept = (id, index, objects)
            return index, objects


class _TcpServer(http.server.ThreadingHTTPServer):
    owner: Server

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a subscriber went away", exc_info=True)


if hasattr(socketserver, "ThreadingUnixStreamServer"):

    class _UnixServer(socketserver.ThreadingUnixStreamServer):
        owner: Server
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            logger.debug("a subscriber went away", exc_info=True)


def _remove_stale(path: str) -> None:
    """Remove the socket of a process that ended without doing so."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _SILENCE

    def do_GET(self) -> None:
        """Answer a request."""
        owner: Server = self.server.owner  # type: ignore[attr-defined]
        parts = urlsplit(self.path)
        try:
            if parts.path == "/v1/checkpoints":
                self._list(owner, parts.query)
            elif parts.path.startswith("/v1/checkpoints/"):
                self._checkpoint(owner, parts.path.removeprefix("/v1/checkpoints/"))
            else:
                self._fail(404, "no such page")
        except NotFoundError as error:
            self._fail(404, str(error))
        except S4Error as error:
            logger.warning("sent an error to a subscriber: %s", error)
            self._fail(500, str(error))

    def _list(self, owner: Server, query: str) -> None:
        asked = parse_qs(query)
        try:
            wait = float(asked.get("wait", ["0"])[0])
        except ValueError:
            wait = 0.0
        wait = min(max(wait, 0.0), LONGEST_WAIT) if math.isfinite(wait) else 0.0
        entries = owner.entries(asked.get("after", [None])[0], wait)
        body = json.dumps([_plain(entry) for entry in entries]).encode()
        self._head(200, "application/json", len(body))
        self.wfile.write(body)

    def _checkpoint(self, owner: Server, id: str) -> None:
        index, objects = owner.payload(id)
        sizes = [len(index), *map(len, objects)]
        text = ",".join(map(str, sizes))
        self._head(200, "application/octet-stream", sum(sizes), {"S4-Sizes": text})
        for part in (index, *objects):
            self.wfile.write(part)

    def _fail(self, status: int, what: str) -> None:
        body = json.dumps({"message": what}).encode()
        self._head(status, "application/json", len(body))
        self.wfile.write(body)

    def _head(self, status: int, kind: str, size: int, more: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(size))
        for name, value in (more or {}).items():
            self.send_header(name, value)
        self.end_headers()

    def address_string(self) -> str:
        """The client's address. Unix sockets have none."""
        return str(self.client_address[0]) if self.client_address else "unix"

    def log_message(self, format: str, *args: Any) -> None:
        """Log to the package's logger."""
        logger.debug("%s: " + format, self.address_string(), *args)


def _plain(entry: CheckpointEntry) -> dict[str, Any]:
    plain = dataclasses.asdict(entry)
    del plain["report"]
    return plain


def _entry(item: Any) -> CheckpointEntry:
    """The entry that `_plain` made this from.

    Raises:
        TypeError: it was not made so.
    """
    entry = CheckpointEntry(**item)
    for name in ("step", "bytes", "raw_bytes", "since_base"):
        value = getattr(entry, name)
        if type(value) is not int or value < 0:
            raise TypeError(f"{name}: expected a non-negative integer")
    if not isinstance(entry.id, str) or not isinstance(entry.parent, str | None):
        raise TypeError("id, parent: expected strings")
    return entry


class Client:
    """Requests checkpoints from a `Server`.

    Args:
        address: its address.
        timeout: seconds for which a server that does not respond is retried.
        threads: number of native threads of its readers.
    """

    def __init__(self, address: str, timeout: float, threads: int | None) -> None:
        self._place = split_address(address)
        self.name = address
        self._timeout, self._threads = timeout, threads

    def close(self) -> None:
        """Nothing stays open between calls."""

    def entries(self, after: str | None, wait: float) -> list[CheckpointEntry]:
        """The listed checkpoints, once the newest is not ``after``, or the time is over."""
        end = time.monotonic() + wait
        while True:
            now = min(max(end - time.monotonic(), 0.0), LONGEST_WAIT)
            query = f"wait={now:.3f}" + ("" if after is None else f"&after={quote(after)}")
            _, body = self._get(f"/v1/checkpoints?{query}", _LIST_BYTES, now)
            found = self._parse(body)
            if (found and found[-1].id != after) or time.monotonic() >= end:
                return found
            time.sleep(min(_PAUSE, max(end - time.monotonic(), 0.0)))

    def _parse(self, body: bytes) -> list[CheckpointEntry]:
        try:
            items = json.loads(body)
            if not isinstance(items, list):
                raise TypeError("expected a list")
            return [_entry(item) for item in items]
        except (ValueError, TypeError, RecursionError) as error:
            raise CorruptDataError(f"{self.name}: not a list of checkpoints: {error}") from error

    def alone(self, entry: CheckpointEntry, most: int) -> _core.Reader:
        """A checkpoint without its parent. An answer of more than ``most`` bytes is an error."""
        header, body = self._get(f"/v1/checkpoints/{quote(entry.id)}", most, 0.0)
        try:
            sizes = [int(size) for size in (header or "").split(",")]
        except ValueError as error:
            raise CorruptDataError(f"{self.name}: invalid sizes {header!r}") from error
        if len(sizes) > _MOST_OBJECTS or min(sizes) < 0 or sum(sizes) != len(body):
            raise CorruptDataError(f"{self.name}: the announced sizes do not fit the {len(body)} bytes received")
        parts, at = [], 0
        for size in sizes:
            parts.append(body[at : at + size])
            at += size
        return _core.Reader.in_memory(parts[0], parts[1:], self._threads)

    def whole(self, chain: list[CheckpointEntry], most: int) -> _core.Reader:
        """The last checkpoint of a chain, with its parents; the base comes first in ``chain``."""
        reader = self.alone(chain[0], most)
        for entry in chain[1:]:
            child = self.alone(entry, most)
            child.set_parent(reader)
            reader = child
        return reader

    def _get(self, path: str, most: int, wait: float) -> tuple[str | None, bytes]:
        end = time.monotonic() + self._timeout
        while True:
            silence = min(_SILENCE, max(end - time.monotonic(), _PAUSE))
            try:
                return self._once(path, most, silence + wait)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, S4Error):
                    raise
                if time.monotonic() + _PAUSE >= end:
                    what = f"the publisher does not respond: {str(error) or type(error).__name__}"
                    raise StorageError(_errno_of(error), what, self.name) from error
            time.sleep(_PAUSE)

    def _once(self, path: str, most: int, silence: float) -> tuple[str | None, bytes]:
        connection: http.client.HTTPConnection
        if isinstance(self._place, str):
            connection = UnixConnection(self._place, timeout=silence)
        else:
            host, port = self._place
            connection = http.client.HTTPConnection(host, port, timeout=silence)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer = connection.getresponse()
            length = answer.length
            if length is None or length > most:
                raise CorruptDataError(
                    f"{self.name}: the response has {length} bytes, expected at most {most}"
                )
            body = answer.read()
            if len(body) != length:
                raise http.client.IncompleteRead(body, length - len(body))
            if answer.status == 404:
                raise NotFoundError(errno.ENOENT, "the publisher has no such checkpoint", self.name)
            if answer.status != 200:
                text = body[:500].decode("utf-8", "replace")
                raise StorageError(errno.EIO, f"status {answer.status}: {text}", self.name)
            return answer.headers.get("S4-Sizes"), body


def _errno_of(error: Exception) -> int:
    """The `errno` of a failed request."""
    number = getattr(error, "errno", None)
    if isinstance(number, int) and number > 0:  # Errors of name lookup have negative numbers.
        return number
    return errno.ETIMEDOUT if isinstance(error, TimeoutError) else errno.EIO
