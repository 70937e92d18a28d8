"""The page standing still: one file that opens from disk, with what was last known of a job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError

from holdfast.coordination.diagnosis.findings import Evidence, diagnose
from holdfast.coordination.diagnosis.step_curve import Sample
from holdfast.proto import session_pb2

from .snapshot import encode, snapshot

_PAGE = Path(__file__).parent / "page"


def write_report(status_file: Path, report_file: Path) -> None:
    """Writes the report of a job, from the status that its launcher has left.

    Raises OSError, and ValueError for a file that is none.
    """
    try:
        kept = json.loads(status_file.read_text())
        status = ParseDict(kept["status"], session_pb2.StatusResponse(), ignore_unknown_fields=True)
        samples = [Sample(*each) for each in kept.get("samples", [])]
        if not status.launcher.state:
            outcome, _, why = str(kept["outcome"]).partition(": ")
            known = session_pb2.Launcher(state=outcome, why=why)
            status.launcher.MergeFrom(known)
        # What was wrong at the end is known from the status alone: nobody can be asked any more.
        findings = [each for each in diagnose(Evidence(status)) if each.kind == "failed"]
        shown = snapshot(
            status, findings, samples, unix_s=float(kept["unix_s"]), gone=str(kept["outcome"])
        )
    except (KeyError, TypeError, ValueError, ParseError) as error:
        raise ValueError(
            f"{status_file}: expected the status that `holdfast run` leaves, found"
            f" {type(error).__name__}: {error}"
        ) from None
    report_file.write_text(standing_still(shown), encoding="utf-8")


def standing_still(shown: dict[str, Any]) -> str:
    """Returns the page with its style, its script and its data in itself."""
    html, css, script = (
        (_PAGE / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    data = f'<script type="application/json" id="data">{encode(shown)}</script>'
    html = html.replace('<link rel="stylesheet" href="page.css">', f"<style>{css}</style>")
    return html.replace('<script src="page.js" defer></script>', "").replace(
        "</body>", f"{data}\n<script>{script}</script>\n</body>"
    )
