"""`nearkv inspect`: the device as the CXL tools of a host would print it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .output import JsonOption, print_json
from .overrides import SetOption, overrides_of


def inspect(
    spec: Annotated[
        str, typer.Argument(help="Which device: model, rtl or cocotb, and a preset: model:card.")
    ] = "model",
    dump: Annotated[
        Path | None,
        typer.Option(help="Write the configuration space to this file, for lspci -F FILE -vvv."),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Open a device, enumerate it as a CXL host does, and print what lspci -vvv and cxl list would say of it:
    configuration space, registers, memory, HDM decoders, poison.
    """
    import nearkv
    from nearkv.cxl import listing

    with nearkv.open(spec, **overrides_of(settings)) as device:
        host = device.cxl()
        if dump is not None:
            dump.write_text(listing.dump(host))
        if as_json:
            print_json({"spec": spec, "pci": listing.function(host), "memdev": listing.memory_device(host)})
        elif dump is None:
            typer.echo(listing.text(host))
        else:
            typer.echo(f"{dump}: 4,096 bytes of configuration space; read them with lspci -F {dump} -vvv")
