from pathlib import Path

import pytest

from harnesses.base import Endpoint
from harnesses.clients import RegistryUnreachable
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.known import KNOWN
from sandbox.base import BoxSpec, SandboxError
from sandbox.bubble import Bubblewrap


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(url="http://127.0.0.1:4000", key="secret", model="policy", context_tokens=32768, output_tokens=2048)


@pytest.fixture(scope="session")
def cache() -> Path:
    """A cache with every known harness, fetched where it is missing; only without a registry are they not tried."""
    for kind in KNOWN.values():
        try:
            fetch(kind(), DEFAULT_CACHE)
        except RegistryUnreachable as error:
            pytest.skip(str(error))
    return DEFAULT_CACHE


@pytest.fixture(scope="session")
async def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Bubblewrap:
    """Real boxes, where this host allows them."""
    try:
        async with Bubblewrap().open(BoxSpec(base=tmp_path_factory.mktemp("base"))):
            return Bubblewrap()
    except SandboxError as error:
        pytest.skip(str(error))
