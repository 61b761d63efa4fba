"""An OpenAI-compatible server on loopback whose answers are a function of the test's."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from serve.model_judge.config import ModelJudgeConfig

KEY_NAME, KEY = "SCRIPTED_MODEL_KEY", "sk-scripted"


@dataclass
class ScriptedModel:
    """What the server says, how long it takes, with which status it fails first, and what it has seen."""

    reply: Callable[[list[dict[str, str]]], str]
    delay_s: float = 0.0
    failures: list[int] = field(default_factory=list)
    finish_reason: str = "stop"
    url: str = ""
    questions: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def config(self, **changes: Any) -> ModelJudgeConfig:
        """A judge that asks this server."""
        settings = {
            "model": "scripted",
            "base_url": self.url,
            "api_key_env": KEY_NAME,
            "prompt": "builtin:proof",
            "concurrency": 64,
        }
        settings |= {"timeout_s": 20.0, "retries": 3, "max_tokens": 256, "temperature": 0.0, "max_response_chars": 100_000}
        return ModelJudgeConfig(**settings | {"prices": (1.0, 2.0)} | changes)


@contextmanager
def serving(model: ScriptedModel) -> Iterator[ScriptedModel]:
    """Serve until the end of the block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with model.lock:
                model.questions.append(asked)
                model.at_once += 1
                model.most_at_once = max(model.most_at_once, model.at_once)
                status = model.failures.pop(0) if model.failures else 200
            if self.headers.get("Authorization") != f"Bearer {KEY}":
                status = 401
            time.sleep(model.delay_s)
            body = {"error": {"message": "scripted"}} if status != 200 else self.completion(asked)
            with model.lock:
                model.at_once -= 1
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def completion(self, asked: dict[str, Any]) -> dict[str, Any]:
            message = {"role": "assistant", "content": model.reply(asked["messages"])}
            choice = {"index": 0, "message": message, "finish_reason": model.finish_reason}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            return {"id": "1", "object": "chat.completion", "created": 0, "model": "scripted", "choices": [choice], "usage": usage}

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    model.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
