"""What is done to a model before any process of a cluster starts."""

from __future__ import annotations

from pathlib import Path

from eaas import native
from eaas.chaos.cli import fail
from eaas.cluster.starting import PACK_ERRORS, pack_experts
from eaas.model.families import spec_of
from eaas.model.tokenizer import Tokenizer, TokenizerInvalid
from experts.checkpoint import Checkpoint


def prepare_model(model: Path, dtype: str) -> None:
    """Find what is wrong with a model before any process starts, and pack its experts once, with a progress bar, so
    that every expert server of the host maps the same file.
    """
    try:
        # Here too, though others compute: what is wrong with it is said before any of them starts.
        native.load()
        spec_of(Checkpoint.open(model).config)
        Tokenizer.load(model)
        pack_experts(model, dtype)
    except (*PACK_ERRORS, TokenizerInvalid) as error:
        raise fail(str(error)) from None
