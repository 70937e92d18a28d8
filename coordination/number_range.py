"""The type of a command's option that is a number."""

from __future__ import annotations

import math
from typing import Any

import click


class NumberRange(click.FloatRange):
    """The type of an option that is a number. FloatRange takes "nan", which is out of no range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Returns the number. Raises BadParameter."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number.", param, ctx)
        return number
