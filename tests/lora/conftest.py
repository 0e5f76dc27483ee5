import pytest

from fast_video_vae.tests.lora.nets import Stack


@pytest.fixture
def stack(tmp_path):
    def made(model, **more):
        return Stack(tmp_path, model, **more)

    return made
