"""Who may connect: TLS, client certificates, and the refusal to be open to the network by accident."""

from __future__ import annotations

import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from engine import ConfigurationError


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Files in PEM. client_ca: clients must show a certificate signed by it. tokens: see service/tokens.py.
    insecure: listens beyond loopback without all that."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    client_ca: Path | None = None
    tokens: Path | None = None
    insecure: bool = False


def server_credentials(config: SecurityConfig) -> grpc.ServerCredentials | None:
    """None without TLS. Raises ConfigurationError for files that are missing or do not belong together."""
    if config.tls_cert is None and config.tls_key is None:
        if config.client_ca is not None:
            raise ConfigurationError("--tls-client-ca needs --tls-cert and --tls-key")
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise ConfigurationError("--tls-cert and --tls-key need each other")
    client_ca = None if config.client_ca is None else _read("--tls-client-ca", config.client_ca)
    key_and_cert = (_read("--tls-key", config.tls_key), _read("--tls-cert", config.tls_cert))
    _check_pem(config)
    return grpc.ssl_server_credentials(
        [key_and_cert],
        root_certificates=client_ca,
        require_client_auth=client_ca is not None,
    )


def _check_pem(config: SecurityConfig) -> None:
    """gRPC itself would only say that it cannot listen."""
    assert config.tls_cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key, password="")
    except ssl.SSLError as error:
        problem = f"no certificate and key in PEM that belong together ({error.reason or error})"
        raise ConfigurationError(f"--tls-cert {config.tls_cert}, --tls-key {config.tls_key}: {problem}") from None
    if config.client_ca is None:
        return
    try:
        context.load_verify_locations(config.client_ca)
    except ssl.SSLError as error:
        problem = f"no certificate in PEM ({error.reason or error})"
        raise ConfigurationError(f"--tls-client-ca {config.client_ca}: {problem}") from None


def check_exposure(host: str, config: SecurityConfig) -> None:
    """Beyond loopback a server encrypts and knows its clients, or was told not to. Raises ConfigurationError."""
    if config.insecure or is_loopback(host):
        return
    if config.tls_cert is None:
        raise ConfigurationError(f"--host {host} is open to the network: set --tls-cert and --tls-key, or --insecure")
    if config.client_ca is None and config.tokens is None:
        raise ConfigurationError(
            f"--host {host} is open to everybody: set --auth-tokens or --tls-client-ca, or --insecure"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _read(flag: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: {error.strerror}") from None
