"""A small OpenAI-compatible server that streams, with latencies that are known and faults on demand.

A request waits for one of `slots`, then `first` seconds for its first token, then `each` seconds for every further
one; so at n requests a second it saturates where n * (first + tokens * each) passes `slots`, and TTFT grows with the
queue. Standard library only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Behaviour:
    """How the server answers.

    Attributes:
        first, each: seconds to the first token and between tokens.
        slots: requests worked on at once; others wait.
        queue: requests that may wait; more get HTTP 503.
        cut: every nth stream breaks off in the middle.
        refuse: every request to complete gets HTTP 500.
        short: streams end after this many tokens, whatever was asked.
        usage: says how many tokens it sent.
    """

    first: float = 0.05
    each: float = 0.002
    slots: int = 4
    queue: int = 1_000_000
    cut: int = 0
    refuse: bool = False
    short: int = 1_000_000
    usage: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    waiting: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def streaming(behaviour: Behaviour, model: str = "tiny") -> Iterator[str]:
    """The URL of a server on a free port of this machine, until the block ends."""
    slots = threading.Semaphore(behaviour.slots)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, {"object": "list", "data": [{"id": model, "object": "model"}]})
            else:
                self._send(404, {"error": {"message": f"no {self.path}"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
            if self.path not in ("/v1/completions", "/v1/chat/completions"):
                return self._send(404, {"error": {"message": f"no {self.path}"}})
            with behaviour.lock:
                behaviour.requests.append(body)
                number = len(behaviour.requests)
                full = behaviour.waiting >= behaviour.queue + behaviour.slots
                behaviour.waiting += not full
            if full or behaviour.refuse:
                with behaviour.lock:
                    behaviour.waiting -= not full
                return self._send(503 if full else 500, {"error": {"message": "too busy" if full else "out of order"}})
            try:
                with slots:
                    self._stream(body, behaviour.cut > 0 and number % behaviour.cut == 0)
            except OSError:  # the client has gone
                self.close_connection = True
                self._leave()

        def _leave(self) -> None:
            with behaviour.lock:
                behaviour.waiting -= 1

        def _stream(self, body: dict[str, Any], cut: bool) -> None:
            chat = self.path.startswith("/v1/chat")
            time.sleep(behaviour.first)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            count = min(int(body["max_tokens"]), behaviour.short)
            for i in range(count):
                if i:
                    time.sleep(behaviour.each)
                if cut and i >= count // 2:
                    raise ConnectionError  # without the last chunk: the client sees a broken transfer
                choice = {"index": 0, **({"delta": {"content": " a"}} if chat else {"text": " a"})}
                event: dict[str, Any] = {"model": body["model"], "choices": [choice]}
                if behaviour.usage:
                    event["usage"] = {"prompt_tokens": 1, "completion_tokens": i + 1}
                self._chunk(f"data: {json.dumps(event)}\n\n".encode())
            self._chunk(b"data: [DONE]\n\n")
            self._leave()  # before the client knows: its next request may come at once
            with suppress(OSError):
                self._chunk(b"")

        def _chunk(self, content: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
            self.wfile.flush()

        def _send(self, status: int, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
