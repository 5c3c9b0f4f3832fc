"""An option's value, parsed by a function of the library that raises ValueError."""

from __future__ import annotations

from collections.abc import Callable

import click

__all__ = ["parsed_by"]


def parsed_by(
    parse: Callable[[str], object],
) -> Callable[[click.Context, click.Parameter, str | None], object]:
    """Return a callback for `click.option`; an option that was not given stays None."""

    def callback(ctx: click.Context, param: click.Parameter, value: str | None) -> object:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error), ctx, param) from error

    return callback
