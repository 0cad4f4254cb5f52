"""A small world of network namespaces for one test: a host with services, an outside, and two boxes on that host.

`unshare --net python -m tests.sandbox.network_driver BACKEND PLACE BASE [STORAGE]` is the host. It prints as JSON what
an ordinary process of the host reaches and what a box does. Nothing here leaves this machine.
"""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from sandbox.base import Box, BoxSpec, Sandbox, StoredImage
from sandbox.bubble import Bubblewrap
from sandbox.docker import Docker
from sandbox.interpreter import python as host_python
from sandbox.podman import Podman
from tests.sandbox.docker_daemon import docker_daemon
from tools.base_image import NAME, TAR

HOST, GATEWAY, OUTSIDE = "192.0.2.2", "192.0.2.1", "198.51.100.7"
ABSTRACT, BOX_ABSTRACT = "\0lego-test-host", "\0lego-test-box"
MODEL_PORT, BOX_PORT, AGENT_PORT = 18080, 9000, 9001
GREETING = b"hi"

PROBE = """
import json, socket, sys
def reached(kind, address):
    if kind == "unix":
        ways = [(socket.AF_UNIX, socket.SOCK_STREAM, address)]
    elif kind == "link-local":
        names = socket.if_nameindex()
        ways = [(socket.AF_INET6, socket.SOCK_STREAM, (address[0], address[1], 0, index)) for index, _ in names]
    else:
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        ways = [(family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM, tuple(address))]
    errors = []
    for family, type, place in ways:
        try:
            with socket.socket(family, type) as sock:
                sock.settimeout(2)
                sock.connect(place)
                if kind == "udp":
                    sock.send(b"?")
                return "open" if sock.recv(2) == b"hi" else "silent"
        except OSError as error:
            errors.append(type_name(error))
    return " ".join(["closed:", *errors])
def type_name(error):
    return type(error).__name__
print(json.dumps({name: reached(*target) for name, target in json.load(sys.stdin).items()}))
"""
SERVE = f"""
import socket, threading
def serve(sock):
    while True:
        one, _ = sock.accept()
        one.sendall({GREETING!r})
        one.close()
places = [(socket.AF_INET, ("0.0.0.0", {AGENT_PORT})), (socket.AF_UNIX, {BOX_ABSTRACT!r})]
for family, place in places:
    sock = socket.socket(family)
    sock.bind(place)
    sock.listen()
    threading.Thread(target=serve, args=[sock]).start()
"""
SERVE_OUTSIDE = f"""
import socket, threading
def serve(sock):
    while True:
        one, _ = sock.accept()
        one.sendall({GREETING!r})
        one.close()
tcp = socket.create_server(("::", 80), family=socket.AF_INET6, dualstack_ipv6=True)
threading.Thread(target=serve, args=[tcp]).start()
names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
names.bind(("0.0.0.0", 53))
print("ready", flush=True)
while True:
    _, sender = names.recvfrom(512)
    names.sendto({GREETING!r}, sender)
"""
Targets = dict[str, tuple[str, object]]


