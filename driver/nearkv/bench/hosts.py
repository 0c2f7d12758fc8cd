"""What it costs a host that others use the same device: calls of several processes on a served one."""

from __future__ import annotations

import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from nearkv_sim import open_port
from nearkv_sim.served import Server

from nearkv.device import open

from .figure import Figure

_ROWS, _KV_HEADS, _HEAD_DIM, _GROUP = 256, 8, 128, 4


def measure(spec: str, *, hosts: Sequence[int], calls: int) -> Iterator[Figure]:
    """`driver.hosts_attend_us`: median microseconds of a call of one sequence, for each number of hosts, all
    of them calling at once.

    Parameters
    ----------
    spec : which device.
    hosts : how many; a power of two of tenants is made that has room for them.
    calls : of each host.
    """
    for count in hosts:
        apertures = 1 << max(count - 1, 1).bit_length()
        with tempfile.TemporaryDirectory(prefix="nearkv-hosts-") as folder:
            server = Server(open_port(spec, apertures=apertures), Path(folder) / "socket")
            threading.Thread(target=server.serve, daemon=True).start()
            try:
                seconds = _medians(server.path, count, calls)
            finally:
                server.close()
        config = {"device": spec, "hosts": count, "rows": _ROWS, "kv_heads": _KV_HEADS}
        yield Figure("driver.hosts_attend_us", 1e6 * statistics.median(seconds), "us", config)


def _medians(path: Path, count: int, calls: int) -> list[float]:
    """The median seconds of a call of each host."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    pipes, processes = [], []
    for tenant in range(count):
        own, other = context.Pipe()
        process = context.Process(target=_host, args=(str(path), tenant, calls, other))
        process.start()
        pipes.append(own)
        processes.append(process)
    for pipe in pipes:
        pipe.recv()
    for pipe in pipes:
        pipe.send("go")
    found = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    return found


def _host(path: str, tenant: int, calls: int, pipe: Connection) -> None:
    """One host: says when it is ready, waits, and says how long a call took."""
    torch.set_num_threads(1)
    with open(f"unix:{path}") as device:
        kv = device.kv_cache(layers=1, kv_heads=_KV_HEADS, head_dim=_HEAD_DIM, dtype="bf16", tenant=tenant)
        sequence = kv.sequence()
        rows = torch.randn(_ROWS, _KV_HEADS, _HEAD_DIM).bfloat16()
        kv.append(sequence, layer=0, k=rows, v=rows)
        q = torch.randn(1, _GROUP * _KV_HEADS, _HEAD_DIM).bfloat16()
        kv.attend([sequence], layer=0, q=q)
        pipe.send("ready")
        pipe.recv()
        seconds = []
        for _ in range(calls):
            started = time.perf_counter()
            kv.attend([sequence], layer=0, q=q)
            seconds.append(time.perf_counter() - started)
        pipe.send(statistics.median(seconds))
