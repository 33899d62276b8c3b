"""Loads a model in a process of its own and prints, as JSON, the memory that it took.

python load_probe.py FOLDER {auto,dummy} DEVICE [FREE_TIMES]
"""

from __future__ import annotations

import json
import sys
import threading
import time

import psutil
import torch

from diptych.shared import registry
from diptych.shared.config import read_config
from diptych.shared.loading import weights as weights_module
from diptych.shared.loading.weights import dummy_weights, iterate_weights
from diptych.shared.tools.conformance.clauses.device import building


class HostPeak(threading.Thread):
    """The largest resident size of this process, pages of mapped files included, while it runs."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.process, self.peak, self.stopped = psutil.Process(), 0, False

    def run(self) -> None:
        while not self.stopped:
            self.peak = max(self.peak, self.process.memory_info().rss)
            time.sleep(0.002)


def main(folder: str, load_format: str, device: str, free_times: str = "") -> None:
    weights_module.FREE_TIMES = int(free_times or weights_module.FREE_TIMES)
    config = read_config(folder)
    layers, moe = registry.load("layers", "optimized"), registry.load("moe", "reference")
    model_class = registry.load("models", "optimized").model_class(config.architecture)
    # The library's own first allocations, as a kernel's and a copy's, are no model's.
    torch.ones(1, device=device).add_(torch.ones(1).to(device)).item()
    torch.cuda.reset_peak_memory_stats()
    device_before = torch.cuda.memory_allocated()
    host = HostPeak()
    host_before = psutil.Process().memory_info().rss
    host.start()
    start = time.perf_counter()
    if load_format == "dummy":
        weights = dummy_weights(config, device=device)
    else:
        weights = iterate_weights(folder, config)
    with building(config.dtype, device):
        model = model_class(config, layers, moe)
    model.load_weights(weights)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    host.stopped = True
    host.join()
    weight_bytes = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    print(
        json.dumps(
            {
                "weights": weight_bytes,
                "device": torch.cuda.max_memory_allocated() - device_before,
                "host": host.peak - host_before,
                "seconds": seconds,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