def ip(*words: str, namespace: int | None = None) -> str:
    prefix = ["nsenter", f"--net=/proc/{namespace}/ns/net"] if namespace else []
    return subprocess.run([*prefix, "ip", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def outside() -> Iterator[None]:
    """Another network namespace, one link away, that answers on TCP 80 and UDP 53 of any address it has."""
    ip("link", "set", "lo", "up")
    process = subprocess.Popen(["unshare", "--net", host_python(), "-I", "-c", SERVE_OUTSIDE], stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline() == b"ready\n"
        ip("link", "add", "host0", "type", "veth", "peer", "name", "out0", "netns", str(process.pid))
        ip("addr", "add", f"{HOST}/24", "dev", "host0")
        ip("link", "set", "host0", "up")
        ip("addr", "add", f"{GATEWAY}/24", "dev", "out0", namespace=process.pid)
        ip("link", "set", "lo", "up", namespace=process.pid)
        ip("addr", "add", f"{OUTSIDE}/32", "dev", "lo", namespace=process.pid)
        ip("link", "set", "out0", "up", namespace=process.pid)
        ip("route", "add", "default", "via", GATEWAY)
        yield
    finally:
        process.kill()
        process.wait()


def link_local(namespace: int | None = None) -> str:
    """The address of this namespace's end of the link."""
    rows = json.loads(ip("-j", "-6", "addr", "show", "dev", "host0", namespace=namespace))
    return next(one["local"] for row in rows for one in row["addr_info"] if one["scope"] == "link")


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(GREETING)
    await writer.drain()
    writer.close()


@asynccontextmanager
async def host_services(place: Path) -> AsyncIterator[Targets]:
    """Listeners of the host, of every kind, and where they and the outside are."""
    async with AsyncExitStack() as stack:
        ports = {}
        for address in ("127.0.0.1", "0.0.0.0", "::"):
            server = await stack.enter_async_context(await asyncio.start_server(greet, address, 0))
            ports[address] = server.sockets[0].getsockname()[1]
        for path in (ABSTRACT, str(place / "host.sock")):
            await stack.enter_async_context(await asyncio.start_unix_server(greet, path))
        yield {
            "host 127.0.0.1": ("tcp", ("127.0.0.1", ports["127.0.0.1"])),
            "host 0.0.0.0 by loopback": ("tcp", ("127.0.0.1", ports["0.0.0.0"])),
            "host 0.0.0.0 by its address": ("tcp", (HOST, ports["0.0.0.0"])),
            "host [::] by loopback": ("tcp", ("::1", ports["::"])),
            "host [::] by link-local": ("link-local", (link_local(), ports["::"])),
            "host abstract socket": ("unix", ABSTRACT),
            "host socket file": ("unix", str(place / "host.sock")),
            "gateway": ("tcp", (GATEWAY, 80)),
            "outside": ("tcp", (OUTSIDE, 80)),
            "DNS": ("udp", (GATEWAY, 53)),
        }


BOX_TARGETS: Targets = {
    "listener of another box": ("tcp", ("127.0.0.1", BOX_PORT)),
    "program of another box": ("tcp", ("127.0.0.1", AGENT_PORT)),
    "abstract socket of another box": ("unix", BOX_ABSTRACT),
}


async def from_host(targets: Targets) -> dict[str, str]:
    """What a process reaches that is in no box. Fresh IPv6 addresses need a moment."""
    for _ in range(20):
        child = await asyncio.create_subprocess_exec(
            host_python(), "-I", "-c", PROBE, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        found = json.loads((await child.communicate(json.dumps(targets).encode()))[0])
        if all(said == "open" for said in found.values()):
            break
        await asyncio.sleep(0.3)
    return found


async def from_box(box: Box, targets: Targets, python: str) -> dict[str, str]:
    result = await box.exec([python, "-I", "-c", PROBE], stdin=json.dumps(targets).encode(), timeout_s=120)
    assert result.code == 0, result
    return json.loads(result.stdout)


@contextmanager
def sandbox_of(backend: str, place: Path, storage: Path | None) -> Iterator[Sandbox]:
    """A backend all of which runs on this host: services too, which must not be another's."""
    image = StoredImage(name=NAME)
    if backend == "podman":
        yield Podman(image=image, storage=storage, state=place / "state")
    elif backend == "docker":
        (place / "docker").mkdir()
        with docker_daemon(place / "docker") as socket:
            subprocess.run(
                ["docker", "-H", f"unix://{socket}", "import", TAR, NAME], check=True, stdout=subprocess.PIPE
            )
            yield Docker(image=image, socket=socket, state=place / "state")
    else:
        yield Bubblewrap(state=place / "state")


async def look(sandbox: Sandbox, place: Path, base: Path) -> dict[str, dict[str, str]]:
    """What is reached from the host and from boxes."""
    spec = BoxSpec(base=base)
    python = host_python() if isinstance(sandbox, Bubblewrap) else "/usr/bin/python3"
    async with host_services(place) as targets, sandbox.open(spec) as box, sandbox.open(spec) as other:
        model = await asyncio.start_server(greet, sock=await box.listen(MODEL_PORT))
        neighbour = await asyncio.start_server(greet, sock=await other.listen(BOX_PORT))
        async with model, neighbour:
            await other.exec(["sh", "-c", f'{python} -I -c "$0" > /dev/null 2>&1 & sleep 0.5', SERVE])
            return {
                "host": await from_host(targets),
                "box": await from_box(box, targets | BOX_TARGETS, python),
                "other box": await from_box(other, BOX_TARGETS, python),
                "model": await from_box(box, {"model": ("tcp", ("127.0.0.1", MODEL_PORT))}, python),
            }


def main() -> None:
    backend, place, base, *storage = sys.argv[1:]
    with outside(), sandbox_of(backend, Path(place), Path(*storage) if storage else None) as sandbox:
        sys.stdout.write(json.dumps(asyncio.run(look(sandbox, Path(place), Path(base)))) + "\n")


if __name__ == "__main__":
    main()
