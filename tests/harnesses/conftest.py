from pathlib import Path

import pytest

from harnesses.base import Endpoint
from harnesses.fetch import DEFAULT_CACHE, fetch
from harnesses.known import KNOWN
from harnesses.packages import WheelTree
from sandbox.base import BoxSpec
from sandbox.bubble import Bubblewrap


@pytest.fixture
def endpoint() -> Endpoint:
    return Endpoint(url="http://127.0.0.1:4000", key="secret", model="policy", context_tokens=32768, output_tokens=2048)


@pytest.fixture(scope="session")
def cache() -> Path:
    """A cache with every known harness, fetched where it is missing, but those of wheels: their own tests do that."""
    for kind in KNOWN.values():
        if not any(isinstance(part, WheelTree) for part in kind().parts):
            fetch(kind(), DEFAULT_CACHE)
    return DEFAULT_CACHE


@pytest.fixture(scope="session")
async def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Bubblewrap:
    """Real boxes."""
    async with Bubblewrap().open(BoxSpec(base=tmp_path_factory.mktemp("base"))):
        return Bubblewrap()
