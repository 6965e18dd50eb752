"""What is done to a model before any process of a cluster starts."""

from __future__ import annotations

from pathlib import Path

from eaas import native
from eaas.model.families import spec_of
from eaas.model.tokenizer import Tokenizer, TokenizerInvalid
from eaas.ops.chaos.cli import fail
from eaas.ops.starting import PACK_ERRORS, pack_experts
from experts.checkpoint import Checkpoint


def prepare_model(model: Path, dtype: str) -> None:
    """Find what is wrong with a model before any process starts, and pack its experts once, with a progress bar, so
    that every expert server of the host maps the same file.
    """
    try:
        # Here too, though others compute: their warnings go to logs that nobody has open.
        native.load_or_none()
        spec_of(Checkpoint.open(model).config)
        Tokenizer.load(model)
        pack_experts(model, dtype)
    except (*PACK_ERRORS, TokenizerInvalid) as error:
        raise fail(str(error)) from None
