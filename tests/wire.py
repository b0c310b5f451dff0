"""A wire that can be cut before a socket."""

import os
import socket
import threading
from contextlib import suppress


class Wire:
    """Stands in front of Docker's socket: can cut it, as a restart of the daemon does, or hang."""

    def __init__(self, path):
        self.path, self.real, self.open, self.hang = path, "/var/run/docker.sock", [], False
        self.cut_at = b"\0never\0"
        self.listen()

    def listen(self):
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(self.path))
        self.server.listen(64)
        threading.Thread(target=self.accept, args=(self.server,), daemon=True).start()

    def accept(self, server):
        with suppress(OSError):
            while True:
                near = server.accept()[0]
                far = socket.socket(socket.AF_UNIX)
                far.connect(self.real)
                self.open += [near, far]
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self.copy, args=(source, target), daemon=True).start()

    def copy(self, source, target):
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if self.cut_at in data:
                    break
                if not self.hang:
                    target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def cut(self):
        for end in (self.server, *self.open):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self.open.clear()
        with suppress(FileNotFoundError):
            os.unlink(self.path)
