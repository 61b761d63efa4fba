"""What the configuration of a model folder says."""

import json
from pathlib import Path
from typing import Any


def read_model_config(path: str) -> dict[str, Any]:
    """The folder's config.json; ValueError in one sentence if the folder is not a model with a tokenizer.

    A model that also sees pictures keeps what concerns its language model in a `text_config`; that is lifted beside the rest.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise ValueError(f"model.path={path}: no config.json there; give a folder in Hugging Face format.")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        raise ValueError(f"model.path={path}: the folder has no tokenizer; save one there with tokenizer.save_pretrained.")
    config = json.loads((folder / "config.json").read_text())
    return {**config, **(config.get("text_config") or {})}


def has_language_part(config: dict[str, Any]) -> bool:
    """Whether the language model is one part of the folder's model, as in one that also sees pictures."""
    return bool(config.get("text_config"))
