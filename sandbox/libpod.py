"""What an `Engine` asks of Podman, in the words of its API (libpod). These functions block; `Wire.call` runs them.

A command's pid and exit code are not here: conmon's files tell them, which the service reads late or, when it was
started again, never.
"""

import json
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

from sandbox.base import Progress
from sandbox.description import description
from sandbox.engine import AGENT_ID, Container, Exec, Listed
from sandbox.service import Service
from sandbox.wire import Api, Lost, Refused, Stream, lost_connections

STARTED_S = 1.0
REMOVE_S, PAUSE_S = 10.0, 0.02
LAST_LINES = 20
NOT_FOUND = 404


def create(api: Api, container: Container) -> str:
    """The id of a new container."""
    try:
        return api.post("containers/create", description(container))["Id"]
    except Refused as error:
        if "already in use" not in str(error):
            raise
        # The name is of this box alone: an earlier try, whose answer was lost, has made it.
        return api.get(f"containers/{container.name}/json")["Id"]


def start(api: Api, container: str) -> tuple[int, Path]:
    """The first process's pid, and the folder where Podman keeps what it knows of this container."""
    api.post(f"containers/{container}/start")
    seen = api.get(f"containers/{container}/json")
    if not seen["State"]["Pid"]:
        raise Refused(0, f"it ended at once with exit code {seen['State']['ExitCode']}; has the image a `sleep`?")
    return seen["State"]["Pid"], Path(seen["StaticDir"])


def execute(api: Api, container: str, folder: Path, command: Exec, service: Service) -> Path:
    """Starts a command; returns the folder below `folder` where conmon writes how it goes."""
    user = AGENT_ID if command.user == "agent" else 0
    env = [f"{key}={value}" for key, value in command.env.items()]
    body = {"Cmd": list(command.argv), "Env": env, "User": f"{user}:{user}"}
    place = folder / api.post(f"containers/{container}/exec", body)["Id"]
    try:
        with lost_connections():
            api.post(f"exec/{place.name}/start", {"Detach": True})
    except Lost:
        if not _appears(service, place / "exec_pid"):  # else it runs, and must not be started twice
            raise
    return place


def _appears(service: Service, path: Path) -> bool:
    deadline = time.monotonic() + STARTED_S
    while time.monotonic() < deadline:
        try:
            service.read_number(path)
        except FileNotFoundError:
            time.sleep(0.01)
        else:
            return True
    return False


def remove(api: Api, container: str, service: Service) -> None:
    """Tries again when the container ends by itself at the same moment, which Podman takes for an error."""
    patience = time.monotonic() + REMOVE_S
    while True:
        try:
            return api.delete(f"containers/{container}", force=True, timeout=0, v=True)
        except Refused as error:
            if error.status == NOT_FOUND:
                return service.sweep(container)
            if time.monotonic() > patience:
                raise
            time.sleep(PAUSE_S)


def listed(api: Api, label: str) -> list[Listed]:
    """All containers with this label, also those that do not run."""
    found = api.get("containers/json", all="true", filters=json.dumps({"label": [label]}))
    return [Listed(id=one["Id"], labels=one["Labels"]) for one in found]


def image_id(api: Api, name: str) -> str | None:
    """The digest of an image; None where there is none."""
    try:
        return api.get(f"images/{name}/json")["Id"]
    except Refused as error:
        if error.status != NOT_FOUND:
            raise
        return None


def load(api: Api, tar: Path, name: str) -> None:
    """Imports a root file system."""
    with tar.open("rb") as file:
        api.send("images/import", file, reference=name)


def archive(api: Api, container: str, path: Path, tar: Path) -> None:
    """Writes a folder of a container to a tar file."""
    with tar.open("wb") as file:
        api.fetch(f"containers/{container}/archive", file, path=str(path))


def pull(api: Api, reference: str, progress: Progress, stream: Stream) -> None:
    """Fetches an image that is not there; progress counts the parts that Podman has begun to copy."""
    steps = 0
    for line in api.told(stream, "images/pull", {"reference": reference, "policy": "missing"}):
        if line.get("stream", "").startswith("Copying"):
            steps += 1
            progress(steps - 1, steps, line["stream"].strip())


def build(api: Api, tar: Path, how: Mapping[str, object], progress: Progress, stream: Stream) -> None:
    """Builds an image from a tar file of its context; an error holds the last lines that the build has said."""
    said = deque[str](maxlen=LAST_LINES)
    with tar.open("rb") as file:
        lines = api.told(stream, "build", how, file)
    try:
        for line in lines:
            for text in line.get("stream", "").splitlines():
                said.append(text)
                if text.startswith("STEP "):
                    done, _, total = text.split(":")[0].removeprefix("STEP ").partition("/")
                    progress(int(done) - 1, int(total), text.partition(": ")[2])
    except Refused as error:
        raise Refused(0, "\n".join([str(error), *said])) from error


def build_options(name: str, dockerfile: Path, *, network: bool) -> dict[str, object]:
    """How to build: from images that are there, with steps that reach out only with `network`."""
    return {
        "t": name, "dockerfile": str(dockerfile), "rm": True, "forcerm": True, "layers": True, "pullpolicy": "never",
        # The service takes no names here: 1 is "none", and any other word than a number is the host's network.
        "networkmode": "0" if network else "1",
        "nsoptions": json.dumps([{"Name": "network", "Host": False, "Path": ""}]),
    }  # fmt: skip
