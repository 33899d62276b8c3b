# --8<-- [start:toy-device]
def model(token):
    return (token * 11 + 7) % 97


class Device:
    """Runs launches in order. A launch returns at once; `now` is the CPU's clock."""

    def __init__(self, step_us):
        self.step_us, self.now, self.free_at = step_us, 0, 0
        self.ring, self.num_launched = [0, 0], 0  # newest tokens, on the device

    def launch(self, token):
        """A token below 0 is a name. Returns the name of the result, and a handle."""
        place = self.num_launched % len(self.ring)
        self.ring[place] = model(self.ring[token] if token < 0 else token)
        self.free_at = max(self.now, self.free_at) + self.step_us
        self.num_launched += 1
        return place - len(self.ring), (self.free_at, self.ring[place])

    def wait(self, handle):
        done_at, token = handle
        self.now = max(self.now, done_at)
        return token
        # --8<-- [end:toy-device]


# --8<-- [start:toy-loops]
def normal_loop(device, token, stop, cpu_us):
    output = []
    while stop not in output:
        device.now += cpu_us  # form the batch, process results
        token = device.wait(device.launch(token)[1])
        output.append(token)
    return output


def overlap_loop(device, token, stop, cpu_us):
    output, in_flight = [], None
    while stop not in output:
        device.now += cpu_us
        token, handle = device.launch(token)  # a known token, or the name of the one in flight
        if in_flight is not None:
            output.append(device.wait(in_flight))
        in_flight = handle
    return output  # the last launch was surplus
    # --8<-- [end:toy-loops]
