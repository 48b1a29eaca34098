"""JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import ConfigurationError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigurationError with one line."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigurationError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path}: a JSON object is expected")
    return value
