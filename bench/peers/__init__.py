"""One worker an engine: loads a model once, then answers batches over standard input and output."""
