"""`holdfast coordinator`: serves one job until it is over."""

from __future__ import annotations

import click

from holdfast.coordination._host import LINGER_S, STARTUP_TIMEOUT_S, Options, serve


@click.command()
@click.option("--num-processes", "-n", type=click.IntRange(1), required=True, help="Processes of the job.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port to listen at; 0 takes a free one.")
@click.option("--advertise", metavar="HOST", help="Host to print, where others reach it by another name than --host.")
@click.option("--job", default="", help="Id of the job; Sessions of another are refused.")
@click.option("--attempt", default=0, show_default=True, help="Attempt of the job; Sessions of another are refused.")
@click.option("--recoverable", is_flag=True, help="A process may die and come back; the others go on.")
@click.option("--survivable", is_flag=True, help="jaxlib's clients live through a restart of this coordinator; they hear of errors later.")
@click.option(
    "--heartbeat-timeout-s", type=click.FloatRange(0.1), default=100.0, show_default=True, help="Silence after which a process is lost."
)
@click.option(
    "--shutdown-timeout-s",
    type=click.FloatRange(0.1),
    default=300.0,
    show_default=True,
    help="Wait of the first to shut down for the rest.",
)
@click.option(
    "--linger-s", type=click.FloatRange(0), default=LINGER_S, show_default=True, help="Ends when all have been dead so long; 0: never."
)
@click.option(
    "--startup-timeout-s", type=click.FloatRange(0), default=STARTUP_TIMEOUT_S, show_default=True, help="Ends when nobody came; 0: never."
)
@click.option("--public-api", is_flag=True, help="Serve over grpc.aio: slower, and only gRPC's public API.")
def coordinator(num_processes: int, **options: object) -> None:
    """Serves the processes of one job: who is alive, keys, barriers.

    Prints `coordinator at HOST:PORT` when it serves, and ends by itself once every process has shut down or stayed dead.
    """
    try:
        serve(Options(num_processes, **options))  # type: ignore[arg-type]
    except OSError as error:
        raise click.ClickException(str(error)) from None
