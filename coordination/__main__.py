"""`python -m holdfast.coordination COMMAND`: the program of a spawned coordinator and of a spawned
relay.
"""

from __future__ import annotations

import click

from .process.relay import relay
from .server.main import coordinator

main = click.Group(
    "holdfast.coordination", {"coordinator": coordinator, "relay": relay}, help=__doc__
)

if __name__ == "__main__":
    main(prog_name="python -m holdfast.coordination")
