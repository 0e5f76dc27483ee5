"""Prompts: what to see, and what the makers of Wan advise against, in English."""

WAN_POSITIVE = (
    "A red fox walks along a mossy log in a misty forest at sunrise, stops and turns its head "
    "towards the camera. Soft golden light, shallow depth of field, cinematic, slow dolly in."
)

WAN_NEGATIVE = (
    "overexposed, static, blurred details, subtitles, painting, still picture, grey, worst "
    "quality, low quality, JPEG artifacts, ugly, deformed, extra fingers, poorly drawn hands, "
    "poorly drawn face, fused fingers, cluttered background, three legs, walking backwards"
)
