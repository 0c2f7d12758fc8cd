"""A served device: several hosts at once, each with its own tenant, that come, share the device, and die."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import nearkv
import pytest
import torch
from driver_cases import context, expected, filled, same_bits, values
from leaks import no_leak
from nearkv.cli import app
from nearkv.errors import LinkError, QuotaError, TenantTakenError
from nearkv_hw.abi import configure
from nearkv_sim.model import ModelPort
from nearkv_sim.served import Server
from typer.testing import CliRunner

SHAPE = {"layers": 2, "kv_heads": 2, "head_dim": 8, "dtype": "fp16", "page_rows": 4}
KILLS = int(os.environ.get("NEARKV_PROCESS_KILLS", "20"))
"""Processes that are killed; more of them where the environment says so."""
APERTURES = 8
Q = values(1, 4, 8, seed=3)


@pytest.fixture
def server(tmp_path):
    served = Server(ModelPort(configure("small", apertures=APERTURES)), tmp_path / "socket")
    threading.Thread(target=served.serve, daemon=True).start()
    yield served
    served.close()


def host(server):
    return nearkv.open(f"unix:{server.path}")


def test_a_served_device_has_the_bits_of_one_of_its_own(server):
    """Also calls whose lines do not fit the shared memory."""
    contexts = [context(n, 2, 8, 8, seed=n) for n in (3, 200, 140_000)]
    with host(server) as device:
        assert device.config == configure("small", apertures=APERTURES)
        assert device.kind == "model"
        with device.kv_cache(**SHAPE) as kv:
            handles = filled(kv, contexts)
            out = kv.attend(handles[:2], layer=0, q=values(2, 4, 8, seed=5), scale=0.3)
            assert same_bits(out, expected(values(2, 4, 8, seed=5), contexts[:2], scale=0.3))
            assert same_bits(kv.read(handles[2], layer=0)[0], contexts[2][0])
            pending = kv.attend_async(handles[:1], layer=0, q=Q, scale=0.3)
            assert same_bits(pending.result(), expected(Q, contexts[:1], scale=0.3))
        assert device.stats().link_bytes > 0


def test_two_hosts_have_two_tenants(server):
    """Neither sees or disturbs the other; a tenant in use is refused, and free once its host is gone."""
    rows = [context(20, 2, 8, 8, seed=s) for s in (1, 3)]
    first, second = host(server), host(server)
    caches = [device.kv_cache(**SHAPE, tenant=t) for t, device in enumerate((first, second))]
    handles = [filled(kv, [own])[0] for kv, own in zip(caches, rows, strict=True)]
    with pytest.raises(TenantTakenError, match="another host uses tenant 0 of this device"):
        second.kv_cache(**SHAPE, tenant=0)
    for _ in range(10):
        for kv, handle, own in zip(caches, handles, rows, strict=True):
            assert same_bits(kv.attend([handle], layer=0, q=Q, scale=0.3), expected(Q, [own], scale=0.3))
    first.close()
    (found,) = until(lambda: second.attach(0))
    assert same_bits(found.read(found.sequences[0], layer=0)[0], rows[0][0])
    assert same_bits(caches[1].read(handles[1], layer=0)[0], rows[1][0])
    second.close()


def until(call, tries=200):
    """What a call returns once it is no longer refused."""
    for _ in range(tries):
        try:
            return call()
        except TenantTakenError:
            time.sleep(0.01)
    return call()


def test_hosts_at_once(server):
    """Threads as hosts, a tenant each, hundreds of calls: every result is its own."""
    failed = []

    def work(tenant):
        rows = context(30, 2, 8, 8, seed=tenant)
        wanted = expected(Q, [rows], scale=0.3)
        with host(server) as device, device.kv_cache(**SHAPE, tenant=tenant) as kv:
            (handle,) = filled(kv, [rows])
            for _ in range(50):
                if not same_bits(kv.attend([handle], layer=0, q=Q, scale=0.3), wanted):
                    failed.append(tenant)

    threads = [threading.Thread(target=work, args=(tenant,)) for tenant in range(APERTURES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_server_that_ends_is_a_lost_link(server):
    device = host(server)
    kv = device.kv_cache(**SHAPE)
    (handle,) = filled(kv, [context(5, 2, 8, 8, seed=1)])
    server.close()
    with pytest.raises(LinkError, match="server is gone"):
        kv.attend([handle], layer=0, q=Q)
    with pytest.raises(ConnectionError, match=r"no device is served at .* nearkv serve"):
        host(server)


def test_what_hosts_may_not_do(server, tmp_path):
    with host(server) as device:
        for call in (
            lambda: device._port.inject(0, [0]),
            lambda: device.start_wave(tmp_path / "wave"),
            lambda: device._port.record(),
        ):
            with pytest.raises(RuntimeError, match="a served device"):
                call()


def append_until_killed(path, seed, said):
    """A host that appends rows for ever, and says after each call how many are committed."""
    torch.set_num_threads(1)
    device = nearkv.open(f"unix:{path}")
    kv = device.kv_cache(**SHAPE)
    handle = kv.sequence()
    chance, total = random.Random(seed), 0
    while True:
        count = chance.choice([1, 2, 7, 40])
        k = numbered(total, count)
        kv.append(handle, layer=0, k=k, v=-k)
        total += count
        said.send(total)
        if chance.random() < 0.2:
            kv.free(kv.fork(handle, chance.randrange(total)))


def numbered(begin, count):
    """Rows that say which ones they are."""
    index = torch.arange(begin, begin + count).view(-1, 1, 1)
    return (index % 1021 + torch.arange(2).view(1, 2, 1) * 0.5).expand(-1, -1, 8).half()


def test_processes_that_are_killed_lose_nothing(server):
    """SIGKILL at random moments: rows that were committed are there, whole; and a next host goes on."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    hosts = multiprocessing.get_context("forkserver")
    hosts.set_forkserver_preload(["torch", "nearkv", "nearkv.device", "test_served"])
    for kill in range(KILLS):
        heard, said = hosts.Pipe(duplex=False)
        process = hosts.Process(target=append_until_killed, args=(str(server.path), seed + kill, said))
        process.start()
        committed = heard.recv()
        time.sleep(chance.random() * 0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        while heard.poll():
            committed = heard.recv()
        with host(server) as device:
            (kv,) = until(partial(device.attach, 0))
            (handle, *_) = kv.sequences
            k, v = kv.read(handle, layer=0)
            assert len(k) >= committed
            assert same_bits(k, numbered(0, len(k)))
            assert same_bits(v, -k)
            no_leak(kv)
            kv.close()
            assert device.memory().pages == 0


@pytest.mark.parametrize("library", ["-1", "9"])
def test_a_library_without_a_tenant_is_refused(tmp_path, library):
    options = ["--device", "model", "--library", library]
    result = CliRunner().invoke(app, ["serve", str(tmp_path / "socket"), *options])
    assert result.exit_code == 2
    assert f"tenant={library}" in result.output


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--quota 1", "write TENANT=MIB"),
        ("--quota x=1", "write TENANT=MIB"),
        ("--quota 9=1", "tenant=9"),
        ("--quota 0=99999999", "size_bytes"),
        ("--weight 1", "write TENANT=N"),
        ("--weight 9=1", "tenant=9"),
        ("--weight 0=256", "weight=256"),
    ],
)
def test_what_no_tenant_can_have_is_refused(tmp_path, option, message):
    result = CliRunner().invoke(
        app, ["serve", str(tmp_path / "socket"), "--device", "model", *option.split()]
    )
    assert result.exit_code == 2
    assert message in result.output


