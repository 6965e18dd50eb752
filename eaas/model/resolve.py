"""From what a user typed to a model folder: a path, the built-in model, or a hub id."""

from __future__ import annotations

import re
from pathlib import Path

DEMO = "demo"
_DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo_model"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_FILES = ["*.json", "*.safetensors", "*.jinja"]


class ModelNotFound(ValueError):
    """No model under that name; the text says where it was looked for."""


def resolve_model(name: str | Path) -> Path:
    """The folder of a model, absolute.

    Args:
        name: A folder that holds config.json, "demo" (the built-in model), or a hub id like
            "Qwen/Qwen3-30B-A3B", which is downloaded unless it is cached.

    Raises:
        ModelNotFound: there is no such folder, or the hub does not have it or cannot be reached.
    """
    text = str(name)
    folder = Path(text).expanduser()
    # A folder that happens to be called "demo" counts only when it holds a model.
    if (folder / "config.json").is_file():
        return folder.resolve()
    if text == DEMO:
        if not (_DEMO_FOLDER / "config.json").is_file():
            raise ModelNotFound(
                f"The built-in model is missing from {_DEMO_FOLDER}. Install the package again."
            )
        return _DEMO_FOLDER
    if folder.is_dir():
        raise ModelNotFound(f"{folder} holds no config.json, so it is not a model folder.")
    if isinstance(name, Path) or not _HUB_ID.fullmatch(text):
        raise ModelNotFound(
            f"{text} is neither a model folder, nor 'demo', nor a hub id like 'Qwen/Qwen3-30B-A3B'."
        )
    return _download(text)


def _download(hub_id: str) -> Path:
    # Imported here: it costs 0.3 s, which a local model need not pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=_FILES)).resolve()
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{hub_id}: not on the hub, or private (set HF_TOKEN); and there is no such folder."
        ) from error
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(
            f"{hub_id}: there is no such folder, it is not cached, and the hub cannot be reached."
            " Give a model folder, or 'demo'."
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise ModelNotFound(f"{hub_id}: the download failed: {error}") from error
