"""Tools around the engine: conformance, measurements, commands, training. The engine never imports them."""
