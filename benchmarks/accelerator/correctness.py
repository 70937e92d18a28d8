"""Part a: runs tests/system/test_accelerator.py, and reports each test as it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# The machine's own plugins of pytest are not this suite's.
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
os.environ.pop("PYTEST_ADDOPTS", None)
# The probe has found what the tests would look for.
os.environ.setdefault("ACCELERATOR_KIT", "accelerator")

import pytest  # noqa: E402
from plan import Plan  # noqa: E402
from report import figure, not_run, seconds  # noqa: E402

SMOKE = "pinned_host"


class Reporter:
    """Reports the outcome of each test, with what its program has printed."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Is called by pytest for each phase of a test."""
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "skipped"
            not_run(name, reason.removeprefix("Skipped: "))
        elif report.failed:
            figure(name, f"FAILED ({report.when})", str(report.longrepr).strip()[-300:])
        elif report.when == "call":
            printed = "; ".join(report.capstdout.strip().splitlines())
            figure(name, f"passed in {seconds(report.duration)}", printed)


def main() -> int:
    plan = Plan.of_json(sys.argv[1])
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    arguments = ["-q", "--capture=sys", "-ppytest_timeout", "-pno:cacheprovider", "-Wdefault"]
    # Each test's files go with it, unless it fails.
    arguments += ["--basetemp", str(plan.folder("tests")), "-o", "tmp_path_retention_policy=failed"]
    if plan.smoke:
        arguments += ["-k", SMOKE]
        not_run("the other tests of tests/system/test_accelerator.py", "not in smoke")
    arguments.append("tests/system/test_accelerator.py")
    return int(pytest.main(arguments, plugins=[Reporter()]))


if __name__ == "__main__":
    raise SystemExit(main())
