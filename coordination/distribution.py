"""The name of holdfast on the package index, and how its optional parts are installed."""

# Not "holdfast": there the index has another project, which is imported under the same name.
DISTRIBUTION = "holdfast-jax"


def install_command(extra: str) -> str:
    """Returns the command that installs an optional part, for messages of errors."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
