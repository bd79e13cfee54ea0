"""Things that fail on purpose: a way to a server that can be cut, hung and mended, and parts that raise when told."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal, TypeAlias

from helpers import TableEmbeddings
from langchain_core.callbacks import BaseCallbackHandler
from typing_extensions import Self

Fate: TypeAlias = Literal["pass", "cut", "lose the answer", "hold"]
"""What becomes of a message to the server.

It arrives; is lost with its connection; arrives, and the answer to it is lost with the connection; or stays on the way,
with all that follows it on this connection, until the line is mended.
"""


class _Link:
    """A client's connection and ours to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.answer_is_lost = self.client_is_gone = False
        self.held: list[bytes] | None = None

    def close(self) -> None:
        for end in (self.client, self.server):
            with contextlib.suppress(OSError):
                # A client that waits for an answer learns of it at once.
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Proxy:
    """A TCP address of its own in front of a server, to which the way can be cut, hung and mended.

    Args:
        target: Where the server is: a host and a port, or the path of a Unix socket.
    """

    def __init__(self, target: tuple[str, int] | str) -> None:
        self._target = target
        self._lock = threading.RLock()
        self._links: list[_Link] = []
        self._hung = self._down = False
        self._fate: Callable[[bytes], Fate] = lambda _: "pass"
        self.messages = 0
        """Messages to the server since the fate was last decided."""
        self.connections = 0
        """Connections accepted so far."""
        self._listener = self._bound(0)
        self._listener.listen(64)
        self.port: int = self._listener.getsockname()[1]
        self._awake, self._waker = socket.socketpair()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="proxy", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cut all connections and end."""
        with self._lock:
            self._closed = True
        self._waker.send(b"x")
        self._thread.join(timeout=30)
        self._drop()
        for end in (self._listener, self._awake, self._waker):
            end.close()

    def refuse(self) -> None:
        """Cut all connections, and refuse new ones: the server is down."""
        with self._lock:
            self._drop()
            if not self._down:
                self._down = True
                self._listener.close()
                # Bound and not listening: the port stays ours, and whoever comes is refused.
                self._listener = self._bound(self.port)
        self._waker.send(b"x")

    def hang(self) -> None:
        """Accept whatever comes, and never answer."""
        with self._lock:
            self._hung = True
        self._waker.send(b"x")

    def cut(self) -> None:
        """Cut the connections there are; new ones work."""
        with self._lock:
            self._drop()

    def decide(self, fate: Callable[[bytes], Fate]) -> None:
        """Let a function say what becomes of each message to the server, from now on."""
        with self._lock:
            self._fate, self.messages = fate, 0

    def mend(self) -> None:
        """Let everything pass again; what was held goes on its way."""
        with self._lock:
            self._fate = lambda _: "pass"
            self._hung = False
            for link in list(self._links):
                held, link.held = link.held, None
                for message in held or ():
                    self._forward(link, link.server, message)
            if self._down:
                self._down = False
                self._listener.close()
                self._listener = self._bound(self.port)
                self._listener.listen(64)
        self._waker.send(b"x")

    @staticmethod
    def _bound(port: int) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        return listener

    def _drop(self) -> None:
        while self._links:
            self._links.pop().close()

    def _serve(self) -> None:
        while not self._closed:
            with selectors.DefaultSelector() as selector:
                with self._lock:
                    for end, link in self._watched():
                        selector.register(end, selectors.EVENT_READ, link)
                ready = [key for key, _ in selector.select(timeout=1)]
            with self._lock:
                for key in ready:
                    self._attend(key.fileobj, key.data)

    def _watched(self) -> Iterator[tuple[socket.socket, _Link | None]]:
        yield self._awake, None
        if not self._down:
            yield self._listener, None
        for link in () if self._hung else self._links:
            yield link.server, link
            if not link.client_is_gone:
                yield link.client, link

    def _attend(self, end: object, link: _Link | None) -> None:
        # Meanwhile the line may have been cut, or hung.
        if end is self._awake:
            self._awake.recv(4096)
        elif end is self._listener and not self._down:
            self._accept()
        elif link in self._links and link is not None and not self._hung:
            self._pass_on(link, from_client=end is link.client)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        self.connections += 1
        server = socket.socket(socket.AF_UNIX if isinstance(self._target, str) else socket.AF_INET)
        try:
            server.connect(self._target)
        except OSError:
            # The server itself is down.
            client.close()
            server.close()
            return
        for end in (client, server):
            if end.family == socket.AF_INET:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links.append(_Link(client, server))

    def _pass_on(self, link: _Link, *, from_client: bool) -> None:
        try:
            message = (link.client if from_client else link.server).recv(1 << 20)
        except OSError:
            message = b""
        if not message:
            self._end(link)
        elif from_client:
            self._to_server(link, message)
        elif link.answer_is_lost:
            self._end(link)
        else:
            self._forward(link, link.client, message)

    def _to_server(self, link: _Link, message: bytes) -> None:
        if link.held is not None:
            link.held.append(message)
            return
        fate = self._fate(message)
        self.messages += 1
        if fate == "cut":
            self._end(link)
        elif fate == "hold":
            link.held = [message]
        else:
            link.answer_is_lost = fate == "lose the answer"
            self._forward(link, link.server, message)

    def _forward(self, link: _Link, end: socket.socket, message: bytes) -> None:
        try:
            end.sendall(message)
        except OSError:
            self._end(link)

    def _end(self, link: _Link) -> None:
        if link in self._links:
            if link.held is not None:
                # The client gave up; what it sent is still on its way.
                link.client_is_gone = True
                return
            self._links.remove(link)
        link.close()


class RateLimitError(Exception):
    """What a client of an embedding service raises when it asks too often."""

    status_code = 429


class RateLimited(TableEmbeddings):
    """A model whose service takes so many calls and refuses all others, until the limit is lifted."""

    def __init__(self, table: dict[str, Any], calls: int | None = None) -> None:
        super().__init__(table)
        self.calls_left = calls

    def _take(self) -> None:
        if self.calls_left is None:
            return
        if self.calls_left == 0:
            message = "429: too many requests"
            raise RateLimitError(message)
        self.calls_left -= 1

    def embed_query(self, text: str) -> list[float]:
        self._take()
        return super().embed_query(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self._take()
        return super().embed_documents(texts)


class Errors(BaseCallbackHandler):
    """Notes the errors and the ends of retriever runs."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.ends = 0

    def on_retriever_error(self, error: BaseException, **kwargs: Any) -> None:
        self.errors.append(error)

    def on_retriever_end(self, documents: Any, **kwargs: Any) -> None:
        self.ends += 1


class Broken:
    """A function that raises while it is told to, and else gives its answer."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.error: Exception | None = None
        self.asked = 0

    def __call__(self, *arguments: Any) -> Any:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.answer
