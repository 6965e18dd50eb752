"""Whatever another process writes, readers take it or refuse it: random choices, and what fuzzing once found."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400))
@example(data=b"")
def test_damaged_messages_are_taken_or_refused(name: str, data: bytes) -> None:
    TARGETS[name](data)
