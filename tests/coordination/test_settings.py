"""Settings as values: what a coordinator's command gets of them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from holdfast.coordination import Endpoint, JobIdentity, ServiceTimeouts, Timeouts


@pytest.mark.parametrize("value", [Endpoint(), JobIdentity(), ServiceTimeouts(), Timeouts()])
def test_settings_are_values(value: Any) -> None:
    """They compare by their fields, and nothing changes one: they are defaults of arguments."""
    assert value == type(value)()
    field = next(iter(vars(value)))
    with pytest.raises(FrozenInstanceError):
        setattr(value, field, None)


@pytest.mark.parametrize(
    ("endpoint", "options"),
    [
        (Endpoint(), ["--host=127.0.0.1", "--port=0"]),
        (Endpoint("0.0.0.0", 80, "me"), ["--host=0.0.0.0", "--port=80", "--advertise=me"]),
    ],
)
def test_endpoint_names_its_options(endpoint: Endpoint, options: list[str]) -> None:
    """Each field is an option of `holdfast coordinator`, and a host that is not told is none."""
    assert list(endpoint.options()) == options
