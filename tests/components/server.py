"""A real HTTP server for tests, which breaks as it is told and records what it was asked for."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# a status, the bytes sent in place of the right ones, or None for all is well
Fault = Callable[["Asked"], "int | bytes | None"]


@dataclass(frozen=True)
class Asked:
    """One GET: the path, the first byte, and the bytes that are right.

    `number` counts the GETs of this path from 0.
    """

    path: str
    start: int
    right: bytes
    number: int


class Short(bytes):
    """Fewer bytes than were asked for, announced as if they were all."""


@dataclass
class Served:
    """The files by path, what goes wrong, and what was asked for."""

    files: dict[str, bytes] = field(default_factory=dict)
    fault: Fault = lambda asked: None
    knows_ranges: bool = True
    refuses: int | None = None  # the status of every answer
    asked: list[Asked] = field(default_factory=list)
    url: str = ""

    def gets(self, path: str) -> list[Asked]:
        return [each for each in self.asked if each.path == path]


class Handler(BaseHTTPRequestHandler):
    """GET with ranges, and HEAD."""

    served: Served
    protocol_version = "HTTP/1.1"
    # else an answer waits 40 ms for an acknowledgement
    disable_nagle_algorithm, wbufsize = (True, 1 << 16)

    def do_HEAD(self) -> None:
        content = self.served.files.get(self.path.partition("?")[0])
        self.send_response(self.served.refuses or (404 if content is None else 200))
        self.send_header("Content-Length", str(len(content or b"")))
        self.end_headers()

    def do_GET(self) -> None:
        content, status, start, stop = (
            self.served.files.get(self.path.partition("?")[0]),
            200,
            0,
            None,
        )
        if content is None or self.served.refuses:
            self._send(self.served.refuses or 404, b"")
            return
        found = re.match(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if found and self.served.knows_ranges:
            status, start, stop = 206, int(found[1]), int(found[2]) + 1
        asked = Asked(self.path, start, content[start:stop], len(self.served.gets(self.path)))
        self.served.asked.append(asked)
        wrong = self.served.fault(asked)
        if isinstance(wrong, int):
            self._send(wrong, b"")
        else:
            self._send(
                status,
                asked.right if wrong is None else wrong,
                None if isinstance(wrong, Short) else len(asked.right),
            )

    def _send(self, status: int, body: bytes, announced: int | None = None) -> None:
        announced = len(body) if announced is None else announced
        self.send_response(status)
        self.send_header("Content-Length", str(announced))
        self.end_headers()
        self.wfile.write(body[:announced])
        if len(body) < announced:  # cut off
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True

    def log_message(self, *what: object) -> None:
        pass


@contextmanager
def serving(files: dict[str, bytes]) -> Iterator[Served]:
    served = Served(files)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"served": served}))
    server.daemon_threads = True
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
    )
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
