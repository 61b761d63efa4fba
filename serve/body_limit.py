"""Refuses requests that are too long to be read."""

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """An ASGI middleware: 413 for a body of more than `most` bytes, whatever its header says."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        chunks: list[Message] = []
        size, more = 0, True
        while more:
            message = await receive()
            size += len(message.get("body", b""))
            if size > self.most:
                await self._refuse(send)
                return
            chunks.append(message)
            more = message["type"] == "http.request" and message.get("more_body", False)
        waiting = iter(chunks)

        async def replay() -> Any:
            return next(waiting, None) or await receive()

        await self.app(scope, replay, send)

    async def _refuse(self, send: Send) -> None:
        body = f'{{"detail":"a request may have at most {self.most} bytes"}}'.encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})
