"""A cable between a client and a server that can be cut, or lose all that goes through it without a word."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Self


class Wire:
    """Passes TCP connections on to a server. A context manager, which cuts what is left."""

    def __init__(self, server: str) -> None:
        """``server`` is HOST:PORT."""
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._dead = False
        self._start(self._accept)

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _shut(self._listener)
        # The first thread is the one that starts the others.
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for end in (self._listener, *self._ends):
            end.close()

    def cut(self) -> None:
        """End all connections at both ends, as when a peer's machine goes down and says so."""
        for end in self._ends:
            _shut(end)

    def die(self) -> None:
        """Lose all that comes from now on. Neither end is told."""
        self._dead = True

    def _start(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # shut
                return
            server = socket.create_connection(self._server)
            self._ends += [client, server]
            self._start(self._pass_on, client, server)
            self._start(self._pass_on, server, client)

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                if not self._dead:
                    sink.sendall(data)
        except OSError:  # the other end is gone
            pass
        _shut(source)
        _shut(sink)


def _shut(end: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is shut
        end.shutdown(socket.SHUT_RDWR)
