"""Benchmark of this VAE against others on the same work in the same run."""

from .chart import draw_chart
from .compare import Contestant, compare, device_label
from .content import Clip, fitted, moving_pictures, random_latent
from .measure import Gauge
from .report import BenchmarkReport, dtype_label, tasks_of

__all__ = [
    "BenchmarkReport",
    "Clip",
    "Contestant",
    "Gauge",
    "compare",
    "device_label",
    "draw_chart",
    "dtype_label",
    "fitted",
    "moving_pictures",
    "random_latent",
    "tasks_of",
]
