"""A prefix cache for enginectl: KV blocks of equal prefixes are reused, found by chained block hashes."""
