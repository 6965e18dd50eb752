"""Failures injected on purpose, by hand or by plan."""

from eaas.ops.chaos.processes import freeze_member as freeze_member
from eaas.ops.chaos.processes import kill_member as kill_member
from eaas.ops.chaos.targets import ChaosRefused as ChaosRefused
