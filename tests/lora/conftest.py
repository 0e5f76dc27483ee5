import functools

import pytest
from safetensors.torch import save_file

from fast_video_vae.tests.lora.nets import Stack


@pytest.fixture
def stack(tmp_path):
    return functools.partial(Stack, tmp_path)


@pytest.fixture
def write(tmp_path):
    def written(tensors, name="some.safetensors", metadata=None):
        save_file(tensors, tmp_path / name, metadata)
        return tmp_path / name

    return written
