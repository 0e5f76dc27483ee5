"""What a stream needs later leaves the device while another model works."""

import pytest
import torch

from fast_video_vae.tests.builders import random_state_dict
from fast_video_vae.tests.seedvr2 import random_seedvr2
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.layers.temporal_cache import TemporalCache

FAMILIES = {"wan2.1": lambda: random_state_dict(8), "seedvr2": random_seedvr2}


@pytest.mark.parametrize(
    ("family", "task", "mode"),
    [("wan2.1", "encode_stream", True), ("seedvr2", "decode_stream", False)],
)
def test_a_parked_stream_goes_on_with_the_same_bits(family, task, mode, monkeypatch):
    with torch.inference_mode(mode):
        check_parked(family, task, monkeypatch)


def check_parked(family, task, monkeypatch):
    vae = load_vae(FAMILIES[family](), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    shape = (1, 3, 13, 16, 16) if task == "encode_stream" else (1, 16, 4, 2, 2)
    given = torch.rand(shape, generator=generator) * 2 - 1
    stream = getattr(vae, task)
    expected = [*stream(given, StreamOptions(1))]
    caches = []
    keep = TemporalCache.__init__
    monkeypatch.setattr(
        TemporalCache, "__init__", lambda self, **o: [keep(self, **o), caches.append(self)][0]
    )
    parked = stream(given, StreamOptions(1))
    for piece in expected:
        assert torch.equal(next(parked), piece)
        before = [tail.data_ptr() for tail in caches[-1].tails.values()]
        parked.park()
        parked.park()  # is parked
        after = [tail.data_ptr() for tail in caches[-1].tails.values()]
        assert before
        assert not {*before} & {*after}
    assert next(parked, None) is None
    parked.park()  # has ended
