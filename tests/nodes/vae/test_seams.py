"""A slow gradient through ComfyUI's VAEDecodeTiled: no seam of ours, and plain ones of stock."""

import pytest

from fast_video_vae.tests.benchmarks import seams

pytestmark = [pytest.mark.comfyui, pytest.mark.slow]


def test_tiles_have_no_seams_unlike_those_of_stock(comfyui, tmp_path, monkeypatch):
    from fast_video_vae.vae.streaming.tiled_executor import TiledDecode

    tiles = []
    advance = TiledDecode.advance

    def counted(self, x):
        tiles.append(len(self.tiles))
        return advance(self, x)

    monkeypatch.setattr(TiledDecode, "advance", counted)
    # More than one tile in height, width and time, as small as the node allows.
    setting = seams.Setting(17, 128, 96, 64, 64, 8, 4)
    images = seams.decoded(setting, tmp_path)
    ours, stock = (seams.error(*images[name]) for name in ("ours", "comfyui"))
    assert images["ours"][1].shape == (17, 128, 96, 3)
    # The two VAEs are one without tiles, so that the difference is that of the tiles.
    assert seams.error(images["comfyui"][0], images["ours"][0])["relative"] <= 1e-5
    assert min(tiles) > 1
    assert ours["relative"] <= 1e-5
    assert ours["step_levels"] <= 1e-3
    assert stock["relative"] > 1000 * ours["relative"]
    assert stock["relative"] > 1e-2
    assert stock["step_levels"] > 1
