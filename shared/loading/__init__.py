"""From a model folder to weights on a device, and the size of the pools."""
