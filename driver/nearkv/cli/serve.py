"""`nearkv serve`: a device in a process of its own, for several hosts."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Annotated

import typer

from .output import say
from .overrides import SetOption, overrides_of


def serve(
    path: Annotated[Path, typer.Argument(help="Where the Unix socket is to be.")],
    device: Annotated[str, typer.Option(help="Which device: rtl or model, with a preset.")] = "model:card",
    quotas: Annotated[
        list[str] | None,
        typer.Option("--quota", metavar="TENANT=MIB", help="What a tenant may own; may be given again."),
    ] = None,
    library: Annotated[
        int | None,
        typer.Option(metavar="TENANT", help="Whose memory holds the prefixes that hosts share."),
    ] = None,
    overrides: SetOption = None,
) -> None:
    """Serve a device to several host processes: nearkv.open("unix:PATH").

    Each host uses tenants (apertures) of its own; one that another host uses is refused until
    that host is gone. With --library they share prefixes, too. Ends with SIGINT or SIGTERM.
    """
    from nearkv_sim import open_port
    from nearkv_sim.served import Server

    from nearkv.errors import ArgumentError, UnknownHandleError
    from nearkv.library import Library
    from nearkv.owner import Owner

    wanted = [_quota(text) for text in quotas or ()]
    port = open_port(device, **overrides_of(overrides))
    try:
        for tenant, size_bytes in wanted:
            Owner(port, port.config).set_quota(tenant, size_bytes)
        service = None if library is None else Library(port, library)
    except (ArgumentError, UnknownHandleError) as error:
        port.close()
        raise typer.BadParameter(str(error)) from error
    server = Server(port, path, service)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.close())
    say(f"{device} is served at {path}")
    try:
        server.serve()
    finally:
        server.close()


def _quota(text: str) -> tuple[int, int]:
    """A tenant and bytes."""
    tenant, _, size_mib = text.partition("=")
    if not tenant.isdecimal() or not size_mib.isdecimal():
        raise typer.BadParameter(f"{text!r}: write TENANT=MIB, such as 1=2048")
    return int(tenant), int(size_mib) << 20
