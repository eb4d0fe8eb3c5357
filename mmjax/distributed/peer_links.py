"""Sockets between the processes of a run: one that is killed is noticed at once, and one asks another for files.

Every process listens, and keeps a connection to the next one. Where that breaks and nobody listens
at its other end any more, the process there is gone: its system says so, at once, where missing
heartbeats take half a minute. A connection that breaks for another reason proves nothing, and is
left to the heartbeats; so is a host that lost its power.
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, BinaryIO

_SECONDS = 5.0  # to connect, and until a request is accepted
_RETRY_SECONDS = 0.1
_TRIES = 10  # in a row that fail for another reason than that nobody listens
_WATCH = "watch"
_ACCEPTED = b"+"
_LEAVING = b"."  # sent to who watches: this process ends in order
_LONGEST = 4096  # bytes of a request

Handler = Callable[[dict[str, Any], BinaryIO], None]


class PeerLinks:
    """The sockets of one process. Only who knows the run's token is answered."""

    def __init__(self, host: str) -> None:
        """host: the address of this process on the network that all share."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=128)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._handlers: dict[str, Handler] = {}
        self._watchers: list[socket.socket] = []
        self._token = ""
        self._addresses: list[str] = []

    def open(self, token: str, addresses: list[str]) -> None:
        """Answer from now on. token: secret of the run; addresses: of all its processes."""
        self._token = token
        self._addresses = addresses
        threading.Thread(target=self._accept, name="links", daemon=True).start()

    def watch(self, process: int, lost: Callable[[int], None]) -> None:
        """Call `lost` from a thread when a process is gone without having said that it leaves."""
        threading.Thread(
            target=self._watch, args=(process, lost), name="watching", daemon=True
        ).start()

    def handle(self, request: str, handler: Handler) -> None:
        """Answer requests of this name by a handler, which gets their fields and the stream."""
        self._handlers[request] = handler

    def request(self, process: int, request: str, **fields: Any) -> BinaryIO:
        """Send a request, and return the stream that answers it. Raises OSError where it is not accepted."""
        connection = socket.create_connection(host_and_port(self._addresses[process]), _SECONDS)
        try:
            message = {"token": self._token, "request": request} | fields
            connection.sendall(json.dumps(message).encode() + b"\n")
            if connection.recv(1) != _ACCEPTED:
                raise ConnectionError(f"process {process} does not answer {request}")
            connection.settimeout(None)
            return connection.makefile("rwb")
        finally:
            connection.close()  # the stream has the connection, which ends with it

    def leave(self) -> None:
        """Tell who watches this process that it ends in order."""
        for watcher in self._watchers:
            with suppress(OSError):
                watcher.sendall(_LEAVING)

    def _watch(self, process: int, lost: Callable[[int], None]) -> None:
        failures = 0
        while failures < _TRIES:
            try:
                with self.request(process, _WATCH) as stream:
                    failures = 0
                    if stream.read(1) == _LEAVING:
                        return
            except ConnectionRefusedError:
                return lost(process)
            except OSError:
                failures += 1
            time.sleep(_RETRY_SECONDS)

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError, KeyError):
            connection.settimeout(_SECONDS)
            stream = connection.makefile("rwb")
            fields = json.loads(stream.readline(_LONGEST))
            if not hmac.compare_digest(str(fields["token"]), self._token):
                return
            handler = self._handlers.get(fields["request"], self._hold)
            connection.sendall(_ACCEPTED)
            connection.settimeout(None)
            if handler == self._hold:
                self._watchers.append(connection)
            handler(fields, stream)

    def _hold(self, fields: dict[str, Any], stream: BinaryIO) -> None:
        """Keep the connection until the watching process closes it."""
        stream.read(1)


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address; one of IPv6 comes in brackets: [::1]:1234."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def own_address(coordinator: str) -> str:
    """Return this host's address on the network over which it reaches the coordinator (host:port)."""
    host, port = host_and_port(coordinator)
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))  # sends nothing
        return probe.getsockname()[0]
