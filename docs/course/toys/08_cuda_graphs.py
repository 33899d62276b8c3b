# --8<-- [start:toy-graph]
import torch


class ToyGraph:
    """Records launches over fixed buffers, and repeats them."""

    def __init__(self):
        self.launches = []

    def launch(self, kernel, *buffers):
        kernel(*buffers)
        self.launches.append((kernel, buffers))

    def replay(self):
        for kernel, buffers in self.launches:
            kernel(*buffers)
            # --8<-- [end:toy-graph]


# --8<-- [start:toy-runner]
class ToyRunner:
    """y = relu(x @ w) for any batch up to the largest captured size."""

    def __init__(self, weight, sizes=(1, 2, 4, 8)):
        self.sizes = sizes
        self.x = torch.zeros(max(sizes), weight.shape[0])  # shared by all graphs
        self.y = torch.zeros(max(sizes), weight.shape[1])
        self.graphs = {size: self.capture(size, weight) for size in reversed(sizes)}

    def capture(self, size, weight):
        graph, x, y = ToyGraph(), self.x[:size], self.y[:size]
        graph.launch(lambda x, y: torch.matmul(x, weight, out=y), x, y)
        graph.launch(lambda y: y.relu_(), y)
        return graph

    def run(self, x):
        size = next(size for size in self.sizes if size >= len(x))
        self.x[: len(x)] = x
        self.x[len(x) : size] = 0  # padding rows
        self.graphs[size].replay()
        return self.y[: len(x)]  # a borrowed buffer: valid until the next replay
        # --8<-- [end:toy-runner]
