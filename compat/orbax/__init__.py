"""`from holdfast.compat import orbax as ocp` stands where `import orbax.checkpoint as ocp` stood.

It imports no Orbax. It translates names, options and results. Checkpoints are saved in holdfast's
layout, and those of Orbax's are read. What is not covered raises NotImplementedError with the call
and what is nearest; docs/from-orbax.md lists every name.

Names are loaded when the first one is asked for: `install()` must not import jax before the program
that it serves has set its environment.
"""

from typing import TYPE_CHECKING, Any

from .installation import install as install

if TYPE_CHECKING:
    from .face import *  # noqa: F403 (its __all__ says which)


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__version__":
        raise AttributeError(name)
    import importlib

    return getattr(importlib.import_module(f"{__name__}.face"), name)
