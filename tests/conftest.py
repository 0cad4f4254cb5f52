"""Real things that several packages test against, made once a run."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from harnesses.codex import Codex
from harnesses.fetch import DEFAULT_CACHE, fetch
from tests.tiny import write_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", default="pi,codex,claude", help="harnesses that test_chaos.py tries, by name, or all")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen3-MoE folder; read only."""
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def fetched_cache() -> Path:
    """The user's own cache with Codex in it; tasks are built there once."""
    cache = DEFAULT_CACHE.expanduser()
    fetch(Codex(), cache)
    return cache


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator:
    """A real server of `tiny_model` in float32 with routing; a test that changes its weights puts the old ones back."""
    from lego.engine.vllm import VllmServer
    from tests.tiny_engine import one_engine

    spec = VllmServer(dtype="float32", kv_cache_mib=64, max_num_seqs=16)
    async with one_engine(spec, tiny_model, tmp_path_factory.mktemp("vllm")) as engine:
        yield engine
