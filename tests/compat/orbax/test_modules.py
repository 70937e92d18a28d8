"""No name of Orbax's falls through: each is covered, or refused with a reason, and the page lists
it as it is.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.compat import orbax as ocp
from holdfast.compat.orbax.refusals import refusal_of
from tests.support.paths import ROOT, program


def test_every_public_name_is_on_the_page(tmp_path: Path) -> None:
    """The script that goes through the installed Orbax finds a counterpart for each name;
    docs/orbax-names.md is what it writes.
    """
    command = [sys.executable, ROOT / "scripts" / "list_orbax_names.py", tmp_path / "page.md"]
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr
    text = (tmp_path / "page.md").read_text()
    assert text == (ROOT / "docs" / "orbax-names.md").read_text(), (
        "run python scripts/list_orbax_names.py"
    )
    assert (
        text.count("| refused |") > 20
        and "`StandardSave`" in text
        and "`orbax.checkpoint.v1.training`" in text
    )


def test_the_script_of_names_explains_itself(tmp_path: Path) -> None:
    """`--help` prints how the script is called, and writes nothing."""
    command = [sys.executable, ROOT / "scripts" / "list_orbax_names.py", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("usage: list_orbax_names.py")
    assert not list(tmp_path.iterdir())


def test_no_orbax_is_imported() -> None:
    """The stand-ins work where Orbax is not installed."""
    ran = subprocess.run(
        [sys.executable, program("without_orbax")],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("module", ["v1", "handling.items"])
def test_a_module_may_be_imported_first(module: str) -> None:
    """Which of the face's modules a program imports first does not matter."""
    ran = subprocess.run(
        [sys.executable, "-c", f"import holdfast.compat.orbax.{module}"],
        capture_output=True,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        timeout=100,
    )
    assert ran.returncode == 0, ran.stderr


CLIENTS = json.loads((ROOT / "scripts" / "orbax_clients.json").read_text())
USED = sorted({name for about in CLIENTS.values() for name in about["names"]})


@pytest.mark.parametrize("name", USED)
def test_names_that_clients_use_are_there(name: str) -> None:
    """Each can be got as an attribute; a refused one is an error at the call, which names it, what
    is nearest, and the page.
    """
    found: Any = ocp
    for word in name.split("."):
        found = getattr(found, word)
    if refusal_of(found) is None:
        return
    with pytest.raises(NotImplementedError, match=rf"{re.escape(name)} is not covered .*\.md"):
        found()


IMPORTS = """
from holdfast.compat.orbax import install
install()
import orbax.checkpoint.experimental.emergency.checkpoint_manager as emergency
import orbax.checkpoint.future as future
from orbax.checkpoint import v1 as ocp_v1
from orbax.checkpoint.experimental.emergency.replicator_checkpoint_manager import (
    ReplicatorCheckpointManager,
)
import orbax.checkpoint.experimental.tiering_service.client as tiering
import orbax.checkpoint.version
from orbax.checkpoint import type_handlers
from orbax.checkpoint._src.arrays import sharding as sharding_utils
from orbax.checkpoint._src.checkpoint_managers import preservation_policy as preservation
from orbax.checkpoint._src.checkpoint_managers import save_decision_policy as decision
import orbax.checkpoint._src.checkpoint_managers.policy_checkpoint_info as infos
from orbax.checkpoint._src.metadata import array_metadata
from orbax.checkpoint._src.metadata import array_metadata_store
from orbax.checkpoint.experimental.v1._src.context import context
from orbax.checkpoint.metadata import value
import orbax.checkpoint.metadata.tree
import orbax.checkpoint.checkpoint_managers as managers
class Handler(type_handlers.ArrayHandler):
    def __init__(self, store: array_metadata_store.Store | None = None) -> None:
        super().__init__(array_metadata_store=store)
Handler(None)
assert preservation.LatestN is managers.LatestN and infos.PolicyCheckpointInfo(1).step == 1
assert decision.FixedIntervalPolicy is ocp_v1.training.save_decision_policies.FixedIntervalPolicy
assert sharding_utils.construct_maximal_shardings({}) == {}
assert orbax.checkpoint.__version__ == orbax.checkpoint.version.__version__
for refused in (array_metadata.SerializedArrayMetadata, context.get_context, value.Metadata):
    try:
        refused()
    except NotImplementedError as error:
        assert f"{refused.__module__}.{refused.__qualname__} is not covered" in str(error)
    else:
        raise AssertionError(refused)
assert issubclass(tiering.Client, object)
class Mine(emergency.CheckpointManager):
    pass
assert not isinstance(3, ReplicatorCheckpointManager) and future.NoopFuture().result() is None
for refused in (Mine, emergency.LocalCheckpointOptions):
    try:
        refused()
    except NotImplementedError as error:
        assert "docs/local-tier.md" in str(error)
    else:
        raise AssertionError(refused)
"""


@pytest.mark.slow
def test_refused_modules_are_imported() -> None:
    """As MaxText and pathwaysutils import them, below `_src` too; a call is the error."""
    command = [sys.executable, "-c", IMPORTS]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100)
    assert ran.returncode == 0, ran.stderr
