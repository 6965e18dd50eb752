"""Read from a checkpoint folder what the gateway needs: tokenizer, limits, fingerprint."""

from __future__ import annotations

from pathlib import Path

from eaas.gateway.served_model import ServedModel
from eaas.model.chat import TemplateRefused
from eaas.model.loader import load_spec
from eaas.model.tokenizer import Tokenizer, TokenizerInvalid
from experts.checkpoint import Checkpoint, CheckpointInvalid
from experts.model import ConfigInvalid


class ModelUnusable(ValueError):
    """The checkpoint folder cannot be served; the text says why."""


def load_model(
    folder: Path, name: str, *, trusts_templates: bool = False, max_model_len: int | None = None
) -> ServedModel:
    """The model in a checkpoint folder under its served name.

    Args:
        trusts_templates: Requests may bring a chat template of their own.
        max_model_len: Tokens of the context, where fewer are wanted than the model has.

    Raises:
        ModelUnusable: a file is missing or makes no sense.
    """
    try:
        checkpoint = Checkpoint.open(folder)
        spec = load_spec(checkpoint)
        tokenizer = Tokenizer.load(folder)
        fingerprint = checkpoint.fingerprint
    except (CheckpointInvalid, ConfigInvalid, TokenizerInvalid, TemplateRefused) as error:
        raise ModelUnusable(str(error)) from error
    return ServedModel(
        name=name,
        tokenizer=tokenizer,
        max_model_len=spec.context(max_model_len),
        vocab=spec.vocab,
        fingerprint=fingerprint,
        created=int((folder / "config.json").stat().st_mtime),
        trusts_templates=trusts_templates,
    )
