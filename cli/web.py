"""`holdfast web`: the page of a job that runs."""

from __future__ import annotations

import click

from holdfast.coordination import CoordinationError, Credentials
from holdfast.coordination.process.job_folder import LaunchedJob, launched_jobs

from .common import Failure, failure_of, flag, print_json, refuse
from .own_jobs import OF_NAMED, credential_options, credentials_of, newest_attempts, only_job


@click.command()
@click.argument("address", required=False)
@click.option(
    "--job-id", help="This user's job of that id on this machine, in whichever attempt it is."
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen at. Stacks and host names are for whoever has the URL.",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    show_default=True,
    help="Port to listen at; 0 takes a free one.",
)
@flag(
    "--end-with-input",
    help="Ends when its standard input does: with the process that started it.",
)
@flag("--json", "as_json", help="Print the URL as JSON.")
@credential_options
def web(
    address: str | None,
    *,
    job_id: str | None,
    host: str,
    port: int,
    end_with_input: bool,
    as_json: bool,
    **files: str | None,
) -> None:
    """Serve a live page of the job that the coordinator at ADDRESS (host:port or unix:PATH)
    serves, and print its URL.

    Without ADDRESS, this user's job on this machine; several are listed. Whoever has the URL sees
    the job and its stacks; it is refused under another host's name. The page lives through restarts
    of the coordinator; without ADDRESS, or with --job-id, through attempts. Needs the extra `web`.
    """
    from holdfast.web import serve_page
    from holdfast.web.feed import CoordinatorAddress

    if address is not None:
        refuse({"--job-id": "is for a job of this machine: leave it out, or the address"})
    else:
        refuse(OF_NAMED)
    try:
        given = Credentials(**files)  # type: ignore[arg-type]
        # Now: the page would wait for a coordinator that lets it in.
        given.tls()
        given.metadata()
    except (ValueError, CoordinationError) as error:
        raise Failure(str(error)) from None

    def find() -> CoordinatorAddress | None:
        if address is not None:
            return CoordinatorAddress(address, credentials_of(address, given))
        running = newest_attempts().get(job_id)
        return None if running is None else CoordinatorAddress(running[0].address, running[1])

    def announce(url: str) -> None:
        if as_json:
            print_json({"url": url})
        else:
            click.echo(f"page at {url}")

    def launched(job: str) -> LaunchedJob | None:
        if address is not None:
            return None
        return next(reversed(launched_jobs(job_id or job)), None)

    if address is None and job_id is None:
        # The page keeps to this job: its next attempt is found by its id.
        job_id = only_job(as_json=as_json)[0].job_id
    try:
        serve_page(
            find,
            launched=launched,
            host=host,
            port=port,
            announce=announce,
            end_with_input=end_with_input,
        )
    except ImportError as error:
        raise Failure(str(error)) from None
    except OSError as error:
        raise failure_of(error) from None