def test_the_command_serves(tmp_path):
    path = tmp_path / "socket"
    command = "import sys; from nearkv.cli import main; sys.argv[1:1] = ['serve']; main()"
    limits = ["--quota", "1=3", "--weight", "1=2", "--library", "0"]
    options = ["--device", "model", *limits, "--set", "apertures=3"]
    process = subprocess.Popen([sys.executable, "-c", command, str(path), *options])
    try:
        for _ in range(600):
            if path.exists():
                break
            time.sleep(0.05)
        with nearkv.open(f"unix:{path}") as device, device.kv_cache(**SHAPE, tenant=2) as kv:
            rows = context(9, 2, 8, 8, seed=1)
            (handle,) = filled(kv, [rows])
            kv.append(handle, layer=1, k=rows[0], v=rows[1])
            assert same_bits(kv.attend([handle], layer=0, q=Q, scale=0.3), expected(Q, [rows], scale=0.3))
            kv.publish(handle, range(9), shared=True)
            assert kv.find_prefix(range(9), shared=True)[1] == 9
            with pytest.raises(QuotaError, match="tenant 1 may own 3 extents of 1 MiB"):
                filled(device.kv_cache(**SHAPE, tenant=1), [context(100_000, 2, 8, 8, seed=1)])
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    assert not path.exists()
