"""Names of other libraries, translated: programs written for them run on holdfast."""

__all__ = ["orbax"]
