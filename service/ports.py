"""Ports are tried before the model loads: a taken one is known at once, and not after minutes. They are not held until
then; whoever is quicker meanwhile is met by the same line when the server starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from engine import ConfigurationError
from service.security import listen_address


def try_ports(asked: Sequence[tuple[str, str, int | None]]) -> None:
    """asked: (flag, host, port); 0 and None ask for none. Raises ConfigurationError, one line that names the flag."""
    flags: dict[int, str] = {}
    for flag, host, port in asked:
        if port:
            if port in flags:
                raise ConfigurationError(f"{flags[port]} and {flag} are both {port}")
            flags[port] = flag
            try_port(flag, host, port)


def try_port(flag: str, host: str, port: int) -> None:
    family, address = resolved(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # old connections do not take a port
        try:
            trial.bind(address)
        except OSError as error:
            raise ConfigurationError(cannot_listen(flag, host, port, error)) from None


def resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Where a server of this host listens. Raises ConfigurationError."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"--host {host}: {error.strerror}") from None
    family, _, _, _, address = found[0]
    return family, (str(address[0]), port)


def cannot_listen(flag: str, host: str, port: int, error: OSError | None = None) -> str:
    cause = f": {os.strerror(error.errno)}" if error is not None and error.errno else ""
    return f"{flag} {port}: cannot listen on {listen_address(host, port)}{cause}"
