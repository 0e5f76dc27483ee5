"""Benchmark of this VAE against others on the same work in the same run."""

from .chart import draw_chart
from .content import Clip, fitted, moving_pictures, random_latent
from .device_report import check_device, device_notes
from .measure import Contestant, compare, device_label
from .precision import compare_precision, int8_layers
from .report import BenchmarkReport, Comparison, dtype_label, tasks_of

__all__ = [
    "BenchmarkReport",
    "Clip",
    "Comparison",
    "Contestant",
    "check_device",
    "compare",
    "compare_precision",
    "device_label",
    "device_notes",
    "draw_chart",
    "dtype_label",
    "fitted",
    "int8_layers",
    "moving_pictures",
    "random_latent",
    "tasks_of",
]
