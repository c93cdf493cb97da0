"""A small OpenAI-compatible server: /v1/models, /v1/completions (logprobs and echo too), /v1/chat/completions.

What it says is a function of the request. Standard library only.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# From one prompt (a text, token ids, or the text of a chat) and the request's body to a choice: its "text" and,
# if asked for, its "logprobs".
Choose = Callable[[Any, dict[str, Any]], dict[str, Any]]


@dataclass
class Server:
    """A running server, and what it was asked.

    Attributes:
        fail: answers HTTP 500 to this many of the next requests.
    """

    url: str
    model: str
    choose: Choose
    fail: int = 0
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def serving(choose: Choose, model: str = "tiny") -> Iterator[Server]:
    """A server on a free port of this machine, until the block ends."""
    state = Server("", model, choose)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, {"object": "list", "data": [{"id": state.model, "object": "model"}]})
            else:
                self._send(404, {"error": {"message": f"no {self.path}"}})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
            with state.lock:
                state.requests.append((self.path, body))
                broken, state.fail = state.fail > 0, max(0, state.fail - 1)
            if broken:
                self._send(500, {"error": {"message": "out of order"}})
            elif body.get("model") != state.model:
                self._send(404, {"error": {"message": f"no model {body.get('model')}"}})
            elif self.path == "/v1/chat/completions":
                text = "\n".join(message["content"] for message in body["messages"])
                said = state.choose(text, body)["text"]
                choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": said}}
                self._send(200, {"object": "chat.completion", "model": state.model, "choices": [choice]})
            elif self.path == "/v1/completions":
                prompt = body["prompt"]
                many = isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list))
                choices = [
                    {"index": i, "finish_reason": "stop", "logprobs": None, **state.choose(one, body)}
                    for i, one in enumerate(prompt if many else [prompt])
                ]
                self._send(200, {"object": "text_completion", "model": state.model, "choices": choices})
            else:
                self._send(404, {"error": {"message": f"no {self.path}"}})

        def _send(self, status: int, value: Any) -> None:
            content = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
