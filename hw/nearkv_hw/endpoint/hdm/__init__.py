"""HDM decoders: from host addresses to the device's own."""
