import pytest

from lego.chat.render import Renderer
from tests.chat.families import FAMILIES, Family


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    """A renderer for each family, by the family's name in tests."""
    return {str(f): Renderer.load(f.write(tmp_path_factory.mktemp("family"))) for f in FAMILIES}


@pytest.fixture(params=FAMILIES, ids=str)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def renderer(family: Family, loaded: dict[str, Renderer]) -> Renderer:
    return loaded[str(family)]
