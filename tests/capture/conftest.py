import pytest

from lego.chat.render import Renderer
from tests.tiny import write_model


@pytest.fixture(scope="session")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(write_model(tmp_path_factory.mktemp("model")))
