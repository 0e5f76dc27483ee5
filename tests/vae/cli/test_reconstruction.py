"""The round trip of a video: pairs of source and result, PSNR, and frames kept in memory."""

import math
from dataclasses import dataclass, field

import pytest
import torch

from fast_video_vae.tests.builders import decoder_of, random_state_dict

pytest.importorskip("av", reason="PyAV is not installed")

from fast_video_vae.tests.videos import write_clip
from fast_video_vae.vae import StreamOptions, load_vae
from fast_video_vae.vae.cli.reconstruction import RoundTrip, shrunk, with_channels
from fast_video_vae.vae.media.video_reader import VideoFile, read_video
from fast_video_vae.vae.media.video_writer import frames_to_uint8


@pytest.fixture(scope="module")
def vae():
    return load_vae(random_state_dict(8), dtype=torch.float32)


def video(tmp_path, frames):
    return read_video(write_clip(tmp_path / "a.mp4", frames))


def joined(trip):
    sources, results = zip(*trip, strict=True)
    return torch.cat(sources), torch.cat(results)


def test_the_results_equal_encode_and_decode(tmp_path, vae):
    clip = video(tmp_path, 9)
    trip = RoundTrip(vae, clip, StreamOptions(1))
    source, result = joined(trip)
    frames = torch.stack(list(clip.frames()))
    assert torch.equal(source, frames)
    whole = vae.decode(vae.encode(frames.permute(3, 0, 1, 2).unsqueeze(0)))
    # Chunks round differently from the whole, which can change a value by one level.
    assert (result.int() - frames_to_uint8(whole).int()).abs().max() <= 1
    assert trip.frames == 9
    assert trip.encode_seconds > 0
    assert trip.decode_seconds > 0


def test_reading_is_at_most_eight_frames_ahead_of_the_results(tmp_path, vae):
    @dataclass(frozen=True)
    class Counted(VideoFile):
        taken: list = field(default_factory=list)

        def pieces(self, **options):
            for piece in super().pieces(**options):
                self.taken.extend([None] * piece.shape[2])
                yield piece

    clip = video(tmp_path, 33)
    clip = Counted(clip.path, clip.height, clip.width, clip.fps, clip.estimated_frames)
    trip = RoundTrip(vae, clip, StreamOptions(1))
    ahead = []
    for _ in trip:
        ahead.append(len(clip.taken) - trip.frames)
    # The piece that was just read, and the frames of one latent that is not decoded yet.
    assert max(ahead) <= 8
    assert trip.frames == 33


@pytest.mark.parametrize("network", ["encoder", "decoder"])
def test_a_restart_loses_and_repeats_no_frame(tmp_path, vae, network):
    clip, calls = video(tmp_path, 17), []
    expected, wanted = joined(RoundTrip(vae, clip, StreamOptions(1)))

    def short(*_):
        calls.append(1)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("no memory")

    (*_, last) = getattr(vae, network).layers()
    handle = last.register_forward_pre_hook(short)
    trip = RoundTrip(vae, clip, StreamOptions(1))
    source, result = joined(trip)
    handle.remove()
    assert len(calls) > 5
    assert torch.equal(source, expected)
    assert (result.int() - wanted.int()).abs().max() <= 1
    assert trip.encode_seconds > 0


@pytest.mark.parametrize(
    ("channels", "scale"),
    [({}, 1), ({"out_channels": 12}, 2), ({"image_channels": 4, "out_channels": 4}, 1)],
    ids=["plain", "2x", "alpha"],
)
def test_rgb_is_compared_at_the_size_of_the_source(tmp_path, channels, scale):
    vae = load_vae(random_state_dict(8, **channels), dtype=torch.float32)
    trip = RoundTrip(vae, video(tmp_path, 5))
    source, result = joined(trip)
    assert source.shape == (5, 32, 48, 3)
    assert result.shape == (5, 32 * scale, 48 * scale, 3)
    error = (source.double() - shrunk(result, scale).double()).square().mean().item()
    assert trip.psnr == pytest.approx(10 * math.log10(255**2 / error), abs=1e-6)


def test_a_decoder_only_vae_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a decoder only"):
        RoundTrip(load_vae(decoder_of(random_state_dict(8))), video(tmp_path, 1))


def test_the_added_alpha_channel_is_opaque():
    pictures = torch.randint(255, (1, 3, 2, 8, 8), dtype=torch.uint8)
    assert with_channels(pictures, 3) is pictures
    layered = with_channels(pictures, 4)
    assert torch.equal(layered[:, :3], pictures)
    assert (layered[:, 3] == 255).all()
    assert (with_channels(pictures / 255, 4)[:, 3] == 1).all()


def test_reduced_frames_are_averaged():
    pictures = torch.tensor([[0, 100], [100, 201]], dtype=torch.uint8)
    pictures = pictures.view(1, 2, 2, 1).expand(-1, -1, -1, 3)
    assert shrunk(pictures, 2).tolist() == [[[[100, 100, 100]]]]  # 100.25
    assert shrunk(pictures, 1) is pictures
