"""The picture of what int8 changes: a frame, and its differences to float32, amplified."""

import math

from PIL import Image
from torch import Tensor

from .pen import CARD, FAINT, FOOT, GAP, HEAD, HEIGHT, INK, MARGIN, WIDTH, Pen
from .precision_report import PrecisionReport
from .tables import dtype_label

# The differences are amplified so that all but one in 50 of their values stay below white.
_SHOWN_SHARE = 0.98
_MAX_FACTOR = 256

# Space in a card: around the picture, and above it for the label.
_RIM, _LABEL = 12, 34


def draw_difference(report: PrecisionReport) -> Image.Image:
    """Draw one frame in float32 and with int8, and the differences of int8 and of bfloat16.

    Args:
        report: The report.

    Returns:
        An RGB picture of the size of the chart. Both differences have the same factor.
    """
    exact, narrow, coded = report.frames
    differences = (coded - exact).abs(), (narrow - exact).abs()
    factor = _amplification(differences)
    shown = f"difference x {factor}"
    cards = [
        ("fp32", "the reference", exact),
        ("int8", f"other layers in {dtype_label(report.dtype)}", coded),
        ("int8 - fp32", shown, differences[0] * factor),
        ("bf16 - fp32", shown, differences[1] * factor),
    ]
    pen = Pen()
    room = WIDTH - 2 * MARGIN
    pen.text((MARGIN, 42), f"int8 in {report.part()}", INK, 27, room=room)
    about = f"{report.vae}   |   last of {report.clip}"
    pen.text((MARGIN, 76), about, FAINT, 15, room=room)
    card_width, card_height = (room - GAP) / 2, (HEIGHT - HEAD - FOOT - GAP) / 2
    for index, (name, remark, frame) in enumerate(cards):
        left = MARGIN + index % 2 * (card_width + GAP)
        top = HEAD + index // 2 * (card_height + GAP)
        _card(pen, (left, top, left + card_width, top + card_height), name, remark, frame)
    foot = HEIGHT - FOOT / 2
    pen.text((MARGIN, foot), f"PSNR against fp32: {report.verdict()}", INK, 15, room=room - 150)
    pen.text((WIDTH - MARGIN, foot), "darker is closer", FAINT, 15, "rm")
    return pen.done()


def _card(
    pen: Pen, box: tuple[float, float, float, float], name: str, remark: str, frame: Tensor
) -> None:
    """Draw a panel with a label and a frame `[H, W, 3]`, as large as it fits."""
    left, top, right, bottom = box
    pen.box(box, CARD, 12)
    pen.text((left + 18, top + _LABEL / 2 + 2), name, INK, 16)
    pen.text((right - 18, top + _LABEL / 2 + 2), remark, FAINT, 15, "rm")
    picture = Image.fromarray(frame.clamp(0, 1).mul(255).round().byte().numpy())
    width, height = right - left - 2 * _RIM, bottom - top - _LABEL - _RIM
    factor = min(width / picture.width, height / picture.height)
    place = (
        left + _RIM + (width - picture.width * factor) / 2,
        top + _LABEL + (height - picture.height * factor) / 2,
    )
    pen.picture(picture, place, factor)


def _amplification(differences: tuple[Tensor, ...]) -> int:
    """Return the largest power of two that keeps `_SHOWN_SHARE` of the values below white."""
    high = 0.0
    for each in differences:
        values = each.flatten().sort().values
        high = max(high, float(values[int(_SHOWN_SHARE * (len(values) - 1))]))
    if not 0 < high < math.inf:
        return _MAX_FACTOR if high == 0 else 1
    return max(1, min(_MAX_FACTOR, 2 ** math.floor(math.log2(1 / high))))
