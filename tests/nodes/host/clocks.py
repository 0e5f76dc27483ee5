"""Clocks and devices that the timing tests control, and readers of the measured times."""

import json
import logging
import threading


class Clock:
    """A clock that only advances on request."""

    def __init__(self):
        self.seconds = 100.0

    def __call__(self):
        return self.seconds

    def passes(self, seconds):
        self.seconds += seconds


class FakeDevice:
    """A device with its own clock, which runs its queue on request."""

    def __init__(self):
        self.seconds = 0.0
        self.queue = []
        self.waits = 0

    def works(self, seconds):
        self.queue.append(seconds)

    def record(self, device):
        event = FakeEvent(self)
        self.queue.append(event)
        return event

    def catch_up(self):
        for each in self.queue:
            if isinstance(each, FakeEvent):
                each.seconds = self.seconds
            else:
                self.seconds += each
        self.queue.clear()


class FakeEvent:
    """The members of `torch.cuda.Event` that the timing uses."""

    def __init__(self, device):
        self.device, self.seconds = device, None

    def query(self):
        return self.seconds is not None

    def synchronize(self):
        self.device.waits += 1
        self.device.catch_up()

    def elapsed_time(self, last):
        return (last.seconds - self.seconds) * 1e3


def in_prompt(name):
    from comfy_execution.utils import CurrentNodeContext

    return CurrentNodeContext(name, "1")


def end(name):
    """Notify the cache providers, as ComfyUI does at the end of every prompt."""
    from comfy_execution.cache_provider import _get_cache_providers

    for provider in _get_cache_providers():
        provider.on_prompt_end(name)


def timings(timing):
    """Return the JSON report as a dict."""
    return json.loads(timing.report().json())


def rows(timing):
    """Return the rows of the report by kind and label."""
    return {(row["kind"], row["label"]): row for row in timings(timing)["rows"]}


def lengths(timing):
    """Return the seconds of each kind."""
    return {kind: row["seconds"] for (kind, _), row in rows(timing).items()}


def printed(caplog, *ended):
    """End the prompts `ended` and return the tables in the log."""
    with caplog.at_level(logging.INFO):
        for name in ended:
            end(name)
    return [record.getMessage() for record in caplog.records if "timing" in record.name]


def in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
