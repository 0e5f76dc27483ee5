import functools

import pytest

from fast_video_vae.tests.lora.nets import Stack


@pytest.fixture
def stack(tmp_path):
    return functools.partial(Stack, tmp_path)
