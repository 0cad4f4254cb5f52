"""HTTP to a Podman service, by podman-py: answers or errors, and a call again where the service went away.

Its client is used below its wrappers, which lose limits and exit codes. All of this is for threads.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from sandbox.base import SandboxError
from sandbox.service import Service

if TYPE_CHECKING:
    from podman.api.client import APIClient, APIResponse

TRIES, PAUSE_S = 6, 0.1
CALL_S, LONG_S = 300.0, 24 * 3600.0
"""The longest that a call may take, and one that fetches or builds an image."""
CONNECTIONS = 64
JSON, TAR = {"Content-Type": "application/json"}, {"Content-Type": "application/x-tar"}
NO_PACKAGE = "podman-py is not installed: pip install podman"

T = TypeVar("T")


class Lost(Exception):
    """The service went away in the middle of a call."""


class Refused(SandboxError):
    """The service's answer is an error."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Wire:
    """A way to one service, which is started, and a call made again, when it went away."""

    def __init__(self, socket: Path | None, service: Service) -> None:
        """`socket` is that of somebody else's service, where ours is not wanted."""
        self._socket, self._service = socket, service
        self._lock = threading.Lock()
        self._api: Api | None = None

    def call(self, what: str, work: Callable[..., T], *args: object) -> T:
        """Runs `work(api, *args)`, which must bear to be done again where it was cut off."""
        for left in reversed(range(TRIES)):
            api = self._connected()
            try:
                with lost_connections():
                    return work(api, *args)
            except Lost as error:
                self._forget(api)
                if not left:
                    raise SandboxError(f"{what}: {self._gone()} ({error})") from error
                time.sleep(PAUSE_S)
            except Refused as error:
                raise SandboxError(f"{what}: {error}") from error
        raise AssertionError("unreachable")

    def _gone(self) -> str:
        if self._socket is None:
            return "Podman's service goes away again and again"
        start = f"podman system service --time=0 unix://{self._socket}"
        return f"socket={self._socket}: no Podman service answers there; start it with `{start}`"

    def _connected(self) -> "Api":
        with self._lock:
            if self._api is None:
                self._api = Api(_client(self._socket or self._service.socket_path()))
            return self._api

    def _forget(self, api: "Api") -> None:
        with self._lock:
            if self._api is api:
                self._api = None


def _client(socket: Path) -> "APIClient":
    try:
        import podman
    except ImportError as error:
        raise SandboxError(NO_PACKAGE) from error
    client = podman.PodmanClient(base_url=f"unix://{socket}", timeout=CALL_S, max_pool_size=CONNECTIONS).api
    # A connection that is kept may be one to a service that is gone, and each takes an open file.
    client.headers["Connection"] = "close"
    return client


@contextmanager
def lost_connections() -> Iterator[None]:
    """Tells a connection that broke from an answer."""
    import requests

    try:
        yield
    except requests.RequestException as error:  # podman-py's own errors are kinds of it
        if isinstance(error.__cause__ or error, requests.Timeout):
            raise Refused(0, "the service does not answer in time; is it stopped?") from error
        raise Lost(str(error.__cause__ or error)) from error


class Api:
    """The verbs of the service; each raises Refused where the answer is an error."""

    def __init__(self, client: "APIClient") -> None:
        self._client = client

    def get(self, path: str, /, **params: str) -> Any:
        """What the service says."""
        return _answer(self._client.get(path, params=params)).json()

    def post(self, path: str, body: Mapping[str, object] | None = None) -> Any:
        """What the service says; None where that is nothing."""
        data = None if body is None else json.dumps(body)
        response = _answer(self._client.post(path, data=data, headers=JSON))
        return response.json() if response.content else None

    def delete(self, path: str, /, **params: object) -> None:
        """Removes what is at a path."""
        _answer(self._client.delete(path, params=params))

    def send(self, path: str, tar: IO[bytes], /, **params: str) -> None:
        """Sends a tar file."""
        _answer(self._client.post(path, params=params, data=tar, headers=TAR, timeout=LONG_S))

    def fetch(self, path: str, into: IO[bytes], /, **params: str) -> None:
        """Writes an answer of any size to a file."""
        response = _answer(self._client.get(path, params=params, stream=True))
        try:
            for block in response.iter_content(1 << 20):
                into.write(block)
        finally:
            response.close()

    def told(
        self, stream: "Stream", path: str, params: Mapping[str, object], tar: IO[bytes] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The objects that the service says one by one while it works."""
        how: dict[str, Any] = {} if tar is None else {"data": tar, "headers": TAR}
        return stream.lines(_answer(self._client.post(path, params=params, stream=True, timeout=LONG_S, **how)))


def _answer(response: "APIResponse") -> "APIResponse":
    """The response, unless it is an error."""
    if response.status_code < 400:
        return response
    try:
        body = response.json()
        words = body.get("message") or body.get("cause") or response.text
    except ValueError:
        words = response.text
    raise Refused(response.status_code, words.strip() or f"status {response.status_code}")


class Stream:
    """A streamed answer that a thread reads; it ends when the context is left early, as by a cancellation.

    Podman 4.3 then starts no further step of a build, but a RUN step goes on to its own end.
    """

    def __init__(self) -> None:
        self._response: APIResponse | None = None
        self._left = False

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._left = True
        if self._response is not None:
            self._response.raw.shutdown()

    def lines(self, response: "APIResponse") -> Iterator[dict[str, Any]]:
        """The objects of the answer; an error in it is one that comes after a good status."""
        self._response = response
        try:
            for text in response.iter_lines():
                line = json.loads(text)
                if line.get("error"):
                    raise Refused(0, line["error"])
                yield line
        except OSError as error:
            if not self._left:
                raise
            raise Refused(0, "nobody waits for it any more") from error
        finally:
            self._response = None
            response.close()
