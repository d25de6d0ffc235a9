"""Messages between two processes of one server, over a socket that does not block."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections import deque
from contextlib import suppress
from typing import Any

LENGTH = struct.Struct("!I")  # before each message
READ_BYTES = 2**18
MAX_WAITING = 2**28  # bytes that wait to be sent; a process that does not read for so long is given up


class Channel:
    """One end of a connection. Any thread may send; one thread receives.

    Messages are pickled: both ends are processes of the same server, and no other program can connect.
    """

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._socket = connection
        self._received = bytearray()
        self._waiting: deque[memoryview] = deque()  # what could not be sent yet
        self._waiting_bytes = 0
        self._lock = threading.Lock()  # of sending

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def full(self) -> bool:
        """Whether messages wait to be sent: `flush` must be called as soon as the socket takes more."""
        return bool(self._waiting)

    def send(self, message: Any) -> bool:
        """Send a message. False: a part of it has to wait for `flush`. If the connection has ended, it is dropped."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        framed = memoryview(LENGTH.pack(len(data)) + data)
        with self._lock:
            if not self._waiting:
                framed = framed[self._write(framed) :]
            if framed:
                self._waiting.append(framed)
                self._waiting_bytes += len(framed)
                if self._waiting_bytes > MAX_WAITING:
                    self._drop()
            return not self._waiting

    def flush(self) -> bool:
        """Send what waits, as far as the socket takes it; whether nothing is left."""
        with self._lock:
            while self._waiting:
                first = self._waiting.popleft()
                sent = self._write(first)
                self._waiting_bytes -= sent
                if sent < len(first):
                    self._waiting.appendleft(first[sent:])
                    break
            return not self._waiting

    def receive(self) -> list[Any]:
        """The messages that have arrived; an EOFError if the other end is closed."""
        try:
            while found := self._socket.recv(READ_BYTES):
                self._received += found
                if len(found) < READ_BYTES:
                    break
            else:
                raise EOFError
        except BlockingIOError:
            pass
        except OSError:
            raise EOFError from None
        return self._take()

    def _take(self) -> list[Any]:
        """The messages that are complete."""
        messages, start, received = list[Any](), 0, self._received
        while len(received) >= start + LENGTH.size:
            end = start + LENGTH.size + LENGTH.unpack_from(received, start)[0]
            if end > len(received):
                break
            with memoryview(received) as whole:
                messages.append(pickle.loads(whole[start + LENGTH.size : end]))
            start = end
        del received[:start]
        return messages

    def close(self) -> None:
        """Close this end."""
        with self._lock:
            self._waiting.clear()
            self._socket.close()

    def _write(self, data: memoryview) -> int:
        """The number of bytes that the socket has taken."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the other end is closed, which `receive` reports
            return len(data)

    def _drop(self) -> None:
        """Give the connection up, so that both ends find it closed."""
        self._waiting.clear()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
