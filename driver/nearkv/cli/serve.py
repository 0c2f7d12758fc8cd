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
    weights: Annotated[
        list[str] | None,
        typer.Option(
            "--weight",
            metavar="TENANT=N",
            help="Its share of the attention units, 1 to 255; may be given again.",
        ),
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

    limits = [_pair(text, "TENANT=MIB, such as 1=2048") for text in quotas or ()]
    shares = [_pair(text, "TENANT=N, such as 1=3") for text in weights or ()]
    port = open_port(device, **overrides_of(overrides))
    try:
        owner = Owner(port, port.config)
        for tenant, size_mib in limits:
            owner.set_quota(tenant, size_mib << 20)
        for tenant, weight in shares:
            owner.set_weight(tenant, weight)
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


def _pair(text: str, form: str) -> tuple[int, int]:
    """A tenant and a number."""
    tenant, _, number = text.partition("=")
    if not tenant.isdecimal() or not number.isdecimal():
        raise typer.BadParameter(f"{text!r}: write {form}")
    return int(tenant), int(number)
