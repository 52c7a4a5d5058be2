"""Facts about this machine, found without importing torch."""
