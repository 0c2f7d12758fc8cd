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
    overrides: SetOption = None,
) -> None:
    """Serve a device to several host processes: nearkv.open("unix:PATH").

    Each host uses tenants (apertures) of its own; one that another host uses is refused until
    that host is gone. Ends with SIGINT or SIGTERM.
    """
    from nearkv_sim import open_port
    from nearkv_sim.served import Server

    server = Server(open_port(device, **overrides_of(overrides)), path)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.close())
    say(f"{device} is served at {path}")
    try:
        server.serve()
    finally:
        server.close()
