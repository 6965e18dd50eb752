"""What can be recorded of the rows that a model computes, by name. Pure.

    embed               the residual stream before the first layer
    layers.N.attention  what the layer's attention adds to it
    layers.N.gate       logits of the gate (MoE layers)
    layers.N.experts    the experts chosen, ids as floats (MoE layers)
    layers.N.expert.E   the output of expert E, whether or not the gate chose it (MoE layers)
    layers.N.residual   the residual stream behind the layer
    final_norm          the last of these, normed
    logits

N: a number, a range such as 0-3, or * for every layer that has it. All are float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from eaas.model.spec import ModelSpec

# In the order of DecoderTap (eaas/native/decoder.h).
KINDS = ("embed", "attention", "gate", "experts", "residual", "final_norm", "logits", "expert")
WHOLE = frozenset({"embed", "final_norm", "logits"})  # of no layer
OF_EXPERTS = frozenset({"gate", "experts", "expert"})
MOST_TAPS = 4096
STATISTICS = ("mean", "rms", "max", "non_finite")

_NAME = re.compile(r"layers\.(?:(\*)|(\d{1,5})(?:-(\d{1,5}))?)\.(attention|gate|experts|residual|expert\.(\d{1,5}))")


class TapInvalid(ValueError):
    """No tap of this model; the text says what would be one."""


class Tap(NamedTuple):
    """One of them. layer: 0 for what no layer has. expert: of "expert" alone."""

    kind: str
    layer: int = 0
    expert: int = 0

    @property
    def name(self) -> str:
        """As it was asked for, of one layer."""
        if self.kind in WHOLE:
            return self.kind
        return f"layers.{self.layer}.{self.kind}" + (f".{self.expert}" if self.kind == "expert" else "")

    def width(self, spec: ModelSpec) -> int:
        """Numbers of one row."""
        widths = {"gate": spec.moe.experts, "experts": spec.moe.top_k, "logits": spec.vocab}
        return widths.get(self.kind, spec.hidden)


def taps_of(names: Iterable[str], spec: ModelSpec) -> tuple[Tap, ...]:
    """The taps of these names, each once, in the order of a step.

    Raises:
        TapInvalid: a name is none, or names what this model has not, or there are too many.
    """
    found: set[Tap] = set()
    for name in names:
        found.update(_taps(name, spec))
        if len(found) > MOST_TAPS:
            raise TapInvalid(f"Over {MOST_TAPS} taps were asked for; ask for fewer layers, or fewer experts.")
    if not found:
        raise TapInvalid("No tap was named; name some, such as layers.*.residual.")
    return tuple(
        sorted(
            found,
            key=lambda tap: (tap.layer + (tap.kind in KINDS[5:7]) * spec.layers, KINDS.index(tap.kind), tap.expert),
        )
    )


def _taps(name: str, spec: ModelSpec) -> Sequence[Tap]:
    if name in WHOLE:
        return [Tap(name)]
    match = _NAME.fullmatch(name)
    if match is None:
        raise TapInvalid(
            f"{name[:64]!r} is no tap. There are embed, layers.N.attention, layers.N.gate, layers.N.experts, "
            "layers.N.expert.E, layers.N.residual, final_norm and logits; N is a number, a range or *."
        )
    every, first, last, kind, expert = match.groups()
    kind = kind.partition(".")[0]
    having = set(spec.moe_layers) if kind in OF_EXPERTS else set(range(spec.layers))
    if every:
        layers = sorted(having)
    else:
        layers = range(int(first), int(last or first) + 1)
        lacking = [layer for layer in layers if layer not in having]
        if lacking or not layers:
            what = "MoE layers" if kind in OF_EXPERTS else "layers"
            raise TapInvalid(f"{name!r} names other layers than the {len(having)} {what} of this model.")
    if expert is not None and int(expert) >= spec.moe.experts:
        raise TapInvalid(f"{name!r} names expert {expert}; this model has 0 to {spec.moe.experts - 1}.")
    return [Tap(kind, layer, int(expert or 0)) for layer in layers]
