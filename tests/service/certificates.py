"""A certificate authority with a server's and a client's certificate, made by the openssl command."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Certificates:
    ca: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path


def make_certificates(folder: Path) -> Certificates:
    names = {name: folder / f"{name}.pem" for name in ("ca", "server", "client")}
    keys = {name: folder / f"{name}.key" for name in names}
    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    _openssl("req", "-x509", *key, "-subj", "/CN=test CA", "-keyout", keys["ca"], "-out", names["ca"])
    for name in ("server", "client"):
        request = folder / f"{name}.csr"
        extensions = folder / f"{name}.ext"
        extensions.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        _openssl("req", *key, "-subj", f"/CN={name}", "-keyout", keys[name], "-out", request)
        signing = ("-CA", names["ca"], "-CAkey", keys["ca"], "-CAcreateserial", "-days", "2", "-extfile", extensions)
        _openssl("x509", "-req", "-in", request, *signing, "-out", names[name])
    return Certificates(names["ca"], names["server"], keys["server"], names["client"], keys["client"])


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
